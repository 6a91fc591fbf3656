// Tuning of the Ampere forward: choices for the compiler, or by measurement. Each has its reason. docs/design has the
// figures.
#pragma once

#include "ampere/kv_loop.cuh"

namespace jax_flash::ampere::forward {

struct Tuning {
  // The steps of k for which Q stays in registers: the number that fits in addition to O and S. Fewer fit with 32 rows
  // per warp, with f32 and with features. None fit with operands in two parts.
  static constexpr int kRegisterBudget = kFormsScores || kMask || kListed || kLocal || kDropout ? 128
                                         : kWarpRows == 32 || kDType == DType::kF32             ? 160
                                                                                                : 192;
  static constexpr int kHeldSteps =
      kThreeProducts ? 0 : (kRegisterBudget - kWarpRows * (RoundUp(kVDim, 16) + kKeys) / 32) / (kWarpRows / 4);

  // These masks keep ranges in registers. Then no registers are left for code that ptxas moves ahead, and OpaqueFalse
  // prevents that.
  static constexpr bool kKeepsRanges = kLocal || kLengths;
  static constexpr bool kStopBeforePV =
      kWarpRows == 32 && ((kDType == DType::kF32 && kKeepsRanges) || (kListed && (kKeepsRanges || kDropout)));

  // Usually the loads of the next tiles are issued between the steps of S = Q K^T. Exception 1: if memory bandwidth
  // limits the speed, they come first. Exception 2: if an SM has two CTAs (H100 and H200, few warps, 16-bit types) and
  // enough registers, they come after S, while the other CTA multiplies.
  static constexpr bool kLoadsFirst = kParts;
  static constexpr bool kLoadsAfter =
      !kParts && kWarps <= 4 && kQKDim <= 128 && kVDim <= 128 && !kDropout && !kKeepsRanges;
};

}  // namespace jax_flash::ampere::forward

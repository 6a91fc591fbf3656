// Where the mma.sync forward differs from what its algorithm says, for the compiler's sake or because measurements said
// so; each field with its reason. docs/design has the figures.
#pragma once

#include "ampere/walk.cuh"

namespace jax_flash::ampere::forward {

struct Tuning {
  // As many steps of k of Q stay in registers as there is room for beside O and S. There is less room with 32 rows to a
  // warp, with f32 and with features, and none with operands of two parts.
  static constexpr int kRegisterBudget = kFormsScores || kMask || kListed || kLocal || kDropout ? 128
                                         : kWarpRows == 32 || kDType == DType::kF32             ? 160
                                                                                                : 192;
  static constexpr int kHeldSteps =
      kThreeProducts ? 0 : (kRegisterBudget - kWarpRows * (RoundUp(kVDim, 16) + kKeys) / 32) / (kWarpRows / 4);

  // These masks keep ranges in registers, so that none are left for ptxas to move work ahead, which it must not do
  // (Never).
  static constexpr bool kKeepsRanges = kLocal || kLengths;
  static constexpr bool kStopBeforePV =
      kWarpRows == 32 && ((kDType == DType::kF32 && kKeepsRanges) || (kListed && (kKeepsRanges || kDropout)));

  // The loads of the next tiles are begun between the steps of S = Q K^T. There are two exceptions. Where memory bounds
  // the speed they come first of all. Where a multiprocessor has two blocks (an H100 or H200, with few warps and 16
  // bits), and there are registers for it, they come after S, while the other block multiplies.
  static constexpr bool kLoadsFirst = kParts;
  static constexpr bool kLoadsAfter =
      !kParts && kWarps <= 4 && kQKDim <= 128 && kVDim <= 128 && !kDropout && !kKeepsRanges;
};

}  // namespace jax_flash::ampere::forward

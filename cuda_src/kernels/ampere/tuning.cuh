// What the mma.sync forward does otherwise than its algorithm says, for the compiler's sake or as measurements had it;
// each field with its reason. docs/design has the figures.
#pragma once

#include "ampere/walk.cuh"

namespace jax_flash {

struct ForwardTuning {
  // So many steps of k of Q stay in registers as there is room for beside O and S, which is less with 32 rows to a warp
  // or f32, and less with features. Operands of two parts leave none.
  static constexpr int kRegisters = kFormsScores || kMask || kListed || kLocal || kDropout ? 128
                                    : kWarpRows == 32 || kDType == DType::kF32             ? 160
                                                                                           : 192;
  static constexpr int kHeldSteps =
      kThreeProducts ? 0 : (kRegisters - kWarpRows * (RoundUp(kVDim, 16) + kCols) / 32) / (kWarpRows / 4);

  // No registers are left to work ahead beside what these masks keep in some: ptxas must not (Never).
  static constexpr bool kKeepsRanges = kLocal || kLengths;
  static constexpr bool kStopBeforePV =
      kWarpRows == 32 && ((kDType == DType::kF32 && kKeepsRanges) || (kListed && (kKeepsRanges || kDropout)));

  // The loads of the next tiles are begun between the steps of S = Q K^T. But first of all where memory bounds the
  // speed; and after S, while another block multiplies, where a multiprocessor has two (an H100 or H200, with few warps
  // and 16 bits) and what else is kept leaves the registers for it.
  static constexpr bool kLoadsFirst = kParts;
  static constexpr bool kLoadsAfter =
      !kParts && kWarps <= 4 && kQKDim <= 128 && kVDim <= 128 && !kDropout && !kKeepsRanges;
};

}  // namespace jax_flash

// Where Hopper's dbias pass differs from its algorithm because of the compiler, or because that is measurably faster.
// Each field has its reason; docs/design has the figures. ptxas "must not move work ahead" where that would spill
// registers; Never() stops it (ptx/compiler.cuh).
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::dbias {

struct Tuning {
  static constexpr bool kNarrowTiles = kTiling.cols < 128;

  // Registers of a thread; the three warpgroups have 504 together. A consumer's sum, S and dP take 192 of them, or half
  // as many with narrow tiles. Windows, segments and soft caps have narrow tiles, so that the producer has enough
  // registers.
  static constexpr int kProducerRegisters = kNarrowTiles ? 88 : kManyRanges ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // Does the product for dP start after the masks? Before, it has no registers.
  static constexpr bool kLateDP = kManyRanges && !kNarrowTiles;

  // ptxas must not move work ahead of the exponentials, after masks in memory, of the random words of dropout,
  static constexpr bool kStopAfterMask = kLookedUp, kStopBeforeZ = kDropout;
  // and of the next 8 entries of a bias that is loaded entry by entry.
  static constexpr bool kBiasInParts = !kTiling.bias_tiles;
};

}  // namespace jax_flash::hopper::dbias

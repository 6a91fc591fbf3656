// Where Hopper's pass for dbias differs from its algorithm, for the compiler's sake or because measurements said so.
// Each field has its reason; docs/design has the figures.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::dbias {

struct Tuning {
  static constexpr bool kNarrowTiles = kTiling.cols < 128;

  // Registers of a thread, of the 504 that the three warpgroups have together. A consumer's sum, S and dP take 192 of
  // them, or half as many with narrow tiles, which windows, segments and soft caps have so that the producer has
  // enough.
  static constexpr int kProducerRegisters = kNarrowTiles ? 88 : kManyRanges ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // The product for dP has to wait for registers until the masks have been applied.
  static constexpr bool kLateDP = kManyRanges && !kNarrowTiles;

  // Where ptxas must not move work ahead, since it would spill registers (Never): between what memory says of masks and
  // the exponentials, before the random words of dropout,
  static constexpr bool kStopAfterMask = kLookedUp, kStopBeforeZ = kDropout;
  // and between every 8 entries of a bias that is looked up.
  static constexpr bool kBiasInParts = !kTiling.bias_tiles;
};

}  // namespace jax_flash::hopper::dbias

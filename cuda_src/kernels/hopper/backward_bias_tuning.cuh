// Tuning of Hopper's dbias kernel: choices for the compiler, or by measurement. Each has its reason. docs/design has
// the figures. OpaqueFalse() (ptx/compiler.cuh) keeps ptxas from moving code ahead where that would spill.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::dbias {

struct Tuning {
  static constexpr bool kTilesOf64Keys = kTiling.cols < 128;

  // Registers per thread. The three warpgroups have 504 together. A consumer needs 192 for its sum, S and dP, or half
  // with tiles of 64 keys. Windows, segments and soft caps use these, because their producer needs more registers.
  static constexpr int kProducerRegisters = kTilesOf64Keys ? 88 : kMoreThanCausal ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // Does the product for dP start after the masks? Otherwise it would spill.
  static constexpr bool kLateDP = kMoreThanCausal && !kTilesOf64Keys;

  // Places where code must not move ahead: of the exponentials after masks in memory, of dropout's random words,
  static constexpr bool kStopAfterMask = kMasksInMemory, kStopBeforeZ = kDropout;
  // and of the next 8 entries of a bias that is loaded entry by entry.
  static constexpr bool kBiasInParts = !kTiling.bias_tiles;
};

}  // namespace jax_flash::hopper::dbias

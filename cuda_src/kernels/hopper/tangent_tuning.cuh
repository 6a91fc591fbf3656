// Where the Hopper tangent pass differs from its algorithm because of the compiler, or because that is measurably
// faster.
#pragma once

#include "hopper/shared_tile.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/tangent.cuh"

namespace jax_flash::hopper::tangent {

static_assert(kTiling.family == Family::kHopper && kElementBytes == 2);
static_assert(!kMask && !kAddsToScores && !kUnrounded);
constexpr int kStages = kTiling.stages;     // tiles of K, and of V, in flight
constexpr int kConsumers = kTiling.groups;  // warpgroups, with 64 rows each
static_assert(kTiling.rows == 64 * kConsumers && kTiling.cols % 16 == 0);
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

struct Tuning {
  // Registers of a thread. Their sum over all warpgroups is what the kernel starts with.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kListed ? 56 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? (504 - kProducerRegisters) / 2 : 160;
};

}  // namespace jax_flash::hopper::tangent

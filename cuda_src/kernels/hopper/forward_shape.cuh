// The shape of the Hopper forward's tiles, and how the consumer warpgroups divide a tile of S.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash::hopper::forward {

static_assert(kTiling.family == Family::kHopper);
static_assert(!kMask);                                     // a mask operand has become a block mask
constexpr int kRows = kTiling.rows, kKeys = kTiling.cols;  // of tiles of Q, and of K and V
constexpr int kStages = kTiling.stages;                    // tiles of K, and of V, in flight
constexpr int kConsumers = kTiling.groups;                 // warpgroups
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

constexpr int kRowGroups = kRows / 64, kKeyGroups = kConsumers / kRowGroups;
constexpr int kWarpgroupKeys = kKeys / kKeyGroups;  // of S in one warpgroup
static_assert(kRows % 64 == 0 && kConsumers % kRowGroups == 0 && kKeyGroups <= 2 && kKeys % kKeyGroups == 0);
static_assert(kWarpgroupKeys % (kTF32 ? 32 : 16) == 0 && (kKeyGroups == 1 || !kTF32));

}  // namespace jax_flash::hopper::forward

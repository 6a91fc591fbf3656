// The tile sizes of the Hopper forward, and the division of a tile of S among consumer warpgroups.
#pragma once

#include "hopper/row_tiles.cuh"

namespace jax_flash::hopper::forward {

static_assert(kTiling.family == Family::kHopper);
static_assert(!kMask);                      // a mask operand has been converted to a block mask
constexpr int kStages = kTiling.stages;     // tiles of K, and of V, in flight
constexpr int kConsumers = kTiling.groups;  // warpgroups
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

constexpr int kRowGroups = kRows / 64, kKeyGroups = kConsumers / kRowGroups;
constexpr int kWarpgroupKeys = kKeys / kKeyGroups;  // keys of one warpgroup
static_assert(kRows % 64 == 0 && kConsumers % kRowGroups == 0 && kKeyGroups <= 2 && kKeys % kKeyGroups == 0);
static_assert(kWarpgroupKeys % (kTF32 ? 32 : 16) == 0 && (kKeyGroups == 1 || !kTF32));

}  // namespace jax_flash::hopper::forward

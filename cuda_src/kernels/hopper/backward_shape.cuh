// The tile sizes of the Hopper backward, and the division of keys among CTAs and warpgroups.
#pragma once

#include "hopper/row_blocks.cuh"

namespace jax_flash::hopper::backward {

static_assert(kTiling.family == Family::kHopper);
static_assert(!kMask);  // a mask operand has been converted to a block mask
constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;      // keys of a CTA
constexpr int kStages = kTiling.stages;  // tiles of Q, and of dO, in flight

constexpr bool kPairs = kQKDim > 128 || kVDim > 128;  // do pairs of CTAs share dQ?
// Do both warpgroups have the same 64 keys? Then one computes S, P and dV, and the other dP, dS and dK.
constexpr bool kSameKeys = kPairs || (kTF32 && kKeys == 64);
static_assert(kSameKeys ? kRows == 64 && kKeys == 64 : (kRows == 64 || kRows == 128) && kKeys == 128);
constexpr int kCluster = kPairs ? 2 : 1;  // CTAs with neighbouring keys and the same tiles of Q
static_assert(!kPairs || kKeys * kCluster == kBackwardKeys);
static_assert(kRows <= kRowPadding && kKeys <= kRowPadding);

constexpr int kConsumers = 2;  // warpgroups
static_assert(kTiling.groups == kConsumers);
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

static_assert(kHeadRows == kRows);
static_assert(!kFusedRows || (kDQ && !kTF32 && !kPairs));
// Are query heads that share keys computed one by one, with their dK and dV added in f32?
constexpr bool kSumKV = kTiling.sum_kv;
static_assert(!kSumKV || kFusedRows);
// Does a kv tile loop over q tiles first, and for each over the query heads of the group?
constexpr bool kInterleavedHeads = kTiling.interleaved_heads;
static_assert(!kInterleavedHeads || (kCausal && !kFusedRows && !kListed));
// Do CTAs add to dQ in a fixed order (hopper/backward_ordered.cuh)?
constexpr bool kOrdered = kTiling.ordered;
static_assert(!kOrdered || (kDQ && !kTF32 && !kFusedRows && !kInterleavedHeads && !kListed && !kSegments));
static_assert(!kOrdered || kStages == 2);
// Does a kv tile whose keys no row sees visit the tile of rows in which its empty range of rows lies?
constexpr bool kCountsHiddenTiles = kOrdered && kProblem.ranges;

}  // namespace jax_flash::hopper::backward

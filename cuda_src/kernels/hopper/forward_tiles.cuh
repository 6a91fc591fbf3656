// The tiles of the Hopper forward, and their layout in shared memory.
#pragma once

#include "hopper/bias_tiles.cuh"
#include "hopper/cleared_rows.cuh"
#include "hopper/forward_tuning.cuh"
#include "hopper/row_tiles.cuh"
#include "hopper/shared_tile.cuh"
#include "ptx/warp.cuh"

namespace jax_flash::hopper::forward {

constexpr int kQKBoxes = Boxes(kQKDim);          // of Q and K
constexpr int kVBoxes = Boxes(kVDim);            // of V and O
using SharedQ = SharedTile<kBoxRows, kQKBoxes>;  // of the 64 rows of a row group
using SharedK = SharedTile<kKeys, kQKBoxes>;
using SharedV = SharedTile<kKeys, kVBoxes>;
using SharedVTransposed = SharedTile<kVBoxes * kBoxColumns, Boxes(kKeys)>;  // f32: V^T, which replaces V
constexpr int kTransposers = 3;                                             // warps
constexpr int kLandings = kWarpgroupKeys < 64 ? 8 : 4;    // landing buffers: boxes of V before they are transposed
constexpr bool kPrefetchesLists = kListed && !kTF32;      // does a thread read lists ahead of the loads?
constexpr int kPrefetchDepth = kPrefetchesLists ? 8 : 1;  // the maximum number of kv tiles that it is ahead
// O is stored through separate shared memory, so the next tile of Q can be loaded at the same time. O has room for the
// whole tile, or for two alternating boxes. Without room for two boxes, O is stored through the memory of Q (kOInQ).
// With room for two tiles of Q, the next tile is loaded while the current one is computed.
constexpr int kQBytes = kRowGroups * SharedQ::kBytes;
constexpr int kKVBytes =
    (SharedK::kBytes + SharedV::kBytes + kBiasTile) * kStages + (kTF32 ? kLandings * SharedV::kBox + 1024 : 0);
constexpr int kPartialValues = kVDim / 2 + 6;  // per thread: its O, and m, l and reference of its two rows
constexpr int kPartialBytes = kKeyGroups > 1 ? kRowGroups * kPartialValues * kWarpgroup * 4 : 0;
constexpr int kRoom = 226 * 1024 - kKVBytes - kPartialBytes;                 // for Q and O; barriers have the last KiB
constexpr int kRoomForO = (kRoom - kQBytes) / (kRowGroups * SharedQ::kBox);  // boxes of each row group
constexpr int kOBoxes = kRoomForO >= kVBoxes ? kVBoxes : kRoomForO >= 2 ? 2 : 0;
constexpr bool kOInQ = kOBoxes == 0;
constexpr int kQBuffers = 2 * kQBytes + kRowGroups * kOBoxes * SharedQ::kBox > kRoom ? 1 : 2;
static_assert(kKeyGroups == 1 || !kOInQ);
static_assert(!kOInQ || kVBoxes <= kQKBoxes);

// Does each warpgroup visit only the keys that its own 64 rows see? With 256 rows in a tile, these are clearly fewer
// than the keys that all rows see. Then warpgroups are at different kv tiles and do not take turns. Four warpgroups
// overlap well without turns.
constexpr bool kWarpgroupRanges = (kCausal || kLocal) && !kListed && kRowGroups == 4;

// The number of kv tiles that a warpgroup skips because only other warpgroups' rows see them: on the right, before its
// first tile, and on the left, after its last tile.
struct SkippedTiles {
  int before, after;
};

struct Shared {
  alignas(1024) uint8_t q[kQBuffers][kRowGroups][SharedQ::kBytes];
  alignas(1024) uint8_t o[kOInQ ? 1 : kRowGroups][kOInQ ? 1 : kOBoxes * SharedQ::kBox];
  alignas(1024) uint8_t k[kStages][SharedK::kBytes];
  alignas(1024) uint8_t v[kStages][SharedV::kBytes];                                                  // f32: V^T
  alignas(kBiasTiles ? 1024 : 1) uint8_t bias[kBiasTiles ? kStages : 1][kBiasTiles ? kBiasTile : 1];  // comes with k
  uint64_t q_full[kQBuffers][kRowGroups], q_empty[kQBuffers][kRowGroups];
  // Comes with q. Its index counts two rounds of q's ring (PackedRing::position). A QTile stays valid until q of the
  // tile kQBuffers later is released.
  QTile tile[2 * kQBuffers][kRowGroups];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  ClearingBarrier uncleared;                  // for loads of V with rows that the producer clears
  ListedTile listed[kListed ? kStages : 1];   // comes with k
  ListedTile prefetched[kPrefetchDepth];      // by the ListPrefetcher
  QTile prefetched_tile[kPrefetchDepth + 1];  // comes with the first of them
  uint64_t prefetched_full[kPrefetchDepth], prefetched_empty[kPrefetchDepth];
  // O, m and l of the first half of the keys, for the warpgroup with the second half.
  float partial[kKeyGroups > 1 ? kRowGroups : 1][kKeyGroups > 1 ? kPartialValues : 1][kKeyGroups > 1 ? kWarpgroup : 1];
  // TF32: for the landing buffers.
  uint64_t landed[kTF32 ? kLandings : 1], transposed[kTF32 ? kLandings : 1];
  bool more[kTF32 ? kLandings : 1];  // true: another box comes; false: the end
  SkippedTiles skipped[kWarpgroupRanges ? 2 * kQBuffers : 1]
                      [kWarpgroupRanges ? kRowGroups : 1];  // comes with q, like the tile
  alignas(kTF32 ? 1024 : 1) uint8_t landing[kTF32 ? kLandings : 1][kTF32 ? SharedV::kBox : 1];
};

static_assert(sizeof(Shared) <= 227 * 1024);

}  // namespace jax_flash::hopper::forward

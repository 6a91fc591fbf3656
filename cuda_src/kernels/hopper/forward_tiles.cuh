// Shared memory of the Hopper forward: Q, O, and rings of tiles of K and V, with their barriers.
#pragma once

#include "hopper/bias_tiles.cuh"
#include "hopper/cleared_rows.cuh"
#include "hopper/forward_tuning.cuh"
#include "hopper/forward_warpgroup_ranges.cuh"
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

// Only f32 (forward_staged_v.cuh).
constexpr int kTransposers = 3;                               // warps
constexpr int kStagingBuffers = kWarpgroupKeys < 64 ? 8 : 4;  // for boxes of V

// Only with a block mask (forward_prefetched_lists.cuh).
constexpr bool kPrefetchesLists = kListed && !kTF32;
constexpr int kPrefetchDepth = kPrefetchesLists ? 8 : 1;  // the maximum number of kv tiles that are read ahead

// Only if two warpgroups share rows: the values that a thread sends, its O, and m, l and reference of its two rows.
constexpr int kPartialValues = kVDim / 2 + 6;

// How much memory do Q and O get? First O: room for the whole tile, else for two boxes that alternate, else none. With
// none, O is stored through the memory of Q (kOInQ), so the next Q is loaded later. Then Q: a second buffer if there is
// still room, so the next tile is loaded while the current one is computed.
constexpr int kQBytes = kRowGroups * SharedQ::kBytes;
constexpr int kQAndOBytes = 226 * 1024  // barriers have the last KiB
                            - (SharedK::kBytes + SharedV::kBytes + kBiasTile) * kStages -
                            (kTF32 ? kStagingBuffers * SharedV::kBox + 1024 : 0) -
                            (kKeyGroups > 1 ? kRowGroups * kPartialValues * kWarpgroup * 4 : 0);
constexpr int kMaxOBoxes = (kQAndOBytes - kQBytes) / (kRowGroups * SharedQ::kBox);  // of each row group
constexpr int kOBoxes = kMaxOBoxes >= kVBoxes ? kVBoxes : kMaxOBoxes >= 2 ? 2 : 0;
constexpr bool kOInQ = kOBoxes == 0;
constexpr int kQBuffers = 2 * kQBytes + kRowGroups * kOBoxes * SharedQ::kBox > kQAndOBytes ? 1 : 2;
static_assert(kKeyGroups == 1 || !kOInQ);
static_assert(!kOInQ || kVBoxes <= kQKBoxes);

// Each buffer has a barrier `full`, at which TMA arrives, and a barrier `empty`, at which its readers arrive. Members
// that a kernel does not use have size 1.
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
  uint64_t staging_full[kTF32 ? kStagingBuffers : 1], staging_empty[kTF32 ? kStagingBuffers : 1];
  bool staging_has_box[kTF32 ? kStagingBuffers : 1];  // false: no more boxes come
  SkippedTiles skipped[kWarpgroupRanges ? 2 * kQBuffers : 1]
                      [kWarpgroupRanges ? kRowGroups : 1];  // comes with q, like the tile
  alignas(kTF32 ? 1024 : 1) uint8_t staging[kTF32 ? kStagingBuffers : 1][kTF32 ? SharedV::kBox : 1];
};

static_assert(sizeof(Shared) <= 227 * 1024);

}  // namespace jax_flash::hopper::forward

// The tiles of the Hopper backward, and their layout in shared memory.
#pragma once

#include "hopper/backward_tuning.cuh"
#include "hopper/bias_tiles.cuh"
#include "hopper/cleared_rows.cuh"
#include "hopper/shared_tile.cuh"
#include "ptx/warp.cuh"
#include "scheduler/lists.cuh"

namespace jax_flash::hopper::backward {

// With kPairs: the columns of a CTA's half of dQ, and the wgmma steps and boxes of these columns of K. The last box may
// have further columns, which are not used.
constexpr int kHalfColumns = (kQKDim / 2 + 15) / 16 * 16, kHalfSteps = kHalfColumns / 16;
constexpr int kHalfBoxes = Boxes(kHalfColumns);
constexpr int kQKBoxes = Boxes(kPairs ? 2 * kHalfColumns : kQKDim);
constexpr int kVBoxes = Boxes(kVDim);
using SharedQ = SharedTile<kRows, kQKBoxes>;
using SharedDO = SharedTile<kRows, kVBoxes>;
using SharedK = SharedTile<kKeys, kQKBoxes>;
using SharedV = SharedTile<kKeys, kVBoxes>;
using SharedHalfK = SharedTile<kKeys, kHalfBoxes>;
using SharedDSTransposed = SharedTile<kKeys, Boxes(kRows)>;  // dS^T

constexpr bool kDS = kDQ || kDK || kCapturedGradients;  // is dS needed?

// TF32
constexpr bool kTF32SameKeys = kTF32 && kSameKeys;
using SharedQTransposed = SharedTile<kQKBoxes * kBoxColumns, Boxes(kRows)>;
using SharedDOTransposed = SharedTile<kVBoxes * kBoxColumns, Boxes(kRows)>;
using SharedKTransposed = SharedTile<kQKBoxes * kBoxColumns, Boxes(kKeys)>;
using SharedDS = SharedTile<kRows, Boxes(kKeys)>;
constexpr int kTransposers = kTF32 ? 3 : 0;  // warps of the producer's warpgroup
constexpr int kDSBytes = kRows * kKeys * kElementBytes;
// With kPairs: buffers for the dS of both CTAs.
constexpr int kDSBuffers = Tuning::kDelayedDQ ? 2 : 1;
constexpr int kDOReaders = kTF32SameKeys ? 4 : 4 * kConsumers;   // warps that read dO; the same number reads dO^T
constexpr int kQTransposers = kTF32SameKeys ? 0 : kTransposers;  // if 0, the consumer warpgroup transposes Q

// With kFusedRows: bytes of 16 rows of a box of dQ in f32, or of a box of O and a box of dO.
constexpr int kRowsBytes = kFusedBoxRows * 64 * 4;

// A tile of K and V.
struct KVTile {
  int first_key, head, batch;  // first_key < 0: there are no more tiles; batch < 0: an empty tile (Producer::Flush)
  // With kFusedRows: the index in p.added of the head to whose dQ the tile adds; < 0: this has been reported there, or
  // there is nothing to report (backward_fused_rows.cuh).
  int item_head;
  int steps;  // the number of q tiles, over all its heads, that it visits; with a block mask only whether there are any
};

// A kv tile, or two with kPairs, and the rows that see it.
struct VisibleTile {
  KVTile tile;
  Visible rows;
};
// Does the producer keep it in shared memory, because it lacks registers?
constexpr bool kVisibleTileInShared = (kListed || kEmptyRows) && (kPairs || Tuning::kProducerRegisters < 56);

// The masks to apply to a tile of S; kOnlyBlock: only the bits of its block.
enum class Masks : int8_t { kNone, kAll, kOnlyBlock };

// One step of the loop: a tile of Q and of dO.
struct Step {
  int row, head;
  int row_block;  // index of its first 64 rows in scratch
  int kind;       // of the block of a block mask
  Masks masks;
  bool last;  // is it the last step of this kv tile?
};

// With kOrdered: a tile of dQ on its way to HBM.
struct DQTile {
  int row_block;  // index of its first 64 rows in scratch; < 0: no more tiles
  int first_key;  // the first of the keys that it sums over
};
constexpr bool kStagesDQ = kOrdered && !kPairs;  // does it wait for its turn in shared memory?

constexpr int kSumBytes = 8 * 16 * kBoxColumns * 4;  // 16 rows of a box of dK or dV in f32, for each consumer warp
constexpr int kStagingBytes = kPairs ? kRows * kKeys * 4 : kSumKV ? kSumBytes : kRows * kQKDim * 4;

struct Shared {
  // With kPairs: K of both CTAs, only the columns of this CTA's half of dQ. TF32: K^T, transposed from K in ds, or with
  // kSameKeys in staging.
  alignas(1024) uint8_t k[kPairs ? 2 * SharedHalfK::kBytes : SharedK::kBytes];
  alignas(1024) uint8_t v[kTF32SameKeys ? 2 * kDSBytes : SharedV::kBytes];  // with kTF32SameKeys later dS and P
  alignas(1024) uint8_t q[kStages][SharedQ::kBytes];
  alignas(1024) uint8_t d_o[kStages][SharedDO::kBytes];
  // dS^T, in boxes of [keys][64 rows]; with kPairs, buffers of this CTA's and of the other CTA's. TF32: first K before
  // it is transposed, then dS, in boxes of [rows][32 keys].
  alignas(1024) uint8_t ds[kTF32 ? 1 : kPairs ? 2 * kDSBuffers : 2][kTF32SameKeys ? 1 : kDSBytes];
  // dQ in f32 before it is added to HBM; at the end dK, if dV and dK do not fit into ds. With kPairs: at the start of a
  // kv tile the columns of K that only S needs, later P on its way from one warpgroup to the other.
  alignas(1024) uint8_t
      staging[(kStagingBytes > SharedK::kBytes || kPairs ? kStagingBytes : SharedK::kBytes) * (kStagesDQ ? 2 : 1)];
  // With kPairs, if dQ is one step behind: dQ in f32 before it is added to HBM.
  alignas(16) float dq[kPairs && Tuning::kDelayedDQ ? 64 * kHalfColumns : 1];
  alignas(kBiasTiles ? 1024 : 1) uint8_t bias[kBiasTiles ? kStages : 1][kBiasTiles ? kBiasTile : 1];  // comes with q
  alignas(16) float minus_l[kStages][kSeparateMaximum ? 2 : 1][kRows];  // -L / scale, or -log l and m separately
  alignas(16) float d[kStages][kRows];
  alignas(16) Step step[kStages];
  alignas(16) KVTile tile[2];
  VisibleTile visible_tile;  // the producer's, with kVisibleTileInShared
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
  uint64_t ds_full[kStages], ds_empty[kStages];  // with kPairs, for the dS of the other CTA
  // With kOrdered: the tiles of dQ in `staging`.
  DQTile dq_tile[kOrdered ? kStages : 1];
  uint64_t dq_full[kOrdered ? kStages : 1], dq_empty[kOrdered ? kStages : 1];
  // With kFusedRows: two buffers for each warp that prepares and finishes rows.
  alignas(kFusedRows ? 1024 : 1) uint8_t rows[3][2][kFusedRows ? kRowsBytes : 1];
  alignas(16) uint8_t zeros[kFusedRows ? kRowsBytes : 1];
  uint64_t rows_full[3][2];
  ClearingBarrier uncleared[2];  // for loads with rows that the producer clears: [0] of Q or V, [1] of dO or K
  EmptyRows<kRows> empty_rows;   // in the tile that the producer loads
  // TF32: the transposes of Q and dO.
  uint64_t q_t_full, q_t_empty, do_t_full, do_t_empty;
  bool more[kTF32 ? kStages : 1];  // comes with dO; false: there are no more steps
  // With kOrdered and kPairs: the consumers' turn to add dq_tile[0] to the sums, and the number of the cluster's kv
  // tile, in the first CTA.
  uint64_t turn_wanted, turn_begins, turn_ends;
  int number;
  alignas(kTF32 ? 1024 : 1) uint8_t q_t[kTF32 ? SharedQTransposed::kBytes : 1];
  alignas(kTF32 ? 1024 : 1) uint8_t do_t[kTF32 ? SharedDOTransposed::kBytes : 1];
};
static_assert(kSameKeys || sizeof(Shared::ds) >= sizeof(Shared::v));                // dV is stored from ds
static_assert(!kTF32 || kTF32SameKeys || sizeof(Shared::ds) >= sizeof(Shared::k));  // K arrives in ds
static_assert(sizeof(Shared::v) >= SharedV::kBytes);
static_assert(!kSumKV || (kSumBytes <= sizeof(Shared::ds) && kStagingBytes >= kRows * kQKDim * 4));

// The memory through which a tile of dQ leaves. With kStagesDQ there are two.
__device__ __forceinline__ uint8_t* StagedDQ(Shared& shared, int stage) {
  return shared.staging + (kStagesDQ ? stage * int(sizeof(shared.staging) / 2) : 0);
}

// The number of blocks of 64 keys of a head in the f32 sums of dK and dV.
__device__ __forceinline__ int KeyBlocksOfHead(const Params& p) {
  return (p.kv_len + kKeys - 1) / kKeys * (kKeys / kRowBlock);
}

// The number of kv tiles of a head.
__device__ __forceinline__ int TilesOfHead(const Params& p) {
  if constexpr (kListed) return ListedColumnTiles<kKeys>(p);
  return (Opaque(p.kv_len) + kKeys - 1) / kKeys;
}

}  // namespace jax_flash::hopper::backward

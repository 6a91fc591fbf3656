// The tiles of the Hopper forward for wide heads in shared memory, and the threads that load them.
#pragma once

#include "hopper/cleared_rows.cuh"
#include "hopper/row_tiles.cuh"
#include "hopper/shared_tile.cuh"
#include "ptx/cluster.cuh"
#include "semantics/dropout.cuh"

namespace jax_flash::hopper::wide_forward {

static_assert(kTiling.family == Family::kHopper && kElementBytes == 2);
static_assert(!kAddsToScores && !kMask && !kListed && !kUnrounded && !kDropout && kVDim <= 512);
static_assert(kTiling.groups == 2 && kRows % 64 == 0 && kKeys == 64);
constexpr int kConsumers = 2;         // warpgroups
constexpr int kCluster = kRows / 64;  // CTAs that share K and V
static_assert(kCluster <= 2);
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

constexpr int kQKBoxes = Boxes(kQKDim), kVBoxes = Boxes(kVDim);
constexpr int kHalfBoxes = (kVBoxes + 1) / 2;  // of V and O, for a warpgroup
using SharedQ = SharedTile<64, kQKBoxes>;      // the rows of this CTA
using SharedP = SharedTile<64, 1>;             // all keys of a kv tile
using BoxOfK = SharedTile<kKeys, 1>;
using HalfOfV = SharedTile<kKeys, kHalfBoxes>;  // of the columns
constexpr bool kVInK = kParts;                  // are the first boxes of a tile of K its tile of V?
static_assert(!kVInK || (kProblem.latent && 2 * kHalfBoxes <= kQKBoxes && kPage % kKeys == 0));
constexpr int kVSlots = 3;                             // halves of V in flight
constexpr int kVBytes = kVInK ? 16 : HalfOfV::kBytes;  // in a slot
constexpr int kRoomForK = 224 * 1024 - SharedQ::kBytes - SharedP::kBytes - (kVInK ? 0 : kVSlots * kVBytes);
constexpr int kBoxesOfRoom = kRoomForK / BoxOfK::kBytes;
constexpr int kKSlots = kVInK ? kBoxesOfRoom / kQKBoxes * kQKBoxes : kBoxesOfRoom;  // boxes of K in flight

static_assert(!kVInK || kKSlots >= 2 * kQKBoxes);  // a tile is only released when the next one is in use

struct Shared {
  alignas(1024) uint8_t q[SharedQ::kBytes];
  alignas(1024) uint8_t p[SharedP::kBytes];
  alignas(1024) uint8_t k[kKSlots][BoxOfK::kBytes];
  alignas(kVInK ? 16 : 1024) uint8_t v[kVSlots][kVBytes];
  // The softmax after the tile in `p`. l is still divided among the lanes of a row.
  float m[64], reference[64], l[2][kWarpgroup];
  uint64_t q_full, q_empty;
  // These come with q, and stay until the next q is released. Tiles of K have owners in turn, also across tiles of Q.
  // So P is always handed over in turn.
  QTile tile[2];
  int owner[2];  // the warpgroup that owns the first tile of K
  int part[2];   // split-KV: the number of this part of the keys
  uint64_t k_full[kConsumers][kKSlots], k_empty[kKSlots];
  uint64_t v_full[kConsumers][kVSlots], v_empty[kVSlots];
  ClearingBarrier uncleared;  // for loads of V with rows that its producer clears
};

static_assert(sizeof(Shared) <= 227 * 1024);

// Where TMA finds tile j of K or V.
struct KVTile {
  int row, head, batch;

  // Tiles do not cross pages, because kKeys divides the size of a page. Invalid page numbers are clamped.
  __device__ __forceinline__ KVTile(const Params& p, const QTile& tile, int j)
      : row(j * kKeys), head(tile.head / (p.q_heads / p.kv_heads)), batch(tile.batch) {
    if constexpr (kPage > 0) {
      const int page = __ldg(p.page_table + int64_t(batch) * (p.kv_len / kPage) + row / kPage);
      row = min(max(page, 0), p.pages - 1) * kPage + row % kPage;
      batch = 0;
    }
  }

  // Loads a box to this CTA.
  __device__ __forceinline__ void Load(uint8_t* to, const TensorMap* map, uint64_t* full, int box) const {
    TmaLoad(to, map, full, box * kBoxColumns, row, head, batch);
  }
  // Loads a box to all CTAs of the cluster. Each CTA loads every other box.
  __device__ __forceinline__ void LoadToAll(uint8_t* to, const TensorMap* map, uint64_t* full, int box) const {
    if constexpr (kCluster == 1) {
      Load(to, map, full, box);
    } else if (box % kCluster == ClusterRank()) {
      TmaLoadToPair(to, map, full, box * kBoxColumns, row, head, batch);
    }
  }
};

// The number of keys of tile j that exist. The others must be cleared in V: their P is 0, but 0 times NaN is NaN.
__device__ __forceinline__ int PresentKeys(const Params& p, int batch, int j) {
  return kProblem.kv_lengths ? int(PositionsOf(p, batch).kv_length) - j * kKeys : kKeys;
}

// Finds the next tile of Q. Returns false at the end.
struct QTiles {
  StaticSchedule<kCluster> schedule;

  __device__ __forceinline__ bool Next(const Params& p, QTile* tile, int*) { return hopper::Next(p, &schedule, tile); }
};

// Split-KV, if all query heads share one key head: tiles of Q, and of each tile the parts of the keys that it sees. One
// part of all tiles comes before the next part. The first parts have one kv tile more than the last ones.
struct QTilesInParts {
  int next = blockIdx.x / kCluster;

  __device__ __forceinline__ bool Next(const Params& p, QTile* tile, int* part) {
    const int tiles = (p.q_len * kPacked + kRows - 1) / kRows, all = p.batch * tiles;
    if (next >= all * p.parts) return false;
    *part = next / all;
    const int row = next % tiles * kRows, batch = next % all / tiles;
    Visible visible = TilesOf(p, batch, row / kPacked, (row + kRows - 1) / kPacked + 1);
    const int count = visible.any_hi - visible.any_lo, share = count / p.parts, more = count % p.parts;
    visible.any_lo += *part * share + min(*part, more);
    visible.any_hi = visible.any_lo + share + (*part < more ? 1 : 0);
    *tile = {row, 0, batch, visible};
    next += gridDim.x / kCluster;
    return true;
  }
};

// Loads Q, and K box by box.
struct ProducerOfQK {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map;
  PackedRing<1> q;
  Ring<kKSlots> k;

  OneOf<kParts, QTilesInParts, QTiles>::Type tiles;

  __device__ __forceinline__ void Run() {
    while (LoadTile()) continue;
  }

 private:
  // Passes the next tile to the consumers, and loads everything for it. The tile is only in shared memory, because this
  // thread has few registers. Returns false at the end.
  __device__ __forceinline__ bool LoadTile() {
    MbarrierWait(&shared.q_empty, q.Parity() ^ 1);
    QTile& tile = shared.tile[q.position];
    int owner = shared.owner[q.position];
    if (!tiles.Next(p, &tile, &shared.part[q.position])) tile = {-1};
    const bool empty = tile.visible.any_lo == tile.visible.any_hi;
    MbarrierArriveExpectTx(&shared.q_full, empty ? 0 : SharedQ::kBytes);
    if (!empty) SharedQ{shared.q}.Load(q_map, &shared.q_full, tile.row + 64 * ClusterRank(), tile.head, tile.batch);
    for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j, owner ^= 1) {
      const KVTile from(p, tile, j);
      if (kVInK && PresentKeys(p, tile.batch, j) < kKeys) {
        LoadAndClear(from, owner, PresentKeys(p, tile.batch, j));
        continue;
      }
#pragma unroll 1
      for (int b = 0; b < kQKBoxes; ++b, k.Next()) {
        MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
        uint64_t* const full = &shared.k_full[owner][k.index];
        MbarrierArriveExpectTx(full, BoxOfK::kBytes);
        from.LoadToAll(shared.k[k.index], k_map, full, b);
      }
    }
    q.Next();
    shared.owner[q.position] = owner;
    return tile.row >= 0;
  }

  // Each CTA loads its own tile, and clears its rows from `present` on.
  __device__ __forceinline__ void LoadAndClear(const KVTile& from, int owner, int present) {
    MbarrierArriveExpectTx(&shared.uncleared.barrier, kQKBoxes * BoxOfK::kBytes);
    const int first = k.index;  // of slots that are next to each other
#pragma unroll 1
    for (int b = 0; b < kQKBoxes; ++b, k.Next()) {
      MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
      from.Load(shared.k[k.index], k_map, &shared.uncleared.barrier, b);
    }
    shared.uncleared.Wait();
#pragma unroll 1
    for (int b = 0; b < kQKBoxes; ++b)
      ClearRowsFrom(BoxOfK{shared.k[first + b]}, max(present, 0), &shared.k_full[owner][first + b]);
  }
};

// Loads V in halves. The half of the warpgroup that computes P comes first.
struct ProducerOfV {
  const Params& p;
  Shared& shared;
  const TensorMap* v_map;
  PackedRing<1> q;
  Ring<kVSlots> v;

  __device__ __forceinline__ void Run() {
    for (;; q.Next()) {
      MbarrierWait(&shared.q_full, q.Parity());
      const QTile tile = shared.tile[q.position];
      int owner = shared.owner[q.position];
      MbarrierArrive(&shared.q_empty);  // with many empty tiles, the other roles could be far ahead
      if (tile.row < 0) return;
      for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j, owner ^= 1) {
        const KVTile from(p, tile, j);
#pragma unroll 1
        for (int other = 0; other < 2; ++other) LoadHalf(owner ^ other, from, PresentKeys(p, tile.batch, j));
      }
    }
  }

 private:
  __device__ __forceinline__ void LoadHalf(int half, const KVTile& from, int present) {
    MbarrierWait(&shared.v_empty[v.index], v.parity ^ 1);
    const HalfOfV to{shared.v[v.index]};
    uint64_t* const full = &shared.v_full[half][v.index];
    const int first = half * kHalfBoxes;
    if (present >= kKeys) {
      MbarrierArriveExpectTx(full, HalfOfV::kBytes);
#pragma unroll 1
      for (int b = 0; b < kHalfBoxes; ++b) from.LoadToAll(to.Box(b), v_map, full, first + b);
    } else {  // each CTA loads and clears its own
      MbarrierArriveExpectTx(&shared.uncleared.barrier, HalfOfV::kBytes);
#pragma unroll 1
      for (int b = 0; b < kHalfBoxes; ++b) from.Load(to.Box(b), v_map, &shared.uncleared.barrier, first + b);
      shared.uncleared.Wait();
      ClearRowsFrom(to, max(present, 0), full);
    }
    v.Next();
  }
};

}  // namespace jax_flash::hopper::wide_forward

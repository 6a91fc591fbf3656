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
constexpr int kVSlots = 3;                      // halves of V in flight
constexpr int kRoomForK = 224 * 1024 - SharedQ::kBytes - SharedP::kBytes - kVSlots * HalfOfV::kBytes;
constexpr int kKSlots = kRoomForK / BoxOfK::kBytes;  // boxes of K in flight

struct Shared {
  alignas(1024) uint8_t q[SharedQ::kBytes];
  alignas(1024) uint8_t p[SharedP::kBytes];
  alignas(1024) uint8_t v[kVSlots][HalfOfV::kBytes];
  alignas(1024) uint8_t k[kKSlots][BoxOfK::kBytes];
  // The softmax after the tile in `p`. l is still divided among the lanes of a row.
  float m[64], reference[64], l[2][kWarpgroup];
  uint64_t q_full, q_empty;
  // These come with q, and stay until the next q is released. Tiles of K have owners in turn, also across tiles of Q.
  // So P is always handed over in turn.
  QTile tile[2];
  int owner[2];  // the warpgroup that owns the first tile of K
  uint64_t k_full[kConsumers][kKSlots], k_empty[kKSlots];
  uint64_t v_full[kConsumers][kVSlots], v_empty[kVSlots];
  ClearingBarrier uncleared;  // for loads of V with rows that its producer clears
};

static_assert(sizeof(Shared) <= 227 * 1024);

// Loads box `box` of tile j of K or V, to all CTAs of the cluster. Each CTA loads every other box.
__device__ __forceinline__ void LoadBox(uint8_t* to, const TensorMap* map, uint64_t* full, int box, int j, int head,
                                        int batch) {
  const int column = box * kBoxColumns, row = j * kKeys;
  if constexpr (kCluster == 1) {
    TmaLoad(to, map, full, column, row, head, batch);
  } else if (box % kCluster == ClusterRank()) {
    TmaLoadToPair(to, map, full, column, row, head, batch);
  }
}

// Loads Q, and K box by box.
struct ProducerOfQK {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map;
  PackedRing<1> q;
  Ring<kKSlots> k;

  StaticSchedule<kCluster> schedule;

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
    if (!Next(p, &schedule, &tile)) tile = {-1};
    const bool empty = tile.visible.any_lo == tile.visible.any_hi;
    MbarrierArriveExpectTx(&shared.q_full, empty ? 0 : SharedQ::kBytes);
    if (!empty) SharedQ{shared.q}.Load(q_map, &shared.q_full, tile.row + 64 * ClusterRank(), tile.head, tile.batch);
    const int head = tile.head / (p.q_heads / p.kv_heads);
    for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j, owner ^= 1) {
#pragma unroll 1
      for (int b = 0; b < kQKBoxes; ++b, k.Next()) {
        MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
        uint64_t* const full = &shared.k_full[owner][k.index];
        MbarrierArriveExpectTx(full, BoxOfK::kBytes);
        LoadBox(shared.k[k.index], k_map, full, b, j, head, tile.batch);
      }
    }
    q.Next();
    shared.owner[q.position] = owner;
    return tile.row >= 0;
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
      const int head = tile.head / (p.q_heads / p.kv_heads), batch = tile.batch;
      for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j, owner ^= 1) {
#pragma unroll 1
        for (int other = 0; other < 2; ++other) LoadHalf(owner ^ other, j, head, batch);
      }
    }
  }

 private:
  // Keys beyond kv_length are set to 0: their P is 0, but 0 times a NaN in V is NaN.
  __device__ __forceinline__ void LoadHalf(int half, int j, int head, int batch) {
    MbarrierWait(&shared.v_empty[v.index], v.parity ^ 1);
    const HalfOfV to{shared.v[v.index]};
    uint64_t* const full = &shared.v_full[half][v.index];
    const int first = half * kHalfBoxes;
    const int present = kProblem.kv_lengths ? int(PositionsOf(p, batch).kv_length) - j * kKeys : kKeys;
    if (present >= kKeys) {
      MbarrierArriveExpectTx(full, HalfOfV::kBytes);
#pragma unroll 1
      for (int b = 0; b < kHalfBoxes; ++b) LoadBox(to.Box(b), v_map, full, first + b, j, head, batch);
    } else {  // each CTA loads and clears its own
      MbarrierArriveExpectTx(&shared.uncleared.barrier, HalfOfV::kBytes);
#pragma unroll 1
      for (int b = 0; b < kHalfBoxes; ++b)
        TmaLoad(to.Box(b), v_map, &shared.uncleared.barrier, (first + b) * kBoxColumns, j * kKeys, head, batch);
      shared.uncleared.Wait();
      ClearRowsFrom(to, max(present, 0), full);
    }
    v.Next();
  }
};

}  // namespace jax_flash::hopper::wide_forward

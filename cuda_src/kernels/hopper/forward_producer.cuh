// The thread of the Hopper forward that loads tiles: lines 7 and 9 of Algorithm 2.
//
// For each q tile it loads K of the last kv tile, then Q, and then in a loop K of the next kv tile and V of the current
// one. So the consumers, which need K of tile j - 1 before V of tile j, never wait for a tile behind another one. A
// buffer has two barriers. The thread waits for `empty`, which the consumers arrive at when they have read the buffer.
// TMA arrives at `full`.
#pragma once

#include "hopper/forward_prefetched_lists.cuh"
#include "hopper/forward_staged_v.cuh"

namespace jax_flash::hopper::forward {

struct Producer {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map, *v_map, *bias_map;
  Ring<kStages> v;                // the buffer of the next tile of V; K is at most one tile ahead, in v.After()
  Ring<kStagingBuffers> staging;  // TF32: the buffer of the next box of V
  PackedRing<kQBuffers> q;

  // Loads tile j of K, and the tile of the bias for this q tile and kv tile.
  __device__ __forceinline__ void LoadK(Ring<kStages> k, int j, int head, int batch, const QTile& tile,
                                        ListedTile listed = {}) {
    MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
    if (kListed) shared.listed[k.index] = listed;
    MbarrierArriveExpectTx(&shared.k_full[k.index], SharedK::kBytes + kBiasTile);
    for (int b = 0; b < kQKBoxes; ++b)
      TmaLoad(shared.k[k.index] + b * SharedK::kBox, k_map, &shared.k_full[k.index], b * kBoxColumns, j * kKeys, head,
              batch);
    if (kBiasTiles)
      LoadBiasTile(p, shared.bias[k.index], bias_map, &shared.k_full[k.index], tile.row, j * kKeys, tile.head, batch);
  }
  __device__ __forceinline__ void LoadV(int j, int head, int batch) {
    if constexpr (kTF32) {
#pragma unroll 1
      for (int b = 0; b < kVBoxes; ++b) {
        WaitForStaging(true);
        LoadBoxesOfV(SharedTile<kKeys, 1>{shared.staging[staging.index]}, &shared.staging_full[staging.index], b, j,
                     head, batch);
        staging.Next();
      }
    } else {
      MbarrierWait(&shared.v_empty[v.index], v.parity ^ 1);
      LoadBoxesOfV(SharedV{shared.v[v.index]}, &shared.v_full[v.index], 0, j, head, batch);
    }
    v.Next();
  }

  // Loads boxes of tile j of V, from box `first` on. Keys beyond kv_length are set to 0: their P is 0, but 0 times a
  // NaN in V is NaN.
  template <int kCount>
  __device__ __forceinline__ void LoadBoxesOfV(SharedTile<kKeys, kCount> boxes, uint64_t* full, int first, int j,
                                               int head, int batch) {
    const int present = kProblem.kv_lengths ? int(PositionsOf(p, batch).kv_length) - j * kKeys : kKeys;
    const bool clears = present < kKeys;
    uint64_t* const arrived = clears ? &shared.uncleared.barrier : full;
    MbarrierArriveExpectTx(arrived, boxes.kBytes);
    for (int b = 0; b < kCount; ++b)
      TmaLoad(boxes.Box(b), v_map, arrived, (first + b) * kBoxColumns, j * kKeys, head, batch);
    if (!clears) return;
    shared.uncleared.Wait();
    ClearRowsFrom(boxes, max(present, 0), full);
  }

  // TF32: waits for a free staging buffer. Tells the warps that transpose whether another box of V comes.
  __device__ __forceinline__ void WaitForStaging(bool has_box) {
    MbarrierWait(&shared.staging_empty[staging.index], staging.parity ^ 1);
    shared.staging_has_box[staging.index] = has_box;
  }
  // Tells the warps that there are no more boxes.
  __device__ __forceinline__ void EndStaging() {
    for (int w = 0; w < kTransposers; ++w) {
      WaitForStaging(false);
      MbarrierArrive(&shared.staging_full[staging.index]);
      staging.Next();
    }
  }

  // Passes the tile to all consumers, and loads its Q. With a block mask there are no registers to unroll the loop.
  __device__ __forceinline__ void LoadQ(const QTile& tile, bool empty) {
#pragma unroll(kListed ? 1 : kRowGroups)
    for (int w = 0; w < kRowGroups; ++w) {
      MbarrierWait(&shared.q_empty[q.Index()][w], q.Parity() ^ 1);
      if (kWarpgroupRanges && !empty) {
        shared.tile[q.position][w] = TileOfWarpgroup(p, tile, w, &shared.skipped[q.position][w]);
      } else {
        shared.tile[q.position][w] = tile;
        if (kWarpgroupRanges) shared.skipped[q.position][w] = {0, 0};
      }
      MbarrierArriveExpectTx(&shared.q_full[q.Index()][w], empty ? 0 : SharedQ::kBytes);
      for (int b = 0; !empty && b < kQKBoxes; ++b)
        TmaLoad(SharedQ{shared.q[q.Index()][w]}.Box(b), q_map, &shared.q_full[q.Index()][w], b * kBoxColumns,
                tile.row + 64 * w, tile.head, tile.batch);
    }
    q.Next();
  }

  __device__ __forceinline__ void Run() {
    if constexpr (kPrefetchesLists) {
      RunListed(PrefetchedLists{shared});
    } else if constexpr (kListed) {
      RunListed(ListReader{p});
    } else {
      auto schedule = MakeSchedule(p);
      QTile tile;
      while (Next(p, &schedule, &tile)) Load(tile, &schedule);
    }
    LoadQ({-1}, true);
    if (kTF32) EndStaging();
  }

  // Loads everything for a tile of O. The next tile is requested from the scheduler before the last tile of V is
  // loaded, to hide the latency of the atomic.
  template <typename Schedule>
  __device__ __forceinline__ void Load(const QTile& tile, Schedule* schedule) {
    const bool empty = tile.visible.any_lo == tile.visible.any_hi;
    if (empty) schedule->Request();
    const int kv_head = tile.head / (p.q_heads / p.kv_heads);
    if (!empty) LoadK(v, tile.visible.any_hi - 1, kv_head, tile.batch, tile);
    LoadQ(tile, empty);
    for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j) {
      if (j > tile.visible.any_lo) {
        LoadK(v.After(), j - 1, kv_head, tile.batch, tile);
      } else {
        schedule->Request();
      }
      LoadV(j, kv_head, tile.batch);
    }
  }

  // With a block mask: loads all tiles from a ListReader or PrefetchedLists.
  template <typename List>
  __device__ __forceinline__ void RunListed(List list) {
    while (list.NextTile()) {
      const QTile& tile = list.Tile();
      const int kv_head = tile.head / (p.q_heads / Opaque(p.kv_heads)), batch = tile.batch;
      ListedTile keys = list.NextKeys();
      if (keys.Exists()) LoadK(v, keys.J(), kv_head, batch, tile, keys);
      LoadQ(tile, !keys.Exists());
      while (keys.Exists()) {
        const int j = keys.J();
        keys = keys.Last() ? ListedTile{} : list.NextKeys();
        if (keys.Exists()) LoadK(v.After(), keys.J(), kv_head, batch, tile, keys);
        LoadV(j, kv_head, batch);
      }
    }
  }
};

}  // namespace jax_flash::hopper::forward

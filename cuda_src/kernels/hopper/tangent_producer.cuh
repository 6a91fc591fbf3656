// The producer of the Hopper tangent pass: one thread loads Q, K and V with their tangents.
#pragma once

#include "hopper/tangent_tiles.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_flash::hopper::tangent {

struct Producer {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map, *v_map, *q_tangent_map, *k_tangent_map, *v_tangent_map;
  Ring<kStages> at;  // of the next tile of V; K is at most one tile ahead of it
  PackedRing<kQBuffers> q;

  __device__ __forceinline__ void LoadK(Ring<kStages> k, int j, int head, int batch, ListedTile listed = {}) {
    MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
    if (kListed) shared.listed[k.index] = listed;
    uint64_t* const full = &shared.k_full[k.index];
    MbarrierArriveExpectTx(full, kKBytes);
    SharedK{shared.k[k.index]}.Load(k_map, full, j * kKeys, head, batch);
    if (kKeyMoves) SharedK{shared.k_tangent[k.index]}.Load(k_tangent_map, full, j * kKeys, head, batch);
  }

  // Loads tile j of V. Keys beyond kv_length are set to 0: their P is 0, but 0 times a NaN in V would be NaN.
  __device__ __forceinline__ void LoadV(int j, int head, int batch) {
    MbarrierWait(&shared.v_empty[at.index], at.parity ^ 1);
    uint64_t* const full = &shared.v_full[at.index];
    const int present = kProblem.kv_lengths ? int(PositionsOf(p, batch).kv_length) - j * kKeys : kKeys;
    const bool clears = present < kKeys;
    uint64_t* const arrived = clears ? &shared.uncleared.barrier : full;
    const SharedV v{shared.v[at.index]}, v_tangent{shared.v_tangent[at.index]};
    MbarrierArriveExpectTx(arrived, kVBytes);
    if (kScoresMove) v.Load(v_map, arrived, j * kKeys, head, batch);
    if (kValueMoves) v_tangent.Load(v_tangent_map, arrived, j * kKeys, head, batch);
    at.Next();
    if (!clears) return;
    shared.uncleared.Wait();
    const int first = max(present, 0), count = kKeys - first;
    MbarrierArriveExpectTx(full, kVBytes / kKeys * count);
    if (kScoresMove) ClearRows(v, first, count, full);
    if (kValueMoves) ClearRows(v_tangent, first, count, full);
  }

  // Passes the tile to all consumers, and loads its Q.
  __device__ __forceinline__ void LoadQ(const QTile& tile, bool empty) {
#pragma unroll 1
    for (int w = 0; w < kConsumers; ++w) {
      MbarrierWait(&shared.q_empty[q.Index()][w], q.Parity() ^ 1);
      shared.tile[q.position][w] = tile;
      uint64_t* const full = &shared.q_full[q.Index()][w];
      MbarrierArriveExpectTx(full, empty ? 0 : kQBytes);
      if (empty) continue;
      const int buffer = q.Index() * kConsumers + w, row = tile.row + 64 * w;
      SharedQ{shared.q[buffer]}.Load(q_map, full, row, tile.head, tile.batch);
      if (kQueryMoves) SharedQ{shared.q_tangent[buffer]}.Load(q_tangent_map, full, row, tile.head, tile.batch);
    }
    q.Next();
  }

  __device__ __forceinline__ void Run() {
    if constexpr (kListed) {
      ListReader list{p};
      while (list.NextTile()) LoadListed(&list);
    } else {
      auto schedule = MakeSchedule(p);
      QTile tile;
      while (Next(p, &schedule, &tile)) Load(tile, &schedule);
    }
    LoadQ({-1}, true);
  }

  // Loads everything for a tile of O. The schedule is asked for the next tile before the last tile of V is loaded,
  // since its answer takes a while.
  template <typename Schedule>
  __device__ __forceinline__ void Load(const QTile& tile, Schedule* schedule) {
    const bool empty = tile.visible.any_lo == tile.visible.any_hi;
    if (empty) schedule->Request();
    const int kv_head = tile.head / (p.q_heads / p.kv_heads);
    if (!empty) LoadK(at, tile.visible.any_hi - 1, kv_head, tile.batch);
    LoadQ(tile, empty);
    for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j) {
      if (j > tile.visible.any_lo) {
        LoadK(at.After(), j - 1, kv_head, tile.batch);
      } else {
        schedule->Request();
      }
      LoadV(j, kv_head, tile.batch);
    }
  }

  // With a block mask: the same for the tile that a ListReader has found.
  __device__ __forceinline__ void LoadListed(ListReader* list) {
    const QTile& tile = list->Tile();
    const int kv_head = tile.head / (p.q_heads / Opaque(p.kv_heads)), batch = tile.batch;
    ListedTile keys = list->NextKeys();
    if (keys.Exists()) LoadK(at, keys.J(), kv_head, batch, keys);
    LoadQ(tile, !keys.Exists());
    while (keys.Exists()) {
      const int j = keys.J();
      keys = keys.Last() ? ListedTile{} : list->NextKeys();
      if (keys.Exists()) LoadK(at.After(), keys.J(), kv_head, batch, keys);
      LoadV(j, kv_head, batch);
    }
  }
};

}  // namespace jax_flash::hopper::tangent

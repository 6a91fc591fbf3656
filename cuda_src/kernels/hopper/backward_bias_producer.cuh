// The producer warpgroup of Hopper's dbias pass. One thread chooses the tiles of S, and loads their Q, K, dO and V. A
// thread of another warp loads tiles of the bias, and stores those of dbias.
#pragma once

#include "hopper/backward_bias_tiles.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_flash::hopper::dbias {

struct Producer {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map, *v_map, *do_map;
  Ring<kStages> at;

  __device__ __forceinline__ void Run() {
    DBiasTiles tiles{p};
    DBiasTile tile;
    while (tiles.Next(&tile)) {
      const int heads = tiles.Head().Summed();
      const int64_t all = tiles.Batch().Summed() * heads;
      const int end = all * (tile.part + 1) / p.parts;
      for (int n = all * tile.part / p.parts; n < end; ++n)
        LoadVisible(tile, tile.batch + n / heads, tile.head + n % heads);
      LoadPair<0>(q_map, k_map, tile, {-1});
    }
    LoadPair<0>(q_map, k_map, {0, 0, 0, -1}, {-1});
  }

  // Loads the tiles for a tile of S, unless all its entries are masked.
  __device__ __forceinline__ void LoadVisible(const DBiasTile& tile, int batch, int head) {
    const Positions positions = PositionsOf(p, batch);
    const Visible keys = KeysOf(p, positions, batch, tile.row, tile.row + kRows);
    const int end = tile.column + kKeys;
    if (max(keys.any_lo, tile.column) >= min(keys.any_hi, end)) return;
    const int kind = KindOfBlock(p, batch, head, tile.row, tile.column);
    if (Block<false>(p.block_mask, batch, kind).Empty()) return;
    const bool every = keys.every_lo <= tile.column && end <= keys.every_hi && kind == kFullBlock;
    const Step step = {batch, head, kind, !every};
    LoadPair<kQKBoxes>(q_map, k_map, tile, step);
    // Keys beyond kv_length are set to 0 in V: their P is 0, but 0 times NaN is NaN. K may contain anything, because
    // its scores are masked.
    const int there = kProblem.kv_lengths ? min(int(positions.kv_length) - tile.column, kKeys) : kKeys;
    LoadPair<kVBoxes>(do_map, v_map, tile, step, there);
  }

  // Loads two tiles that are multiplied. Keys from index `keys` on are set to 0.
  template <int kBoxes>
  __device__ __forceinline__ void LoadPair(const TensorMap* rows_map, const TensorMap* keys_map, const DBiasTile& tile,
                                           const Step& step, int keys = kKeys) {
    const bool clears = keys < kKeys;
    uint64_t* const full = clears ? &shared.uncleared.barrier : &shared.full[at.index];
    const int kv_head = step.head / (p.q_heads / Opaque(p.kv_heads));
    MbarrierWait(&shared.empty[at.index], at.parity ^ 1);
    shared.step[at.index] = step, shared.tile[at.index] = tile;
    MbarrierArriveExpectTx(full, kBoxes * (SharedRows::kBox + SharedKeys::kBox));
#pragma unroll 1
    for (int b = 0; b < kBoxes; ++b) {
      const int d = b * kBoxColumns;
      TmaLoad(SharedRows{shared.rows[at.index]}.Box(b), rows_map, full, d, tile.row, step.head, step.batch);
      TmaLoad(SharedKeys{shared.keys[at.index]}.Box(b), keys_map, full, d, tile.column, kv_head, step.batch);
    }
    if (clears) {
      using Keys = SharedTile<kKeys, kBoxes == 0 ? 1 : kBoxes>;  // without boxes there is nothing to clear
      shared.uncleared.Wait();
      ClearRowsFrom(Keys{shared.keys[at.index]}, keys, &shared.full[at.index]);
    }
    at.Next();
  }
};

// The thread that loads tiles of the bias. It waits until the consumers have finished a tile of dbias. The Producer
// cannot wait for that, because it is some tiles of S ahead of the consumers.
struct BiasProducer {
  const Params& p;
  Shared& shared;
  const TensorMap *bias_map, *dbias_map;
  Ring<kBiasStages> at;

  // When consumers release a tile of the bias, dbias has replaced it. It is stored before the next tile is loaded. If
  // dbias is computed in parts, the consumers write them.
  __device__ __forceinline__ void Run() {
    DBiasTiles to_load{p}, to_store{p};
    DBiasTile loaded, stored;
    bool more = to_load.Next(&loaded);
    for (int n = 0;; ++n, at.Next()) {
      if (n >= kBiasStages) {
        if (!to_store.Next(&stored)) return;
        MbarrierWait(&shared.bias_empty[at.index], at.parity ^ 1);
        if (Opaque(p.parts) == 1) Store(stored);
      }
      if (!more) continue;
      Load(loaded);
      more = to_load.Next(&loaded);
      if (more) PrefetchBiasTile(p, bias_map, loaded.row, loaded.column, loaded.head, loaded.batch);
    }
  }

  __device__ __forceinline__ void Load(const DBiasTile& tile) {
    uint64_t* const full = &shared.bias_full[at.index];
    MbarrierArriveExpectTx(full, kBiasTile);
    LoadBiasTile(p, shared.bias[at.index], bias_map, full, tile.row, tile.column, tile.head, tile.batch);
  }

  __device__ __forceinline__ void Store(const DBiasTile& tile) {
    StoreBiasTile(shared.bias[at.index], dbias_map, tile.row, tile.column, tile.head, tile.batch);
    TmaCommit();
    TmaWaitRead<0>();
  }
};

}  // namespace jax_flash::hopper::dbias

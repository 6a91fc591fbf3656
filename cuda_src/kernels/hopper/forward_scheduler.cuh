// The tile scheduler of the Hopper forward: the next tile of O, and the kv tiles that it sees. Tiles come from ranges,
// or with a block mask from lists.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash::hopper::forward {

// The kv tiles that some of the rows [i0, i1) see, and the kv tiles that are fully visible to all these rows.
__device__ __forceinline__ Visible TilesOf(const Params& p, int batch, int i0, int i1) {
  const Visible keys = KeysOf(p, PositionsOf(p, batch), batch, i0, i1);
  const int begin = keys.any_lo / kKeys;
  const int end = keys.any_lo < keys.any_hi ? (keys.any_hi + kKeys - 1) / kKeys : begin;
  return {begin, end, max((keys.every_lo + kKeys - 1) / kKeys, begin), max(keys.every_hi / kKeys, begin)};
}

__device__ __forceinline__ auto MakeSchedule(const Params& p) {
  if constexpr (kUnevenTiles) {
    return DynamicQTiles(p);
  } else {
    return StaticSchedule<>();
  }
}

// Finds the next tile of O. Returns false at the end.
template <typename Rows>
__device__ __forceinline__ bool Next(const Params& p, Rows* rows, QTile* tile) {
  const int heads = p.batch * p.q_heads, tiles = (p.q_len + kRows - 1) / kRows;
  int head, t;
  if (!rows->Next(heads, tiles, &head, &t)) return false;
  tile->row = t * kRows;
  tile->head = head % p.q_heads;
  tile->batch = head / p.q_heads;
  tile->visible = TilesOf(p, tile->batch, tile->row, tile->row + kRows);
  return true;
}

// The part of a tile that a warpgroup computes. It is clamped to the loaded tiles, because the user's ranges may be
// inconsistent.
__device__ __forceinline__ QTile PartOf(const Params& p, const QTile& tile, int row_group, SkippedTiles* skipped) {
  QTile part = tile;
  const int row = tile.row + 64 * row_group;
  const Visible& all = tile.visible;
  Visible& own = part.visible = TilesOf(p, tile.batch, row, row + 64);
  own.any_lo = max(own.any_lo, all.any_lo), own.any_hi = min(own.any_hi, all.any_hi);
  if (own.any_lo >= own.any_hi) own.any_lo = own.any_hi = all.any_lo;
  *skipped = {all.any_hi - own.any_hi, own.any_lo - all.any_lo};
  return part;
}

// With a block mask: visits the tiles of O, and for each the kv tiles that it sees.
struct ListReader {
  const Params& p;
  QTile tile;
  const int32_t* kinds;
  ListedKeys<kKeys> keys;

  __device__ __forceinline__ const QTile& Tile() const { return tile; }
  // Moves to the next tile. Returns false at the end.
  __device__ __forceinline__ bool NextTile() {
    constexpr int kTiles = kTilesOfRow<kRows>;
    const int q_heads = Opaque(p.q_heads);
    int item, t;
    if (!DynamicLists(p).Next(p.batch * q_heads, ListedRowTiles<kRows>(p), &item, &t)) return false;
    tile.head = item % q_heads, tile.batch = item / q_heads;
    const BlockList blocks = RowList(p, tile.batch, tile.head, t / kTiles);
    tile.row = FirstRow<kRows>(blocks, t % kTiles);
    tile.visible = KeysOf(p, PositionsOf(p, tile.batch), tile.batch, tile.row, tile.row + kRows);
    kinds = KindsOfRow(p, p.block_mask, tile.batch, tile.head, tile.row);
    keys = {blocks, tile.visible};
    if (keys.at < 0) tile.visible.any_hi = tile.visible.any_lo;
    return true;
  }

  __device__ __forceinline__ ListedTile NextKeys() {
    if (keys.at < 0) return {};
    const int column = keys.at, kind = KindOfColumn(kinds, column);
    const bool within = tile.visible.every_lo <= column && column + kKeys <= tile.visible.every_hi;
    const bool inside = within && !(kMaskMod && kind != kFullBlock), masked = !within || kind != kFullBlock;
    keys.Next(tile.visible);
    return {column / kKeys * 8 + inside * 4 + masked * 2 + (keys.at < 0), ElementsOf(p.block_mask, tile.batch, kind)};
  }
};

// A thread that reads the lists ahead of the thread that loads tiles. Finding a tile takes four dependent reads: the
// counter, the list, its members, and their kinds. Together they take as long as the computation of a short list.
struct ListPrefetcher {
  const Params& p;
  Shared& shared;
  Ring<kPrefetchDepth> at;
  // One more than kv tiles, which makes separate barriers for tiles of O unnecessary.
  Ring<kPrefetchDepth + 1> tiles;

  __device__ __forceinline__ void Run() {
    ListReader reader{p};
    while (reader.NextTile()) {
      ListedTile keys = reader.NextKeys();
      Wait();
      Publish(reader.tile);
      Publish(keys);
      while (keys.Exists() && !keys.Last()) {
        keys = reader.NextKeys();
        Wait();
        Publish(keys);
      }
    }
    Wait();
    Publish(QTile{-1});
    Publish(ListedTile{});
  }

 private:
  __device__ __forceinline__ void Wait() { MbarrierWait(&shared.prefetched_empty[at.index], at.parity ^ 1); }
  __device__ __forceinline__ void Publish(const QTile& next) {
    shared.prefetched_tile[tiles.index] = next;
    tiles.Next();
  }
  __device__ __forceinline__ void Publish(ListedTile keys) {
    shared.prefetched[at.index] = keys;
    MbarrierArrive(&shared.prefetched_full[at.index]);
    at.Next();
  }
};

// Visits the tiles that a ListPrefetcher has read, with the interface of ListReader.
struct PrefetchedLists {
  Shared& shared;
  Ring<kPrefetchDepth> at;
  Ring<kPrefetchDepth + 1> tiles;
  const QTile* tile;

  __device__ __forceinline__ const QTile& Tile() const { return *tile; }
  __device__ __forceinline__ bool NextTile() {
    MbarrierWait(&shared.prefetched_full[at.index], at.parity);
    tile = &shared.prefetched_tile[tiles.index];
    tiles.Next();
    return tile->row >= 0;
  }
  __device__ __forceinline__ ListedTile NextKeys() {
    MbarrierWait(&shared.prefetched_full[at.index], at.parity);
    const ListedTile keys = shared.prefetched[at.index];
    MbarrierArrive(&shared.prefetched_empty[at.index]);
    at.Next();
    return keys;
  }
};

}  // namespace jax_flash::hopper::forward

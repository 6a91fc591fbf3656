// The tile scheduler of the Hopper kernels that keep a tile of Q and loop over K and V: the next tile of Q, and the kv
// tiles that it sees. Tiles come from ranges, or with a block mask from lists.
#pragma once

#include "scheduler/lists.cuh"
#include "scheduler/q_schedule.cuh"
#include "semantics/tangent.cuh"

namespace jax_flash::hopper {

constexpr int kRows = kTiling.rows, kKeys = kTiling.cols;  // of q tiles and kv tiles

// A tile of O, and the kv tiles that it sees. With a block mask, `visible` counts keys instead of tiles.
struct QTile {
  int row, head, batch;  // row: -1 after the last tile
  Visible visible;
};

// With a block mask: the next kv tile.
struct ListedTile {
  int word = -1;  // 8 j + 4 only_element_mask + 2 masked + last; < 0: no tile
  int elements;   // ElementsOf the tile's block

  __device__ __forceinline__ bool Exists() const { return word >= 0; }
  __device__ __forceinline__ int J() const { return word >> 3; }
  // Has the tile no mask but the element mask of its block?
  __device__ __forceinline__ bool OnlyElementMask() const { return word & 4; }
  __device__ __forceinline__ bool Masked() const { return word & 2; }
  __device__ __forceinline__ bool Last() const { return word & 1; }
};

// The kv tiles that some of the rows [i0, i1) see, and the kv tiles that are fully visible to all these rows. Only in a
// tangent (kScoresMove), the tile with the last key of a row counts as masked: the first masked tile from the right
// sets the row's reference r (hopper/tangent.cuh).
__device__ __forceinline__ Visible TilesOf(const Params& p, int batch, int i0, int i1) {
  const Visible keys = KeysOf(p, PositionsOf(p, batch), batch, i0, i1);
  const int begin = keys.any_lo / kKeys;
  const int end = keys.any_lo < keys.any_hi ? (keys.any_hi + kKeys - 1) / kKeys : begin;
  const int every_hi = keys.every_hi - int(kScoresMove);
  return {begin, end, max((keys.every_lo + kKeys - 1) / kKeys, begin), max(every_hi / kKeys, begin)};
}

__device__ __forceinline__ auto MakeSchedule(const Params& p) {
  if constexpr (kUnevenTiles) {
    return DynamicQTiles(p);
  } else {
    return StaticSchedule<>();
  }
}

// Finds the next tile of O. Returns false at the end.
template <typename Schedule>
__device__ __forceinline__ bool Next(const Params& p, Schedule* schedule, QTile* tile) {
  const int heads = p.batch * p.q_heads, tiles = (p.q_len + kRows - 1) / kRows;
  int head, t;
  if (!schedule->Next(heads, tiles, &head, &t)) return false;
  tile->row = t * kRows;
  tile->head = head % p.q_heads;
  tile->batch = head / p.q_heads;
  tile->visible = TilesOf(p, tile->batch, tile->row, tile->row + kRows);
  return true;
}

// With a block mask: visits the tiles of O, and for each the kv tiles that it sees.
struct ListReader {
  const Params& p;
  QTile tile;
  const int32_t* kinds;
  ListedKeys<kKeys> keys;
  bool has_references;  // with kScoresMove: does every row that sees a key have its reference?

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
    has_references = false;
    return true;
  }

  __device__ __forceinline__ ListedTile NextKeys() {
    if (keys.at < 0) return {};
    const int column = keys.at, kind = KindOfColumn(kinds, column);
    const bool within = tile.visible.every_lo <= column && column + kKeys <= tile.visible.every_hi;
    const bool only_element_mask = within && !(kMaskMod && kind != kFullBlock);
    bool masked = !within || kind != kFullBlock;
    if (kScoresMove && !masked) masked = !has_references, has_references = true;
    keys.Next(tile.visible);
    return {column / kKeys * 8 + only_element_mask * 4 + masked * 2 + (keys.at < 0),
            ElementsOf(p.block_mask, tile.batch, kind)};
  }
};

}  // namespace jax_flash::hopper

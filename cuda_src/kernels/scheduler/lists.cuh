// Lists of the non-empty blocks of a block mask, and their order.
#pragma once

#include "ptx/warp.cuh"
#include "scheduler/numbers.cuh"
#include "scheduler/ranges.cuh"

namespace jax_flash {

// The list of a block row has columns in ascending order. The list of a block column has rows.
struct BlockList {
  int index;  // of the block row or column
  int count;
  const int32_t* members;
};

__device__ __forceinline__ BlockList ListAt(const int32_t* list, int width, int size) {
  return {min(max(list[0], 0), size - 1), min(max(list[1], 0), width - kListHeader), list + kListHeader};
}

// The list at position t of a head's block rows.
__device__ __forceinline__ BlockList RowList(const Params& p, int batch, int head, int t) {
  const int64_t list = HeadOfBlocks(p.block_mask, batch, head) * BlockRows(p) + t;
  return ListAt(p.block_mask.row_lists + list * p.block_mask.row_list_size, p.block_mask.row_list_size, BlockRows(p));
}
__device__ __forceinline__ BlockList ColumnList(const Params& p, int batch, int head, int t) {
  const int64_t list = HeadOfBlocks(p.block_mask, batch, head) * BlockColumns(p) + t;
  return ListAt(p.block_mask.column_lists + list * p.block_mask.column_list_size, p.block_mask.column_list_size,
                BlockColumns(p));
}

// The number of tiles of kRows rows, or of kKeys columns: in a block, and in all lists of a head.
template <int kRows>
constexpr int kTilesOfRow = kListed ? kQBlock / kRows : 1;
template <int kKeys>
constexpr int kTilesOfColumn = kListed ? kKVBlock / kKeys : 1;
template <int kRows>
__device__ __forceinline__ int ListedRowTiles(const Params& p) {
  return BlockRows(p) * kTilesOfRow<kRows>;
}
template <int kKeys>
__device__ __forceinline__ int ListedColumnTiles(const Params& p) {
  return BlockColumns(p) * kTilesOfColumn<kKeys>;
}

// The first row, or column, of tile `part` in the list's block row, or block column.
template <int kRows>
__device__ __forceinline__ int FirstRow(const BlockList& list, int part) {
  return list.index * kQBlock + part * kRows;
}
template <int kKeys>
__device__ __forceinline__ int FirstColumn(const BlockList& list, int part) {
  return list.index * kKVBlock + part * kKeys;
}

// The order of the lists of all heads. Within a head, the longest list comes first. Most lists come head by head, so
// CTAs read the arrays of few heads at a time, which then stay in L2. But the longest sixteenth of the lists of every
// head comes first, so no long list starts late. The shortest sixteenth comes last, so CTAs finish at nearly the same
// time. The single-kernel backward (hopper/backward_fused_rows.cuh) has a different order.
__device__ __forceinline__ void ListOfItem(uint32_t item, uint32_t lists, uint32_t heads, int* head, int* list) {
  const uint32_t edge = (lists + 8) / 16, middle = lists - 2 * edge, first = edge * heads;
  if (item - first < middle * heads) {
    *head = (item - first) / middle, *list = edge + (item - first) % middle;
  } else {
    const bool longest = item < first;
    if (!longest) item -= middle * heads;
    *head = item % heads, *list = item / heads + (longest ? 0 : middle);
  }
}

// Visits lists in this order. `Numbers` defines which numbers of the order belong to this CTA.
template <typename Numbers>
struct ListSchedule : Numbers {
  using Numbers::Numbers;

  // Finds the list for the current number. Returns false at the end.
  __device__ __forceinline__ bool Next(int heads, int lists, int* head, int* list) const {
    lists = Opaque(lists), heads = Opaque(heads);
    if (Numbers::number >= lists * heads) return false;
    ListOfItem(Numbers::number, lists, heads, head, list);
    return true;
  }
};
using DynamicLists = ListSchedule<DynamicNumbers>;
template <int kCluster>
using StaticLists = ListSchedule<StaticNumbers<kCluster>>;

// Finds the list of the same block column in another head; its lists have another order. Heads that share a mask share
// `members`.
__device__ __forceinline__ BlockList SameColumn(const Params& p, int batch, int head, int index,
                                                const int32_t* members) {
  if (p.block_mask.head == 0) return ListAt(members - kListHeader, p.block_mask.column_list_size, BlockColumns(p));
  BlockList same = {index, 0, members};
#pragma unroll 1
  for (int t = 0; t < BlockColumns(p); ++t) {
    const BlockList x = ColumnList(p, batch, head, t);
    if (x.index == index) same = x;
  }
  return same;
}

// Visits the tiles of kTile rows (or columns) in the blocks of a list that may be visible, from last to first.
template <int kTile, int kBlock>
struct ListedTiles {
  int at = -1;   // the first row or column of the tile; -1 at the end
  int left = 0;  // the number of blocks left
  const int32_t* members;

  ListedTiles() = default;
  __device__ __forceinline__ ListedTiles(const BlockList& list, const Visible& visible)
      : left(list.count), members(list.members) {
    NextBlock(visible);
  }

  __device__ __forceinline__ void Next(const Visible& visible) {
    if (at % kBlock == 0 || at <= visible.any_lo) {
      NextBlock(visible);
    } else {
      at -= kTile;
    }
  }

 private:
  __device__ __forceinline__ void NextBlock(const Visible& visible) {
    at = -1;
    while (at < 0 && left > 0) {
      const int block = members[--left];
      if (block < 0 || block > (visible.any_hi - 1) / kBlock) continue;
      const int begin = block * kBlock, end = begin + min(kBlock, visible.any_hi - begin);
      if (max(begin, visible.any_lo) < end) at = (end - 1) / kTile * kTile;
    }
  }
};

template <int kTile>
using ListedKeys = ListedTiles<kTile, kKVBlock>;

// Visits the q tiles that see a kv tile, over all query heads of a group. `blocks`: the list of the group's first head.
template <int kTile>
struct ListedQTiles {
  const Params& p;
  const int& batch;
  int head, row;
  const int last_head, index;
  const Visible& rows;
  ListedTiles<kTile, kQBlock> tiles;

  __device__ __forceinline__ ListedQTiles(const Params& p, const int& batch, int kv_head, const BlockList& blocks,
                                          const Visible& rows)
      : p(p),
        batch(batch),
        head(kv_head * (p.q_heads / p.kv_heads)),
        last_head(head + p.q_heads / p.kv_heads - 1),
        index(blocks.index),
        rows(rows),
        tiles(blocks, rows) {
    StartHead();
  }

  __device__ __forceinline__ bool Exists() const { return head <= last_head; }
  __device__ __forceinline__ void Next() {
    tiles.Next(rows);
    StartHead();
  }

 private:
  __device__ __forceinline__ void StartHead() {
    while (tiles.at < 0 && ++head <= last_head)
      tiles = ListedTiles<kTile, kQBlock>(SameColumn(p, batch, head, index, tiles.members), rows);
    row = tiles.at;
  }
};

}  // namespace jax_flash

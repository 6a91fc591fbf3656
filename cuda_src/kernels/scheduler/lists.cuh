// With a block mask: the lists of the blocks that are computed at all, and the order in which they are computed.
#pragma once

#include "ptx/warp.cuh"
#include "scheduler/ranges.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash {

// The list of a block row has its columns in order, that of a block column its rows.
struct BlockList {
  int index;  // of the block row or column
  int count;
  const int32_t* members;
};

__device__ __forceinline__ BlockList ListAt(const int32_t* list, int width, int size) {
  return {min(max(list[0], 0), size - 1), min(max(list[1], 0), width - kListHeader), list + kListHeader};
}

// The t-th of a head's rows of blocks.
__device__ __forceinline__ BlockList RowList(const Params& p, int batch, int head, int t) {
  const int64_t list = HeadOfBlocks(p.block_mask, batch, head) * BlockRows(p) + t;
  return ListAt(p.block_mask.row_lists + list * p.block_mask.row_width, p.block_mask.row_width, BlockRows(p));
}
__device__ __forceinline__ BlockList ColumnList(const Params& p, int batch, int head, int t) {
  const int64_t list = HeadOfBlocks(p.block_mask, batch, head) * BlockColumns(p) + t;
  return ListAt(p.block_mask.column_lists + list * p.block_mask.column_width, p.block_mask.column_width,
                BlockColumns(p));
}

// How many tiles of kRows rows, or of kKeys columns, a block has, and how many all lists of a head have.
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

// The first row, or column, of the part-th tile of a list's own blocks.
template <int kRows>
__device__ __forceinline__ int FirstRow(const BlockList& list, int part) {
  return list.index * kQBlock + part * kRows;
}
template <int kKeys>
__device__ __forceinline__ int FirstColumn(const BlockList& list, int part) {
  return list.index * kKVBlock + part * kKeys;
}

// The order in which the lists of all heads are taken; in each head the longest list is the first. They are taken head
// by head, so that the arrays of few heads are read at a time, and stay in the L2. But the longest sixteenth of the
// lists of all heads comes first, so that none of these begins late, and the shortest sixteenth comes last, so that
// what ends last is short. (The backward of one kernel, hopper/backward_alongside.cuh, has an order of its own.)
__device__ __forceinline__ void ListOfItem(uint32_t item, uint32_t lists, uint32_t heads, int* head, int* list) {
  const uint32_t apart = (lists + 8) / 16, together = lists - 2 * apart, first = apart * heads;
  if (item - first < together * heads) {
    *head = (item - first) / together, *list = apart + (item - first) % together;
  } else {
    const bool longest = item < first;
    if (!longest) item -= together * heads;
    *head = item % heads, *list = item / heads + (longest ? 0 : together);
  }
}

// Goes through all lists in this order. Numbers says which numbers in that order are this CTA's.
template <typename Numbers>
struct Listing : Numbers {
  using Numbers::Numbers;

  // Finds the list that was asked for; returns false when there are no more.
  __device__ __forceinline__ bool Next(int heads, int lists, int* head, int* list) const {
    lists = Fresh(lists), heads = Fresh(heads);
    if (Numbers::number >= lists * heads) return false;
    ListOfItem(Numbers::number, lists, heads, head, list);
    return true;
  }
};
using CountedLists = Listing<Counted>;
template <int kCluster>
using DealtLists = Listing<Dealt<kCluster>>;

// Finds the list of the same block column among those of another head, which are in another order. Heads that share a
// mask share `members`.
__device__ __forceinline__ BlockList SameColumn(const Params& p, int batch, int head, int index,
                                                const int32_t* members) {
  if (p.block_mask.head == 0) return ListAt(members - kListHeader, p.block_mask.column_width, BlockColumns(p));
  BlockList same = {index, 0, members};
#pragma unroll 1
  for (int t = 0; t < BlockColumns(p); ++t) {
    const BlockList x = ColumnList(p, batch, head, t);
    if (x.index == index) same = x;
  }
  return same;
}

// Goes through the tiles of kTile rows (or columns) that are in the blocks of a list and may be visible, from the last
// to the first.
template <int kTile, int kBlock>
struct ListedTiles {
  int at = -1;   // where the tile begins; -1: there are no more
  int left = 0;  // how many blocks are to come
  const int32_t* members;

  ListedTiles() = default;
  __device__ __forceinline__ ListedTiles(const BlockList& list, const Visible& visible)
      : left(list.count), members(list.members) {
    TakeBlock(visible);
  }

  __device__ __forceinline__ void Next(const Visible& visible) {
    if (at % kBlock == 0 || at <= visible.any_lo) {
      TakeBlock(visible);
    } else {
      at -= kTile;
    }
  }

 private:
  __device__ __forceinline__ void TakeBlock(const Visible& visible) {
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

// Goes through the tiles of Q, of all heads of the group of a head of K, that see a tile of K and V. `blocks`: the list
// of the first of those heads.
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
    TakeHead();
  }

  __device__ __forceinline__ bool Exists() const { return head <= last_head; }
  __device__ __forceinline__ void Next() {
    tiles.Next(rows);
    TakeHead();
  }

 private:
  __device__ __forceinline__ void TakeHead() {
    while (tiles.at < 0 && ++head <= last_head)
      tiles = ListedTiles<kTile, kQBlock>(SameColumn(p, batch, head, index, tiles.members), rows);
    row = tiles.at;
  }
};

}  // namespace jax_flash

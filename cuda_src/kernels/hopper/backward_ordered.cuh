// If kOrdered: the gradients have the same bits in every run, because CTAs add to a tile of dQ in a fixed order.
//
// The consumers leave a tile of dQ in shared memory. One of two idle warps of the producer warpgroup waits for the turn
// of this CTA, adds the tile to the sum in HBM, and gives the turn to the next CTA. The warps alternate, so the turn of
// one tile is passed on while the next tile is added.
//
// The order is such that CTAs that start together rarely wait:
//   If masks hide later keys (kFalling), CTAs take the last tile of keys of a head first. Each walks the rows from the
//   first that sees its keys on, so the tiles of keys reach a tile of rows in falling order, one step apart.
//   Otherwise all tiles of keys have the same rows. Each starts at another row and wraps around at the last one
//   (DASH, arXiv 2601.21824). This needs all tiles of a group to run at a time, so a group has at most one tile for
//   each CTA.
//
// There is no deadlock. CTAs take tiles of keys in order. In falling order a tile waits only for tiles that were taken
// before. In a group, the CTAs that do not work on an older group are enough to take all of its tiles.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/counter.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::backward {

// The tiles of keys from `first` on that run at a time, and where they start.
struct Group {
  int first, tiles, rows;  // number of tiles of keys, and of tiles of rows

  __device__ __forceinline__ Group(const Params& p, const Positions& positions, int tile) {
    const int all = (Fresh(p.kv_len) + kKeys - 1) / kKeys, groups = (all + gridDim.x - 1) / gridDim.x;
    const int size = (all + groups - 1) / groups;
    first = tile / size * size;
    tiles = min(size, int(positions.kv_length + kKeys - 1) / kKeys - first);
    rows = int(positions.q_length + kRows - 1) / kRows;
  }

  // The tile of rows at which a tile of keys starts.
  __device__ __forceinline__ int Start(int tile) const { return int(int64_t(tile - first) * rows / tiles); }

  // How many tiles of keys are at this tile of rows before `tile` is: those that start between its start and the row,
  // and those of earlier groups.
  __device__ __forceinline__ int Before(int tile, int row) const {
    const int started = int((int64_t(row + 1) * tiles + rows - 1) / rows);  // tiles that start at this row or above
    const int after = Start(tile) <= row ? started : started + tiles;
    return first + after - (tile - first) - 1;
  }
};

// A thread that adds the tiles of dQ in one of the two buffers.
struct DQAdder {
  const Params& p;
  Shared& shared;
  int stage;

  __device__ __forceinline__ void Run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      MbarrierWait(&shared.dq_full[stage], parity);
      const DQTile tile = shared.dq_tile[stage];
      if (tile.row_block < 0) return;
      float* const sum = p.dq_sum + int64_t(tile.row_block) * (kRowBlock * kQKDim);
      const float* const staged = reinterpret_cast<const float*>(StagedDQ(shared, stage));
      constexpr int kBytes = kRows * kQKDim * 4;
      int* const count = p.added + tile.row_block / (kRows / kRowBlock);
      const int before = AddedBefore(tile);
      if (before == 0) {
        BulkStore(sum, staged, kBytes);
      } else {
        WaitForCount<20>(count, before);
        FenceProxyAsyncGlobal();
        BulkReduceAdd(true, sum, staged, kBytes);
      }
      TmaCommit();
      TmaWaitRead<0>();
      MbarrierArrive(&shared.dq_empty[stage]);
      TmaWaitAll();
      FenceProxyAsyncGlobal();
      Count(count, true);
    }
  }

  // How many tiles of keys add to this tile of rows before.
  __device__ __forceinline__ int AddedBefore(const DQTile& tile) const {
    const int blocks = BlocksOfHead(p), head = tile.row_block / blocks;
    const int row = (tile.row_block - head * blocks) / (kRows / kRowBlock), key_tile = tile.column / kKeys;
    const Positions positions = PositionsOf(p, head / p.q_heads);
    if constexpr (kFalling) {
      const int last = int(AnyRowKeys(positions, int64_t(row) * kRows, int64_t(row + 1) * kRows).hi - 1) / kKeys;
      return last - key_tile;
    } else {
      return Group(p, positions, key_tile).Before(key_tile, row);
    }
  }
};

}  // namespace jax_flash::hopper::backward

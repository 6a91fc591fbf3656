// If kOrdered: the gradients have the same bits in every run, because CTAs add to a tile of dQ in a fixed order.
//
// The consumers leave a tile of dQ in shared memory. One of two idle warps of the producer warpgroup waits for the turn
// of this CTA, adds the tile to the sum in HBM, and gives the turn to the next CTA. The warps alternate, so the turn of
// one tile is passed on while the next tile is added.
//
// The order: the last tile of keys of a head comes first, and each CTA walks the rows from the first that sees its keys
// on. So the tiles of keys add to a tile of rows in falling order. With a causal mask, tiles that start together reach
// a tile of rows one step apart. Without one they start at the same row and wait once; from then on they stay a step
// apart (FallingTiles in scheduler/schedule.cuh).
//
// There is no deadlock, however many CTAs run at a time: CTAs take tiles of keys in this order from a counter, and wait
// only for tiles that were taken before. The order of additions does not depend on the number of CTAs.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/counter.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::backward {

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

  // How many tiles of keys add to this tile of rows before: those after this one that its rows see.
  __device__ __forceinline__ int AddedBefore(const DQTile& tile) const {
    const int blocks = BlocksOfHead(p), head = tile.row_block / blocks;
    const int row = (tile.row_block - head * blocks) / (kRows / kRowBlock), key_tile = tile.column / kKeys;
    const Positions positions = PositionsOf(p, head / p.q_heads);
    const auto keys = AnyRowKeys(positions, int64_t(row) * kRows, int64_t(row + 1) * kRows);
    return int(keys.hi - 1) / kKeys - key_tile;
  }
};

}  // namespace jax_flash::hopper::backward

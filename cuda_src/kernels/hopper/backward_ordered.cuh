// With kOrdered, CTAs add to a tile of dQ in a fixed order. So the gradients are bitwise reproducible.
//
// The consumers leave a tile of dQ in shared memory. One of two idle warps of the producer warpgroup waits for this
// CTA's turn, adds the tile to the sum in HBM, and passes the turn on. The warps alternate, so one passes the turn on
// while the other adds the next tile.
//
// The order: the last kv tile of a head comes first, and each CTA starts at the first rows that see its keys. So kv
// tiles add to a q tile in descending order. With a causal mask, kv tiles that start together reach a q tile one step
// apart. Otherwise they start at the same rows and wait at the first of them; from then on they stay one step apart
// (DescendingKVTiles in scheduler/kv_schedule.cuh).
//
// There is no deadlock for any number of concurrent CTAs. CTAs take kv tiles in this order from a counter, and wait
// only for tiles taken before. The order of additions does not depend on the number of CTAs.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/counter.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::backward {

// A thread that adds the tiles of dQ from one of the two buffers.
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

  // The number of kv tiles that add to this q tile before this one: the tiles after it that these rows see.
  __device__ __forceinline__ int AddedBefore(const DQTile& tile) const {
    const int blocks = BlocksOfHead(p), head = tile.row_block / blocks;
    const int row = (tile.row_block - head * blocks) / (kRows / kRowBlock), key_tile = tile.first_key / kKeys;
    const Positions positions = PositionsOf(p, head / p.q_heads);
    const auto keys = AnyRowKeys(positions, int64_t(row) * kRows, int64_t(row + 1) * kRows);
    return int(keys.hi - 1) / kKeys - key_tile;
  }
};

}  // namespace jax_flash::hopper::backward

// With kOrdered, CTAs add to a tile of dQ in a fixed order. So the gradients are bitwise reproducible.
//
// The consumers leave a tile of dQ in shared memory. One of two idle warps of the producer warpgroup waits for this
// CTA's turn, adds the tile to the sum in HBM, and passes the turn on. The warps alternate, so one passes the turn on
// while the other adds the next tile. With kPairs there is no shared memory for dQ. So the consumers add it themselves,
// and an idle warp waits for their turn and passes it on.
//
// The order: the last kv tile of a head comes first, and each CTA starts at the first rows that see its keys. So kv
// tiles add to a q tile in descending order. With a causal mask, kv tiles that start together reach a q tile one step
// apart. Otherwise they start at the same rows and wait at the first of them; from then on they stay one step apart
// (DescendingKVTiles in scheduler/kv_schedule.cuh).
//
// There is no deadlock for any number of concurrent CTAs. CTAs take kv tiles in this order from a counter, and wait
// only for tiles taken before. The order of additions does not depend on the number of CTAs. With ranges, the kv tiles
// that a tile of rows sees may have gaps: tiles whose keys no row sees. These add zeros in their turn, because it would
// take too long to find them (kCountsHiddenTiles). With kPairs, each cluster takes one tile, and the grid has a cluster
// for each tile.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/counter.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::backward {

// The turn of a CTA at a tile of dQ, or with kPairs at its half of the columns.
struct Turn {
  int* count;  // the kv tiles that have been added
  int before;  // the kv tiles with later keys, up to the end of the range of the last row. They add first.
  // The kv tile begins after this end, so it would add only zeros. Then it has no turn. A tile of rows in which the
  // queries end can have such kv tiles.
  bool hidden;

  __device__ __forceinline__ Turn(const Params& p, const DQTile& tile) {
    const int row_tile = tile.row_block / (kRows / kRowBlock);
    count = p.added + row_tile * kCluster + (kPairs ? ClusterRank() : 0);
    const int blocks = BlocksOfHead(p), head = tile.row_block / blocks;
    const int row = tile.row_block - head * blocks;
    const Positions positions = PositionsOf(p, head / p.q_heads);
    const auto keys = AnyRowKeys(positions, int64_t(row) * kRowBlock, int64_t(row) * kRowBlock + kRows);
    before = int(keys.hi - 1) / kBackwardKeys - tile.first_key / kBackwardKeys;
    hidden = before < 0;
  }

  // Waits until all kv tiles before have been added.
  __device__ __forceinline__ void Wait() const {
    if (before > 0) WaitForCount<20>(count, before);
  }
  // Passes the turn on.
  __device__ __forceinline__ void PassOn() const { Count(count, true); }
};

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
      const Turn turn(p, tile);
      turn.Wait();
      if (turn.before == 0) {
        BulkStore(sum, staged, kBytes);
      } else if (!turn.hidden) {
        FenceProxyAsyncGlobal();
        BulkReduceAdd(true, sum, staged, kBytes);
      }
      TmaCommit();
      TmaWaitRead<0>();
      MbarrierArrive(&shared.dq_empty[stage]);
      TmaWaitAll();
      FenceProxyAsyncGlobal();
      if (!turn.hidden) turn.PassOn();
    }
  }
};

// With kPairs: the thread that waits for the consumers' turns and passes them on.
struct TurnKeeper {
  const Params& p;
  Shared& shared;

  __device__ __forceinline__ void Run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      MbarrierWait(&shared.turn_wanted, parity);
      const DQTile tile = shared.dq_tile[0];
      if (tile.row_block < 0) return;
      const Turn turn(p, tile);
      turn.Wait();
      MbarrierArrive(&shared.turn_begins);
      MbarrierWait(&shared.turn_ends, parity);
      if (!turn.hidden) turn.PassOn();
    }
  }
};

}  // namespace jax_flash::hopper::backward

// TF32: V goes through staging buffers. wgmma reads a TF32 operand only if it is K-major, so P V needs V^T. TMA cannot
// transpose. So it loads V box by box into a ring of staging buffers, and three warps of the producer warpgroup
// transpose each box into the tile that the consumers read. The thread that loads (Producer) sets staging_has_box to
// false after the last box.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "hopper/transpose.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_flash::hopper::forward {

// A warp that transposes every kTransposers-th box of V. A wait for a parity cannot tell a phase from the one two
// phases earlier, so a warp must not skip phases. At `staging_full` it waits for every box, also for the boxes that
// other warps transpose, and arrives at `staging_empty` for these, too.
//
// At v_empty it waits only for its own boxes. This is safe. A consumer releases V of tile u - 2, then K of tile u, then
// V of tile u - 1 (FinishO comes after FinishS). When a box of tile t has arrived, K of tile t has been loaded before
// it, so consumers had released K of tile t - kStages, and before it V of tile t - kStages - 2. So with kStages >= 2,
// the phase before the awaited one, for V of tile t - 2 kStages, is over.
struct Transposer {
  static_assert(!kTF32 || kStages >= 2);
  Shared& shared;
  Ring<kStagingBuffers> staging;
  Ring<kStages> v;

  __device__ __forceinline__ void Run() {
    const int lane = threadIdx.x % 32;
    int turn = threadIdx.x / 32 - 1;  // how many boxes come before this warp's next one
    for (int box = 0;; ++box, --turn, staging.Next()) {
      if (box == kVBoxes) box = 0, v.Next();
      MbarrierWait(&shared.staging_full[staging.index], staging.parity);
      SyncWarp();
      if (turn > 0) {
        MbarrierArrive(&shared.staging_empty[staging.index], ArrivesForWarp(lane));
        continue;
      }
      if (!shared.staging_has_box[staging.index]) return;
      MbarrierWait(&shared.v_empty[v.index], v.parity ^ 1);
      TransposeBox<kWarpgroupKeys, Tuning::kTransposedAtOnce>(
          shared.staging[staging.index], shared.v[v.index] + box * kBoxColumns * kBoxBytes, SharedVTransposed::kBox);
      FenceProxyAsync();
      SyncWarp();
      MbarrierArrive(&shared.v_full[v.index], ArrivesForWarp(lane));
      MbarrierArrive(&shared.staging_empty[staging.index], ArrivesForWarp(lane));
      turn = kTransposers;
    }
  }
};

}  // namespace jax_flash::hopper::forward

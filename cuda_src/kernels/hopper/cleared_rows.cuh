// Clearing of rows of a tile in shared memory after the tile has arrived.
//
// wgmma multiplies whole tiles, and 0 times NaN is NaN. So some rows must be cleared before a consumer reads them:
// empty rows of Q and dO, and keys beyond the length. The producer thread does this. It counts the loads of such a tile
// at a separate barrier, waits for them, and then copies zeros over the rows by TMA. The consumers' barrier counts
// these copies instead of the loads. Consumers need no special case.
#pragma once

#include "hopper/shared_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "semantics/mask.cuh"

namespace jax_flash::hopper {

constexpr int kMaxCleared = 256;  // rows of a box

__device__ uint4 zero_rows[kMaxCleared * kBoxBytes / sizeof(uint4)];

// Clears rows [first, first + count) of a tile. `barrier` counts the bytes.
template <int kRows, int kBoxes>
__device__ __forceinline__ void ClearRows(SharedTile<kRows, kBoxes> tile, int first, int count, uint64_t* barrier) {
#pragma unroll 1
  for (int b = 0; count > 0 && b < kBoxes; ++b)
    BulkLoad(tile.Box(b) + first * kBoxBytes, zero_rows, count * kBoxBytes, barrier);
}

// The same for all rows from `first` on. The barrier's phase waits for no other bytes.
template <int kRows, int kBoxes>
__device__ __forceinline__ void ClearRowsFrom(SharedTile<kRows, kBoxes> tile, int first, uint64_t* barrier) {
  const int count = kRows - first;
  MbarrierArriveExpectTx(barrier, kBoxes * count * kBoxBytes);
  ClearRows(tile, first, count, barrier);
}

// The barrier for the loads of a tile that must be cleared, one tile at a time.
struct ClearingBarrier {
  uint64_t barrier;
  uint32_t parity;  // in shared memory, because the producer has no free register

  __device__ __forceinline__ void Init() {
    MbarrierInit(&barrier, 1);
    parity = 0;
  }
  __device__ __forceinline__ void Wait() {
    MbarrierWait(&barrier, parity);
    parity ^= 1;
  }
};

// The empty rows of a tile of Q or dO, one bit each. It is in shared memory; only the producer reads it.
template <int kRows>
struct EmptyRows {
  static constexpr int kWords = kRows / 32;
  uint32_t words[kWords];
  // Counted when the bits are read, before the tile has arrived. Later, consumers would wait for the count.
  int first, count;
  bool one_run;  // are these rows consecutive?

  // Reads the bits from scratch, and returns whether any is set. It reads from L2, because another head may have used
  // this memory before (hopper/backward_fused_rows.cuh).
  __device__ __forceinline__ bool Read(const uint32_t* bits) {
    int lowest = kRows, highest = -1, total = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = __ldcg(bits + w);
      words[w] = word;
      if (word == 0) continue;
      total += __popc(word);
      lowest = min(lowest, 32 * w + __ffs(word) - 1);
      highest = 32 * w + 31 - __clz(word);
    }
    first = lowest, count = total, one_run = highest - lowest + 1 == total;
    return total != 0;
  }

  // Clears these rows of a tile, run by run. The barrier's phase waits for no other bytes.
  template <int kBoxes>
  __device__ __forceinline__ void Clear(SharedTile<kRows, kBoxes> tile, uint64_t* barrier) const {
    MbarrierArriveExpectTx(barrier, kBoxes * count * kBoxBytes);
    if (one_run) return ClearRows(tile, first, count, barrier);
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
      for (uint32_t left = words[w]; left != 0;) {
        const int begin = __ffs(left) - 1, after = __ffs(~(left >> begin)) - 1, run = after < 0 ? 32 : after;
        ClearRows(tile, 32 * w + begin, run, barrier);
        left &= ~(FirstBits(run) << begin);
      }
    }
  }
};

}  // namespace jax_flash::hopper

// Wide heads: tiles in slices of kSlice columns. The accumulators of 16 rows would fill the registers of a warp, and a
// tile of K or V most of the shared memory. So two rows of warps divide the rows of a result, and the warps of a row
// divide the columns of each slice. The tiles that a CTA loops over pass through shared memory slice by slice.
//
// Loops over slices that add to S or dP are not unrolled. Otherwise the compiler keeps the addresses of all their loads
// in registers, which then spill.
#pragma once

#include "ampere/fragments.cuh"

namespace jax_flash::ampere {

constexpr int kSlice = kWideSlice;
constexpr int kQKSlices = RoundUp(kQKDim, kSlice) / kSlice, kVSlices = RoundUp(kVDim, kSlice) / kSlice;

// A tile that stays in shared memory, in whole slices.
template <int kRows, int kDim>
using SlicedTile = SharedTile<kRows, RoundUp(kDim, kSlice)>;

// Slice n of a SlicedTile as an operand of AddRowsTimesRows.
template <typename Tile>
struct SliceOf {
  static constexpr int kSteps = kSlice / kStep;
  const Tile& tile;
  const int n;

  __device__ __forceinline__ SliceOf(const Tile& tile, int n) : tile(tile), n(n) {}
  __device__ __forceinline__ OperandA RowsAsA(int row, int step) const { return tile.RowsAsA(row, n * kSteps + step); }
  __device__ __forceinline__ void RowsAsB(OperandB (&b)[2], int row, int step) const {
    tile.RowsAsB(b, row, n * kSteps + step);
  }
};

// The kCount slices of each tile of a loop, in order, in kStages buffers. load(buffer, n, later) starts to load slice n
// of the current tile, or if `later` of the tile after it.
template <int kCount, int kThreads, int kStages, typename Buffer, typename Load>
struct Slices {
  static_assert(kStages >= 2 && kStages - 1 <= kCount);
  Buffer (&buffers)[kStages];
  const Load load;
  int stage = 0;

  __device__ __forceinline__ Slices(Buffer (&buffers)[kStages], Load load) : buffers(buffers), load(load) {}

  // Starts the first loads. The tiles that stay must be a group of copies before it. They have arrived, in this
  // thread, when it returns.
  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int n = 0; n < kStages - 1; ++n) {
      load(buffers[n], n, false);
      CpAsyncCommit();
    }
    CpAsyncWait<kStages - 1>();
  }

  // Waits for slice n, and starts a load into the buffer of the slice before it. All threads call it for every slice.
  // They synchronise, so they also see what others have written to shared memory before.
  __device__ __forceinline__ const Buffer& Next(int n) {
    CpAsyncWait<kStages - 2>();
    Buffer& slice = buffers[stage];
    slice.template Landed<kThreads>();
    __syncthreads();
    const int ahead = n + kStages - 1;
    load(buffers[stage == 0 ? kStages - 1 : stage - 1], ahead % kCount, ahead >= kCount);
    CpAsyncCommit();
    stage = stage == kStages - 1 ? 0 : stage + 1;
    return slice;
  }
};

template <int kCount, int kThreads, int kStages, typename Buffer, typename Load>
__device__ __forceinline__ auto SlicesOf(Buffer (&buffers)[kStages], Load load) {
  return Slices<kCount, kThreads, kStages, Buffer, Load>(buffers, load);
}

// 16 kRowBlocks rows of P or dS as the left operand of products with every slice: read(m, s) is step s of rows 16 m to
// 16 m + 15. It stays in registers if it fits.
template <int kRowBlocks, int kSteps, typename Read>
struct LeftOperand {
  static constexpr bool kHeld = !kThreeProducts;
  const Read read;
  OperandA held[kHeld ? kRowBlocks : 1][kHeld ? kSteps : 1];

  __device__ __forceinline__ explicit LeftOperand(Read read) : read(read) {}
  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int i = 0; kHeld && i < kRowBlocks * kSteps; ++i) held[i / kSteps][i % kSteps] = read(i / kSteps, i % kSteps);
  }
  __device__ __forceinline__ OperandA operator()(int m, int s) const {
    if constexpr (kHeld) return held[m][s];
    return read(m, s);
  }
};
template <int kRowBlocks, int kSteps, typename Read>
__device__ __forceinline__ LeftOperand<kRowBlocks, kSteps, Read> LeftOperandOf(Read read) {
  return LeftOperand<kRowBlocks, kSteps, Read>(read);
}

}  // namespace jax_flash::ampere

// The entries of S that a lane holds in an accumulator of S, or of its transpose.
//
// A lane has every 8th line of an accumulator. In each line it has the entries 0, 1, 8, 9, 16, 17, ..., counted from
// its first one. They are numbered x = 0, 1, 2, ... A line of S is a row; a line of S^T is a key.
#pragma once

#include <cstdint>

namespace jax_flash {

// Entry x of line h of a wgmma accumulator with two lines, or of mma.sync accumulators with two lines each.
template <int kCount>
__device__ __forceinline__ float& At(float (&C)[kCount], int h, int x) {
  return C[x / 2 * 4 + 2 * h + x % 2];
}
template <int kChunks>
__device__ __forceinline__ float& At(float (&C)[kChunks][4], int h, int x) {
  return C[x / 2][h * 2 + x % 2];
}
template <int kCount, int kChunks>
__device__ __forceinline__ float& At(float (&C)[kCount][kChunks][4], int h, int x) {
  return C[h / 2][x / 2][h % 2 * 2 + x % 2];
}

// The number of entries of a line in a lane.
template <int kCount>
__host__ __device__ constexpr int EntriesOfLine(const float (&)[kCount]) {
  return kCount / 2;
}
template <int kChunks>
__host__ __device__ constexpr int EntriesOfLine(const float (&)[kChunks][4]) {
  return 2 * kChunks;
}
template <int kCount, int kChunks>
__host__ __device__ constexpr int EntriesOfLine(const float (&)[kCount][kChunks][4]) {
  return 2 * kChunks;
}

// The distance between entry x and the line's first entry.
__host__ __device__ constexpr int OffsetOf(int x) { return x / 2 * 8 + x % 2; }

template <bool kTransposed>
struct View {
  int row, key;  // of the lane's first entry

  __device__ __forceinline__ int Row(int h, int x) const { return row + (kTransposed ? OffsetOf(x) : 8 * h); }
  __device__ __forceinline__ int Key(int h, int x) const { return key + (kTransposed ? 8 * h : OffsetOf(x)); }
};

}  // namespace jax_flash

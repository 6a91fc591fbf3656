// Transposition in shared memory, for TF32. wgmma reads a TF32 operand from shared memory only if it is K-major
// (hopper/shared_tile.cuh). So the forward transposes V, and the backward transposes Q, dO and K.
//
// Rows and columns are also permuted, in the same way: position 2 t + e of each 8 becomes position t + 4 e. Then P and
// O have the layouts that are needed:
//   key 2 t + e of V is column t + 4 e of V^T, and so of P: a lane's columns of an accumulator are its k of A
//   column t + 4 e of V is row 2 t + e of V^T, and so column of O: a lane's columns match stmatrix
#pragma once

#include "ptx/types.cuh"

namespace jax_flash::hopper {

// A warp transposes a box of V, [kKeys][32], to 32 rows of V^T. They are [32] in each box of 32 keys, and boxes are
// `stride` bytes apart. kKeys is a multiple of 32. Each lane transposes a column. Reads of 32 lanes, and writes of 8
// lanes with 16 bytes each, have no bank conflicts. kAtOnce: the number of keys in registers, 8 or 16.
template <int kKeys, int kAtOnce>
__device__ __forceinline__ void TransposeBox(const uint8_t* v, uint8_t* v_t, int stride) {
  int column = threadIdx.x % 32;
  asm volatile("" : "+r"(column));  // keeps the compiler from computing the addresses of all boxes ahead
  const int row = column / 8 * 8 + column % 4 * 2 + column / 4 % 2;
#pragma unroll 1
  for (int key = 0; key < kKeys; key += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      x[k] = *reinterpret_cast<const float*>(v + (key + k) * 128 + (column / 4 ^ k % 8) * 16 + column % 4 * 4);
#pragma unroll
    for (int k = 0; k < kAtOnce; k += 4) {
      const int first = k / 8 * 8 + k / 4 % 2, chunk = (key % 32 + k) / 4 ^ row % 8;
      *reinterpret_cast<float4*>(v_t + key / 32 * stride + row * 128 + chunk * 16) =
          make_float4(x[first], x[first + 2], x[first + 4], x[first + 6]);
    }
  }
}

// The same for 32 keys, in fewer steps and with more registers: a lane has 8 keys and 4 columns. Reads and writes of 8
// lanes, 16 bytes each, have no bank conflicts.
__device__ __forceinline__ void TransposeSquare(const uint8_t* v, uint8_t* v_t) {
  const int lane = threadIdx.x % 32, columns = lane % 8, keys = columns / 2 ^ lane / 8;  // 4 columns, 8 keys
  const int row = columns / 2 * 8 + columns % 2;
  int from = keys * 8 * 128 + columns * 16, to = row * 128 + (keys * 2 ^ row % 8) * 16;
  asm volatile("" : "+r"(from), "+r"(to));  // keeps the compiler from computing all addresses ahead
  alignas(16) float x[8][4];
#pragma unroll
  for (int key = 0; key < 8; ++key)
    *reinterpret_cast<float4*>(x[key]) = *reinterpret_cast<const float4*>(v + (from ^ key * 16) + key * 128);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      *reinterpret_cast<float4*>(v_t + (to ^ (2 * t + e) * 16) + t * 256) =
          make_float4(x[e][t], x[2 + e][t], x[4 + e][t], x[6 + e][t]);
    }
  }
}

}  // namespace jax_flash::hopper

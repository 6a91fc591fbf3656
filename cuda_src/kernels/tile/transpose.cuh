// TF32 wgmmas take B from shared memory only where its k is contiguous, which the keys of V are not: V is transposed.
//
// Both ways round, position 2 t + e of each 8 holds what is at t + 4 e of the other, which puts both P and O where
// they are wanted:
//   key 2 t + e of V is column t + 4 e of V^T, and so of P: a lane's columns of an accumulator are its k of A
//   column t + 4 e of V is row 2 t + e of V^T, and so column of O: a lane's columns are those of stmatrix
#pragma once

#include "tile/types.cuh"

namespace jax_flash {

// A warp transposes a box of V, [kKeys][32], to 32 rows of V^T, [32] in each of its boxes of 32 keys, which are
// `stride` bytes apart; kKeys is a multiple of 32. Each lane does a column: 32 reads, and 8 writes of 16 bytes, are of
// all banks.
template <int kKeys>
__device__ __forceinline__ void TransposeBox(const uint8_t* v, uint8_t* v_t, int stride) {
  int column = threadIdx.x % 32;
  asm volatile("" : "+r"(column));  // so that addresses of all boxes do not fill the registers
  const int row = column / 8 * 8 + column % 4 * 2 + column / 4 % 2;
#pragma unroll 1
  for (int i = 0; i < kKeys / 8; ++i) {
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      x[k] = *reinterpret_cast<const float*>(v + (8 * i + k) * 128 + (column / 4 ^ k) * 16 + column % 4 * 4);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int chunk = (i % 4 * 2 + e) ^ row % 8;
      *reinterpret_cast<float4*>(v_t + i / 4 * stride + row * 128 + chunk * 16) =
          make_float4(x[e], x[2 + e], x[4 + e], x[6 + e]);
    }
  }
}

}  // namespace jax_flash

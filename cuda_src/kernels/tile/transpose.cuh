// TF32 wgmmas take B from shared memory only where its k is contiguous, which the keys of V are not: V is transposed.
//
// Both ways round, position 2 t + e of each 8 holds what is at t + 4 e of the other, which puts both P and O where
// they are wanted:
//   key 2 t + e of V is column t + 4 e of V^T, and so of P: a lane's columns of an accumulator are its k of A
//   column t + 4 e of V is row 2 t + e of V^T, and so column of O: a lane's columns are those of stmatrix
#pragma once

#include "tile/types.cuh"

namespace jax_flash {

// A warp transposes a box of V, [kKeys][32], to 32 rows of V^T, [32] in each of its boxes of 32 keys; these are
// `stride` bytes apart. A lane does 4 x 4 elements at a time, and the lanes are so divided among blocks of 8 x 8 that 8
// of them always read, and write, all banks.
template <int kKeys>
__device__ __forceinline__ void TransposeBox(const uint8_t* v, uint8_t* v_t, int stride) {
  static_assert(kKeys % 32 == 0);
  const int lane = threadIdx.x % 32;
  const int columns = lane / 2 % 4, keys = columns ^ lane / 16;  // the block
  const int key_e = lane / 8 % 2, column_e = lane % 2 ^ key_e;   // and a quarter of it
  const int from = (8 * keys + key_e) * 128 + ((2 * columns + column_e) ^ key_e) * 16;
  const int to = (8 * columns + column_e) * 128 + ((2 * keys + key_e) ^ column_e) * 16;
#pragma unroll 1
  for (int i = 0; i < kKeys / 16; ++i) {  // keys ^ 2 are the next block
    float4 x[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
      x[t] = *reinterpret_cast<const float4*>(v + i / 2 * 32 * 128 + (from ^ i % 2 * 2048 ^ t * 32) + t * 256);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const auto at = [&](int k) { return t == 0 ? x[k].x : t == 1 ? x[k].y : t == 2 ? x[k].z : x[k].w; };
      *reinterpret_cast<float4*>(v_t + i / 2 * stride + (to ^ i % 2 * 64 ^ t * 32) + t * 256) =
          make_float4(at(0), at(1), at(2), at(3));
    }
  }
}

}  // namespace jax_flash

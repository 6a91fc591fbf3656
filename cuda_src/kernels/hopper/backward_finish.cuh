// Kernels after the Hopper backward. They convert f32 sums, in blocks of kRowBlock rows, to the dtype and layout of the
// results: dQ unless kFusedRows (hopper/backward_fused_rows.cuh), and dK and dV with kSumKV.
#pragma once

#include "hopper/backward_rows.cuh"
#include "hopper/backward_softmax.cuh"

namespace jax_flash::hopper::backward {

// Converts the first `rows` rows of a block. Their destination in `to`, with rows of kDim elements, is row `first` and
// every `stride`-th row after it. It has f32 elements with kF32. A thread converts 8 columns of two rows, which come
// from four lanes of the backward.
template <int kDim, bool kF32 = kTF32>
__device__ __forceinline__ void Convert(const float* sum, float scale, void* to, int64_t first, int rows, int stride) {
  constexpr int kChunks = kDim / 8;
  for (int i = threadIdx.x; i < 32 * kChunks; i += kRowThreads) {
    const int chunk = i % kChunks, quad = i / kChunks % 8, warp = i / kChunks / 8;
    const float4* x = reinterpret_cast<const float4*>(sum + 16 * warp * kDim) + chunk * 32 + quad * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + quad + 8 * h;
      if (row >= rows) continue;
      const int64_t at = (first + int64_t(row) * stride) * kChunks + chunk;
      float low[4], high[4];  // columns 2 j and 2 j + 1; for f32 j and j + 4
#pragma unroll
      for (int j = 0; j < 4; ++j) low[j] = (h ? x[j].z : x[j].x) * scale, high[j] = (h ? x[j].w : x[j].y) * scale;
      if constexpr (kTF32) {
        float4* const out = static_cast<float4*>(to) + 2 * at;
        out[0] = make_float4(low[0], low[1], low[2], low[3]);
        out[1] = make_float4(high[0], high[1], high[2], high[3]);
      } else if constexpr (kF32) {
        float4* const out = static_cast<float4*>(to) + 2 * at;
        out[0] = make_float4(low[0], high[0], low[1], high[1]);
        out[1] = make_float4(low[2], high[2], low[3], high[3]);
      } else {
        static_cast<uint4*>(to)[at] =
            make_uint4(Pack(low[0], high[0]), Pack(low[1], high[1]), Pack(low[2], high[2]), Pack(low[3], high[3]));
      }
    }
  }
}

// Each CTA converts a block of dQ.
extern "C" __global__ void __launch_bounds__(kRowThreads) jax_flash_backward_finish(const __grid_constant__ Params p) {
  const RowBlock block(p, blockIdx.x);
  Convert<kQKDim, kTF32 || kUnrounded>(block.DQ(p), DQKScale(p), p.dq,
                                       (int64_t(block.batch) * p.q_len + block.row) * p.q_heads + block.head,
                                       p.q_len - block.row, p.q_heads);
}

// Each CTA converts a block of dK and a block of dV.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    jax_flash_backward_finish_keys(const __grid_constant__ Params p) {
  if constexpr (!kSumKV) return;
  const uint32_t blocks = KeyBlocksOfHead(p), all_heads = blockIdx.x / blocks;
  const int key = blockIdx.x % blocks * kRowBlock, head = all_heads % p.kv_heads, batch = all_heads / p.kv_heads;
  const int64_t first = (int64_t(batch) * p.kv_len + key) * p.kv_heads + head;
  const int64_t before = int64_t(blockIdx.x) * kRowBlock;  // rows
  if (kDK) Convert<kQKDim>(p.dk_sum + before * kQKDim, DQKScale(p), p.dk, first, p.kv_len - key, p.kv_heads);
  if (kDV) Convert<kVDim>(p.dv_sum + before * kVDim, ZScale(p), p.dv, first, p.kv_len - key, p.kv_heads);
}

}  // namespace jax_flash::hopper::backward

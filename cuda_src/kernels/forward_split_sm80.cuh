// The forward where few queries see many keys: each CTA of forward_sm80.cuh has a part of the keys, and the parts'
// results are merged, the same way whichever came first:
//   m = max m_p;   l = sum l_p exp(m_p - m);   O = sum l_p exp(m_p - m) / l O_p
#pragma once

#include "forward_sm80.cuh"

namespace jax_flash {

constexpr int kMergeWarps = 8;
static_assert(kParts && !kBlockMask);

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, s));
  return x;
}
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, s);
  return x;
}

}  // namespace jax_flash

// A block of 32 kMergeWarps threads for each row of O, [batch, head, row]. A warp adds up every kMergeWarps-th part, a
// lane 8 columns of it.
extern "C" __global__ void __launch_bounds__(32 * jax_flash::kMergeWarps)
    jax_flash_forward_merge(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  __shared__ float sums[kMergeWarps][kVDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t at = blockIdx.x, rows = int64_t(p.batch) * p.q_heads * p.q_len;
  const float unit = Unit(p);

  float m = -Infinity();
  for (int part = lane; part < p.parts; part += 32) m = fmaxf(m, p.m_parts[part * rows + at]);
  m = WarpMax(m);
  // l_p exp(m_p - m)
  const auto weight = [&](int part) {
    const float m_p = p.m_parts[part * rows + at];
    return p.l_parts[part * rows + at] * (m_p == m ? 1.0f : Exp2((m_p - m) * unit));
  };
  float l = 0.0f;
  for (int part = lane; part < p.parts; part += 32) l += weight(part);
  l = WarpSum(l);

  if (lane < kVDim / 8) {
    float O[8] = {};
#pragma unroll 4
    for (int part = warp; part < p.parts; part += kMergeWarps) {
      const float4* const o_p = reinterpret_cast<const float4*>(p.o_parts + (part * rows + at) * kVDim) + 2 * lane;
      const float4 a = o_p[0], b = o_p[1];
      const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, w = weight(part);
#pragma unroll
      for (int i = 0; i < 8; ++i) O[i] = fmaf(w, x[i], O[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[warp][8 * lane + i] = O[i];
  }
  __syncthreads();
  if (warp == 0 && lane < kVDim / 8) {
    const float factor = l == 0.0f ? 0.0f : 1.0f / l;
    float O[8] = {};
#pragma unroll
    for (int i = 0; i < 8 * kMergeWarps; ++i) O[i % 8] += sums[i / 8][8 * lane + i % 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) O[i] *= factor;
    const int row = at % p.q_len, head = at / p.q_len % p.q_heads, batch = at / p.q_len / p.q_heads;
    StoreEight(Matrix(p.o, batch, head, p.q_len, p.q_heads, kVDim).At(row, 8 * lane), O);
  }
  if (threadIdx.x == 0) {
    p.l[at] = l;
    p.m[at] = l != l ? l : kScores ? m : m * p.scale;
  }
}

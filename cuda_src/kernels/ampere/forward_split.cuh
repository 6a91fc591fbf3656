// The forward where few queries see many keys: each CTA of ampere/forward.cuh has a part of the keys, and the parts'
// results are merged, the same way whichever came first:
//   m = max m_p;   l = sum l_p exp(m_p - m);   O = sum l_p exp(m_p - m) / l O_p
// A sink joins the l of that last division, and none of the l_p.
#pragma once

#include "ampere/forward.cuh"

namespace jax_flash {

constexpr int kMergeWarps = kMergeThreads / 32;
constexpr int kAtOnce = 9;  // parts that a warp loads at once; it seldom has more
static_assert(kParts && !kListed);

// Where the parts of row `at` of [batch, head, row] are if work is balanced, in arrays that have `rows` rows a part.
struct PartsOfRow {
  int64_t first;
  int count;

  __device__ __forceinline__ PartsOfRow(const Params& p, int64_t at, int64_t rows) {
    if constexpr (kBalanced) {
      const int row = at % p.q_len, head = at / p.q_len % p.q_heads, batch = at / p.q_len / p.q_heads;
      const int packed = row * kPacked + head % kPacked;
      const PartsOfTile parts = p.tile_parts[batch * TilesOfHead(p) + packed / kRows];
      first = parts.first * rows + head / kPacked * kRows + packed % kRows;
      count = parts.count;
    }
  }
};

// The weight of l_p and O_p of a part, whose maximum is m_p, beside the maximum m of all. `to_log2` is ToLog2, which is
// read once, before it is needed.
__device__ __forceinline__ float Alpha(float to_log2, float m_p, float m) {
  return m_p == m ? 1.0f : Exp2((m_p - m) * to_log2);
}

}  // namespace jax_flash

// Merges the parts: there is a block of kMergeThreads threads for each row of O, [batch, head, row], and there are no
// more parts than threads. Each warp merges every kMergeWarps-th part, of which a lane has one; then the results of the
// warps are merged.
extern "C" __global__ void __launch_bounds__(jax_flash::kMergeThreads)
    jax_flash_forward_merge(const __grid_constant__ jax_flash::RowParams p) {
  using namespace jax_flash;
  __shared__ float m_w[kMergeWarps], l_w[kMergeWarps];
  __align__(16) __shared__ float O_w[kMergeWarps][kVDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t at = blockIdx.x, rows = kBalanced ? p.kv_heads * kRows : int64_t(p.batch) * p.q_heads * p.q_len;
  // Where the row's parts are in o_parts, l_parts and m_parts: from the first on they are `rows` apart.
  const PartsOfRow of_row(p, at, rows);
  const int64_t& first_row = kBalanced ? of_row.first : at;
  const int& parts = kBalanced ? of_row.count : p.parts;
  const float to_log2 = ToLog2(p);
  {
    const int part = warp + lane * kMergeWarps;
    const float m_p = part < parts ? p.m_parts[part * rows + first_row] : -Infinity();
    const float l_p = part < parts ? p.l_parts[part * rows + first_row] : 0.0f;
    float4 O_p[kAtOnce];  // the first are on their way while their weights are computed
    const auto load = [&](int first_part, int first_column) {
      const int column = min(first_column + 4 * lane, kVDim - 4);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = (warp + (first_part + i) * kMergeWarps) * rows + first_row;
        O_p[i] = row < parts * rows + (kBalanced ? first_row : 0)
                     ? *reinterpret_cast<const float4*>(p.o_parts + row * kVDim + column)
                     : float4();
      }
    };
    load(0, 0);
    const float m = LaneMax<32>(m_p);
    const float weight = l_p * Alpha(to_log2, m_p, m), l = LaneSum<32>(weight);
    if (lane == 0) m_w[warp] = m, l_w[warp] = l;
#pragma unroll
    for (int column = 0; column < kVDim; column += 128) {
      float4 O = {};
      for (int first = 0; warp + first * kMergeWarps < parts; first += kAtOnce) {
        if (first + column > 0) load(first, column);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(0xFFFFFFFFu, weight, (first + i) % 32);  // after the last part O_p is 0
          O.x = fmaf(w, O_p[i].x, O.x), O.y = fmaf(w, O_p[i].y, O.y);
          O.z = fmaf(w, O_p[i].z, O.z), O.w = fmaf(w, O_p[i].w, O.w);
        }
      }
      *reinterpret_cast<float4*>(&O_w[warp][min(column + 4 * lane, kVDim - 4)]) = O;
    }
  }
  __syncthreads();
  float m = m_w[0], l = 0.0f;
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) m = fmaxf(m, m_w[w]);
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) l += l_w[w] * Alpha(to_log2, m_w[w], m);
  if (const int column = 2 * threadIdx.x; column < kVDim) {
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) {
      const float alpha = Alpha(to_log2, m_w[w], m);
      a = fmaf(alpha, O_w[w][column], a), b = fmaf(alpha, O_w[w][column + 1], b);
    }
    const float shift = kMaximumApart ? m : m * to_log2;
    const float with_sink = SumWithSink(p, at / p.q_len / p.q_heads, at / p.q_len % p.q_heads, to_log2, shift, l);
    const float factor = l == 0.0f ? 0.0f : 1.0f / with_sink;
    const int row = at % p.q_len, head = at / p.q_len % p.q_heads, batch = at / p.q_len / p.q_heads;
    StorePair(Matrix(p.o, batch, head, p.q_len, p.q_heads, kVDim).At(row, column), a * factor, b * factor);
  }
  if (threadIdx.x == 0) {
    p.l[at] = l;
    p.m[at] = isnan(l) ? l : m * ScoreScale(p);
  }
}

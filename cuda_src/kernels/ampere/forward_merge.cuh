// The kernel that merges the parts of a split-KV forward, in a fixed order:
//   m = max m_p;   l = sum l_p exp(m_p - m);   O = sum l_p exp(m_p - m) / l O_p
// A sink joins only the final l.
#pragma once

#include "ampere/balanced_split.cuh"

namespace jax_flash::ampere::forward {

constexpr int kMergeWarps = kMergeThreads / 32, kMergedRows = kTiling.merged_rows;
constexpr int kMergeRowWarps = kMergeWarps / kMergedRows;  // warps for each row
constexpr int kAtOnce = 9;                                 // parts that a warp loads at a time
constexpr int kLaneParts = 32 / kAtOnce * kAtOnce;         // parts that the lanes of a warp hold at a time
static_assert(kParts && !kListed);

// The parts of row `at` of [batch, head, row] if work is balanced. The arrays have `rows` rows for each part.
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

// The weight of l_p and O_p of a part with maximum m_p, given the overall maximum m. `to_log2` is ToLog2, loaded early.
__device__ __forceinline__ float Alpha(float to_log2, float m_p, float m) {
  return m_p == m ? 1.0f : Exp2((m_p - m) * to_log2);
}

// Merges the parts of kMergedRows rows of O, [batch, head, row]. Each row has kMergeRowWarps warps. Each warp merges
// every kMergeRowWarps-th part of its row, one part for each lane at a time. Then the results of the warps are merged.
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    jax_flash_forward_merge(const __grid_constant__ RowParams p) {
  __shared__ float m_w[kMergeWarps], l_w[kMergeWarps];
  __align__(16) __shared__ float O_w[kMergeWarps][kVDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_warp = warp / kMergeRowWarps * kMergeRowWarps;
  const int64_t all = int64_t(p.batch) * p.q_heads * p.q_len, rows = kBalanced ? p.kv_heads * kRows : all;
  // The last CTA may merge the last row more than once.
  const int64_t at = min(int64_t(blockIdx.x) * kMergedRows + warp / kMergeRowWarps, all - 1);
  // The row's parts in o_parts, l_parts and m_parts start at first_row, with a stride of `rows`.
  const PartsOfRow of_row(p, at, rows);
  const int64_t& first_row = kBalanced ? of_row.first : at;
  const int& parts = kBalanced ? of_row.count : p.parts;
  const float to_log2 = ToLog2(p);
  // This warp has every kMergeRowWarps-th part.
  const auto there = [&](int number) { return warp - first_warp + number * kMergeRowWarps < parts; };
  const int64_t stride = kMergeRowWarps * rows, begin = (warp - first_warp) * rows + first_row;
  const auto statistic = [&](const float* of_parts, int number, float nothing) {
    return lane < kLaneParts && there(number + lane) ? of_parts[begin + (number + lane) * stride] : nothing;
  };
  {
    float4 O_p[kAtOnce];  // the first loads are in flight while the weights are computed
    const float* from = p.o_parts + begin * kVDim;
    const auto load = [&](int number, int first_column) {
      const float* next = from + min(first_column + 4 * lane, kVDim - 4);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, next += stride * kVDim) {
        O_p[i] = there(number + i) ? *reinterpret_cast<const float4*>(next) : float4();
      }
    };
    float m_p = statistic(p.m_parts, 0, -Infinity()), l_p = statistic(p.l_parts, 0, 0.0f);
    load(0, 0);
    float m = m_p;
#pragma unroll 1
    for (int first = kLaneParts; there(first); first += kLaneParts) {
      m = fmaxf(m, statistic(p.m_parts, first, -Infinity()));
    }
    m = LaneMax<32>(m);
    float weight = l_p * Alpha(to_log2, m_p, m), l = weight;
    float4 O[(kVDim + 127) / 128] = {};
#pragma unroll 1
    for (int number = 0; there(number); number += kAtOnce) {
      if (number > 0 && number % kLaneParts == 0) {
        m_p = statistic(p.m_parts, number, -Infinity()), l_p = statistic(p.l_parts, number, 0.0f);
        weight = l_p * Alpha(to_log2, m_p, m), l += weight;
      }
#pragma unroll
      for (int column = 0; column < kVDim; column += 128) {
        if (number + column > 0) load(number, column);
        float4& sum = O[column / 128];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(0xFFFFFFFFu, weight, number % kLaneParts + i);
          sum.x = fmaf(w, O_p[i].x, sum.x), sum.y = fmaf(w, O_p[i].y, sum.y);
          sum.z = fmaf(w, O_p[i].z, sum.z), sum.w = fmaf(w, O_p[i].w, sum.w);
        }
      }
      from += kAtOnce * stride * kVDim;
    }
    l = LaneSum<32>(l);
    if (lane == 0) m_w[warp] = m, l_w[warp] = l;
#pragma unroll
    for (int column = 0; column < kVDim; column += 128) {
      *reinterpret_cast<float4*>(&O_w[warp][min(column + 4 * lane, kVDim - 4)]) = O[column / 128];
    }
  }
  if (kMergeRowWarps > 1) {
    __syncthreads();
  } else {
    SyncWarp();
  }
  float m = m_w[first_warp], l = 0.0f;
#pragma unroll
  for (int w = 1; w < kMergeRowWarps; ++w) m = fmaxf(m, m_w[first_warp + w]);
#pragma unroll
  for (int w = 0; w < kMergeRowWarps; ++w) l += l_w[first_warp + w] * Alpha(to_log2, m_w[first_warp + w], m);
  const int thread = threadIdx.x - 32 * first_warp, row = at % p.q_len, head = at / p.q_len % p.q_heads;
  const int batch = at / p.q_len / p.q_heads;
#pragma unroll
  for (int column = 2 * thread; column < kVDim; column += 64 * kMergeRowWarps) {
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int w = first_warp; w < first_warp + kMergeRowWarps; ++w) {
      const float alpha = Alpha(to_log2, m_w[w], m);
      a = fmaf(alpha, O_w[w][column], a), b = fmaf(alpha, O_w[w][column + 1], b);
    }
    const float shift = kSeparateMaximum ? m : m * to_log2;
    const float factor = l == 0.0f ? 0.0f : 1.0f / SumWithSink(p, batch, head, to_log2, shift, l);
    const OutputMatrix O(p.o, batch, head, p.q_len, p.q_heads, kVDim);
    StorePair<kOutputBytes>(O.At(row, column), a * factor, b * factor);
  }
  if (thread == 0) {
    p.l[at] = l;
    p.m[at] = isnan(l) ? l : m * ScoreScale(p);
  }
}

}  // namespace jax_flash::ampere::forward

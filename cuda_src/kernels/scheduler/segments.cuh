// A kernel before a forward or backward with segment ids. For each block of 64 queries it finds the keys that they see,
// and for each block of 64 keys the rows that see them. The bounds are exact for packed sequences in order, and safe
// for any ids.
#pragma once

#include "scheduler/ranges.cuh"

namespace jax_flash {

constexpr int kThreads = kSegmentThreads;
constexpr int kBlocks = kSegmentBlocks;  // blocks of a CTA, which share one pass over the ids of the other side
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// The queries, or the keys, of a batch entry.
struct Side {
  const int32_t* ids;
  int size;
  SegmentBounds* bounds;

  __device__ __forceinline__ Side(const Params& p, int batch, bool queries) : size(queries ? p.q_len : p.kv_len) {
    ids = (queries ? p.q_segments : p.kv_segments) + int64_t(batch) * size;
    bounds = (queries ? p.q_bounds : p.kv_bounds) + int64_t(batch) * SegmentBlocks(size);
  }
};

// The lowest and the highest id of a block, and the positions of the other side with ids in this range.
struct BlockIds {
  int low, high;
  int first, last, count;
};

// Finds the lowest and the highest id of a block, with one warp. The positions are still empty.
__device__ __forceinline__ BlockIds LoadIds(const Side& own, int block) {
  const int i = block * kSegmentBlock + threadIdx.x % 32;
  const int a = own.ids[min(i, own.size - 1)], b = own.ids[min(i + 32, own.size - 1)];
  return {__reduce_min_sync(kAllLanes, min(a, b)), __reduce_max_sync(kAllLanes, max(a, b)), 0x7FFFFFFF, -1, 0};
}

__device__ __forceinline__ void Find(BlockIds (&blocks)[kBlocks], const Side& other) {
  int first[kBlocks], last[kBlocks], count[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) first[b] = 0x7FFFFFFF, last[b] = -1, count[b] = 0;
  constexpr int kIds = 4;  // ids that a lane tests at a time; most often all are too low or too high
  static_assert(kThreads * kIds <= kMaxStep);
#pragma unroll 4
  for (int i = threadIdx.x / 32 * (32 * kIds) + threadIdx.x % 32; i < other.size; i += kThreads * kIds) {
    int ids[kIds], low = 0x7FFFFFFF, high = -0x7FFFFFFF - 1;
#pragma unroll
    for (int x = 0; x < kIds; ++x) {
      ids[x] = other.ids[min(i + 32 * x, other.size - 1)];
      low = min(low, ids[x]), high = max(high, ids[x]);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (high < blocks[b].low || blocks[b].high < low) continue;
#pragma unroll
      for (int x = 0; x < kIds; ++x) {
        const int at = i + 32 * x;
        if (at >= other.size || ids[x] < blocks[b].low || blocks[b].high < ids[x]) continue;
        first[b] = min(first[b], at), last[b] = at, ++count[b];
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    first[b] = __reduce_min_sync(kAllLanes, first[b]), last[b] = __reduce_max_sync(kAllLanes, last[b]);
    count[b] = __reduce_add_sync(kAllLanes, count[b]);
    if (threadIdx.x % 32 > 0 || count[b] == 0) continue;
    atomicMin(&blocks[b].first, first[b]), atomicMax(&blocks[b].last, last[b]), atomicAdd(&blocks[b].count, count[b]);
  }
}

__device__ __forceinline__ SegmentBounds BoundsOf(const BlockIds& x) {
  const int end = x.last + 1;
  if (x.count == 0) return {0, 0, 0, 0};
  if (x.low < x.high || x.count < end - x.first) return {x.first, end, 0, 0};
  return {x.first, end, x.first, end};  // both sides have only one id
}

// Each CTA of kThreads threads computes kBlocks blocks of queries, then of keys, of a batch entry.
extern "C" __global__ void __launch_bounds__(kThreads) jax_flash_segments(const __grid_constant__ Params p) {
  const auto ctas = [](int size) { return (SegmentBlocks(size) + kBlocks - 1) / kBlocks; };
  const int q_ctas = ctas(p.q_len), all_ctas = q_ctas + ctas(p.kv_len);
  const int cta = blockIdx.x % all_ctas, batch = blockIdx.x / all_ctas;
  const bool queries = cta < q_ctas;
  const Side own(p, batch, queries), other(p, batch, !queries);
  const int first_block = (queries ? cta : cta - q_ctas) * kBlocks;
  __shared__ BlockIds blocks[kBlocks];
  const int warp = threadIdx.x / 32, i = threadIdx.x;
  if (warp < kBlocks) blocks[warp] = LoadIds(own, first_block + warp);
  __syncthreads();
  Find(blocks, other);
  __syncthreads();
  if (i < kBlocks && first_block + i < SegmentBlocks(own.size)) own.bounds[first_block + i] = BoundsOf(blocks[i]);
}

}  // namespace jax_flash

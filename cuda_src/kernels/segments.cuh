// Before a forward or backward with segment ids: which keys each block of 64 queries can see, and which rows each block
// of 64 keys. Tight for packed sequences, whose segments lie one after the other; right for any ids.
#pragma once

#include "visible.cuh"

namespace jax_flash {

constexpr int kThreads = 128;

// `own` ids of a block against all ids of the other side.
__device__ __forceinline__ SegmentBounds BoundsOf(const int32_t* own, int own_size, const int32_t* other,
                                                  int other_size) {
  __shared__ int lowest, highest, first, last, inside;
  if (threadIdx.x == 0) lowest = first = 0x7FFFFFFF, highest = 0x80000000, last = -1, inside = 0;
  __syncthreads();
  if (threadIdx.x < own_size) {
    atomicMin(&lowest, own[threadIdx.x]);
    atomicMax(&highest, own[threadIdx.x]);
  }
  __syncthreads();
  const int low = lowest, high = highest;
  int my_first = 0x7FFFFFFF, my_last = -1, my_inside = 0;
  for (int i = threadIdx.x; i < other_size; i += kThreads) {
    if (low <= other[i] && other[i] <= high) my_first = min(my_first, i), my_last = i, ++my_inside;
  }
  atomicMin(&first, my_first);
  atomicMax(&last, my_last);
  atomicAdd(&inside, my_inside);
  __syncthreads();
  if (last < 0) return {0, 0, 0, 0};
  const bool same = low == high && inside == last - first + 1;  // one id on both sides
  return {first, last + 1, same ? first : 0, same ? last + 1 : 0};
}

}  // namespace jax_flash

// A block of kThreads threads for each block of queries, then of keys, of each batch entry.
extern "C" __global__ void __launch_bounds__(jax_flash::kThreads)
    jax_flash_segments(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  const int q_blocks = (p.q_len + kSegmentBlock - 1) / kSegmentBlock;
  const int kv_blocks = (p.kv_len + kSegmentBlock - 1) / kSegmentBlock;
  const int block = blockIdx.x % (q_blocks + kv_blocks), batch = blockIdx.x / (q_blocks + kv_blocks);
  const int32_t* q = p.q_segments + int64_t(batch) * p.q_len;
  const int32_t* kv = p.kv_segments + int64_t(batch) * p.kv_len;
  const bool of_queries = block < q_blocks;
  const int b = of_queries ? block : block - q_blocks;
  const SegmentBounds bounds =
      of_queries ? BoundsOf(q + b * kSegmentBlock, min(kSegmentBlock, p.q_len - b * kSegmentBlock), kv, p.kv_len)
                 : BoundsOf(kv + b * kSegmentBlock, min(kSegmentBlock, p.kv_len - b * kSegmentBlock), q, p.q_len);
  if (threadIdx.x == 0) {
    (of_queries ? p.q_bounds + int64_t(batch) * q_blocks : p.kv_bounds + int64_t(batch) * kv_blocks)[b] = bounds;
  }
}

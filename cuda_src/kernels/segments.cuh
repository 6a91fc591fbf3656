// Before a forward or backward with segment ids: which keys each block of 64 queries can see, and which rows each block
// of 64 keys. Tight for packed sequences, whose segments lie one after the other; right for any ids.
#pragma once

#include "tile/warp.cuh"
#include "visible.cuh"

namespace jax_flash {

constexpr int kThreads = JAX_FLASH_THREADS;

// `own` ids of a block against all ids of the other side.
__device__ __forceinline__ SegmentBounds BoundsOf(const int32_t* own, int own_size, const int32_t* other,
                                                  int other_size) {
  const auto lower = [](int a, int b) { return min(a, b); };
  const auto higher = [](int a, int b) { return max(a, b); };
  __shared__ int first[kThreads / 32], last[kThreads / 32], inside[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int a = own[min(lane, own_size - 1)], b = own[min(lane + 32, own_size - 1)];
  const int low = LaneReduce<32>(min(a, b), lower), high = LaneReduce<32>(max(a, b), higher);
  int my_first = 0x7FFFFFFF, my_last = -1, my_inside = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < other_size; i += kThreads) {
    const int id = other[i];
    if (low <= id && id <= high) my_first = min(my_first, i), my_last = i, ++my_inside;
  }
  my_first = LaneReduce<32>(my_first, lower), my_last = LaneReduce<32>(my_last, higher),
  my_inside = LaneSum<32>(my_inside);
  if (lane == 0) first[warp] = my_first, last[warp] = my_last, inside[warp] = my_inside;
  __syncthreads();
  my_inside = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w)
    my_first = min(my_first, first[w]), my_last = max(my_last, last[w]), my_inside += inside[w];
  if (my_last < 0) return {0, 0, 0, 0};
  const bool same = low == high && my_inside == my_last - my_first + 1;  // one id on both sides
  return {my_first, my_last + 1, same ? my_first : 0, same ? my_last + 1 : 0};
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

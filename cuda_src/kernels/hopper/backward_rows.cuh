// Preparation of the rows of Q before the Hopper backward: L, D, and zeros for the f32 sums of dQ. They are in scratch,
// in blocks of kRowBlock rows. A small kernel prepares them, or with kFusedRows idle warps of the main kernel
// (hopper/backward_fused_rows.cuh).
#pragma once

#include "hopper/row_blocks.cuh"
#include "ptx/warp.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper {

// A block of kRowBlock rows of Q.
struct RowBlock {
  int batch, head, row;  // the first row
  int index;             // its index among the blocks in scratch

  // The block with this index among the blocks of all heads.
  __device__ __forceinline__ RowBlock(const Params& p, uint32_t number) {
    const uint32_t blocks = BlocksOfHead(p), all_heads = number / blocks;
    const int heads = Opaque(p.q_heads);
    batch = all_heads / uint32_t(heads), head = all_heads - batch * heads;
    row = (number - all_heads * blocks) * kRowBlock;
    index = FirstRowBlock(p, all_heads) + (number - all_heads * blocks);
  }

  // The head's index among the heads of all batch entries.
  __device__ __forceinline__ int Head(const Params& p) const { return batch * p.q_heads + head; }
  // The block's first row in scratch, and its dQ there.
  __device__ __forceinline__ int64_t Rows() const { return int64_t(index) * kRowBlock; }
  __device__ __forceinline__ float* DQ(const Params& p) const {
    return p.dq_sum + int64_t(index) * (kRowBlock * kQKDim);
  }
};

// kRowLanes lanes read a row of O, with 8 elements each. The last lanes may have none.
constexpr int kRowChunks = kVDim / 8;
constexpr int kRowLanes = kRowChunks > 16 ? 32 : kRowChunks > 8 ? 16 : 8;

__device__ __forceinline__ int64_t ChunkOfO(const Params& p, const RowBlock& block, int r) {
  return ((int64_t(block.batch) * p.q_len + block.row + r) * p.q_heads + block.head) * kRowChunks;
}

// The dot product of 8 elements of O and dO.
__device__ __forceinline__ float DotOfEight(const void* o, const void* d_o) {
  float sum = 0.0f;
  if constexpr (kTF32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = static_cast<const float4*>(o)[i], y = static_cast<const float4*>(d_o)[i];
      sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
  } else if constexpr (kUnrounded) {
    const uint4 y = *static_cast<const uint4*>(d_o);
    const uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = static_cast<const float2*>(o)[i], b = Unpack(pairs[i]);
      sum += a.x * b.x + a.y * b.y;
    }
  } else {
    const uint4 x = *static_cast<const uint4*>(o), y = *static_cast<const uint4*>(d_o);
    const auto dot = [](uint32_t packed_a, uint32_t packed_b) {
      const float2 a = Unpack(packed_a), b = Unpack(packed_b);
      return a.x * b.x + a.y * b.y;
    };
    sum = dot(x.x, y.x) + dot(x.y, y.y) + dot(x.z, y.z) + dot(x.w, y.w);
  }
  return sum;
}

// Stores D = rowsum(dO O) - dlogsumexp of row r, and what the row adds to other gradients.
__device__ __forceinline__ void StoreD(const Params& p, const RowBlock& block, int r, float product) {
  const bool exists = block.row + r < p.q_len;
  if (RowGradients::kNeeded && exists) {
    const int64_t at = int64_t(block.Head(p)) * p.q_len + block.row + r;
    const RowGradients gradients(p, block.batch, block.head, at, product);
    product = gradients.d;
    gradients.StoreOfSink(p, at);
  }
  p.d[block.Rows() + PermutedRow(r)] = exists ? product / ZScale(p) : 0.0f;
}

// Stores -L of row r, divided by the scale of S; with a bias or a score_mod, it stores -log l and m separately. The
// lanes of a warp have 32 consecutive rows. Together they store one word with a bit for each empty row.
__device__ __forceinline__ void StoreL(const Params& p, const RowBlock& block, int r) {
  const int64_t from = int64_t(block.Head(p)) * p.q_len + block.row + r;
  const int64_t to = block.Rows() + PermutedRow(r);
  const bool exists = block.row + r < p.q_len;
  float l = exists ? p.l[from] : 0.0f, m = exists ? p.m[from] : 0.0f;
  JoinSink(p, block.batch, block.head, &m, &l);
  if constexpr (kSeparateMaximum) {
    p.logsumexp[to] = l == 0.0f ? -Infinity() : -logf(l);
    p.maximum[to] = l == 0.0f ? 0.0f : m;
  } else {
    p.logsumexp[to] = l == 0.0f ? -Infinity() : -(m + logf(l)) / ScoreScale(p);
  }
  if constexpr (kEmptyRows) {
    const uint32_t empty = __ballot_sync(0xFFFFFFFF, exists && l == 0.0f);  // a sink leaves l at 0
    if (r % 32 == 0) p.empty_rows[(block.Rows() + r) / 32] = empty;
  }
}

// Does the main kernel overwrite all of dQ of a block before it adds to it? It does up to head dim 128 if it adds in a
// fixed order, and the keys that the rows see are in a range that is not empty.
__device__ __forceinline__ bool StoresDQ(const Params& p, const RowBlock& block) {
  const int tile = block.row / kTiling.rows * kTiling.rows;
  const auto keys = AnyRowKeys(PositionsOf(p, block.batch), tile, tile + kTiling.rows);
  return kTiling.ordered && kQKDim <= 128 && kVDim <= 128 && keys.lo < keys.hi;
}

// Each CTA prepares a block of rows: zeros for dQ, L and D.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    jax_flash_backward_prepare(const __grid_constant__ RowParams p) {
  const RowBlock block(p, blockIdx.x);
  if (kDQ && !StoresDQ(p, block)) {
    float4* const dq = reinterpret_cast<float4*>(block.DQ(p));
    for (int i = threadIdx.x; i < kRowBlock * kQKDim / 4; i += kRowThreads) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (threadIdx.x < kRowBlock) StoreL(p, block, threadIdx.x);
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll 2
  for (int i = 0; i < kRowBlock; i += kRowThreads / kRowLanes) {
    const int r = i + threadIdx.x / kRowLanes;
    const int64_t at = (ChunkOfO(p, block, r) + lane) * 8;
    const uint8_t* const o = static_cast<const uint8_t*>(p.o) + at * kOutputBytes;
    const uint8_t* const d_o = static_cast<const uint8_t*>(p.d_o) + at * kElementBytes;
    float sum = block.row + r < p.q_len && lane < kRowChunks ? DotOfEight(o, d_o) : 0.0f;
    sum = LaneSum<kRowLanes>(sum);
    if (lane == 0) StoreD(p, block, r, sum);
  }
}

}  // namespace jax_flash::hopper

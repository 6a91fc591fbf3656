// The rows of Q in the Hopper backward, before and after: L and D, zeros from which dQ grows in f32, and dQ in the
// problem's dtype and layout. All of that is in scratch by blocks of 64 rows.
//
// Two small kernels do it; or if kAlongside warps of the main kernel, head by head: some heads before they are
// computed, and as soon as they have been. Then the scratch of few heads is used, and stays in the L2. Heads, and
// tiles of keys, are taken in their order by whoever is free, and none waits for a later one: so it comes to an end
// however many CTAs run at a time.
#pragma once

#include "backward_keys_sm90.cuh"
#include "tile/mma.cuh"

namespace jax_flash {

// How many of 64 rows there are. (Asked again and again by warps that have few registers.)
__device__ __forceinline__ int BlocksOfHead(const Params& p) {
  return (Fresh(p.q_len) + kRows - 1) / kRows * (kRows / 64);
}

// 64 rows of Q.
struct RowBlock {
  int batch, head, row;  // the first row
  int place;             // of blocks in scratch

  // That of this number among the blocks of all heads.
  __device__ __forceinline__ RowBlock(const Params& p, uint32_t number) {
    const uint32_t blocks = BlocksOfHead(p), all_heads = number / blocks;
    const int heads = Fresh(p.q_heads);
    batch = all_heads / uint32_t(heads), head = all_heads - batch * heads;
    row = (number - all_heads * blocks) * 64;
    place = (kAlongside ? all_heads % Fresh(p.scratch_heads) : all_heads) * blocks + (number - all_heads * blocks);
  }

  // Among those of all batches.
  __device__ __forceinline__ int Head(const Params& p) const { return batch * p.q_heads + head; }
  // Its rows in scratch, row by row; its dQ.
  __device__ __forceinline__ int64_t Rows() const { return int64_t(place) * 64; }
  __device__ __forceinline__ float* DQ(const Params& p) const { return p.dq_sum + int64_t(place) * (64 * kQKDim); }
};

// To a row of O: lanes of 8 elements each, of which the last may have none.
constexpr int kRowChunks = kVDim / 8;
constexpr int kRowLanes = kRowChunks > 16 ? 32 : kRowChunks > 8 ? 16 : 8;

__device__ __forceinline__ int64_t ChunkOfO(const Params& p, const RowBlock& block, int r) {
  return ((int64_t(block.batch) * p.q_len + block.row + r) * p.q_heads + block.head) * kRowChunks;
}

// The sum of the products of 8 elements of O and dO.
__device__ __forceinline__ float DotOfEight(const void* o, const void* d_o) {
  float sum = 0.0f;
  if constexpr (kTF32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = static_cast<const float4*>(o)[i], y = static_cast<const float4*>(d_o)[i];
      sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
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

// D = rowsum(dO O) - dlogsumexp of row r.
__device__ __forceinline__ void StoreD(const Params& p, const RowBlock& block, int r, float product) {
  const bool exists = block.row + r < p.q_len;
  if (kDLogsumexp && exists)
    product -= p.dlogsumexp[(int64_t(block.batch) * p.q_heads + block.head) * p.q_len + block.row + r];
  p.d[block.Rows() + Place(r)] = exists ? product / KeepScale(p) : 0.0f;
}

// -L / scale of row r (with a bias -log l and m apart).
__device__ __forceinline__ void StoreL(const Params& p, const RowBlock& block, int r) {
  const int64_t from = (int64_t(block.batch) * p.q_heads + block.head) * p.q_len + block.row + r;
  const int64_t to = block.Rows() + Place(r);
  const bool exists = block.row + r < p.q_len;
  const float l = exists ? p.l[from] : 0.0f, m = exists ? p.m[from] : 0.0f;
  if constexpr (kMaximumApart) {
    p.logsumexp[to] = l == 0.0f ? -Infinity() : -logf(l);
    p.maximum[to] = l == 0.0f ? 0.0f : m;
  } else {
    p.logsumexp[to] = l == 0.0f ? -Infinity() : -(m + logf(l)) / ScoreScale(p);
  }
}

// Zeros for dQ.
template <int kThreads>
__device__ __forceinline__ void ClearRows(const Params& p, const RowBlock& block, int thread) {
  float4* dq = reinterpret_cast<float4*>(block.DQ(p));
  for (int i = thread; i < 64 * kQKDim / 4; i += kThreads) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// dQ. A thread takes 8 columns of two rows, what four lanes held.
template <int kThreads>
__device__ __forceinline__ void FinishRows(const Params& p, const RowBlock& block, int thread) {
  constexpr int kChunks = kQKDim / 8;
  const float scale = p.scale * KeepScale(p);
  for (int i = thread; i < 32 * kChunks; i += kThreads) {
    const int chunk = i % kChunks, quad = i / kChunks % 8, warp = i / kChunks / 8;
    const float4* x = reinterpret_cast<const float4*>(block.DQ(p) + 16 * warp * kQKDim) + chunk * 32 + quad * 4;
    const int row = block.row + 16 * warp + quad;
    const int64_t at = ((int64_t(block.batch) * p.q_len + row) * p.q_heads + block.head) * kChunks + chunk;
    if constexpr (kTF32) {  // columns j and j + 4
      float4* to = static_cast<float4*>(p.dq) + 2 * at;
      if (row < p.q_len) {
        to[0] = make_float4(x[0].x * scale, x[1].x * scale, x[2].x * scale, x[3].x * scale);
        to[1] = make_float4(x[0].y * scale, x[1].y * scale, x[2].y * scale, x[3].y * scale);
      }
      if (row + 8 < p.q_len) {
        to += 16 * p.q_heads * kChunks;
        to[0] = make_float4(x[0].z * scale, x[1].z * scale, x[2].z * scale, x[3].z * scale);
        to[1] = make_float4(x[0].w * scale, x[1].w * scale, x[2].w * scale, x[3].w * scale);
      }
    } else {
      uint32_t low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 y = x[j];
        low[j] = Pack(y.x * scale, y.y * scale);
        high[j] = Pack(y.z * scale, y.w * scale);
      }
      uint4* to = static_cast<uint4*>(p.dq) + at;
      if (row < p.q_len) *to = make_uint4(low[0], low[1], low[2], low[3]);
      if (row + 8 < p.q_len) to[8 * p.q_heads * kChunks] = make_uint4(high[0], high[1], high[2], high[3]);
    }
  }
}

// If kAlongside: a warp that does all this, 16 rows of a box at a time, by way of its own shared memory. They are
// loaded one ahead.
struct RowsWarp {
  const Params& p;
  BackwardShared& shared;
  const TensorMap *o_map, *do_map, *dq_map;
  PackedRing<2> at;  // what was loaded first of what has not been used

  __device__ __forceinline__ void Run() {
    while (true) {
      const int next = Uniform(Take()), before = next - p.scratch_heads * BlocksOfHead(p);
      if (before >= AllBlocks()) return;
      if (next < AllBlocks()) Prefetch(RowBlock(p, next));
      if (before >= 0) Finish(RowBlock(p, before));
      if (next < AllBlocks()) Prepare(RowBlock(p, next));
    }
  }

  // O and dO
  __device__ __forceinline__ void Prefetch(const RowBlock& block) {
    const int i = Lane();
    if (i >= 4 * kVBoxes) return;
    TmaPrefetch(o_map, i % kVBoxes * 64, block.row + i / kVBoxes * 16, block.head, block.batch);
    TmaPrefetch(do_map, i % kVBoxes * 64, block.row + i / kVBoxes * 16, block.head, block.batch);
  }

  // dQ
  __device__ __forceinline__ void Finish(const RowBlock& block) {
    WaitForCount(p.added + block.Head(p), (Fresh(p.kv_len) + kCols - 1) / kCols);
    FenceProxyAsyncGlobal();
    const auto load = [&](int i, PackedRing<2> to) {
      const int box = i % kQKBoxes, bytes = 64 * min(64, kQKDim - 64 * box);
      if (Lane() == 0) {
        MbarrierArriveExpectTx(Full(to), bytes);
        BulkLoad(Slot(to), block.DQ(p) + i / kQKBoxes * (16 * kQKDim) + box * 1024, bytes, Full(to));
      }
    };
    load(0, at);
#pragma unroll 1
    for (int i = 0; i < 4 * kQKBoxes; ++i) {
      TmaWaitRead<0>();
      __syncwarp();
      if (i + 1 < 4 * kQKBoxes) load(i + 1, at.After());
      uint8_t* const rows = Wait();
      PackRows(rows);
      FenceProxyAsync();
      __syncwarp();
      if (Lane() == 0)
        TmaStore(dq_map, rows, i % kQKBoxes * 64, block.row + i / kQKBoxes * 16, block.head, block.batch);
      TmaCommit();
    }
    TmaWaitRead<0>();
    __syncwarp();
  }

  // dQ in the problem's dtype, where half of its f32 was. (What is outside of the head dim need not be defined.)
  __device__ __forceinline__ void PackRows(uint8_t* rows) {
    const float4* from = reinterpret_cast<const float4*>(rows) + Lane();
    const float scale = p.scale * KeepScale(p);
#pragma unroll
    for (int half = 0; half < (kQKDim > 32 ? 2 : 1); ++half) {
      uint32_t packed[8];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float4 x = from[(4 * half + c) * 32];
        packed[2 * c] = Pack(x.x * scale, x.y * scale);
        packed[2 * c + 1] = Pack(x.z * scale, x.w * scale);
      }
      __syncwarp();
#pragma unroll
      for (int c = 0; c < 4; c += 2)
        Stmatrix(Chunk(rows, 4 * half + c), packed[2 * c], packed[2 * c + 1], packed[2 * c + 2], packed[2 * c + 3]);
    }
  }

  // Zeros for dQ, L and D
  __device__ __forceinline__ void Prepare(const RowBlock& block) {
    if (Lane() == 0) {
      constexpr int kBytes = kQKDim > 64 ? 32 * kQKDim : 64 * kQKDim;
      uint8_t* const to = reinterpret_cast<uint8_t*>(block.DQ(p));
#pragma unroll 1
      for (int i = 0; i < 256 * kQKDim; i += kBytes) BulkStore(to + i, shared.zeros, kBytes);
    }
    TmaCommit();
    const auto load = [&](int i, PackedRing<2> to) {
      if (Lane() == 0) {
        const int row = block.row + i / kVBoxes * 16, column = i % kVBoxes * 64;
        MbarrierArriveExpectTx(Full(to), kRowsBytes);
        TmaLoad(Slot(to), o_map, Full(to), column, row, block.head, block.batch);
        TmaLoad(Slot(to) + kRowsBytes / 2, do_map, Full(to), column, row, block.head, block.batch);
      }
    };
    load(0, at);
    for (int r = Lane(); r < 64; r += 32) StoreL(p, block, r);
    float products[2][4] = {};
#pragma unroll 1
    for (int i = 0; i < 4 * kVBoxes; ++i) {
      __syncwarp();
      if (i + 1 < 4 * kVBoxes) load(i + 1, at.After());
      MultiplyRows(Wait(), products);
      if (i % kVBoxes == kVBoxes - 1) StoreDiagonal(block, i / kVBoxes * 16, products);
    }
    TmaWaitAll();
    FenceProxyAsyncGlobal();
    __syncwarp();
    Count(p.prepared + block.Head(p), Lane() == 0);
  }

  // O dO^T, of the first 8 rows of dO and of the others.
  __device__ __forceinline__ void MultiplyRows(uint8_t* rows, float (&products)[2][4]) {
#pragma unroll
    for (int c = 0; c < (kVDim < 64 ? kVDim / 8 : 8); c += 2) {
      uint32_t o[4], d_o[4];
      Ldmatrix(o, Chunk(rows, c));
      Ldmatrix(d_o, Chunk(rows + kRowsBytes / 2, c));
      MmaSync(products[0], o, {d_o[0], d_o[2]});
      MmaSync(products[1], o, {d_o[1], d_o[3]});
    }
  }

  // Its diagonal. The rest is for nothing.
  __device__ __forceinline__ void StoreDiagonal(const RowBlock& block, int first, float (&products)[2][4]) {
    const int row = Lane() / 4;
    if (Lane() % 4 == row / 2) {
      StoreD(p, block, first + row, row % 2 == 0 ? products[0][0] : products[0][1]);
      StoreD(p, block, first + row + 8, row % 2 == 0 ? products[1][2] : products[1][3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i / 4][i % 4] = 0.0f;
  }

  // Of 16 rows of a box: where this lane's part begins of 16 columns from chunk c on.
  __device__ __forceinline__ static uint32_t Chunk(uint8_t* rows, int c) {
    return (SharedAddress(rows) + Lane() % 16 * 128 + (Lane() / 16 ^ Lane() % 8) * 16) ^ c * 16;
  }

  // What was loaded first of what has not been used.
  __device__ __forceinline__ uint8_t* Wait() {
    uint8_t* const rows = Slot(at);
    MbarrierWait(Full(at), at.Parity());
    at.Next();
    return rows;
  }

  __device__ __forceinline__ uint8_t* Slot(PackedRing<2> at) const { return shared.rows[Warp()][at.Index()]; }
  __device__ __forceinline__ uint64_t* Full(PackedRing<2> at) const { return &shared.rows_full[Warp()][at.Index()]; }
  __device__ __forceinline__ int Take() const { return Lane() == 0 ? atomicAdd(p.rows_taken, 1) : 0; }
  __device__ __forceinline__ int AllBlocks() const { return Fresh(p.batch) * p.q_heads * BlocksOfHead(p); }
  __device__ __forceinline__ static int Warp() { return Fresh(threadIdx.x) / 32u - 1; }
  __device__ __forceinline__ static int Lane() { return Fresh(threadIdx.x) % 32u; }
};

}  // namespace jax_flash

// Otherwise: a block for each 64 rows.
extern "C" __global__ void __launch_bounds__(256)
    jax_flash_backward_prepare(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  const RowBlock block(p, blockIdx.x);
  if (kDQ) ClearRows<256>(p, block, threadIdx.x);
  if (threadIdx.x < 64) StoreL(p, block, threadIdx.x);
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll 2
  for (int r = threadIdx.x / kRowLanes; r < 64; r += 256 / kRowLanes) {
    const int64_t at = (ChunkOfO(p, block, r) + lane) * 8 * kElementBytes;
    const uint8_t *o = static_cast<const uint8_t*>(p.o) + at, *d_o = static_cast<const uint8_t*>(p.d_o) + at;
    float sum = block.row + r < p.q_len && lane < kRowChunks ? DotOfEight(o, d_o) : 0.0f;
#pragma unroll
    for (int s = kRowLanes / 2; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    if (lane == 0) StoreD(p, block, r, sum);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    jax_flash_backward_finish(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  FinishRows<256>(p, RowBlock(p, blockIdx.x), threadIdx.x);
}

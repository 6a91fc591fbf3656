// The work before and after the Hopper backward for the rows of Q (hopper/backward_rows.cuh), with kFusedRows. The
// three idle warps of the producer warpgroup do it, instead of separate kernels. They prepare the rows of a head some
// heads before its computation, and convert its dQ after all additions. So scratch is needed for few heads at a time,
// and stays in L2.
//
// Warps take heads and kv tiles in order, and never wait for a later one. So there is no deadlock for any number of
// concurrent CTAs. The tiles of the last heads may be interleaved (scheduler/kv_schedule.cuh). These heads have scratch
// from the start, and do not wait for each other.
//
// Each head of Q has two counters in HBM:
//   prepared  blocks of rows with L, D and zeros for dQ. The warps of this file count them (Prepare). A producer waits
//             for all of them before it loads rows of the head (Producer::WaitForRows)
//   added     kv tiles whose dQ has been added. These warps wait for all of them before they convert dQ (Finish)
//
// Additions to dQ are asynchronous. Consumers wait for the additions of a kv tile only in the next tile: in its first
// step with Tuning::kDelayedDQ, otherwise before its first step, and always before they release its K (k_empty). When
// the producer sees this release, it counts the tile before as added (Producer::Unreported). Consumers count the last
// tile of a CTA themselves (Consume). A wait for rows may be a wait for scratch that a tile of this CTA, not counted
// yet, still uses. Then the producer first sends an empty tile through the consumers (Producer::Flush).
#pragma once

#include "hopper/backward_rows.cuh"
#include "hopper/backward_softmax.cuh"
#include "ptx/counter.cuh"
#include "ptx/mma.cuh"

namespace jax_flash::hopper::backward {

// One of these warps. It has a double buffer in shared memory, with kFusedBoxRows rows of a box.
struct RowsWarp {
  const Params& p;
  Shared& shared;
  const TensorMap *o_map, *do_map, *dq_map;
  PackedRing<2> at;  // the oldest load that has not been consumed

  static constexpr int kSteps = kRowBlock / kFusedBoxRows * kVBoxes;  // loads of O, and of dO, in a block

  __device__ __forceinline__ void Run() {
    while (true) {
      const int next = Uniform(RequestBlock()), before = next - p.scratch_heads * BlocksOfHead(p);
      if (before >= AllBlocks()) return;
      if (next < AllBlocks()) Prefetch(RowBlock(p, next));
      if (before >= 0) Finish(RowBlock(p, before));
      if (next < AllBlocks()) Prepare(RowBlock(p, next));
    }
  }

  // Prefetches O and dO of a block to L2.
  __device__ __forceinline__ void Prefetch(const RowBlock& block) {
    const int i = Lane();
    if (i >= kSteps) return;
    TmaPrefetch(o_map, i % kVBoxes * 64, block.row + i / kVBoxes * kFusedBoxRows, block.head, block.batch);
    TmaPrefetch(do_map, i % kVBoxes * 64, block.row + i / kVBoxes * kFusedBoxRows, block.head, block.batch);
  }

  // Converts dQ of a block, after all kv tiles have added to it.
  __device__ __forceinline__ void Finish(const RowBlock& block) {
    WaitForCount(p.added + block.Head(p), TilesOfHead(p));
    FenceProxyAsyncGlobal();
    const auto load = [&](int i, PackedRing<2> to) {
      const int box = i % kQKBoxes, bytes = 64 * min(64, kQKDim - 64 * box);
      if (Lane() == 0) {
        MbarrierArriveExpectTx(Full(to), bytes);
        BulkLoad(Slot(to), block.DQ(p) + i / kQKBoxes * (kFusedBoxRows * kQKDim) + box * 1024, bytes, Full(to));
      }
    };
    load(0, at);
#pragma unroll 1
    for (int i = 0; i < 4 * kQKBoxes; ++i) {
      TmaWaitRead<0>();
      SyncWarp();
      if (i + 1 < 4 * kQKBoxes) load(i + 1, at.After());
      uint8_t* const rows = Wait();
      PackRows(rows);
      FenceProxyAsync();
      SyncWarp();
      if (Lane() == 0)
        TmaStore(dq_map, rows, i % kQKBoxes * 64, block.row + i / kQKBoxes * kFusedBoxRows, block.head, block.batch);
      TmaCommit();
    }
    TmaWaitRead<0>();
    SyncWarp();
  }

  // Converts rows of dQ in place. The result needs half of the memory of f32. Columns beyond the head dim are
  // undefined.
  __device__ __forceinline__ void PackRows(uint8_t* rows) {
    const float4* from = reinterpret_cast<const float4*>(rows) + Lane();
    const float scale = DQKScale(p);
#pragma unroll
    for (int half = 0; half < (kQKDim > 32 ? 2 : 1); ++half) {
      uint32_t packed[8];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float4 x = from[(4 * half + c) * 32];
        packed[2 * c] = Pack(x.x * scale, x.y * scale);
        packed[2 * c + 1] = Pack(x.z * scale, x.w * scale);
      }
      SyncWarp();
#pragma unroll
      for (int c = 0; c < 2; ++c)
        Stmatrix(Matrices(rows, 2 * half + c), packed[4 * c], packed[4 * c + 1], packed[4 * c + 2], packed[4 * c + 3]);
    }
  }

  // Writes zeros for dQ, and L and D, of a block.
  __device__ __forceinline__ void Prepare(const RowBlock& block) {
    const auto load = [&](int i, PackedRing<2> to) {
      if (Lane() == 0) {
        const int row = block.row + i / kVBoxes * kFusedBoxRows, column = i % kVBoxes * 64;
        MbarrierArriveExpectTx(Full(to), kRowsBytes);
        TmaLoad(Slot(to), o_map, Full(to), column, row, block.head, block.batch);
        TmaLoad(Slot(to) + kRowsBytes / 2, do_map, Full(to), column, row, block.head, block.batch);
      }
    };
    load(0, at);
    for (int r = Lane(); r < kRowBlock; r += 32) StoreL(p, block, r);
    float products[2][4] = {};
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      SyncWarp();
      if (i + 1 < kSteps) load(i + 1, at.After());
      StoreZeros(block, i);
      MultiplyRows(Wait(), products);
      FenceProxyAsync();
      if (i % kVBoxes == kVBoxes - 1) StoreDiagonal(block, i / kVBoxes * kFusedBoxRows, products);
    }
    TmaCommit();
    TmaWaitAll();
    FenceProxyAsyncGlobal();
    SyncWarp();
    Count(p.prepared + block.Head(p), Lane() == 0);
  }

  // Stores a part of the zeros for dQ in each step. Storing all of them together would delay the loads of O and dO.
  __device__ __forceinline__ void StoreZeros(const RowBlock& block, int i) {
    constexpr int kPieces = kQKDim > 64 ? 8 : 4, kBytes = kRowBlock * kQKDim * 4 / kPieces;
    static_assert(kBytes <= sizeof(Shared::zeros) || !kFusedRows);
    if (Lane() > 0) return;
#pragma unroll 1
    for (int piece = i; piece < kPieces; piece += kSteps)
      BulkStore(reinterpret_cast<uint8_t*>(block.DQ(p)) + piece * kBytes, shared.zeros, kBytes);
  }

  // Adds O dO^T to the products: the first one with the first 8 rows of dO, the second with the other 8.
  __device__ __forceinline__ void MultiplyRows(uint8_t* rows, float (&products)[2][4]) {
#pragma unroll
    for (int c = 0; c < (kVDim < 64 ? (kVDim + 8) / 16 : 4); ++c) {
      uint32_t o[4], d_o[4];
      Ldmatrix(o, Matrices(rows, c));
      Ldmatrix(d_o, Matrices(rows + kRowsBytes / 2, c));
      MmaSync(products[0], o, {d_o[0], d_o[2]});
      MmaSync(products[1], o, {d_o[1], d_o[3]});
    }
  }

  // Stores the diagonal of O dO^T, which is rowsum(dO O). The other entries are discarded.
  __device__ __forceinline__ void StoreDiagonal(const RowBlock& block, int first, float (&products)[2][4]) {
    const int row = Lane() / 4;
    if (Lane() % 4 == row / 2) {
      StoreD(p, block, first + row, row % 2 == 0 ? products[0][0] : products[0][1]);
      StoreD(p, block, first + row + 8, row % 2 == 0 ? products[1][2] : products[1][3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i / 4][i % 4] = 0.0f;
  }

  // Waits for the oldest load that has not been consumed, and returns its buffer.
  __device__ __forceinline__ uint8_t* Wait() {
    uint8_t* const rows = Slot(at);
    MbarrierWait(Full(at), at.Parity());
    at.Next();
    return rows;
  }

  __device__ __forceinline__ static uint32_t Matrices(uint8_t* rows, int c) { return MatricesOf(rows, Lane(), c); }
  __device__ __forceinline__ uint8_t* Slot(PackedRing<2> at) const { return shared.rows[Warp()][at.Index()]; }
  __device__ __forceinline__ uint64_t* Full(PackedRing<2> at) const { return &shared.rows_full[Warp()][at.Index()]; }
  __device__ __forceinline__ int RequestBlock() const { return Lane() == 0 ? atomicAdd(p.row_block_counter, 1) : 0; }
  __device__ __forceinline__ int AllBlocks() const { return Opaque(p.batch) * p.q_heads * BlocksOfHead(p); }
  __device__ __forceinline__ static int Warp() { return Opaque(int(threadIdx.x)) / 32u - 1; }
  __device__ __forceinline__ static int Lane() { return Opaque(int(threadIdx.x)) % 32u; }
};

}  // namespace jax_flash::hopper::backward

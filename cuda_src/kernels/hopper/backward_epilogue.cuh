// The epilogue of the Hopper backward: a consumer warpgroup writes dK and dV, and adds dQ.
#pragma once

#include "hopper/backward_softmax.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::backward {

// Lines 21 and 24 of Algorithm 4.
struct Epilogue : Probabilities {
  using Probabilities::Probabilities;

  // The lane. With pairs of CTAs, Opaque keeps the compiler from computing addresses ahead, which would spill.
  __device__ __forceinline__ int LateLane() const { return kPairs ? Opaque(lane) : lane; }

  // The address of the c-th 32 bytes of this warp's keys in a tile. Four addresses are enough for all boxes, because c
  // / 4 is an immediate offset. If even four need too many registers, MatricesOf derives them from one.
  template <int kBoxes>
  __device__ __forceinline__ uint32_t Matrices(SharedTile<kKeys, kBoxes> keys, int lane, int c) const {
    const uint8_t* const rows = keys.memory + c / 4 * keys.kBox + (key_offset + 16 * warp) * kBoxBytes;
    if constexpr (kSameKeys) return MatricesOf(rows, lane, c % 4);
    return SharedAddress(rows + lane % 16 * 128 + ((c % 4 * 2 + lane / 16) ^ lane % 8) * 16);
  }

  // Writes this warpgroup's part of dK or dV to HBM through `memory`. kEveryThread: all threads commit, not only the
  // thread that issued stores.
  template <int kDim, bool kEveryThread = false>
  __device__ __forceinline__ void StoreGradient(const float (&C)[kDim / 2], float scale, uint8_t* memory,
                                                const KVTile& tile, const TensorMap* map) {
    const SharedTile<kKeys, Boxes(kDim)> to{memory};
    const int late_lane = LateLane();
#pragma unroll
    for (int c = 0; kTF32 && c < kDim / 8; ++c) {
      const auto scaled = [&](int i) { return __float_as_uint(C[4 * c + i] * scale); };
      Stmatrix(Matrices(to, late_lane, c), scaled(0), scaled(2), scaled(1), scaled(3));
    }
#pragma unroll
    for (int c = 0; !kTF32 && c < kDim / 8; c += 2) {
      const float* x = C + 4 * c;
      const bool whole = c + 1 < kDim / 8;  // otherwise the last 8 of 16 columns are beyond the head dim
      Stmatrix(Matrices(to, late_lane, c / 2), Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale),
               whole ? Pack(x[4] * scale, x[5] * scale) : 0, whole ? Pack(x[6] * scale, x[7] * scale) : 0);
    }
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      for (int b = 0; b < Boxes(kDim); ++b)
        TmaStore(map, to.Box(b) + key_offset * kBoxBytes, b * kBoxColumns, tile.first_key + key_offset, tile.head,
                 tile.batch);
      if (!kEveryThread) TmaCommit();
    }
    if (kEveryThread) TmaCommit();
  }

  // kWidth columns of 64 rows of dQ.
  template <int kWidth>
  struct DQ {
    float C[kWidth > 0 ? kWidth / 2 : 1];
  };

  // Adds dQ of the step `of` to the sums in HBM, from column `first_dim` on. `row_block` is the index of 64 rows among
  // all heads.
  template <int kWidth>
  __device__ __forceinline__ void AddDQ(const DQ<kWidth>& dQ, int row_block, int first_dim,
                                        const Ring<kStages>& of = {}) {
    if (kWidth == 0) return;
    float* staged = reinterpret_cast<float*>(StagedDQ(shared, of.index)) +
                    (row_block % (kRows / 64) * 4 + warp) * 16 * kQKDim + 16 * first_dim;
    if constexpr (kStagesDQ) {
      MbarrierWait(&shared.dq_empty[of.index], of.parity ^ 1);
      Stage<0, kWidth>(dQ.C, staged);
      PassOn({row_block, TileHere().first_key}, of);
    } else {
      float* to = p.dq_sum + int64_t(row_block * 4 + warp) * 16 * kQKDim + 16 * first_dim;
      TmaWaitRead<0>();
      AddColumns<0, kWidth>(to, dQ.C, staged);
    }
  }

  // With kStagesDQ: passes a tile of dQ to the thread that adds it. This warp holds a part of the tile.
  __device__ __forceinline__ void PassOn(const DQTile& tile, const Ring<kStages>& of) {
    if (threadIdx.x == kWarpgroup) shared.dq_tile[of.index] = tile;
    Release(&shared.dq_full[of.index]);
  }

  // Adds kWidth columns from kFirstColumn on of this warp's rows of C, or the first `columns` of them, to sums in HBM,
  // through shared memory.
  template <int kFirstColumn, int kWidth, int kCount>
  __device__ __forceinline__ void AddColumns(float* to, const float (&C)[kCount], float* staged, int columns = kWidth) {
    SyncWarp();
    Stage<kFirstColumn, kWidth>(C, staged);
    BulkReduceAdd(lane == 0 && columns > 0, to, staged, 16 * min(columns, kWidth) * 4);
    TmaCommit();
  }

  // Writes kWidth columns from kFirstColumn on of this warp's rows of C to shared memory, for TMA.
  template <int kFirstColumn, int kWidth, int kCount>
  __device__ __forceinline__ void Stage(const float (&C)[kCount], float* staged) {
#pragma unroll
    for (int r = 0; r < kWidth / 8; ++r) {
      const float* x = C + kFirstColumn / 2 + 4 * r;
      reinterpret_cast<float4*>(staged)[r * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
    FenceProxyAsync();
    SyncWarp();
  }

  // With kSumKV: adds this warpgroup's part of dK or dV to sums in HBM, from box kBox on. Boxes alternate between ds
  // (slot 0) and staging (slot 1), starting with kSlot.
  template <int kDim, int kSlot, int kBox = 0>
  __device__ __forceinline__ void AddGradient(const float (&C)[kDim / 2], float* sum, const KVTile& tile) {
    constexpr int kFirstColumn = kBox * kBoxColumns,
                  kWidth = kDim - kFirstColumn < kBoxColumns ? kDim - kFirstColumn : kBoxColumns;
    const int consumer_warp = Opaque(int(threadIdx.x)) / 32u - 4;  // recomputed to save registers
    const int block = (tile.batch * p.kv_heads + tile.head) * KeyBlocksOfHead(p) + tile.first_key / 64;
    uint8_t* const slot = kSlot == 0 ? reinterpret_cast<uint8_t*>(shared.ds) : shared.staging;
    float* const staged = reinterpret_cast<float*>(slot) + consumer_warp * (16 * kBoxColumns);
    TmaWaitRead<1>();
    AddColumns<kFirstColumn, kWidth>(sum + ((int64_t(block) * 4 + consumer_warp) * kDim + kFirstColumn) * 16, C,
                                     staged);
    if constexpr (kFirstColumn + kWidth < kDim) AddGradient<kDim, 1 - kSlot, kBox + 1>(C, sum, tile);
  }

  __device__ __forceinline__ void ReleaseKV() {
    TmaWaitRead<0>();
    FenceProxyAsync();  // the next K or V may overwrite P
    SyncWarp();
    Release(&shared.k_empty);
    Release(&shared.v_empty);
  }
};

}  // namespace jax_flash::hopper::backward

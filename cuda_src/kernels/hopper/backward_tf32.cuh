// Hopper backward kernel for f32 as TF32. TMA rounds Q, K, V and dO.
//
// wgmma reads f32 operands from shared memory only if they are K-major (hopper/shared_tile.cuh). The bottleneck is the
// bandwidth of shared memory, 128 bytes per cycle. So the operands are
//   S^T = K Q^T, dP^T = V dO^T   K is in registers, which have room for it. It arrives in the memory of dS
//   dV += P^T dO, dK += dS^T Q   P^T and dS^T are in registers. The other producer warps compute dO^T and Q^T
//   dQ = dS K                    dS is in shared memory, transposed. So is K^T, which is computed once for each kv tile
// Rows and columns are permuted as hopper/transpose.cuh describes, also in dS and dQ. Tiles of 64 keys are in
// hopper/backward_tf32_same_keys.cuh.
#pragma once

#include "hopper/backward_epilogue.cuh"
#include "hopper/backward_producer.cuh"

namespace jax_flash::hopper::backward::tf32 {

// The functions that all consumer warpgroups share for f32.
struct CommonConsumer : Epilogue {
  // The columns of dQ in the first warpgroup: half of them, rounded up to 8.
  static constexpr int kFirstDQWidth = (kQKDim + 8) / 16 * 8;

  uint32_t parity = 0;  // of Q^T and dO^T

  using Epilogue::Epilogue;

  // Transposes K to K^T, with all consumer warps.
  __device__ __forceinline__ void TransposeK(SharedK k) {
    const SharedKTransposed k_t{shared.k};
#pragma unroll 1
    for (int i = 4 * warpgroup + warp; kDQ && i < kQKBoxes * (kKeys / 32); i += 4 * kConsumers) {
      const int box = i / (kKeys / 32), keys = i % (kKeys / 32);
      TransposeSquare(k.Box(box) + keys * 32 * kBoxBytes, k_t.Box(keys) + box * kBoxColumns * kBoxBytes);
    }
    FenceProxyAsync();
    SyncConsumers();
  }

  // Loads 64 keys into registers, as left operands.
  template <int kSteps, int kBoxes>
  __device__ __forceinline__ void LoadKeys(uint32_t (&A)[kSteps][4], SharedTile<kKeys, kBoxes> keys) {
#pragma unroll
    for (int d = 0; d < kSteps; ++d) Ldmatrix(A[d], Matrices(keys, lane, d));
  }

  // Starts C = A B^T, or C += A B^T. A is K or V in registers, B a tile of Q or dO.
  template <int kSteps, int kBoxes>
  __device__ __forceinline__ void IssueHeldKeysTimesRows(float (&C)[kRows / 2], const uint32_t (&A)[kSteps][4],
                                                         SharedTile<kRows, kBoxes> rows, bool accumulate) {
    const auto b = rows.KMajor();
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < kSteps; ++d) Wgmma<kRows>::template RS<Major::kK>(C, A[d], b.KStep(d), accumulate || d > 0);
    WgmmaCommit();
  }

  // Starts C += A B. A is P^T or dS^T, B^T is dO^T or Q^T.
  template <int kDim, int kColumns>
  __device__ __forceinline__ void IssueGradient(float (&C)[kDim / 2], const uint32_t (&A)[kRows / 2],
                                                SharedTile<kColumns, Boxes(kRows)> transposed) {
    const auto b = transposed.KMajor();
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      Wgmma<kDim>::template RS<Major::kK>(C, A + 4 * i, b.KStep(i), true);
    }
    WgmmaCommit();
  }

  // Rounds an accumulator to a left operand. kIsP: it is P, and dropped entries become 0.
  template <bool kIsP>
  __device__ __forceinline__ static void Round(const float (&C)[kRows / 2], uint32_t (&A)[kRows / 2]) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float x = C[i / 4 * 4 + i % 2 * 2 + i / 2 % 2];
      A[i] = RoundTF32(__float_as_uint(kIsP ? Kept(x) : x));
    }
  }

  // Writes dS to shared memory from the accumulator dS^T. Key i of each 8 goes to position i / 2 + 4 (i % 2), as in
  // K^T. The stores have no bank conflicts.
  __device__ __forceinline__ void StoreDS(SharedDS ds, const uint32_t (&A)[kRows / 2]) {
    const int key = lane / 4, row = lane % 4 * 2, keys = key_offset + 16 * warp;
    uint8_t* const box = ds.memory + keys / 32 * ds.kBox + key / 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2, e = i / 2, chunk = (keys % 32 / 4 + 2 * h + key % 2) ^ (row + e);
#pragma unroll
      for (int c = 0; c < kRows / 8; ++c)
        *reinterpret_cast<uint32_t*>(box + (8 * c + row + e) * kBoxBytes + chunk * 16) = A[4 * c + i];
    }
  }

  // Starts kWidth columns of dQ = dS K.
  template <int kWidth>
  __device__ __forceinline__ void IssueDQ(DQ<kWidth>& dQ, SharedDS ds, int first_dim) {
    if constexpr (kWidth > 0) {
      const auto a = ds.KMajor();
      const auto b = SharedKTransposed{shared.k}.KMajor(first_dim);
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        Wgmma<kWidth>::template SS<Major::kK, Major::kK>(dQ.C, a.KStep(j), b.KStep(j), j > 0);
      }
      WgmmaCommit();
    }
  }
};

// The warpgroup that computes S, dP, dK and dV of its 64 keys, and half of the columns of dQ.
struct Consumer : CommonConsumer {
  static constexpr int kRegisters = Tuning::kConsumerRegisters;

  uint32_t K[kQKDim / 8][4];  // as left operands
  float dK[kQKDim / 2], dV[kVDim / 2];

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared) : CommonConsumer(p, shared) { FreeDS(); }

  // Tells the other warpgroup that this one has read dS, which has only one buffer.
  __device__ __forceinline__ void FreeDS() {
    if (kDQ) BarrierArrive(kDSFree + 1 - warpgroup, kConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void WaitForFreeDS() { BarrierSync(kDSFree + warpgroup, kConsumers * kWarpgroup); }

  // Computes one step. Returns false after the last step.
  __device__ __forceinline__ bool ComputeStep(const KVTile& tile) {
    const int stage = at.index;
    WaitForQ();
    StartS();
    IssueHeldKeysTimesRows(S, K, SharedQ{shared.q[stage]}, true);  // 11
    MbarrierWait(&shared.do_full[stage], at.parity);
    if (kDS) IssueKeysTimesRows<kVDim>(dP, SharedV{shared.v}, SharedDO{shared.d_o[stage]}, false);  // 17
    const Step step = StepHere();
    FetchMasks(tile, step);
    WgmmaWait<kDS ? 1 : 0>();
    Pin(S);
    Softmax(tile, step);  // lines 12, 13, 14 of Algorithm 4
    uint32_t P[kRows / 2], dS[kRows / 2];
    Round<true>(S, P);  // 15
    MbarrierWait(&shared.do_t_full, parity);
    if (kDV) IssueGradient<kVDim>(dV, P, SharedDOTransposed{shared.do_t});  // 16
    WgmmaWait<kDV ? 1 : 0>();
    Pin(dP);
    if (step.last) Release(&shared.v_empty);
    if (kDS) ComputeDS(tile, step);  // 18, 20
    Round<false>(dP, dS);
    if (kDQ) {
      WaitForFreeDS();
      StoreDS(SharedDS{shared.ds[0]}, dS);
    }
    FenceProxyAsync();  // for dS; and before TMA overwrites L and D of these rows
    SyncWarp();
    Release(&shared.q_empty[stage]);
    Release(&shared.do_empty[stage]);
    if (kDQ) SyncConsumers();
    if (kFirstDQWidth == kQKDim - kFirstDQWidth || warpgroup == 0) {
      ComputeDQAndDK<kFirstDQWidth>(dS, step.row_block, warpgroup * kFirstDQWidth);
    } else {
      ComputeDQAndDK<kQKDim - kFirstDQWidth>(dS, step.row_block, kFirstDQWidth);
    }
    at.Next();
    parity ^= 1;
    return !step.last;
  }

  // Computes dQ and dK from dS.
  template <int kWidth>
  __device__ __forceinline__ void ComputeDQAndDK(const uint32_t (&dS)[kRows / 2], int row_block, int first_dim) {
    DQ<kWidth> dQ;
    if (kDQ) IssueDQ(dQ, SharedDS{shared.ds[0]}, first_dim);  // 21
    WgmmaWait<(kDQ && kWidth > 0) ? 1 : 0>();
    Pin(dV);
    Release(&shared.do_t_empty);
    MbarrierWait(&shared.q_t_full, parity);
    if (kDK) IssueGradient<kQKDim>(dK, dS, SharedQTransposed{shared.q_t});  // 22
    WgmmaWait<(kDQ && kDK && kWidth > 0) ? 1 : 0>();
    Pin(dQ.C);
    FreeDS();
    if (kDQ) AddDQ(dQ, row_block, first_dim);
    WgmmaWait<0>();
    Pin(dK);
    Release(&shared.q_t_empty);
  }

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    Clear(dV);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    const SharedK arrived{shared.ds[0]};
    LoadKeys(K, arrived);
    TransposeK(arrived);
    if (Uniform(tile.steps) > 0) {
      while (ComputeStep(tile)) continue;
    } else {
      Release(&shared.v_empty);
    }
    TmaWaitRead<0>();
    SyncConsumers();  // waits until the last dQ has read all of dS, and has left
    if (kDV) StoreGradient<kVDim>(dV, ZScale(p), shared.ds[0], tile, dv_map);
    if (kDK) StoreGradient<kQKDim>(dK, DQKScale(p), shared.staging, tile, dk_map);
    TmaWaitRead<0>();
    SyncWarp();
    Release(&shared.k_empty);  // the next K may overwrite dV
    return true;
  }
};

}  // namespace jax_flash::hopper::backward::tf32

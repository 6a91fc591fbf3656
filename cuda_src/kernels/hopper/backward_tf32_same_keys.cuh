// The Hopper backward for f32 as TF32, for head dims above 64 or with a bias. One warpgroup has no registers for both
// dK and dV of 64 keys, and shared memory has no room for more keys. So both warpgroups have the same keys, and P
// passes from the first to the second.
//
// Shared memory is full. It has one tile of Q, one of dO, and their transposes, so the next tiles can be loaded while
// the transposes are in use. V arrives in the memory of dS and P, and K in the memory of dQ; then both are loaded into
// registers. The next tile of Q waits until the current one is transposed. The second warpgroup does that while it
// waits for P. The other producer warps transpose dO.
#pragma once

#include "hopper/backward_tf32.cuh"

namespace jax_flash::hopper::backward::tf32 {

// The warpgroup for S, P and dV of 64 keys, and the first half of the columns of dQ.
struct ConsumerOfP : CommonConsumer {
  static constexpr int kRegisters = Tuning::kConsumerRegisters;
  uint32_t K[kQKDim / 8][4];
  float dV[kVDim / 2];

  using CommonConsumer::CommonConsumer;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dV);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    const SharedK arrived{shared.staging};
    LoadKeys(K, arrived);
    TransposeK(arrived);
    if (Uniform(tile.steps) > 0) {
      FreeDS();
      ComputeSteps(tile);
    }
    TmaWaitRead<0>();
    SyncConsumers();  // waits until the last dQ has read all of dS, and has left
    if (kDV) StoreGradient<kVDim>(dV, ZScale(p), shared.v, tile, dv_map);
    ReleaseKV();
    return true;
  }

  __device__ __forceinline__ void FreeDS() {
    if (kDQ) BarrierArrive(kDSFree, 2 * kWarpgroup);
  }

  // Starts S^T = K Q^T.
  __device__ __forceinline__ void IssueS() {
    WaitForQ();
    IssueHeldKeysTimesRows(S, K, SharedQ{shared.q[at.index]}, false);  // 11
  }

  __device__ __forceinline__ void ComputeSteps(const KVTile& tile) {
    IssueS();
    while (true) {
      const Step step = StepHere();
      FetchMasks(tile, step);
      WgmmaWait<0>();
      Pin(S);
      Softmax(tile, step);  // lines 12, 13, 14 of Algorithm 4
      SyncWarp();           // all lanes have read l and m of these rows
      ReleaseRows(&shared.q_empty[at.index]);
      at.Next();
      if (kDS) SendP(shared.v + kDSBytes);
      uint32_t P[kRows / 2];
      Round<true>(S, P);  // 15
      MbarrierWait(&shared.do_t_full, parity);
      if (kDV) IssueGradient<kVDim>(dV, P, SharedDOTransposed{shared.do_t});  // 16
      DQ<kFirstDQWidth> dQ;
      if (kDQ) {
        BarrierSync(kDSFull, 2 * kWarpgroup);
        IssueDQ(dQ, SharedDS{shared.v}, 0);  // 21
      }
      WgmmaWait<kDQ ? 1 : 0>();
      Pin(dV);
      Release(&shared.do_t_empty);
      parity ^= 1;
      WgmmaWait<0>();
      Pin(dQ.C);
      if (step.last) {
        if (kDQ) AddDQ(dQ, step.row_block, 0);
        return;
      }
      FreeDS();
      IssueS();
      if (kDQ) AddDQ(dQ, step.row_block, 0);
    }
  }
};

// The warpgroup for dP, dS and dK of 64 keys, and the second half of the columns of dQ.
struct ConsumerOfDS : CommonConsumer {
  static constexpr int kRegisters = Tuning::kConsumerRegisters;
  static constexpr int kSecondDQWidth = kQKDim - kFirstDQWidth;
  uint32_t V[kVDim / 8][4];
  float dK[kQKDim / 2];

  using CommonConsumer::CommonConsumer;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    LoadKeys(V, SharedV{shared.v});
    TransposeK(SharedK{shared.staging});
    if (Uniform(tile.steps) > 0) {
      if (kDS) BarrierArrive(kPRead, 2 * kWarpgroup);  // the other warpgroup may write P
      while (ComputeStep(tile)) continue;
    }
    TmaWaitRead<0>();
    SyncConsumers();  // waits until the last dQ has read all of dS, and has left
    if (kDK) StoreGradient<kQKDim>(dK, DQKScale(p), shared.staging, tile, dk_map);
    ReleaseKV();
    return true;
  }

  // Computes one step. Returns false after the last step.
  __device__ __forceinline__ bool ComputeStep(const KVTile& tile) {
    WaitForQ();
    const Step step = StepHere();
    if (kDK) TransposeQ();
    Release(&shared.q_empty[at.index]);
    MbarrierWait(&shared.do_full[at.index], at.parity);
    if (kDS) IssueHeldKeysTimesRows(dP, V, SharedDO{shared.d_o[at.index]}, false);  // 17
    uint32_t dS[kRows / 2];
    if (kDS) {
      ReceiveP(shared.v + kDSBytes, step.last);
      WgmmaWait<0>();
      Pin(dP);
      ComputeDS(tile, step);  // 18, 20
      Round<false>(dP, dS);
    }
    SyncWarp();
    ReleaseRows(&shared.do_empty[at.index]);
    at.Next();
    DQ<kSecondDQWidth> dQ;
    if (kDQ) {
      BarrierSync(kDSFree, 2 * kWarpgroup);
      StoreDS(SharedDS{shared.v}, dS);
      FenceProxyAsync();
      BarrierArrive(kDSFull, 2 * kWarpgroup);
      SyncWarpgroup();
      IssueDQ(dQ, SharedDS{shared.v}, kFirstDQWidth);  // 21
    }
    if (kDK) IssueGradient<kQKDim>(dK, dS, SharedQTransposed{shared.q_t});  // 22
    WgmmaWait<(kDQ && kDK && kSecondDQWidth > 0) ? 1 : 0>();
    Pin(dQ.C);
    if (kDQ) AddDQ(dQ, step.row_block, kFirstDQWidth);
    WgmmaWait<0>();
    Pin(dK);
    return !step.last;
  }

  // Computes Q^T, which only this warpgroup needs.
  __device__ __forceinline__ void TransposeQ() {
    SyncWarpgroup();  // waits until all warps are done with the previous Q^T
#pragma unroll 1
    for (int i = warp; i < kQKBoxes * kRows / 32; i += 4) TransposeSquareOf(SharedQ{shared.q[at.index]}, shared.q_t, i);
    FenceProxyAsync();
    SyncWarpgroup();
  }
};

}  // namespace jax_flash::hopper::backward::tf32

// The Hopper backward for head dims above 128. dK and dV of 64 keys do not fit into the registers of one warpgroup. So
// one warpgroup computes S, P and dV, and the other dP, dS and dK. P passes from the first to the second through shared
// memory.
//
// A tile of 64 keys adds to dQ twice as often as a tile of 128 keys, which exceeds the L2's rate of additions. So two
// CTAs of a cluster, with 64 keys each, exchange their dS. Each computes half of the columns of dQ over the keys of
// both CTAs. For that it has these columns of K of both CTAs in shared memory. Only S needs the other columns of a
// CTA's K; they stay in registers.
#pragma once

#include "hopper/backward_epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/reduce.cuh"

namespace jax_flash::hopper::backward::pairs {

// The warpgroup for S, P and dV of 64 keys.
struct ConsumerOfP : Epilogue {
  static constexpr int kRegisters = Tuning::kDelayedDQ ? 208 : 240;
  const int rank = Uniform(ClusterRank());
  float dV[kVDim / 2];
  uint32_t K[kHalfSteps][4];  // columns that only S needs, as left operands

  using Epilogue::Epilogue;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dV);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    const int late_lane = LateLane();
#pragma unroll
    for (int d = 0; d < kHalfSteps; ++d) Ldmatrix(K[d], Matrices(SharedHalfK{shared.staging}, late_lane, d));
    SyncWarpgroup();  // from here on P may overwrite it
    if (Uniform(tile.steps) > 0) ComputeSteps(tile);
    SyncConsumers();  // all warps are done with V
    if (kDV) StoreGradient<kVDim>(dV, ZScale(p), shared.v, tile, dv_map);
    ReleaseKV();
    return true;
  }

  // Starts S^T = K Q^T: line 11 of Algorithm 4.
  __device__ __forceinline__ void IssueS() {
    StartS();
    const auto a = SharedK{shared.k}.KMajor();
    const auto b = SharedQ{shared.q[at.index]}.KMajor();
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < kHalfSteps; ++d) {
      Wgmma<kRows>::template SS<Major::kK, Major::kK>(S, a.KStep(d), b.KStep(rank == 0 ? d : kHalfSteps + d), true);
    }
#pragma unroll
    for (int d = 0; d < kHalfSteps; ++d) {
      Wgmma<kRows>::template RS<Major::kK>(S, K[d], b.KStep(rank == 0 ? kHalfSteps + d : d), true);
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void ComputeSteps(const KVTile& tile) {
    WaitForQ();
    IssueS();
    Step step = StepHere();
    if (!Tuning::kLateMaskFetch) FetchMasks(tile, step);
    while (true) {
      const int stage = at.index;
      WgmmaWait<0>();
      Pin(S);
      Softmax(tile, step);                     // 12, 13, 14
      if (Tuning::kRecomputesSlopes) PackP();  // 15
      if (!Tuning::kStartsAtL) SyncWarp();     // all lanes have read l and m of these rows
      ReleaseRows(&shared.q_empty[stage]);
      if (!Tuning::kRecomputesSlopes) PackP();  // 15
      if (kDS) SendP(shared.staging);
      MbarrierWait(&shared.do_full[stage], at.parity);
      if (kDV) IssueGradient<kVDim>(dV, P, SharedDO{shared.d_o[stage]});  // 16
      at.Next();
      if (step.last) {
        WgmmaWait<0>();
        Pin(dV);
        Release(&shared.do_empty[stage]);
        return;
      }
      WaitForQ();
      IssueS();
      step = StepHere();
      if (!Tuning::kLateMaskFetch) FetchMasks(tile, step);
      WgmmaWait<1>();
      Pin(dV);
      Release(&shared.do_empty[stage]);
    }
  }
};

// The warpgroup for dP, dS and dK of 64 keys, and half the columns of dQ.
struct ConsumerOfDS : Epilogue {
  static constexpr int kRegisters = Tuning::kDelayedDQ ? 256 : 224;
  Ring<kDSBuffers> ds_at;  // the buffers of the next dS
  float dK[kQKDim / 2], dQ[kHalfColumns / 2];
  int row_block;  // with Tuning::kDelayedDQ: the row block of the previous step

  using Epilogue::Epilogue;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    if (!NextTile()) {
      if (kOrdered) WantTurn(-1);
      return false;
    }
    const KVTile& tile = TileHere();
    if (Uniform(tile.steps) > 0) {
      if (kDS) BarrierArrive(kPRead, 2 * kWarpgroup);  // the other warpgroup may write P
      if constexpr (Tuning::kDelayedDQ) {
        if (ComputeStepWithDelayedDQ<true>(tile)) {
          while (ComputeStepWithDelayedDQ<false>(tile)) continue;
        }
        ComputeLastDQ();
      } else {
        while (ComputeStep(tile)) continue;
      }
    }
    SyncConsumers();  // all warps are done with K
    if (kDK) StoreGradient<kQKDim>(dK, DQKScale(p), shared.k, tile, dk_map);
    ReleaseKV();
    return true;
  }

  // Computes one step. Returns false after the last step.
  __device__ __forceinline__ bool ComputeStep(const KVTile& tile) {
    WaitForQ();
    MbarrierWait(&shared.do_full[at.index], at.parity);
    if (kDS) IssueKeysTimesRows<kVDim>(dP, SharedV{shared.v}, SharedDO{shared.d_o[at.index]}, false);  // 17
    const Step step = StepHere();
    if (kOrdered) WantTurn(step.row_block);
    if (kDS) {
      ReceiveP(shared.staging, step.last);
      WgmmaWait<0>();
      Pin(dP);
      ComputeDS(tile, step);  // 18, 20
    }
    ReleaseRows(&shared.do_empty[at.index]);
    if (kDQ) SendDS();
    if (kDK) IssueGradient<kQKDim>(dK, dS, SharedQ{shared.q[at.index]});  // 22
    WgmmaWait<0>();
    Pin(dK);
    Release(&shared.q_empty[at.index]);
    at.Next();
    if (kDQ) {
      IssueDQ();  // 21
      FinishDQ();
      AddDQ(step.row_block);
    }
    return !step.last;
  }

  // The same, but dQ is one step behind, so no product waits for the other CTA, and the tensor cores have work while
  // this warpgroup computes dS. kFirstStep: the first step of a kv tile, which has no dQ yet.
  template <bool kFirstStep>
  __device__ __forceinline__ bool ComputeStepWithDelayedDQ(const KVTile& tile) {
    WaitForQ();
    MbarrierWait(&shared.do_full[at.index], at.parity);
    IssueKeysTimesRows<kVDim>(dP, SharedV{shared.v}, SharedDO{shared.d_o[at.index]}, false);  // 17
    if (!kFirstStep) IssueDQ();                                                               // 21
    const Step step = StepHere();
    ReceiveP(shared.staging, step.last);
    WgmmaWait<kFirstStep ? 0 : 1>();
    Pin(dP);
    if (!kFirstStep) ReleaseQ(at.Before());
    ComputeDS(tile, step);  // 18, 20
    ReleaseRows(&shared.do_empty[at.index]);
    if (!kFirstStep) FinishDQ();
    SendDS();
    if (kDK) IssueGradient<kQKDim>(dK, dS, SharedQ{shared.q[at.index]});  // 22
    if (!kFirstStep) AddDQ(row_block);
    row_block = step.row_block;
    at.Next();
    return !step.last;
  }

  // With Tuning::kDelayedDQ: dQ of the last step.
  __device__ __forceinline__ void ComputeLastDQ() {
    IssueDQ();
    FinishDQ();
    ReleaseQ(at.Before());
    AddDQ(row_block);
  }

  // Releases a tile of Q, after its dK.
  __device__ __forceinline__ void ReleaseQ(const Ring<kStages>& of) {
    Pin(dK);
    Release(&shared.q_empty[of.index]);
  }

  // Writes dS to the shared memory of both CTAs.
  __device__ __forceinline__ void SendDS() {
    // Waits until the other CTA has used the previous dS. By then the copy from this CTA is complete, too.
    MbarrierWait(&shared.ds_empty[ds_at.index], ds_at.parity ^ 1);
    auto* const ds = shared.ds + 2 * ds_at.index;  // TF32 kernels, which compile this too, have a smaller array
    const int late_lane = LateLane();
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c)
      Stmatrix(Matrices(SharedDSTransposed{ds[0]}, late_lane, c), dS[4 * c], dS[4 * c + 1], dS[4 * c + 2],
               dS[4 * c + 3]);
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      MbarrierArriveExpectTx(&shared.ds_full[ds_at.index], kDSBytes);
      PeerCopy(ds[1], ds[0], kDSBytes, &shared.ds_full[ds_at.index]);
    }
    ds_at.Next();
  }

  // Starts dQ = dS K over the keys of both CTAs, after the dS of the other CTA has arrived.
  __device__ __forceinline__ void IssueDQ() {
    const Ring<kDSBuffers> from = ds_at.Before();
    MbarrierWait(&shared.ds_full[from.index], from.parity);
    const auto a = SharedTile<kCluster * kKeys, 1>{shared.ds[2 * from.index]}.MNMajorBox(0);
    const auto b = SharedK{shared.k}.MNMajor();
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Wgmma<kHalfColumns>::template SS<Major::kMN, Major::kMN>(dQ, a.KStep(j), b.KStep(j % 4, j / 4 * kHalfBoxes),
                                                               j > 0);
    }
    WgmmaCommit();
  }

  // Waits for dQ, and lets the other CTA write the next dS.
  __device__ __forceinline__ void FinishDQ() {
    WgmmaWait<0>();
    Pin(dQ);
    PeerArrive(&shared.ds_empty[ds_at.Before().index], ArrivesForWarp(lane));
  }

  // With kOrdered: asks for the turn to add this tile of dQ. A negative index ends the thread that keeps turns.
  __device__ __forceinline__ void WantTurn(int row_block) {
    if (threadIdx.x % kWarpgroup > 0) return;
    shared.dq_tile[0] = {row_block, TileHere().first_key};
    MbarrierArrive(&shared.turn_wanted);
  }

  // Adds dQ to the sums in HBM. With Tuning::kDelayedDQ it goes through shared memory, so this warpgroup does not wait
  // for the L2.
  __device__ __forceinline__ void AddDQ(int row_block) {
    const int first_dim = ClusterRank() * kHalfColumns, dims = kQKDim - first_dim;
    float* to = p.dq_sum + int64_t(row_block * 4 + warp) * 16 * kQKDim + 16 * first_dim;
    if constexpr (Tuning::kDelayedDQ) {
      TmaWaitRead<0>();
      AddColumns<0, kHalfColumns>(to, dQ, shared.dq + warp * 16 * kHalfColumns, dims);
    } else {
      // The barrier completes a phase in each step, like the ring of two stages.
      if (kOrdered) MbarrierWait(&shared.turn_begins, at.Before().index);
#pragma unroll
      for (int r = 0; r < kHalfColumns / 8; ++r) {
        if (kQKDim == 2 * kHalfColumns || 8 * r < dims)
          AddToGlobal(to + r * 128, {dQ[4 * r], dQ[4 * r + 1], dQ[4 * r + 2], dQ[4 * r + 3]});
      }
      if (kOrdered) {
        SyncWarp();
        Release(&shared.turn_ends);
      }
    }
  }
};

}  // namespace jax_flash::hopper::backward::pairs

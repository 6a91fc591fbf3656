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
  static constexpr int kRegisters = 240;
  const int rank = Uniform(ClusterRank());
  float dV[kVDim / 2];
  uint32_t K[4 * kHalfBoxes][4];  // columns that only S needs, as left operands

  using Epilogue::Epilogue;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dV);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    const int late_lane = LateLane();
#pragma unroll
    for (int d = 0; d < 4 * kHalfBoxes; ++d) Ldmatrix(K[d], Matrices(SharedHalfK{shared.staging}, late_lane, d));
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
    for (int d = 0; d < 4 * kHalfBoxes; ++d) {
      Wgmma<kRows>::template SS<Major::kK, Major::kK>(S, a.KStep(d), b.KStep(d, rank * kHalfBoxes), true);
    }
#pragma unroll
    for (int d = 0; d < 4 * kHalfBoxes; ++d) {
      Wgmma<kRows>::template RS<Major::kK>(S, K[d], b.KStep(d, (1 - rank) * kHalfBoxes), true);
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
      Softmax(tile, step);                 // 12, 13, 14
      if (Tuning::kFindsSlopes) RoundP();  // 15
      if (!Tuning::kStartAtL) SyncWarp();  // all lanes have read l and m of these rows
      ReleaseRows(&shared.q_empty[stage]);
      if (!Tuning::kFindsSlopes) RoundP();  // 15
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
  static constexpr int kRegisters = 224;
  uint32_t ds_parity = 0;
  float dK[kQKDim / 2], dQ[32 * kHalfBoxes];

  using Epilogue::Epilogue;

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    if (!NextTile()) return false;
    const KVTile& tile = TileHere();
    if (Uniform(tile.steps) > 0) {
      if (kDS) BarrierArrive(kPRead, 2 * kWarpgroup);  // the other warpgroup may write P
      while (ComputeStep(tile)) continue;
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
      MbarrierWait(&shared.ds_full[0], ds_parity);
      ds_parity ^= 1;
      IssueDQ();  // 21
      WgmmaWait<0>();
      Pin(dQ);
      PeerArrive(&shared.ds_empty[0], ArrivesForWarp(lane));
      AddDQ(step.row_block);
    }
    return !step.last;
  }

  // Writes dS to the shared memory of both CTAs.
  __device__ __forceinline__ void SendDS() {
    // Waits until the other CTA has used the previous dS. By then the copy from this CTA is complete, too.
    MbarrierWait(&shared.ds_empty[0], ds_parity ^ 1);
    const int late_lane = LateLane();
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c)
      Stmatrix(Matrices(SharedDSTransposed{shared.ds[0]}, late_lane, c), dS[4 * c], dS[4 * c + 1], dS[4 * c + 2],
               dS[4 * c + 3]);
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      MbarrierArriveExpectTx(&shared.ds_full[0], sizeof(shared.ds[0]));
      PeerCopy(shared.ds[1], shared.ds[0], sizeof(shared.ds[0]), &shared.ds_full[0]);
    }
  }

  // Starts dQ = dS K over the keys of both CTAs.
  __device__ __forceinline__ void IssueDQ() {
    const auto a = SharedTile<kCluster * kKeys, 1>{shared.ds[0]}.MNMajorBox(0);
    const auto b = SharedK{shared.k}.MNMajor();
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Wgmma<64 * kHalfBoxes>::template SS<Major::kMN, Major::kMN>(dQ, a.KStep(j), b.KStep(j % 4, j / 4 * kHalfBoxes),
                                                                  j > 0);
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void AddDQ(int row_block) {
    const int column = ClusterRank() * 64 * kHalfBoxes;
    float* to = p.dq_sum + int64_t(row_block * 4 + warp) * 16 * kQKDim + 16 * column;
#pragma unroll
    for (int r = 0; r < 8 * kHalfBoxes; ++r) {
      if (kQKDim == 128 * kHalfBoxes || column + 8 * r < kQKDim)
        AddToGlobal(to + r * 128, {dQ[4 * r], dQ[4 * r + 1], dQ[4 * r + 2], dQ[4 * r + 3]});
    }
  }
};

}  // namespace jax_flash::hopper::backward::pairs

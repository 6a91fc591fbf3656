// A consumer warpgroup of the Hopper forward, and its products S = Q K^T and O += P V.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace jax_flash::hopper::forward {

constexpr int kQKSteps = (kQKDim + kStep - 1) / kStep;

// Named barriers. Each name is the first of several: one for each consumer warpgroup, or for each row group.
// __syncthreads uses 0.
enum NamedBarrier {
  kWarpgroupBarrier = 1,
  kTurnBarrier = kWarpgroupBarrier + kConsumers,
  kPartialFull = kTurnBarrier + kConsumers,  // O, m and l of the first half of the keys are in shared memory ...
  kPartialEmpty = kPartialFull + kRowGroups  // ... and have been read
};

// A consumer warpgroup owns 64 rows, and all keys of a tile or half of them. Each lane has two of the rows: Row and Row
// + 8.
struct Warpgroup {
  const Params& p;
  Shared& shared;
  const int warpgroup, row_group, key_group, warp, lane;
  Ring<kStages> k, v;
  PackedRing<kQBuffers> q;

  __device__ __forceinline__ Warpgroup(const Params& p, Shared& shared)
      : p(p),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0) - 1),
        row_group(kKeyGroups > 1 ? warpgroup % kRowGroups : warpgroup),
        key_group(kKeyGroups > 1 ? warpgroup / kRowGroups : 0),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32) {
    if (warpgroup == kConsumers - 1) PassTurn();  // the first warpgroup starts
    if (kKeyGroups > 1 && key_group == 1) BarrierArrive(kPartialEmpty + row_group, 2 * kWarpgroup);
  }

  __device__ __forceinline__ int RowInTile() const { return 64 * row_group + 16 * warp + lane / 4; }
  __device__ __forceinline__ int Row(const QTile& tile) const { return tile.row + RowInTile(); }
  // The first of this warpgroup's keys in tile j.
  __device__ __forceinline__ int Column(int j) const { return j * kKeys + key_group * kWarpgroupKeys; }
  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, ArrivesForWarp(lane)); }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(kWarpgroupBarrier + warpgroup, kWarpgroup); }
  // With kWarpgroupRanges, warpgroups are at different tiles and do not take turns.
  __device__ __forceinline__ void TakeTurn() {
    if (!kWarpgroupRanges) BarrierSync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void PassTurn() {
    if (!kWarpgroupRanges) BarrierArrive(kTurnBarrier + (warpgroup + 1) % kConsumers, 2 * kWarpgroup);
  }

  // Skips tiles of K and V that only other warpgroups need.
  __device__ __forceinline__ void SkipTiles(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles, k.Next(), v.Next()) {
      MbarrierWait(&shared.k_full[k.index], k.parity);
      MbarrierWait(&shared.v_full[v.index], v.parity);
      SyncWarp();  // all lanes have passed the barriers
      Release(&shared.k_empty[k.index]);
      Release(&shared.v_empty[v.index]);
    }
  }
};

// Lines 10 and 15 of Algorithm 2: S = Q K^T, and O += P V.
struct Products : Warpgroup {
  float S[kWarpgroupKeys / 2], O[kVDim / 2];
  uint32_t P[kWarpgroupKeys / kStep * 4], Q[kTF32 ? kQKSteps : 1][4];  // left operands; Q only for f32

  using Warpgroup::Warpgroup;

  __device__ __forceinline__ void TakeQ() {
    const SharedQ rows{shared.q[q.Index()][row_group] + 16 * warp * kBoxBytes};
    const int opaque_lane = Opaque(lane);
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) Ldmatrix(Q[d], rows.Matrices(opaque_lane, d));
    FenceProxyAsync();  // before TMA writes the next Q
  }

  __device__ __forceinline__ void WaitForK() {
    if (!kListed) MbarrierWait(&shared.k_full[k.index], k.parity);  // with a block mask, Listed has waited
  }

  // S = Q K^T
  __device__ __forceinline__ void IssueS() {
    WgmmaFence();
    const auto a = SharedQ{shared.q[q.Index()][row_group]}.KMajor();
    const auto b = SharedK{shared.k[k.index]}.KMajor(key_group * kWarpgroupKeys);
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) {
      const uint64_t b_d = b.KStep(d);
      if constexpr (kTF32) {
        Wgmma<kWarpgroupKeys>::template RS<Major::kK>(S, Q[d], b_d, d > 0);
      } else {
        Wgmma<kWarpgroupKeys>::template SS<Major::kK, Major::kK>(S, a.KStep(d), b_d, d > 0);
      }
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void FinishS(bool last) {
    Pin(S);
    Release(&shared.k_empty[k.index]);
    // No branch here: it would split the basic block in which the compiler schedules the wait for O between the
    // exponentials.
    if (!kOInQ) MbarrierArrive(&shared.q_empty[q.Index()][row_group], ArrivesForWarp(lane) && last);
    k.Next();
  }

  // O += P V
  __device__ __forceinline__ void IssueO() {
    MbarrierWait(&shared.v_full[v.index], v.parity);
    WgmmaFence();
    const auto b = SharedV{shared.v[v.index]}.MNMajor(key_group * kWarpgroupKeys);
    // f32: V^T replaces V. A K-major operand ignores the distance between boxes in the descriptor.
    const KMajorOperand<kVBoxes * kBoxColumns> b_transposed{b.descriptor};
#pragma unroll
    for (int c = 0; c < kWarpgroupKeys / kStep; ++c) {
      if constexpr (kTF32) {
        Wgmma<kVDim>::template RS<Major::kK>(O, P + 4 * c, b_transposed.KStep(c), true);
      } else {
        Wgmma<kVDim>::template RS<Major::kMN>(O, P + 4 * c, b.KStep(c), true);
      }
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void FinishO() {
    WgmmaWait<0>();
    Pin(O);
    Release(&shared.v_empty[v.index]);
    v.Next();
  }

  // O = diag(alpha) O. Mostly alpha is 1 in all rows of a warp.
  __device__ __forceinline__ void RescaleO(const float (&alpha)[2]) {
    if (__any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) O[i] *= alpha[i / 2 % 2];
    }
  }
};

}  // namespace jax_flash::hopper::forward

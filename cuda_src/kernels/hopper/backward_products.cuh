// A consumer warpgroup of the Hopper backward, and its products S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace jax_flash::hopper::backward {

// Named barriers. __syncthreads uses 0.
enum NamedBarrier {
  kConsumersBarrier = 1,
  kWarpgroupBarrier = 2,  // and 3: one for each warpgroup
  // If both warpgroups have the same keys: P is in shared memory, and P has been read.
  kPFull = 4,
  kPRead = 5,
  // TF32: dS has been read, and it is in shared memory. If the warpgroups have different keys, kDSFree and the number
  // after it mean that the dS of the first or the second warpgroup has been read.
  kDSFree = 6,
  kDSFull = 7
};

__device__ __forceinline__ void SyncConsumers() { BarrierSync(kConsumersBarrier, kConsumers * kWarpgroup); }

// A consumer warpgroup owns 64 keys. Each lane has two of them, Key and Key + 8.
struct Warpgroup {
  const Params& p;
  Shared& shared;
  const int warpgroup, warp, lane;
  const int key_offset;  // of the warpgroup's keys in the kv tile
  uint32_t kv_parity = 0;
  Ring<kStages> at;  // the buffers of Q and dO

  __device__ __forceinline__ Warpgroup(const Params& p, Shared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup - 1)),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        key_offset(kSameKeys ? 0 : 64 * warpgroup) {}

  // Waits for the next kv tile. Returns false at the end. Afterwards TileHere is that tile, until the second call of
  // NextTile from here.
  __device__ __forceinline__ bool NextTile() {
    MbarrierWait(&shared.k_full, kv_parity);
    if (Uniform(shared.tile[kv_parity].first_key) < 0) return false;
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    return true;
  }
  __device__ __forceinline__ const KVTile& TileHere() const { return shared.tile[kv_parity ^ 1]; }

  __device__ __forceinline__ void WaitForQ() { MbarrierWait(&shared.q_full[at.index], at.parity); }

  // The current step. Reading it has some latency, so call this while the tensor cores compute.
  __device__ __forceinline__ Step StepHere() {
    const Step& step = shared.step[at.index];
    const int masks = Uniform(int(step.masks));
    const bool only_block = Tuning::kOnlyBlockBits && masks == int(Masks::kOnlyBlock);
    return {Uniform(step.row),
            Uniform(step.head),
            Uniform(step.row_block),
            kListed ? Uniform(step.kind) : kFullBlock,
            masks == int(Masks::kNone) ? Masks::kNone
            : only_block               ? Masks::kOnlyBlock
                                       : Masks::kAll,
            bool(Uniform(step.last))};
  }

  template <int kCount>
  __device__ __forceinline__ void Clear(float (&C)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) C[i] = 0.0f;
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, ArrivesForWarp(lane)); }
  // Releases memory of L or D that the warp has loaded. TMA may overwrite it only after this fence.
  __device__ __forceinline__ void ReleaseRows(uint64_t* barrier) {
    FenceProxyAsync();
    Release(barrier);
  }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(kWarpgroupBarrier + warpgroup, kWarpgroup); }

  __device__ __forceinline__ int Key(const KVTile& tile) const {
    return tile.first_key + key_offset + 16 * warp + lane / 4;
  }
};

// Lines 11, 16, 17 and 22 of Algorithm 4, on the transposes.
struct Products : Warpgroup {
  float S[kRows / 2], dP[kRows / 2];  // transposes; P replaces S, and dS replaces dP
  uint32_t P[kRows / 4], dS[kRows / 4];

  using Warpgroup::Warpgroup;

  // Starts C = A B^T, or C += A B^T to accumulate. A is this warpgroup's 64 rows of K or V, B a tile of Q or dO.
  template <int kDim, int kBoxes>
  __device__ __forceinline__ void IssueKeysTimesRows(float (&C)[kRows / 2], SharedTile<kKeys, kBoxes> keys,
                                                     SharedTile<kRows, kBoxes> rows, bool accumulate) {
    const auto a = keys.KMajor(key_offset);
    const auto b = rows.KMajor();
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < (kDim + kStep - 1) / kStep; ++d) {
      Wgmma<kRows>::template SS<Major::kK, Major::kK>(C, a.KStep(d), b.KStep(d), accumulate || d > 0);
    }
    WgmmaCommit();
  }

  // Starts C += A B. A is P^T or dS^T, B a tile of dO or Q.
  template <int kDim, int kBoxes>
  __device__ __forceinline__ void IssueGradient(float (&C)[kDim / 2], const uint32_t (&A)[kRows / 4],
                                                SharedTile<kRows, kBoxes> rows) {
    const auto b = rows.MNMajor();
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) Wgmma<kDim>::template RS<Major::kMN>(C, A + 4 * i, b.KStep(i), true);
    WgmmaCommit();
  }

  // Initializes S^T to -L / scale, or to 0. The product accumulates into it.
  __device__ __forceinline__ void StartS() {
    Clear(S);
    const float4* memory = reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4;
#pragma unroll
    for (int c = 0; Tuning::kStartsAtL && c < kRows / 16; ++c) {
      const float4 x = memory[4 * c];
      const float minus_l[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) S[8 * c + i] = minus_l[i / 4 * 2 + i % 2];
    }
    Pin(S);
  }
};

}  // namespace jax_flash::hopper::backward

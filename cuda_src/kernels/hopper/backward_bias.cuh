// Hopper kernel for dbias: dbias is dS, summed over the batch entries and heads that share the bias. The bias has all
// rows and columns. Each CTA keeps one tile of dbias in registers and loops, in a fixed order, over the tiles of S that
// contribute to it. So there are no atomics.
//
// Roles. One thread of the producer warpgroup loads tiles by TMA: Q and K, then dO and V. Each consumer warpgroup owns
// 64 rows of the tile:
//   S = Q_i K_j^T;   P = exp(S - L_i);   dP = dO_i V_j^T;   dbias += P (dP - D_i)
// All tiles of S that contribute to a tile of dbias have the same tile of the bias. It is loaded once for each tile of
// dbias, and stays in shared memory until dbias replaces it.
//
// Tiles have kRows rows (64 for each consumer) and kKeys keys (128, or 64 with windows, segments or a soft cap). The
// host launches
//   jax_flash_backward_prepare       see hopper/backward_rows.cuh; unless hopper/backward.cuh has run
//   jax_flash_backward_bias          at most one CTA for each SM, with kThreads threads and `jax_flash_shared_bytes` of
//                                    shared memory. TMA boxes have kRows rows for Q, dO, the bias and dbias, and kKeys
//                                    for K and V
//   jax_flash_backward_bias_finish   if p.parts > 1; see scheduler/bias_sums.cuh
#pragma once

#include "hopper/backward_bias_producer.cuh"
#include "hopper/backward_rows.cuh"
#include "ptx/wgmma.cuh"
#include "semantics/tile_mask.cuh"

namespace jax_flash::hopper::dbias {

// A consumer warpgroup owns 64 rows. Each lane has two of them.
struct Consumer {
  const Params& p;
  Shared& shared;
  const int warpgroup, warp, lane;  // warp: index among the warps of all consumers, with 16 rows each
  Ring<kStages> at;
  Ring<kBiasStages> bias;
  float sum[kKeys / 2], S[kKeys / 2], dP[kKeys / 2];  // P replaces S
  float minus_l[2], m[2], D[2];                       // of this lane's rows
  TileMask<false, kKeys> tile_mask;

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup - 1)),
        warp(threadIdx.x / 32 - kWarpgroup / 32),
        lane(threadIdx.x % 32) {}

  // The current tile of dbias. It is loaded at each use, to save registers.
  __device__ __forceinline__ const DBiasTile& TileHere() const { return shared.tile[at.index]; }
  __device__ __forceinline__ View<false> ViewOf(const DBiasTile& tile) const {
    return {tile.row + 16 * warp + lane / 4, tile.column + lane % 4 * 2};
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, ArrivesForWarp(lane)); }

  // Computes the next tile of dbias. Returns false at the end.
  __device__ __forceinline__ bool ComputeDBiasTile() {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) sum[i] = 0.0f;
    while (NextStep()) AddStep();
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) sum[i] *= ZScale(p);
    const DBiasTile tile = TileHere();
    SyncWarp();  // all lanes have read it
    Release(&shared.empty[at.index]);
    at.Next();
    if (Uniform(tile.column) < 0) return false;
    if (kBiasTiles) StoreInPlaceOfBias();
    if (!kBiasTiles || p.parts > 1) Write(tile);
    return true;
  }

  // Waits for the next tile of S that contributes to this tile of dbias. Returns false at the end.
  __device__ __forceinline__ bool NextStep() {
    MbarrierWait(&shared.full[at.index], at.parity);
    return Uniform(shared.step[at.index].batch) >= 0;
  }
  __device__ __forceinline__ Step StepHere() const {
    const Step& step = shared.step[at.index];
    return {Uniform(step.batch), Uniform(step.head), kListed ? Uniform(step.kind) : kFullBlock,
            bool(Uniform(step.masked))};
  }

  // Adds dS of a tile of S to the sum. Numbers are lines of Algorithm 4.
  __device__ __forceinline__ void AddStep() {
    IssueRowsTimesKeys<kQKDim>(S);  // 11
    const int before = at.index;
    at.Next();
    MbarrierWait(&shared.full[at.index], at.parity);
    if (!Tuning::kLateDP) IssueRowsTimesKeys<kVDim>(dP);  // 17
    const DBiasTile& tile = TileHere();
    const Step step = StepHere();
    FetchRowsAndMasks(tile, step);
    WgmmaWait<Tuning::kLateDP ? 0 : 1>();
    Pin(S);
    Release(&shared.empty[before]);
    ToScores(tile, step);
    if (step.masked) ApplyMasks(tile, step);  // 12
    if (Tuning::kLateDP) IssueRowsTimesKeys<kVDim>(dP);
    ToP();               // 13
    ApplyZ(tile, step);  // 14
    WgmmaWait<0>();
    Pin(dP);
    Release(&shared.empty[at.index]);
    at.Next();
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int h = i / 2 % 2;
      if (minus_l[h] != -Infinity()) sum[i] += DSOf(S[i], dP[i], D[h]);  // 18, 20; the dP of an empty row may be NaN
    }
  }

  // Starts C = A B^T of the current pair of tiles, for this warpgroup's rows and all keys.
  template <int kDim>
  __device__ __forceinline__ void IssueRowsTimesKeys(float (&C)[kKeys / 2]) {
    const auto a = SharedRows{shared.rows[at.index]}.KMajor(64 * warpgroup);
    const auto b = SharedKeys{shared.keys[at.index]}.KMajor();
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < (kDim + kStep - 1) / kStep; ++d) {
      Wgmma<kKeys>::template SS<Major::kK, Major::kK>(C, a.KStep(d), b.KStep(d), d > 0);
    }
    WgmmaCommit();
  }

  // Loads L and D of this lane's rows, and their masks, while the tensor cores compute.
  __device__ __forceinline__ void FetchRowsAndMasks(const DBiasTile& tile, const Step& step) {
    const int64_t head = int64_t(FirstRowBlock(p, step.batch * p.q_heads + step.head)) * kRowBlock;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = head + PermutedRow(ViewOf(tile).Row(h, 0));
      minus_l[h] = p.logsumexp[at] * kLog2e, m[h] = p.maximum[at], D[h] = p.d[at];
    }
    if (!step.masked) return;
    tile_mask.FetchBlock(Block<false>(p.block_mask, step.batch, step.kind), ViewOf(tile).row, tile.column);
    tile_mask.PackBits();
  }

  // Replaces q_i k_j by s_ij.
  __device__ __forceinline__ void ToScores(const DBiasTile& tile, const Step& step) {
    const Score score(p, step.batch, step.head);
    const View<false> view = ViewOf(tile);
    if (kBiasTiles) MbarrierWait(&shared.bias_full[bias.index], bias.parity);
    SoftCapTanh(p, S);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (Tuning::kBiasInParts && i % 8 == 0 && OpaqueFalse()) return;
      const int h = i / 2 % 2, x = i / 4 * 2 + i % 2;
      S[i] = kBiasTiles ? S[i] * CapOrScale(p) : score.Of(S[i], view.Row(h, x), view.Key(h, x));
    }
#pragma unroll
    for (int c = 0; kBiasTiles && c < kKeys; c += 16)
      AddBiasTile<false>(shared.bias[bias.index] + 16 * warp * kBoxBytes, c, S + c / 2);
  }

  // Overwrites the tile of the bias with dbias. The load of the bias must be complete, even if no tile of S
  // contributed.
  __device__ __forceinline__ void StoreInPlaceOfBias() {
    MbarrierWait(&shared.bias_full[bias.index], bias.parity);
    SyncWarp();
    if (p.parts == 1) {
      uint8_t* const rows = shared.bias[bias.index] + 16 * warp * kBoxBytes;
#pragma unroll
      for (int c = 0; c < kKeys; c += 16) PutBiasTile(rows, c, sum + c / 2);
    }
    FenceProxyAsync();
    SyncWarp();  // otherwise a lane that still waits for this bias could wait for the next phase
    Release(&shared.bias_empty[bias.index]);
    bias.Next();
  }

  // Sets masked entries to -inf.
  __device__ __forceinline__ void ApplyMasks(const DBiasTile& tile, const Step& step) {
    const Positions positions = PositionsOf(p, step.batch);
    if constexpr (kMasksInMemory) {
      tile_mask.Intersect(positions, Entries(p, step.batch, step.head), ViewOf(tile));
      tile_mask.Apply(S);
    } else {
      MaskOutside(positions, ViewOf(tile), S);
    }
  }

  // Replaces S by P = exp(s - m) / l.
  __device__ __forceinline__ void ToP() {
    if (Tuning::kStopAfterMask && OpaqueFalse()) return;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) S[i] = Exp2(fmaf(S[i] - m[i / 2 % 2], kLog2e, minus_l[i / 2 % 2]));
  }

  // Negates the entries of P that dropout drops.
  __device__ __forceinline__ void ApplyZ(const DBiasTile& tile, const Step& step) {
    if (Tuning::kStopBeforeZ && OpaqueFalse()) return;
    const Seed seed(p, step.batch, step.head);
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      MarkZ<false>(p, seed.Words(tile.column / 16 + c, RowCounter(ViewOf(tile).row)), S + 8 * c);
  }

  // Writes this lane's sums to memory.
  __device__ __forceinline__ void Write(const DBiasTile& tile) {
    const Sums to(p, tile.part);
    const View<false> view = ViewOf(tile);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int row = view.Row(i / 2 % 2, 0), key = view.Key(0, i / 4 * 2 + i % 2);
      if (row >= p.q_len || key >= p.kv_len) continue;
      to.Store(tile.batch * p.bias.batch + tile.head * p.bias.head + row * p.bias.row + key, sum[i]);
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_backward_bias(const __grid_constant__ KernelParams p JAX_FLASH_BACKWARD_BIAS_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByConsumers = ArrivalsOf(4 * kConsumers);
    for (int s = 0; s < kStages; ++s) MbarrierInit(&shared.full[s], 1), MbarrierInit(&shared.empty[s], kByConsumers);
    for (int b = 0; b < kBiasStages; ++b)
      MbarrierInit(&shared.bias_full[b], 1), MbarrierInit(&shared.bias_empty[b], kByConsumers);
    if (kProblem.kv_lengths) shared.uncleared.Init();
    FenceMbarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<Tuning::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer{p, shared, &query_map, &key_map, &value_map, &d_o_map}.Run();
    } else if (kBiasTiles && threadIdx.x == 32) {
      BiasProducer{p, shared, &bias_map, &dbias_map}.Run();
    }
  } else {
    SetMaxRegistersUp<Tuning::kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (consumer.ComputeDBiasTile()) continue;
  }
}

}  // namespace jax_flash::hopper::dbias

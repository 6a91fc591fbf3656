// Hopper backward kernel: Algorithm 4 of the paper. Each CTA keeps one tile of K and V, and loops over tiles of Q and
// dO.
//
// Roles. One thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup owns 64 rows of K and V, and
// keeps their dK and dV in registers. It computes transposes, in which rows are keys. So P^T and dS^T are left operands
// in registers:
//   S^T = K Q_i^T;   P^T = exp(S^T - L_i);   dP^T = V dO_i^T;   dS^T = P^T (dP^T - D_i)
//   dV += P^T dO_i;  dK += dS^T Q_i;         dQ_i += dS K, over all CTAs, in f32
// Only dQ needs the dS of all warpgroups. So dS goes through shared memory, and dQ may be computed one step later than
// the rest. P needs only the logsumexp L = m + log l; with a bias or a score_mod it needs m and l separately.
//
// Before and after. L, D and zeros for dQ are prepared before, and dQ is converted after. Separate kernels do this
// (hopper/backward_rows.cuh, hopper/backward_finish.cuh), or idle warps of this kernel
// (hopper/backward_fused_rows.cuh).
//
// Variants. Head dims above 128 are in hopper/backward_pairs.cuh, f32 as TF32 is in hopper/backward_tf32.cuh.
//
// A tile of Q has kRows rows: 64 or 128, for f32 64. A CTA has kKeys keys: 128, or 64 if a head dim is above 128. For
// f32 it has 64 if a head dim is above 64 or there is a bias. The host launches
//   jax_flash_backward_prepare      if not kFusedRows: a CTA of kRowThreads threads for each kRowBlock rows of each
//                                   head, with T rounded up to kRows
//   jax_flash_backward              at most one CTA for each SM, an even number if a head dim is above 128 (then with
//                                   kOrdered two CTAs for each tile of 128 keys), with kThreads threads and
//                                   `jax_flash_shared_bytes` of shared memory. TMA boxes have kRows rows for Q and dO,
//                                   kKeys for K and V, kBoxRows for dK and dV (if requested), and kFusedBoxRows for the
//                                   O, dO and dQ of kFusedRows
//   jax_flash_backward_finish       if dQ is requested, and not kFusedRows: the same grid as _prepare
//   jax_flash_backward_finish_keys  if kSumKV: a CTA of kRowThreads threads for each kRowBlock keys of each head of K,
//                                   with S rounded up to kKeys
#pragma once

#include "hopper/backward_epilogue.cuh"
#include "hopper/backward_finish.cuh"
#include "hopper/backward_fused_rows.cuh"
#include "hopper/backward_ordered.cuh"
#include "hopper/backward_pairs.cuh"
#include "hopper/backward_producer.cuh"
#include "hopper/backward_rows.cuh"
#include "hopper/backward_tf32.cuh"
#include "hopper/backward_tf32_same_keys.cuh"

namespace jax_flash::hopper::backward {

// The two warpgroups divide a tile of dQ: each computes 64 rows, or all rows and a part of the columns. The first
// warpgroup has the first kFirstDQWidth columns: half of them, rounded up to 8, because the N of wgmma is a multiple of
// 8. Above 64 columns it has the first box, because an operand that starts inside a box cannot continue in the next.
constexpr bool kSplitRows = kRows == 128;
static_assert(kRows == 64 || (kRows == 128 && !kPairs));
constexpr int kFirstDQWidth = kSplitRows ? kQKDim : kQKDim > 64 ? 64 : (kQKDim + 8) / 16 * 8;
constexpr int kSecondDQWidth = kSplitRows ? kQKDim : kQKDim - kFirstDQWidth;

static_assert(kTF32 || kStages == 2);  // dS has two buffers, with the same index as those of Q

// dV and dK are stored through the memory of dS if both fit there. Otherwise dK is stored through `staging`, after the
// last dQ has left it.
constexpr bool kStoredInDS = sizeof(Shared::ds) >= SharedV::kBytes + SharedK::kBytes;

// A consumer warpgroup, with S, dP, dK and dV of its 64 keys.
struct Consumer : Epilogue {
  static constexpr int kRegisters = Tuning::kConsumerRegisters;
  float dK[kQKDim / 2], dV[kVDim / 2];
  int row_block;  // if Tuning::kDelayedDQ: the row block of the previous step, which is added next; < 0: none

  using Epilogue::Epilogue;

  // Computes one step: one tile of Q and dO. Numbers are lines of Algorithm 4. kFirstStep: the first step of a kv tile,
  // if it has separate code. Returns false after the last step.
  template <bool kFirstStep>
  __device__ __forceinline__ bool ComputeStep(const KVTile& tile) {
    WaitForQ();
    if (Tuning::kInitializesS) StartS();
    IssueKeysTimesRows<kQKDim>(S, SharedK{shared.k}, SharedQ{shared.q[at.index]}, Tuning::kInitializesS);  // 11
    MbarrierWait(&shared.do_full[at.index], at.parity);
    if (kDS && !Tuning::kLateDP)
      IssueKeysTimesRows<kVDim>(dP, SharedV{shared.v}, SharedDO{shared.d_o[at.index]}, false);  // 17
    const Step step = StepHere();
    if (!Tuning::kLateMaskFetch) FetchMasks(tile, step);
    WgmmaWait<kDS && !Tuning::kLateDP ? 1 : 0>();
    Pin(S);
    Softmax(tile, step);            // 12, 13, 14
    if (Tuning::kEarlyDV) PackP();  // 15
    if (kDS && Tuning::kLateDP) IssueKeysTimesRows<kVDim>(dP, SharedV{shared.v}, SharedDO{shared.d_o[at.index]}, false);
    if (kDV && Tuning::kEarlyDV) IssueGradient<kVDim>(dV, P, SharedDO{shared.d_o[at.index]});  // 16
    WgmmaWait<Tuning::kEarlyDV && kDV ? 1 : 0>();
    Pin(dP);
    if (step.last) Release(&shared.v_empty);
    ComputeDS(tile, step);                          // 18, 20; and 15 if not kEarlyDV
    if (kFirstStep && OpaqueFalse()) return false;  // never taken: ptxas moves no code across, which would spill
    if (kDV && !Tuning::kEarlyDV) IssueGradient<kVDim>(dV, P, SharedDO{shared.d_o[at.index]});
    if (kDQ) {
      StoreDS();
    } else {
      FenceProxyAsync();  // before TMA overwrites L and D (StoreDS has this fence, too)
    }
    if (kSplitRows) {
      ComputeDQAndDK<kFirstDQWidth, kFirstStep>(step, warpgroup, 0);
    } else if (kFirstDQWidth == kSecondDQWidth || warpgroup == 0) {
      ComputeDQAndDK<kFirstDQWidth, kFirstStep>(step, 0, warpgroup * kFirstDQWidth);
    } else {
      ComputeDQAndDK<kSecondDQWidth, kFirstStep>(step, 0, kFirstDQWidth);
    }
    at.Next();
    return !step.last;
  }

  // Writes dS^T to shared memory, for both warpgroups.
  __device__ __forceinline__ void StoreDS() {
    if (Tuning::kDelayedDQ) MbarrierWait(&shared.ds_empty[at.index], at.parity ^ 1);
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c)
      Stmatrix(Matrices(SharedDSTransposed{shared.ds[at.index]}, lane, c), dS[4 * c], dS[4 * c + 1], dS[4 * c + 2],
               dS[4 * c + 3]);
    FenceProxyAsync();
    if (Tuning::kDelayedDQ) {
      SyncWarp();
      Release(&shared.ds_full[at.index]);
    } else {
      SyncConsumers();
    }
  }

  // Computes this warpgroup's part of dQ, and dK: lines 21 and 22. The part has rows [64 half, 64 half + 64) of the
  // tile, and kWidth columns from `first_dim` on.
  //
  // If dQ is one step behind (Tuning::kDelayedDQ), the first step of a kv tile has no dQ. With Tuning::kPeeledFirst,
  // the code of the first step omits it. Otherwise this step's dQ is computed and discarded, because a branch around it
  // would serialize all products. The last step also computes its own dQ.
  template <int kWidth, bool kFirstStep>
  __device__ __forceinline__ void ComputeDQAndDK(Step step, int half, int first_dim) {
    const bool add = kDQ && !kFirstStep && (!Tuning::kDelayedDQ || Tuning::kPeeledFirst || Uniform(row_block) >= 0);
    // The dS for dQ: of the previous step if dQ is one step behind and will be added, otherwise of this step.
    const Ring<kStages> from = Tuning::kDelayedDQ && add ? at.Before() : at;
    DQ<kWidth> dQ;
    if (Tuning::kDelayedDQ && !kFirstStep) MbarrierWait(&shared.ds_full[from.index], from.parity);
    if (kDQ && !kFirstStep) IssueDQ(dQ, SharedDSTransposed{shared.ds[from.index]}, half, first_dim);
    if (kDK) IssueGradient<kQKDim>(dK, dS, SharedQ{shared.q[at.index]});
    WgmmaWait<kDK ? 1 : 0>();  // for dV and dQ; dK may still run
    Pin(dV);
    if (!kFirstStep) Pin(dQ.C);
    // The step is read again, which takes fewer registers than keeping it: here, or if registers are scarcest, after dQ
    // has been added.
    if (Tuning::kDelayedDQ && !Tuning::kLateStepReread) step = StepHere();
    Release(&shared.do_empty[at.index]);
    if (!Tuning::kDelayedDQ && step.last) Release(&shared.k_empty);
    if (Tuning::kDelayedDQ && add) Release(&shared.ds_empty[from.index]);
    if (add) {
      AddDQ(dQ, (Tuning::kDelayedDQ ? row_block : step.row_block) + half, first_dim, from);
    } else if (kFusedRows) {
      TmaWaitAll();  // the dQ of the previous kv tile has been added (backward_fused_rows.cuh)
    }
    if (Tuning::kDelayedDQ && Tuning::kLateStepReread) step = StepHere();
    row_block = step.row_block;
    if (Tuning::kDelayedDQ && step.last) {
      MbarrierWait(&shared.ds_full[at.index], at.parity);
      IssueDQ(dQ, SharedDSTransposed{shared.ds[at.index]}, half, first_dim);
      WgmmaWait<0>();
      Pin(dQ.C);
      Release(&shared.ds_empty[at.index]);
      Release(&shared.k_empty);
      AddDQ(dQ, row_block + half, first_dim, at);
    }
    WgmmaWait<0>();
    Pin(dK);
    Release(&shared.q_empty[at.index]);
  }

  // Begins dQ = dS K: line 21.
  template <int kWidth>
  __device__ __forceinline__ void IssueDQ(DQ<kWidth>& dQ, SharedDSTransposed ds, int half, int first_dim) {
    if constexpr (kWidth > 0) {
      const auto a = ds.MNMajorBox(half);
      const auto b = SharedK{shared.k}.MNMajor(0, first_dim);
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        Wgmma<kWidth>::template SS<Major::kMN, Major::kMN>(dQ.C, a.KStep(j), b.KStep(j), j > 0);
      }
      WgmmaCommit();
    }
  }

  // With kStagesDQ: waits until all tiles of dQ so far have left shared memory.
  __device__ __forceinline__ void WaitForAdders() {
    Ring<kStages> of = at;
    for (int i = 0; i < kStages; ++i) {
      of = of.Before();
      MbarrierWait(&shared.dq_empty[of.index], of.parity);
    }
  }
  // Tells the threads that add dQ that there are no more tiles.
  __device__ __forceinline__ void EndDQ() {
    WaitForAdders();
    if (kSecondDQWidth == 0 && warpgroup > 0) return;  // this warpgroup computes no part of dQ
    for (int i = 0; i < kStages; ++i, at.Next()) PassOn({-1, 0}, at);
  }

  // Computes the next kv tile. Returns false at the end.
  __device__ __forceinline__ bool ComputeKVTile(const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    Clear(dV);
    const bool more = NextTile();
    if (kFusedRows && (!more || !Tuning::kDelayedDQ)) TmaWaitAll();  // all dQ so far have been added
    TmaWaitRead<0>();  // waits until the stores of the previous tile's gradients have read shared memory
    if (kStagesDQ && !more) EndDQ();
    if (!more) return false;
    const KVTile& tile = TileHere();
    SyncConsumers();
    if (Uniform(tile.steps) > 0) {
      row_block = -1;
      if (!Tuning::kPeeledFirst || ComputeStep<true>(tile)) {
        while (ComputeStep<false>(tile)) continue;
      }
    } else {
      if (kFusedRows) TmaWaitAll();
      Release(&shared.k_empty);
      Release(&shared.v_empty);
      if (kFusedRows && Uniform(tile.batch) < 0) return true;  // a tile of Producer::Flush: no dK or dV to store
    }
    if (kSumKV || !kStoredInDS) TmaWaitRead<0>();
    if (kStagesDQ && !kStoredInDS) WaitForAdders();
    SyncConsumers();  // waits until the last dQ has read all of dS
    if constexpr (kSumKV) {
      if (kDV) AddGradient<kVDim, 0>(dV, p.dv_sum, tile);
      // dK continues with the staging slot after the last one of dV.
      if (kDK) AddGradient<kQKDim, kDV ? Boxes(kVDim) % 2 : 0>(dK, p.dk_sum, tile);
      return true;
    }
    uint8_t* const ds = shared.ds[0];
    if (kDV) StoreGradient<kVDim, Tuning::kAllThreadsCommit>(dV, ZScale(p), ds, tile, dv_map);
    if (kDK)
      StoreGradient<kQKDim, Tuning::kAllThreadsCommit>(
          dK, DQKScale(p), kStoredInDS ? ds + SharedV::kBytes : shared.staging, tile, dk_map);
    return true;
  }
};

// Runs a consumer warpgroup over all kv tiles of its CTA.
template <typename Consumer>
__device__ __forceinline__ void Consume(const Params& p, Shared& shared, const TensorMap* dk_map,
                                        const TensorMap* dv_map) {
  SetMaxRegistersUp<Consumer::kRegisters>();
  Consumer consumer(p, shared);
  while (consumer.ComputeKVTile(dk_map, dv_map)) continue;
  if (!kFusedRows) return;
  SyncConsumers();
  // The producer reports a tile of this CTA when it loads a later one. After the last tile it loads none.
  const int last = consumer.TileHere().item_head;
  FenceProxyAsyncGlobal();
  Count(p.added + last, threadIdx.x == kWarpgroup && last >= 0);
}

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    jax_flash_backward(const __grid_constant__ KernelParams p JAX_FLASH_BACKWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByConsumers = ArrivalsOf(4 * kConsumers);
    MbarrierInit(&shared.k_full, 1), MbarrierInit(&shared.k_empty, kByConsumers);
    MbarrierInit(&shared.v_full, 1), MbarrierInit(&shared.v_empty, kByConsumers);
    for (int s = 0; s < kStages; ++s) {
      MbarrierInit(&shared.q_full[s], 1), MbarrierInit(&shared.q_empty[s], ArrivalsOf(4 * kConsumers + kQTransposers));
      MbarrierInit(&shared.do_full[s], 1), MbarrierInit(&shared.do_empty[s], ArrivalsOf(kDOReaders + kTransposers));
      MbarrierInit(&shared.ds_full[s], kPairs ? 1 : kByConsumers);
      MbarrierInit(&shared.ds_empty[s], kPairs ? ArrivalsOf(4) : kByConsumers);
    }
    if (kTF32) {
      MbarrierInit(&shared.q_t_full, ArrivalsOf(kTransposers)), MbarrierInit(&shared.q_t_empty, kByConsumers);
      MbarrierInit(&shared.do_t_full, ArrivalsOf(kTransposers));
      MbarrierInit(&shared.do_t_empty, ArrivalsOf(kDOReaders));
    }
    for (int s = 0; kStagesDQ && s < kStages; ++s) {
      MbarrierInit(&shared.dq_full[s], ArrivalsOf(4 * (kSecondDQWidth > 0 ? kConsumers : 1)));
      MbarrierInit(&shared.dq_empty[s], 1);
    }
    if (kOrdered && kPairs) {
      MbarrierInit(&shared.turn_wanted, 1), MbarrierInit(&shared.turn_begins, 1);
      MbarrierInit(&shared.turn_ends, ArrivalsOf(4));
      if (ClusterRank() == 0) shared.number = atomicAdd(p.tile_counter, 1);
    }
    for (int i = 0; i < 6; ++i) MbarrierInit(&shared.rows_full[i / 2][i % 2], 1);
    if (kEmptyRows) shared.uncleared[0].Init(), shared.uncleared[1].Init();
    FenceMbarrierInit();
    shared.tile[0].item_head = shared.tile[1].item_head = -1;
  }
  if (kFusedRows) {
    for (int i = threadIdx.x; i < kRowsBytes / 4; i += kThreads) reinterpret_cast<float*>(shared.zeros)[i] = 0.0f;
    FenceProxyAsync();
  }
  __syncthreads();
  if (kPairs) ClusterSync();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<Tuning::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer{p, shared, &query_map, &key_map, &value_map, &d_o_map, &bias_map}.Run();
    }
    if constexpr (kTF32) {
      if (threadIdx.x >= 32) Transposer{shared}.Run();
    }
    if constexpr (kOrdered && kPairs) {
      if (threadIdx.x == 32) TurnKeeper{p, shared}.Run();
    } else if constexpr (kOrdered) {
      if (threadIdx.x == 32 || threadIdx.x == 64) DQAdder{p, shared, int(threadIdx.x) / 32 - 1}.Run();
    }
    if constexpr (kFusedRows) {
      if (threadIdx.x >= 32) RowsWarp{p, shared, &o_rows_map, &d_o_rows_map, &dq_rows_map}.Run();
    }
  } else if constexpr (kTF32 && !kSameKeys) {
    Consume<tf32::Consumer>(p, shared, &dk_map, &dv_map);
  } else if constexpr (!kSameKeys) {
    Consume<Consumer>(p, shared, &dk_map, &dv_map);
  } else if constexpr (kTF32) {
    if (threadIdx.x < 2 * kWarpgroup) {
      Consume<tf32::ConsumerOfP>(p, shared, &dk_map, &dv_map);
    } else {
      Consume<tf32::ConsumerOfDS>(p, shared, &dk_map, &dv_map);
    }
  } else if (threadIdx.x < 2 * kWarpgroup) {
    Consume<pairs::ConsumerOfP>(p, shared, &dk_map, &dv_map);
  } else {
    Consume<pairs::ConsumerOfDS>(p, shared, &dk_map, &dv_map);
  }
  if (kPairs) ClusterSync();  // the other CTA may still write to this one's shared memory
}

}  // namespace jax_flash::hopper::backward

// The forward for Hopper: Algorithm 2 of the paper with its loops exchanged. A CTA keeps a tile of Q and walks K and V.
//
// One thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup has 64 rows of Q and O:
//   S = Q K_j^T;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j
// S of the next tile is issued together with P V, so that the tensor cores work while the softmax runs; and the
// warpgroups take turns in issuing, so that one's softmax runs under the other's products. K and V are walked from
// right to left, and only the tiles at either end of what the rows see are masked. With a block mask, whose blocks are
// whole tiles, a thread of the producer's goes through the list of the blocks that there are, and consumers are told.
//
// Where a tile has more rows than keys and a mask, a warpgroup walks the tiles of K and V that its own rows see, and
// passes over those that only the rows of others see. Then warpgroups take no turns.
//
// Where a tile has too few rows to give each warpgroup 64 of its own, half of the warpgroups take the first half of the
// keys of each tile and the others the second half; O, m and l of the two halves are merged at the end.
//
// f32 is taken as TF32: TMA rounds Q, K and V, as their maps say. There Q is held in registers, for the
// sake of shared memory's bandwidth, and V lands box by box and is transposed by the other warps of the producer's
// warpgroup.
//
// Tiles of S have kRows rows (a multiple of 64) and kKeys columns (a multiple of 16, or of 32 for f32). There are 2, 3
// or 4 consumer warpgroups, one or two of them for each 64 rows. The host launches at most one CTA a multiprocessor, of
// kThreads and `jax_flash_shared_bytes`, with boxes of kBoxRows in the maps of Q and O and of kKeys in those of K and
// V. What is beyond the head dim arrives as zeros, and is left out of O.
#pragma once

#include "hopper/forward_epilogue.cuh"
#include "hopper/forward_producer.cuh"

namespace jax_flash::hopper::forward {

// All that a consumer warpgroup does.
struct Consumer : Epilogue {
  using Epilogue::Epilogue;

  // Computes S and P of tile j of K, and adds P V of the tile before it, which lies to its right, to O. Numbers are
  // lines of Algorithm 2. `inside`: if the tile is masked, do the bits of its block alone say what is seen?
  template <bool kMasked>
  __device__ __forceinline__ void ComputeSTile(const QTile& tile, int j, bool last, bool inside = false) {
    float alpha[2], shift[2];
    FetchMasks<kMasked>(tile, j, inside);  // before S needs registers
    WaitForK();                            // before the turn, which others wait for
    TakeTurn();
    IssueS();  // 10
    IssueO();  // 15, of the tile before
    PassTurn();
    DrawZ(tile, j);
    WgmmaWait<1>();
    if (kBiasTiles) AddBias();  // 11
    FinishS(last);
    if (kMasked && kLookedUp && !Tuning::kEarlyMasks) {
      if (Never()) return;  // or ptxas would have the turn wait for what memory says
      JoinMasks(tile, j, inside);
    }
    if ((kFormsScores && (!kBiasTiles || kScoreMod)) || !kMasked || !Tuning::kVote || !seen.All())
      ToScores<kMasked>(tile, j);  // 11
    Maximum(alpha, shift);         // 12, 13
    Exponentials(shift);           // 12
    FinishO();
    if (Tuning::kEarlyPack) PackP();  // 14
    if (__any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) O[i] *= alpha[i / 2 % 2];
    }
    if (!Tuning::kEarlyPack) PackP();
  }

  // With lists: waits for the next tile of K, and says which one it is.
  __device__ __forceinline__ ListedTile Listed() {
    MbarrierWait(&shared.k_full[k.index], k.parity);
    return {Uniform(shared.listed[k.index].word)};
  }

  // Computes one tile of O: an i of line 8, with the loop of line 6 inside. Returns false if the producer has no more
  // tiles.
  __device__ __forceinline__ bool ComputeOTile(const TensorMap* o_map) {
    SyncWarp();  // all lanes have read the tile before, which q_empty will say
    MbarrierWait(&shared.q_full[q.Index()][row_group], q.Parity());
    // The tile stays in shared memory for want of registers. Only the loop's bounds are read into registers; they are
    // the same in all threads, which the compiler cannot know.
    const QTile& tile = shared.tile[q.position][row_group];
    const int begin = kLocal || kListed ? Uniform(tile.visible.any_lo) : 0, end = Uniform(tile.visible.any_hi);
    const int unmasked_begin = kLocal ? Uniform(tile.visible.every_lo) : 0;
    const int unmasked_end = Uniform(tile.visible.every_hi);
    if (kOwnKeys) SkipTiles(shared.skipped[q.position][row_group].before);
    if (begin == end) {
      if (tile.row < 0) return false;
      WriteEmpty(tile);
      return true;
    }

    softmax.Start();
    z.Start(p, tile.batch, tile.head);
    if (kTF32) TakeQ();
    ListedTile listed = kListed ? Listed() : ListedTile();
    int j = kListed ? listed.J() : end - 1;
    float alpha[2], shift[2];  // alpha of the first tile is not used: there is no O yet
    WaitForK();                // before the turn, which others wait for
    TakeTurn();
    IssueS();
    PassTurn();
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) O[i] = 0.0f;
    const bool masked = Tuning::kFirstMasked || (kListed ? listed.Masked() : j >= unmasked_end || j < unmasked_begin);
    if (masked) FetchMasks<true>(tile, j, kListed && listed.Inside());
    DrawZ(tile, j);
    WgmmaWait<0>();
    if (kBiasTiles) AddBias();
    FinishS(kListed ? listed.Last() : j == begin);
    if (masked) {
      if (kLookedUp && !Tuning::kEarlyMasks) JoinMasks(tile, j, kListed && listed.Inside());
      ToScores<true>(tile, j);
    } else {
      ToScores<false>(tile, j);
    }
    Maximum(alpha, shift);
    Exponentials(shift);
    PackP();
    if constexpr (kListed) {  // Algorithm 5, line 8: only the blocks that are not empty
      while (!listed.Last()) {
        listed = Listed();
        if (listed.Masked()) {
          ComputeSTile<true>(tile, listed.J(), listed.Last(), listed.Inside());
        } else {
          ComputeSTile<false>(tile, listed.J(), listed.Last());
        }
      }
    } else {
      for (--j; j >= unmasked_end; --j) ComputeSTile<true>(tile, j, j == begin);
      for (; j >= unmasked_begin; --j) ComputeSTile<false>(tile, j, j == begin);
      if (kLocal) {
        for (; j >= begin; --j) ComputeSTile<true>(tile, j, j == begin);
      }
    }
    IssueO();
    FinishO();
    if (kOwnKeys && kLocal) SkipTiles(shared.skipped[q.position][row_group].after);
    Finish(tile, o_map);
    return true;
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_forward(const __grid_constant__ KernelParams p JAX_FLASH_FORWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByConsumers = ArrivalsOf(4 * kConsumers);
    for (int b = 0; b < kQBuffers; ++b) {
      for (int w = 0; w < kRowGroups; ++w)
        MbarrierInit(&shared.q_full[b][w], 1), MbarrierInit(&shared.q_empty[b][w], ArrivalsOf(4 * kKeyGroups));
    }
    for (int s = 0; s < kStages; ++s) {
      MbarrierInit(&shared.k_full[s], 1), MbarrierInit(&shared.k_empty[s], kByConsumers);
      MbarrierInit(&shared.v_full[s], kTF32 ? ArrivalsOf(kVBoxes) : 1);
      MbarrierInit(&shared.v_empty[s], kByConsumers);
    }
    for (int s = 0; kPrefetchesLists && s < kPrefetchDepth; ++s)
      MbarrierInit(&shared.prefetched_full[s], 1), MbarrierInit(&shared.prefetched_empty[s], 1);
    for (int s = 0; kTF32 && s < kLandings; ++s)
      MbarrierInit(&shared.landed[s], 1), MbarrierInit(&shared.transposed[s], ArrivalsOf(kTransposers));
    if (kProblem.kv_lengths) shared.uncleared.Init();
    FenceMbarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<Tuning::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer{p, shared, &query_map, &key_map, &value_map, &bias_map}.Run();
    } else if (kPrefetchesLists && threadIdx.x == 32) {
      ListPrefetcher{p, shared}.Run();
    } else if (kTF32 && threadIdx.x >= 32) {
      Transposer{shared}.Run();
    }
  } else {
    SetMaxRegistersUp<Tuning::kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (consumer.ComputeOTile(&o_map)) consumer.q.Next();
    TmaWaitRead<0>();  // a CTA may not end before O has left its shared memory
  }
}

}  // namespace jax_flash::hopper::forward

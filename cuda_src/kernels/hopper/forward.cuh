// Hopper forward kernel: Algorithm 2 of the paper with its loops exchanged. Each CTA keeps one tile of Q, and loops
// over tiles of K and V from right to left. One thread of the producer warpgroup loads tiles by TMA
// (forward_producer.cuh). Each consumer warpgroup owns 64 rows of Q and O:
//
//   for each tile of Q:                                          ComputeOTile
//     S = Q K_j^T of the last kv tile;  P, m, l = softmax(S)
//     for each further kv tile j:                                ComputeSTile
//       issue S = Q K_j^T and O += P V_{j+1}                     two products in flight
//       wait for S;  P, m, l = online softmax of S               overlaps with O
//       wait for O;  O = diag(alpha) O
//     O += P V of the first kv tile;  write O / l, m and l       Epilogue::Finish
//
// Turns. Consumers take turns to issue products: one computes its softmax while another multiplies (the ping-pong
// schedule of FlashAttention-3).
//
// Masks. Only tiles at either end of the visible range are masked.
//
// Special cases, each by compile-time constants:
//   block mask           A thread of the producer warpgroup walks the list of non-empty blocks, and tells the consumers
//                        which tile comes next. Blocks consist of whole tiles (kListed, forward_prefetched_lists.cuh).
//   256 rows, masked     Each warpgroup skips kv tiles that its own rows do not see (forward_warpgroup_ranges.cuh).
//   few rows             Two warpgroups share 64 rows. One has the first half of the keys of each tile, the other the
//                        second half. At the end they merge their O, m and l (kKeyGroups = 2: split-KV within a CTA).
//   f32                  is computed as TF32. TMA rounds Q, K and V. Q stays in registers, which saves shared memory
//                        bandwidth. Warps of the producer warpgroup transpose V (forward_staged_v.cuh).
//
// The host launches at most one CTA for each SM, with kThreads threads and `jax_flash_shared_bytes` of shared memory.
// TMA boxes have kBoxRows rows for Q and O, and kKeys rows for K and V. Columns beyond the head dim arrive as zeros,
// and are not stored in O.
#pragma once

#include "hopper/forward_epilogue.cuh"
#include "hopper/forward_producer.cuh"

namespace jax_flash::hopper::forward {

// A consumer warpgroup.
struct Consumer : Epilogue {
  using Epilogue::Epilogue;

  // Computes S and P of tile j of K. Adds P V of the previous tile, on the right of tile j, to O. Numbers are lines of
  // Algorithm 2. `only_element_mask`: the tile has no mask but the element mask of its block.
  template <bool kMasked>
  __device__ __forceinline__ void ComputeSTile(const QTile& tile, int j, bool last, bool only_element_mask = false) {
    float alpha[2], shift[2];
    if (kMasked) FetchMasks(tile, j, only_element_mask);  // before S needs registers
    WaitForK();                                           // before the turn, which others wait for
    TakeTurn();
    IssueS();  // 10
    IssueO();  // 15, for the previous tile
    PassTurn();
    GenerateZ(tile, j);
    WgmmaWait<1>();
    if (kBiasTiles) AddBias();  // between 10 and 11; the paper has no bias
    FinishS(last);              // releases K, and after the last tile Q
    if (kMasked && Tuning::kCombineMasksLate) {
      if (OpaqueFalse()) return;  // never taken: otherwise ptxas moves the wait for the masks ahead of PassTurn
      CombineMasks(tile, j, only_element_mask);
    }
    if (!(kMasked && Tuning::kVote && tile_mask.AllVisible())) ToScores<kMasked>(tile, j);  // 11
    Maximum(alpha, shift);                                                                  // 12, 13
    Exponentials(shift);                                                                    // 12
    FinishO();
    if (Tuning::kEarlyPack) PackP();  // 14: packs P and applies Z
    RescaleO(alpha);                  // 15
    if (!Tuning::kEarlyPack) PackP();
  }

  // With a block mask: waits for the next tile of K, and returns its description.
  __device__ __forceinline__ ListedTile Listed() {
    MbarrierWait(&shared.k_full[k.index], k.parity);
    return {Uniform(shared.listed[k.index].word)};
  }

  // Computes one tile of O: one iteration of line 8, with the loop of line 6 inside. Returns false at the end.
  __device__ __forceinline__ bool ComputeOTile(const TensorMap* o_map) {
    // Waits until all lanes have read the previous QTiles. There are 2 kQBuffers places for QTiles, so when this warp
    // releases Q of tile n, the producer may overwrite QTile n - kQBuffers.
    SyncWarp();
    MbarrierWait(&shared.q_full[q.Index()][row_group], q.Parity());
    // The tile stays in shared memory to save registers. Only the loop bounds are in registers. All threads read equal
    // bounds, and Uniform tells the compiler. With a block mask, begin and end only tell whether any key is visible.
    const QTile& tile = shared.tile[q.position][row_group];
    const int begin = kLocal || kListed ? Uniform(tile.visible.any_lo) : 0, end = Uniform(tile.visible.any_hi);
    const int unmasked_begin = kLocal ? Uniform(tile.visible.every_lo) : 0;
    const int unmasked_end = Uniform(tile.visible.every_hi);
    if (kWarpgroupRanges) SkipTiles(shared.skipped[q.position][row_group].before);
    if (begin == end) {
      if (tile.row < 0) return false;  // the end marker; its range is empty, too
      WriteEmpty(tile);
      return true;
    }

    softmax.Start();
    z.Start(p, tile.batch, tile.head);
    if (kTF32) TakeQ();
    // The first kv tile, the rightmost. These are the steps of ComputeSTile without a previous tile.
    ListedTile listed = kListed ? Listed() : ListedTile();
    int j = kListed ? listed.J() : end - 1;
    float alpha[2], shift[2];  // the first tile does not use alpha: O is still 0
    WaitForK();                // before the turn, which others wait for
    TakeTurn();
    IssueS();
    PassTurn();
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) O[i] = 0.0f;
    const bool masked = Tuning::kFirstMasked || (kListed ? listed.Masked() : j >= unmasked_end || j < unmasked_begin);
    if (masked) FetchMasks(tile, j, kListed && listed.OnlyElementMask());
    GenerateZ(tile, j);
    WgmmaWait<0>();
    if (kBiasTiles) AddBias();
    FinishS(kListed ? listed.Last() : j == begin);
    if (masked) {
      if (Tuning::kCombineMasksLate) CombineMasks(tile, j, kListed && listed.OnlyElementMask());
      ToScores<true>(tile, j);
    } else {
      ToScores<false>(tile, j);
    }
    Maximum(alpha, shift);
    Exponentials(shift);
    PackP();
    // All further tiles.
    if constexpr (kListed) {  // Algorithm 5, line 8: skip empty blocks
      while (!listed.Last()) {
        listed = Listed();
        if (listed.Masked()) {
          ComputeSTile<true>(tile, listed.J(), listed.Last(), listed.OnlyElementMask());
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
    if (kWarpgroupRanges && kLocal) SkipTiles(shared.skipped[q.position][row_group].after);
    Finish(tile, o_map);
    return true;
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

// The macro adds the parameters query_map, key_map, value_map, o_map and bias_map.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_forward(const __grid_constant__ KernelParams p JAX_FLASH_FORWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByConsumers = ArrivalsOf(4 * kConsumers);  // a warpgroup has four warps
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
    for (int s = 0; kTF32 && s < kStagingBuffers; ++s)
      MbarrierInit(&shared.staging_full[s], 1), MbarrierInit(&shared.staging_empty[s], ArrivalsOf(kTransposers));
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
    TmaWaitRead<0>();  // a CTA must not exit before O has left its shared memory
  }
}

}  // namespace jax_flash::hopper::forward

// The static schedule: each CTA of a persistent grid knows its tiles in advance. Tiles are ordered head by head, so
// concurrent CTAs read the same K and V, or Q and dO, from L2.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash {

// If causal, the work of a tile grows linearly from one end of a head to the other. So a CTA takes tiles in pairs, the
// t-th from each end, because every pair has the same work. A head's tile without a partner comes last. The CTAs of a
// cluster take the same tiles.
//
// Packed sequences may be causal, each on its own. With sequences of equal lengths, a CTA that takes every n-th tile
// could get the longest tile of each sequence. So the CTAs reverse their order in every other round.
template <int kCluster = 1>
struct StaticSchedule {
  int next = 0;  // the number of tiles that this CTA has taken

  __device__ __forceinline__ void Request() const {}

  // Finds the next of `tiles` tiles in each of `heads` heads. Returns false at the end.
  __device__ __forceinline__ bool Next(int heads, int tiles, int* head, int* tile) {
    const int per_head = kCausal ? tiles / 2 : tiles;
    const bool second = !kCausal || next % 2 == 1;
    int item = blockIdx.x / kCluster + (kCausal ? next / 2 : next) * (gridDim.x / kCluster);
    if (kProblem.ranges && next % 2 == 1) item += gridDim.x / kCluster - 1 - 2 * (blockIdx.x / kCluster);
    const bool paired = item < per_head * heads;
    *head = paired ? item / per_head : item - per_head * heads;
    *tile = !paired ? per_head : second ? item % per_head : tiles - 1 - item % per_head;
    next += paired ? 1 : 2;
    return paired || (kCausal && tiles % 2 == 1 && *head < heads);
  }
};

}  // namespace jax_flash

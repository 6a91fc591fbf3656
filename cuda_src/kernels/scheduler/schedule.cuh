// The order in which the CTAs of a persistent grid take the tiles of all heads. Head by head (but for the last), for
// the sake of the L2: the CTAs that run at a time read the same K and V, or Q and dO. The work of a causal tile grows
// from one end to the other.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash {

// Each CTA has its share from the start. If causal it takes tiles in pairs, the t-th from one end and the t-th from the
// other: each pair is the same work. The tile without a partner of each head comes last. CTAs of a cluster take the
// same tiles.
template <int kCluster = 1>
struct Schedule {
  int next = 0;  // how many tiles this CTA has had

  __device__ __forceinline__ void Ask() const {}

  // The next of `tiles` tiles of each of `heads` heads; false when there are no more.
  __device__ __forceinline__ bool Next(int heads, int tiles, int* head, int* tile) {
    const int per_head = kCausal ? tiles / 2 : tiles;
    const bool second = !kCausal || next % 2 == 1;
    const int item = blockIdx.x / kCluster + (kCausal ? next / 2 : next) * (gridDim.x / kCluster);
    const bool paired = item < per_head * heads;
    *head = paired ? item / per_head : item - per_head * heads;
    *tile = !paired ? per_head : second ? item % per_head : tiles - 1 - item % per_head;
    next += paired ? 1 : 2;
    return paired || (kCausal && tiles % 2 == 1 && *head < heads);
  }
};

// Work from a counter that is 0 at first, for whoever is free. The backward asks for the next when it is almost done
// with what it has: the answer takes a microsecond, but to have a tile for long before it is computed costs up to 10%.
// (The forward asks some tiles of keys ahead.)
struct Counted {
  const Params& p;
  int number;

  __device__ __forceinline__ explicit Counted(const Params& p) : p(p) { Ask(); }
  __device__ __forceinline__ void Ask() { number = atomicAdd(p.taken, 1); }
};

// Work in the same order for all CTAs, dealt out from the start: those of a cluster have the same.
template <int kCluster>
struct Dealt {
  int number = blockIdx.x / kCluster;

  __device__ __forceinline__ explicit Dealt(const Params&) {}
  __device__ __forceinline__ void Ask() { number += gridDim.x / kCluster; }
};

// All tiles, head by head. A causal head's first tile of keys, which the most rows see, comes first, as does the
// longest list of a block mask; and of the last heads the first tiles of all come first, so that what ends last is
// short. (Tiles with a window mostly see as many rows each.)
struct CountedTiles : Counted {
  using Counted::Counted;

  // The tile that was asked for, of `tiles` tiles of each of `heads` heads; false when there are no more.
  __device__ __forceinline__ bool Next(uint32_t heads, uint32_t tiles, int* head, int* tile) const {
    const uint32_t n = number, last_heads = p.last_heads, first = (heads - last_heads) * tiles;
    if (((kCausal && !kWindow) || kListed) && n >= first) {
      *head = heads - last_heads + (n - first) % last_heads, *tile = (n - first) / last_heads;
    } else {
      *head = n / tiles, *tile = n % tiles;
    }
    return n < heads * tiles;
  }
};

}  // namespace jax_flash

// The order in which the CTAs of a persistent grid take the tiles of all heads. They go head by head, but for the last
// heads, so that the CTAs that run at a time read the same K and V, or Q and dO, which then stay in the L2. The work of
// causal tiles grows from one end of a head to the other.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash {

// A schedule where each CTA has its share from the start. If causal it takes tiles in pairs, the t-th from one end and
// the t-th from the other, since each pair is the same work. A head's tile without a partner comes last. CTAs of a
// cluster take the same tiles.
//
// Packed sequences may be causal, each for itself. If they are equally long, a CTA that takes every n-th tile may have
// the last one of all of them. So in every other round the CTAs come in the opposite order.
template <int kCluster = 1>
struct Schedule {
  int next = 0;  // how many tiles this CTA has had

  __device__ __forceinline__ void Ask() const {}

  // Finds the next of `tiles` tiles of each of `heads` heads; returns false when there are no more.
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

// Work that whoever is free takes from a counter, which is 0 at first. The answer takes a microsecond, so the next tile
// is asked for before the last one is done; but in the backward not long before, since to hold a tile that nobody
// computes yet costs up to 10%. (The forward asks some tiles of keys ahead.)
struct Counted {
  const Params& p;
  int number;

  __device__ __forceinline__ explicit Counted(const Params& p) : p(p) { Ask(); }
  __device__ __forceinline__ void Ask() { number = atomicAdd(p.taken, 1); }
};

// Work that is dealt out from the start, in one order for all CTAs; those of a cluster get the same.
template <int kCluster>
struct Dealt {
  int number = blockIdx.x / kCluster;

  __device__ __forceinline__ explicit Dealt(const Params&) {}
  __device__ __forceinline__ void Ask() { number += gridDim.x / kCluster; }
};

// May a tile of rows be more work than another? (With a window most of them see as many keys as others.)
constexpr bool kUneven = (kCausal && !kWindow) || kLengths || kSegments || kProblem.ranges;

// All tiles of rows, head by head: each CTA has one from the start, and takes the others from a counter, if there is
// one (there is where the host has more tiles than CTAs). Of a causal head the last rows, which see the most keys, come
// first. For the last heads the last rows of all of them come before the rows above, so that what ends last is short.
// With lengths or segments a tile may be any work: a CTA that took every n-th might have the longest of all.
struct CountedRows {
  const Params& p;
  int number = blockIdx.x;

  __device__ __forceinline__ explicit CountedRows(const Params& p) : p(p) {}
  __device__ __forceinline__ void Ask() {
    number = int(gridDim.x) + (p.taken != nullptr ? atomicAdd(p.taken, 1) : number);
  }

  // Finds the tile that was asked for, of `tiles` tiles of each of `heads` heads; returns false when there are no more.
  __device__ __forceinline__ bool Next(int heads, int tiles, int* head, int* tile) const {
    const int n = UniformOfOne(number), last_heads = min(heads, int(gridDim.x) / tiles + 1);
    const int first = (heads - last_heads) * tiles;
    const bool last = n >= first;
    *head = last ? heads - last_heads + (n - first) % last_heads : n / tiles;
    *tile = tiles - 1 - (last ? (n - first) / last_heads : n % tiles);
    return n < heads * tiles;
  }
};

// All tiles, head by head, from a counter. Of a causal head the first tile of keys, which the most rows see, comes
// first, and so does the longest list of a block mask. For the last heads the first tiles of all of them come before
// the second ones, so that what ends last is short. (With a window most tiles see as many rows as others.)
struct CountedTiles : Counted {
  using Counted::Counted;

  // Finds the tile that was asked for, of `tiles` tiles of each of `heads` heads; returns false when there are no more.
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

// All tiles from a counter, so many heads at a time as there are CTAs for all their tiles. The last tiles of these
// heads come first, one of each head, then those before. So the tiles of a head start one after the other.
struct FallingTiles : Counted {
  using Counted::Counted;

  // Finds the tile that was asked for, of `tiles` tiles of each of `heads` heads; returns false when there are no more.
  __device__ __forceinline__ bool Next(uint32_t heads, uint32_t tiles, int* head, int* tile) const {
    const uint32_t n = number, at_a_time = max(gridDim.x / tiles, 1u);
    if (n >= heads * tiles) return false;
    const uint32_t first = n / (at_a_time * tiles) * at_a_time, own = min(at_a_time, heads - first);
    const uint32_t of_these = n - first * tiles;
    *head = first + of_these % own, *tile = tiles - 1 - of_these / own;
    return true;
  }
};

}  // namespace jax_flash

// Tile schedulers of persistent grids. Tiles are ordered head by head, except for the last heads. So concurrent CTAs
// read the same K and V, or Q and dO, from L2. With causal masks, the work of a tile grows linearly from one end of a
// head to the other.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash {

// A static schedule, for the backward and for q tiles with equal work. (A causal forward without a window has
// DynamicQTiles.) If causal, a CTA takes tiles in pairs, the t-th from each end, because every pair has the same
// work. A head's tile without a partner comes last. The CTAs of a cluster take the same tiles.
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

// A dynamic schedule: free CTAs take numbers from a counter in HBM, which starts at 0. The atomic takes about a
// microsecond, so a CTA requests its next tile before it finishes the current one. In the backward it requests late,
// because holding a tile that nobody computes yet costs up to 10%. The forward requests some kv tiles ahead.
struct DynamicNumbers {
  const Params& p;
  int number;

  __device__ __forceinline__ explicit DynamicNumbers(const Params& p) : p(p) { Request(); }
  __device__ __forceinline__ void Request() { number = atomicAdd(p.tile_counter, 1); }
};

// A static schedule with the same order for all CTAs. The CTAs of a cluster get the same numbers.
template <int kCluster>
struct StaticNumbers {
  int number = blockIdx.x / kCluster;

  __device__ __forceinline__ explicit StaticNumbers(const Params&) {}
  __device__ __forceinline__ void Request() { number += gridDim.x / kCluster; }
};

// Can q tiles differ in work? With a window, most see equally many keys. AddRowLaunch (plan/hopper.cc) has the same
// condition.
constexpr bool kUnevenTiles = (kCausal && !kWindow) || kLengths || kSegments || kProblem.ranges;

// All q tiles, head by head. Each CTA starts with one tile. If there are more tiles than CTAs, the host passes a
// counter from which CTAs take further tiles. Within a causal head, the last rows come first, because they see the most
// keys. The heads with the highest indices are interleaved, from their longest tiles to their shortest, so the tiles at
// the end are short. With lengths or segments, the work of tiles is irregular, and a static schedule could give the
// longest ones to one CTA.
struct DynamicQTiles {
  const Params& p;
  int number = blockIdx.x;

  __device__ __forceinline__ explicit DynamicQTiles(const Params& p) : p(p) {}
  __device__ __forceinline__ void Request() {
    number = int(gridDim.x) + (p.tile_counter != nullptr ? atomicAdd(p.tile_counter, 1) : number);
  }

  // Finds the requested tile among `tiles` tiles in each of `heads` heads. Returns false at the end.
  __device__ __forceinline__ bool Next(int heads, int tiles, int* head, int* tile) const {
    const int n = UniformSingleLane(number), last_heads = min(heads, int(gridDim.x) / tiles + 1);
    const int first = (heads - last_heads) * tiles;
    const bool last = n >= first;
    *head = last ? heads - last_heads + (n - first) % last_heads : n / tiles;
    *tile = tiles - 1 - (last ? (n - first) / last_heads : n % tiles);
    return n < heads * tiles;
  }
};

// All kv tiles, head by head, from a counter. Within a causal head, the first keys come first, because the most rows
// see them. With a block mask, the longest list comes first. The heads with the highest indices are
// interleaved, from their longest tiles to their shortest, so the tiles at the end are short. With a window, most tiles
// see equally many rows.
struct DynamicKVTiles : DynamicNumbers {
  using DynamicNumbers::DynamicNumbers;

  // Finds the requested tile among `tiles` tiles in each of `heads` heads. Returns false at the end.
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

// All tiles from a counter, in groups of heads. A group has all heads whose tiles fit into the grid at a time. The last
// tile of each of these heads comes first, then the tiles before. So the tiles of a head start one after another.
struct DescendingKVTiles : DynamicNumbers {
  using DynamicNumbers::DynamicNumbers;

  // Finds the requested tile among `tiles` tiles in each of `heads` heads. Returns false at the end.
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

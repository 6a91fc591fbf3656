// The order of q tiles in the forward and the tangent, which keep a tile of Q and loop over K and V.
#pragma once

#include "ptx/compiler.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash {

// Can q tiles differ in work, so that they need DynamicQTiles instead of a StaticSchedule? With a window, most see
// equally many keys. AddRowLaunch (plan/hopper.cc) has the same condition.
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

}  // namespace jax_flash

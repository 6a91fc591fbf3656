// The numbers that a CTA takes. A schedule defines the tile, or the list, of each number.
#pragma once

#include "config.cuh"

namespace jax_flash {

// Free CTAs of a persistent grid take numbers from a counter in HBM, which starts at 0. The atomic takes about a
// microsecond, so a CTA requests its next number before it finishes the current tile. In the backward it requests late,
// because holding a tile that nobody computes yet costs up to 10%. The forward requests some kv tiles ahead.
struct DynamicNumbers {
  const Params& p;
  int number;

  __device__ __forceinline__ explicit DynamicNumbers(const Params& p) : p(p) { Request(); }
  __device__ __forceinline__ void Request() { number = atomicAdd(p.tile_counter, 1); }
};

// One number, which was taken before. The grid is not persistent.
struct OneNumber {
  const Params& p;
  uint32_t number;

  __device__ __forceinline__ OneNumber(const Params& p, uint32_t number) : p(p), number(number) {}
  __device__ __forceinline__ void Request() { number = 0xFFFFFFFF; }
};

// CTA i of n takes the numbers i, i + n, i + 2 n and so on. The CTAs of a cluster count as one.
template <int kCluster>
struct StaticNumbers {
  int number = blockIdx.x / kCluster;

  __device__ __forceinline__ explicit StaticNumbers(const Params&) {}
  __device__ __forceinline__ void Request() { number += gridDim.x / kCluster; }
};

}  // namespace jax_flash

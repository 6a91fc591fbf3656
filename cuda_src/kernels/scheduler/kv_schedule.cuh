// The order of kv tiles in a backward that takes them from a counter.
#pragma once

#include "scheduler/numbers.cuh"
#include "semantics/mask.cuh"

namespace jax_flash {

// All kv tiles, head by head, from a counter. Within a causal head, the first keys come first, because the most rows
// see them. With a block mask, the longest list comes first. The heads with the highest indices are
// interleaved, from their longest tiles to their shortest, so the tiles at the end are short. With a window, most tiles
// see equally many rows.
struct DynamicKVTiles : DynamicNumbers {
  using DynamicNumbers::DynamicNumbers;

  // Finds the requested tile among `tiles` tiles in each of `heads` heads. Returns false at the end.
  __device__ __forceinline__ bool Next(uint32_t heads, uint32_t tiles, int* head, int* tile) const {
    const uint32_t n = number, last_heads = p.heads_at_a_time, first = (heads - last_heads) * tiles;
    if (((kCausal && !kWindow) || kListed) && n >= first) {
      *head = heads - last_heads + (n - first) % last_heads, *tile = (n - first) / last_heads;
    } else {
      *head = n / tiles, *tile = n % tiles;
    }
    return n < heads * tiles;
  }
};

// All tiles, by numbers from a counter, in groups of p.heads_at_a_time heads. The last tile of each of these heads
// comes first, then the tiles before. So the tiles of a head start one after another.
template <typename Numbers>
struct DescendingKVTiles : Numbers {
  using Numbers::Numbers;

  // Finds the requested tile among `tiles` tiles in each of `heads` heads. Returns false at the end.
  __device__ __forceinline__ bool Next(uint32_t heads, uint32_t tiles, int* head, int* tile) const {
    const uint32_t n = this->number, at_a_time = this->p.heads_at_a_time;
    if (n >= heads * tiles) return false;
    const uint32_t first = n / (at_a_time * tiles) * at_a_time, own = min(at_a_time, heads - first);
    const uint32_t of_these = n - first * tiles;
    *head = first + of_these % own, *tile = tiles - 1 - of_these / own;
    return true;
  }
};

}  // namespace jax_flash

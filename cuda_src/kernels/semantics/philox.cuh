// The random words of the dropout mask, which `jax_flash/dropout.py` specifies. One call decides the eight entries
// {i, i+8} x {j, j+1, j+8, j+9} (i % 16 < 8, j % 16 in {0, 2, 4, 6}), 16 bits each: what one lane holds of a 16x16 tile
// of a tensor-core accumulator. An entry is dropped iff the lower 15 of them are less than the threshold,
// which is how the magnitudes of bfloat16 numbers compare, if the threshold is not NaN.
#pragma once

#include <cstdint>

namespace jax_flash {

struct Philox4 {
  uint32_t x[4];
};

// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
__device__ __forceinline__ Philox4 Philox(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.x[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * c.x[2];
    c = {{uint32_t(b >> 32) ^ c.x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.x[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

}  // namespace jax_flash

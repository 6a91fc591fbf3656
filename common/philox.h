// The dropout mask: which entries of P are kept. The specification is `jax_flash/dropout.py`; this is the scalar
// form for host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAX_FLASH_HOST_DEVICE inline
#endif

namespace jax_flash {

struct Philox4 {
  uint32_t x[4];
};

// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
JAX_FLASH_HOST_DEVICE Philox4 Philox(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.x[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * c.x[2];
    c = {{uint32_t(b >> 32) ^ c.x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.x[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// One Philox call decides the eight entries {i, i+8} x {j, j+1, j+8, j+9} (i % 16 < 8, j % 16 in {0, 2, 4, 6}): what
// one lane holds of a 16x16 tile of a tensor-core accumulator. 16 random bits an entry.
JAX_FLASH_HOST_DEVICE uint32_t DropoutBits(uint32_t seed0, uint32_t seed1, uint32_t batch_id, uint32_t head_id,
                                           int64_t i, int64_t j) {
  const Philox4 counter = {{uint32_t(j / 16 * 4 + j % 8 / 2), uint32_t(i / 16 * 8 + i % 8), head_id, batch_id}};
  const Philox4 random = Philox(counter, seed0, seed1);
  const uint32_t word = random.x[i / 8 % 2 * 2 + j / 8 % 2];
  return j % 2 ? word >> 16 : word & 0xFFFFu;
}

}  // namespace jax_flash

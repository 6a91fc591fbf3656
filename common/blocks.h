// A block mask's numbers and lists, as host and device code read them (jax_flash/block_sparse.py writes them).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace jax_flash {

// The number for a block says what may attend in it: nothing, everything, or what element mask
// number - kFirstElementMask says.
constexpr int kEmptyBlock = 0, kFullBlock = 1, kFirstElementMask = 2;

// The list of a block row or column begins with its index and the number of its blocks.
constexpr int kListHeader = 2;

// The 32-bit words of a line of an element mask with so many entries.
JAX_FLASH_STATIC_HOST_DEVICE constexpr int64_t WordsOfLine(int64_t entries) { return (entries + 31) / 32; }

}  // namespace jax_flash

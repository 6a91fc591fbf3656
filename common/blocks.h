// The format of block masks for host and device code (jax_flash/block_sparse.py writes it).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace jax_flash {

// The kind of a block: empty, full, or kFirstElementMask plus the number of its element mask.
constexpr int kEmptyBlock = 0, kFullBlock = 1, kFirstElementMask = 2;

// The list of a block row or column begins with its index and the number of its blocks.
constexpr int kListHeader = 2;

// The number of 32-bit words for a line of this many entries of an element mask.
JAX_FLASH_STATIC_HOST_DEVICE constexpr int64_t WordsOfLine(int64_t entries) { return (entries + 31) / 32; }

}  // namespace jax_flash

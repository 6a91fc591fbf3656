// The tiles of S, and the part of a tile that must be computed.
#pragma once

#include "common/problem.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// The rows and columns of a tile of S. Large tiles reduce the overhead per row and tile. But all tiles of an inner step
// must fit into the L2 cache. Dropout generates 16 x 64 entries at a time.
constexpr int64_t kTileRows = 48;
constexpr int64_t kTileColumns = 256;

// Divides T or S into tiles of at most `tile`. No tile crosses the border of a block of a block mask.
struct Tiling {
  int64_t size, block, tile;

  struct Range {
    int64_t begin, size;
  };

  int64_t per_block() const { return (block + tile - 1) / tile; }
  int64_t count() const { return size / block * per_block() + (size % block + tile - 1) / tile; }
  // The tile that contains a position.
  int64_t Of(int64_t position) const { return position / block * per_block() + position % block / tile; }
  Range operator[](int64_t t) const {
    const int64_t first = t / per_block() * block, begin = first + t % per_block() * tile;
    return {begin, Min(Min(tile, first + block - begin), size - begin)};
  }
};

inline Tiling RowTiles(const Problem& p) {
  return {p.q_len, p.mask.block_mask.present ? p.mask.q_block : RoundUp(Max(p.q_len, 1), kTileRows), kTileRows};
}
inline Tiling ColumnTiles(const Problem& p) {
  return {p.kv_len, p.mask.block_mask.present ? p.mask.kv_block : RoundUp(Max(p.kv_len, 1), kTileColumns),
          kTileColumns};
}

// The part of a tile of S that is computed: rows i0 <= i < i0 + rows, and columns j0 + c0 <= j < j0 + c1. c0 is a
// multiple of the vector size. `masked`: the mask operand hides entries of it. `mod_masked`: mask_mod does. (A block of
// a block mask is something else, and may have several tiles.)
struct Block {
  int64_t i0, rows, j0, c0, c1;
  bool masked = false, mod_masked = false;

  bool empty() const { return rows <= 0 || c0 >= c1; }
  // Its rows from r on, at most `count` of them.
  Block Rows(int64_t r, int64_t count) const { return {i0 + r, Min(count, rows - r), j0, c0, c1, masked, mod_masked}; }
};

}  // namespace jax_flash::JAX_FLASH_ISA

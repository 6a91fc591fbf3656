// Tables of the tiles of a kernel, from the fastest to the most general. The first row that fits is used, unless ptxas
// spills registers with it.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "common/problem.h"
#include "cuda_src/element.h"
#include "cuda_src/plan/features.h"
#include "cuda_src/plan/target.h"

namespace jax_flash {

struct TileSizes {
  int rows, cols;  // queries and keys
  int groups;      // warps, or on Hopper consumer warpgroups
  int stages;
  bool bias_tiles = false;  // for a bias that TMA can load

  bool operator==(const TileSizes& x) const {
    return std::tie(rows, cols, groups, stages, bias_tiles) ==
           std::tie(x.rows, x.cols, x.groups, x.stages, x.bias_tiles);
  }
};

// {shared, dim, {rows, cols, groups, stages[, bias_tiles]}, without}
struct Row {
  int shared;  // KiB of shared memory that the GPU must allow for a CTA
  int dim;     // the maximum of the larger head dim
  TileSizes tile;
  FeatureBits without = 0;  // features that exclude this row
};

// The rows of a kernel, and the features that it supports.
struct Rows {
  const Row *first, *last;
  FeatureBits supported;
  const Row* begin() const { return first; }
  const Row* end() const { return last; }
  // All features that exclude a row.
  FeatureBits Without(const Row& row) const { return row.without | ~supported; }

  template <size_t kCount>
  constexpr Rows(const Row (&rows)[kCount], FeatureBits supported = ~FeatureBits(0))
      : first(rows), last(rows + kCount), supported(supported) {}
};

// The rows of a kernel, by element size.
struct Table {
  Rows of_16_bits, of_32_bits;

  const Rows& Of(DType dtype) const;
};

// Can TMA load tiles of the bias with this number of columns, in whole boxes?
bool LoadsBias(const Problem& p, int cols);

// The tiles of the rows that fit, in the order in which they are tried. A row fits if the problem's features, its head
// dims and the GPU allow it. Blocks of a block mask must also consist of its tiles, unless `may_divide_blocks`. Rows
// that only a preference excludes come last. No tile is larger than the one before it, because it is tried when
// registers spill.
std::vector<TileSizes> Candidates(const Rows& rows, const Target& target, const Problem& p, bool may_divide_blocks);

// Explains why no row fits: the row that the fewest features exclude, with these features. Preferences do not count.
// "its tiles of 64 x 64 do not support a soft cap"
std::string Obstacle(const Rows& rows, const Target& target, const Problem& p);

}  // namespace jax_flash

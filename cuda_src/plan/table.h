// Tables of the tiles that may be chosen for a kernel, from the best to what does for all. The first row that fits is
// taken, unless ptxas spills registers with it.
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
  int groups;      // warps, or on Hopper warpgroups beside the one that loads
  int stages;
  bool bias_tiles = false;  // for a bias that TMA loads, or not for one

  bool operator==(const TileSizes& x) const {
    return std::tie(rows, cols, groups, stages, bias_tiles) ==
           std::tie(x.rows, x.cols, x.groups, x.stages, x.bias_tiles);
  }
};

// {shared, dim, {rows, cols, groups, stages}, without}
struct Row {
  int shared;  // KiB of shared memory that a block must be able to have
  int dim;     // the larger head dim is at most this
  TileSizes tile;
  FeatureBits without = 0;  // the problem has none of these features
};

// The rows of a kernel, and the features that it has an implementation of.
struct Rows {
  const Row *first, *last;
  FeatureBits supported;
  const Row* begin() const { return first; }
  const Row* end() const { return last; }
  // The features that exclude a row.
  FeatureBits Without(const Row& row) const { return row.without | ~supported; }

  template <size_t kCount>
  constexpr Rows(const Row (&rows)[kCount], FeatureBits supported = ~FeatureBits(0))
      : first(rows), last(rows + kCount), supported(supported) {}
};

// The rows of a kernel, by the bytes of an element.
struct Table {
  Rows of_two, of_four;

  const Rows& Of(DType dtype) const;
};

// Whether TMA can load tiles of the bias with so many columns: in whole boxes.
bool LoadsBias(const Problem& p, int cols);

// The tiles of the rows that fit, in the order in which they are tried. A row fits if the features of the problem, its
// head dims and the GPU allow it, and if blocks of a block mask consist of its tiles or `may_divide_blocks`. Rows that
// only a preference excludes come last. What comes after another has no more entries in a tile: it needs no more
// registers.
std::vector<TileSizes> Candidates(const Rows& rows, const Target& target, const Problem& p, bool may_divide_blocks);

// Why no row is taken: the one that the fewest of the problem's features stand in the way of, and these. Without
// kPreferences, which do not. "its tiles of 64 x 64 do not do a soft cap"
std::string Obstacle(const Rows& rows, const Target& target, const Problem& p);

}  // namespace jax_flash

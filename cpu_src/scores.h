// From X = τQKᵀ to the scores S: soft cap, bias and masks.
#pragma once

#include "common/arrays.h"
#include "common/blocks.h"
#include "common/masking.h"
#include "common/problem.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// Rows of Q and columns (rows of K and V) that a tile of S holds. Large enough that what is done once per row of a tile
// costs little, small enough for all tiles of an inner step to stay in the L2 cache. Dropout decides 16 x 64 entries at
// a time.
constexpr int64_t kTileRows = 48;
constexpr int64_t kTileColumns = 256;

// T or S in tiles of at most `tile`, none of which crosses the border of a block of a block mask.
struct Tiling {
  int64_t size, block, tile;

  struct Range {
    int64_t begin, size;
  };

  int64_t per_block() const { return (block + tile - 1) / tile; }
  int64_t count() const { return size / block * per_block() + (size % block + tile - 1) / tile; }
  // The tile that a position is in.
  int64_t Of(int64_t position) const { return position / block * per_block() + position % block / tile; }
  Range operator[](int64_t t) const {
    const int64_t first = t / per_block() * block, begin = first + t % per_block() * tile;
    return {begin, Min(Min(tile, first + block - begin), size - begin)};
  }
};

inline Tiling RowTiles(const Problem& p) {
  return {p.q_len, p.block_mask.present ? p.q_block : RoundUp(Max(p.q_len, 1), kTileRows), kTileRows};
}
inline Tiling ColumnTiles(const Problem& p) {
  return {p.kv_len, p.block_mask.present ? p.kv_block : RoundUp(Max(p.kv_len, 1), kTileColumns), kTileColumns};
}

// Where a [B, N, T, S] operand has row 0 of one head, and how far apart its rows and columns are: 0 if broadcast.
struct HeadOffset {
  int64_t start, row_stride, column_stride;

  HeadOffset(const Problem& p, const Extent& extent, int64_t b, int64_t n) {
    column_stride = extent.columns;
    const int64_t columns = extent.columns ? p.kv_len : 1;
    row_stride = extent.rows ? columns : 0;
    const int64_t head = extent.rows ? p.q_len * columns : columns;
    const int64_t batch = extent.heads ? p.q_heads * head : head;
    start = (extent.batch ? b * batch : 0) + (extent.heads ? n * head : 0);
  }

  int64_t At(int64_t i, int64_t j) const { return start + i * row_stride + j * column_stride; }
};

// The part of a tile of S that is worked on: rows i0 <= i < i0 + rows, and columns j0 + c0 <= j < j0 + c1, where c0 is
// a whole number of vectors. `masked`: the mask operand hides some of it.
struct Block {
  int64_t i0, rows, j0, c0, c1;
  bool masked;

  bool empty() const { return rows <= 0 || c0 >= c1; }
  // At most `count` rows from row r of it on.
  Block Rows(int64_t r, int64_t count) const { return {i0 + r, Min(count, rows - r), j0, c0, c1, masked}; }
};

// The scores of one sequence of the batch.
template <typename A>
class Scores {
 public:
  Scores(const Problem& problem, const Operands& operands, int64_t b) : p_(problem), in_(operands), b_(b) {
    positions_ = {p_.q_lengths ? ClampLength(in_.q_lengths[b], p_.q_len) : p_.q_len,
                  p_.kv_lengths ? ClampLength(in_.kv_lengths[b], p_.kv_len) : p_.kv_len,
                  p_.query_offset ? in_.query_offset[b] : 0,
                  p_.causal,
                  p_.window_left,
                  p_.window_right};
  }

  // The keys that rows i0 <= i < i1 may attend to, as far as positions tell.
  KeyRange Keys(int64_t i0, int64_t i1) const { return AnyRowKeys(positions_, i0, i1); }

  // The block of head n's rows i0 <= i < i0 + rows in the tile of columns j0 <= j < j0 + columns that has to be
  // computed.
  Block Visible(int64_t n, int64_t i0, int64_t rows, int64_t j0, int64_t columns) const {
    const KeyRange keys = Keys(i0, i0 + rows);
    Block block = {i0, rows, j0, Max(keys.lo - j0, 0) / kLanes<A> * kLanes<A>, Min(keys.hi - j0, columns), false};
    if (p_.block_mask.present && !block.empty() && BlockKind(n, i0, j0) == kNothing) block.rows = 0;
    if (p_.segments && !block.empty() && !SegmentsMeet(block)) block.rows = 0;
    if (p_.mask.present && !block.empty()) TrimToMask(&block, n);
    return block;
  }

  // S from X, in place. `slope`, if there is one, becomes dC/dX = 1 - (C / cap)^2.
  void FromProducts(Tile<A> s, const Block& block, int64_t n, Tile<A> slope = {}) const {
    if (p_.soft_cap > 0) SoftCap(s, block, slope);
    if (p_.bias.present) AddBias(s, block, n);
    if (block.masked) ApplyMask(s, block, n);
    if (p_.block_mask.present) ApplyElementMask(s, block, n);
    if (p_.segments) ApplySegments(s, block);
    ApplyPositions(s, block);
  }

  // The tile of slopes, where there are any.
  static Tile<A> NewSlope(const Problem& p, Carver* carver) {
    return p.soft_cap > 0 ? carver->NewTile<A>(kTileRows, kTileColumns) : Tile<A>{};
  }

  // dX = dS dC/dX, in place.
  void ToProducts(Tile<A> ds, const Block& block, Tile<A> slope) const {
    if (!slope.data) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = block.c0; c < block.c1; ++c) ds.row(r)[c] *= slope.row(r)[c];
    }
  }

 private:
  struct Range {
    int32_t first, last;
  };

  static Range SegmentsOf(const int32_t* ids, int64_t count) {
    Range range = {ids[0], ids[0]};
    for (int64_t i = 1; i < count; ++i) {
      range.first = ids[i] < range.first ? ids[i] : range.first;
      range.last = ids[i] > range.last ? ids[i] : range.last;
    }
    return range;
  }

  // Whether the ranges of segment ids of the rows and of the columns overlap.
  bool SegmentsMeet(const Block& block) const {
    const Range rows = SegmentsOf(in_.q_segments + b_ * p_.q_len + block.i0, block.rows);
    const Range columns = SegmentsOf(in_.kv_segments + b_ * p_.kv_len + block.j0 + block.c0, block.c1 - block.c0);
    return rows.first <= columns.last && columns.first <= rows.last;
  }

  // Leaves the columns, in whole vectors, that the mask shows to any row, and finds out whether all rows see them.
  void TrimToMask(Block* block, int64_t n) const {
    const HeadOffset offset(p_, p_.mask, b_, n);
    // What is broadcast is looked at once.
    const int64_t rows = offset.row_stride ? block->rows : 1;
    int64_t begin = offset.column_stride ? block->c0 : 0, end = offset.column_stride ? block->c1 : 1;
    uint8_t any[kTileColumns] = {}, every[kTileColumns];
    std::memset(every, 1, sizeof(every));
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* mask = in_.mask + offset.At(block->i0 + r, block->j0);
      for (int64_t c = begin; c < end; ++c) {
        any[c] |= mask[c];
        every[c] &= mask[c];
      }
    }
    while (begin < end && !any[begin]) ++begin;
    while (begin < end && !any[end - 1]) --end;
    if (begin == end) {
      block->rows = 0;
      return;
    }
    if (offset.column_stride) {
      begin = block->c0 = begin / kLanes<A> * kLanes<A>;
      end = block->c1 = Min(RoundUp(end, kLanes<A>), block->c1);
    }
    for (int64_t c = begin; c < end; ++c) block->masked |= !every[c];
  }

  void SoftCap(Tile<A> s, const Block& block, Tile<A> slope) const {
    const A cap = A(p_.soft_cap), inverse = A(1 / p_.soft_cap);
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
        const Vec<A> t = Tanh<A>(Load(s.row(r) + c) * inverse);
        Store(s.row(r) + c, t * cap);
        if (slope.data) Store(slope.row(r) + c, 1 - t * t);
      }
    }
  }

  void AddBias(Tile<A> s, const Block& block, int64_t n) const {
    const HeadOffset offset(p_, p_.bias, b_, n);
    WithDType(p_.bias_dtype, [&](auto* type) {
      const auto* bias = static_cast<decltype(type)>(in_.bias);
      for (int64_t r = 0; r < block.rows; ++r) {
        const auto* from = bias + offset.At(block.i0 + r, block.j0);
        A* row = s.row(r);
        if (offset.column_stride) {
          for (int64_t c = block.c0; c < block.c1; ++c) row[c] += To<A>(from[c]);
        } else {
          for (int64_t c = block.c0; c < block.c1; ++c) row[c] += To<A>(from[0]);
        }
      }
    });
  }

  void ApplyMask(Tile<A> s, const Block& block, int64_t n) const {
    const HeadOffset offset(p_, p_.mask, b_, n);
    for (int64_t r = 0; r < block.rows; ++r) {
      const uint8_t* mask = in_.mask + offset.At(block.i0 + r, block.j0);
      A* row = s.row(r);
      if (offset.column_stride) {
        for (int64_t c = block.c0; c < block.c1; ++c) row[c] = mask[c] ? row[c] : -kInfinity<A>;
      } else if (!mask[0]) {
        for (int64_t c = block.c0; c < block.c1; ++c) row[c] = -kInfinity<A>;
      }
    }
  }

  void ApplySegments(Tile<A> s, const Block& block) const {
    const int32_t* rows = in_.q_segments + b_ * p_.q_len + block.i0;
    const int32_t* columns = in_.kv_segments + b_ * p_.kv_len + block.j0;
    for (int64_t r = 0; r < block.rows; ++r) {
      A* row = s.row(r);
      for (int64_t c = block.c0; c < block.c1; ++c) row[c] = columns[c] == rows[r] ? row[c] : -kInfinity<A>;
    }
  }

  // The number for the block of the block mask that row i, column j are in (common/blocks.h).
  int32_t BlockKind(int64_t n, int64_t i, int64_t j) const {
    const Extent& extent = p_.block_mask;
    const int64_t head = (extent.batch ? b_ * (extent.heads ? p_.q_heads : 1) : 0) + (extent.heads ? n : 0);
    const int32_t kind = in_.blocks[(head * p_.block_rows() + i / p_.q_block) * p_.block_columns() + j / p_.kv_block];
    return 0 <= kind && kind < kFirstElementMask + p_.element_masks ? kind : kNothing;
  }

  void ApplyElementMask(Tile<A> s, const Block& block, int64_t n) const {
    const int32_t kind = BlockKind(n, block.i0, block.j0);
    if (kind < kFirstElementMask) return;
    const int64_t mask = (p_.block_mask.batch ? b_ * p_.element_masks : 0) + kind - kFirstElementMask;
    const int64_t words = p_.element_words(), column = block.j0 % p_.kv_block;
    for (int64_t r = 0; r < block.rows; ++r) {
      const uint32_t* bits = in_.element_masks + (mask * p_.q_block + (block.i0 + r) % p_.q_block) * words;
      A* row = s.row(r);
      for (int64_t c = block.c0; c < block.c1; ++c) {
        if (!(bits[(column + c) / 32] >> ((column + c) % 32) & 1)) row[c] = -kInfinity<A>;
      }
    }
  }

  // -inf outside of each row's range, up to a whole vector.
  void ApplyPositions(Tile<A> s, const Block& block) const {
    const int64_t end = RoundUp(block.c1, kLanes<A>);
    const KeyRange every = EveryRowKeys(positions_, block.i0, block.i0 + block.rows);
    if (every.lo <= block.j0 + block.c0 && every.hi >= block.j0 + end) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      const KeyRange keys = RowKeys(positions_, block.i0 + r);
      A* row = s.row(r);
      for (int64_t c = block.c0; c < Min(keys.lo - block.j0, end); ++c) row[c] = -kInfinity<A>;
      for (int64_t c = Max(keys.hi - block.j0, block.c0); c < end; ++c) row[c] = -kInfinity<A>;
    }
  }

  const Problem& p_;
  const Operands& in_;
  int64_t b_;
  Positions positions_;
};

}  // namespace jax_flash::JAX_FLASH_ISA

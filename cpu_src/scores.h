// The scores S from X = τQKᵀ: soft cap, bias, programs and masks.
#pragma once

#include "common/arrays.h"
#include "common/blocks.h"
#include "common/masking.h"
#include "common/problem.h"
#include "cpu_src/block.h"
#include "cpu_src/interpreter.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// The offset of row 0 of one head in a [B, N, T, S] operand, and its strides; 0 if broadcast.
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

// The number of rows of S that derivatives process at a time: few, so they stay in the L1 cache.
constexpr int64_t kScoredRows = 8;

// Values from the forward that derivatives need: dC/dX = 1 - (C / cap)^2, and the argument of score_mod.
template <typename A>
struct Trace {
  Tile<A> slope = {}, given = {};

  Trace() = default;
  Trace(const Problem& p, Carver* carver) {
    if (p.score.logits_soft_cap > 0) slope = carver->NewTile<A>(kTileRows, kTileColumns);
    if (p.score.score_grad.size() > 0 || p.score.score_tangent.size() > 0)
      given = carver->NewTile<A>(kTileRows, kTileColumns);
  }

  Trace FromRow(int64_t r) const {
    Trace rest;
    rest.slope = JAX_FLASH_ISA::FromRow(slope, r);
    rest.given = JAX_FLASH_ISA::FromRow(given, r);
    return rest;
  }
};

// The scores of one batch entry. With merged heads, row i is query i / merged (units.h).
template <typename A>
class Scores {
 public:
  Scores(const Problem& problem, const Operands& operands, int64_t b, Programs<A>* programs, int64_t merged = 1)
      : p_(problem), in_(operands), b_(b), programs_(*programs), merged_(merged) {
    positions_ = {p_.mask.query_seq_lengths ? ClampLength(in_.query_seq_lengths[b], p_.q_len) : p_.q_len,
                  p_.mask.key_value_seq_lengths ? ClampLength(in_.key_value_seq_lengths[b], p_.kv_len) : p_.kv_len,
                  p_.mask.query_offset ? in_.query_offset[b] : 0,
                  p_.mask.is_causal,
                  p_.mask.local_window_size.left,
                  p_.mask.local_window_size.right,
                  p_.mask.ranges,
                  p_.mask.ranges ? in_.keys_of_rows + b * p_.q_len * 2 : nullptr,
                  p_.mask.ranges ? in_.rows_of_keys + b * p_.kv_len * 2 : nullptr};
  }

  // The number of keys of a tile within the key length. Later keys are in no block, and are not read.
  int64_t WithinLength(int64_t j0, int64_t columns) const { return Min(columns, positions_.kv_length - j0); }

  // The keys that rows i0 <= i < i1 may attend to, by positions only.
  KeyRange Keys(int64_t i0, int64_t i1) const { return AnyRowKeys(positions_, i0 / merged_, (i1 - 1) / merged_ + 1); }

  // The part that must be computed of rows i0 <= i < i0 + rows and columns j0 <= j < j0 + columns, for head n. Also
  // prepares the programs for it.
  Block Visible(int64_t n, int64_t i0, int64_t rows, int64_t j0, int64_t columns) const {
    const KeyRange keys = Keys(i0, i0 + rows);
    Block block = {i0, rows, j0, Max(keys.lo - j0, 0) / kLanes<A> * kLanes<A>, Min(keys.hi - j0, columns)};
    if (p_.mask.block_mask.present && !block.empty() && BlockKind(n, i0, j0) == kEmptyBlock) block.rows = 0;
    if (p_.mask.ranges && !block.empty() && !RangesMeet(block)) block.rows = 0;
    if (p_.mask.segment_ids && !block.empty() && !SegmentsMeet(block)) block.rows = 0;
    if (p_.mask.array.present && !block.empty()) block.masked = TrimToMask(&block, MaskOf(block, n));
    if (programs_.mask_mod.present() && !block.empty()) {
      programs_.mask_mod.Begin(in_, b_, n, positions_.offset, block);
      const Range results = programs_.mask_mod.ResultRange();
      if (results.high == 0) {
        block.rows = 0;
      } else if (results.low == 0) {
        programs_.mask_mod.Evaluate();
        block.mod_masked = TrimToMask(&block, programs_.mask_mod.Mask(block.i0));
      }
    }
    if (programs_.score_mod.present() && !block.empty()) {
      programs_.score_mod.Begin(in_, b_, n, positions_.offset, block);
    }
    return block;
  }

  // S from X, in place.
  void FromProducts(Tile<A> s, const Block& block, int64_t n, const Trace<A>& trace = {}) const {
    if (p_.score.logits_soft_cap > 0) SoftCap(s, block, trace.slope);
    if (p_.score.bias.present) AddBias(s, block, n);
    if (programs_.score_mod.present()) {
      if (trace.given.data) Copy(s, block, trace.given);
      programs_.score_mod.Score(block, s);
      if (p_.score.bias.present) ApplyBiasMask(s, block, n);
    }
    if (block.masked) ApplyMask(s, block, MaskOf(block, n));
    if (block.mod_masked) ApplyMask(s, block, programs_.mask_mod.Mask(block.i0));
    if (p_.mask.block_mask.present) ApplyElementMask(s, block, n);
    if (p_.mask.segment_ids) ApplySegments(s, block);
    ApplyPositions(s, block);
  }

  // Replaces dS by the cotangent of the score that score_mod received: with a bias, if any. Adds gradients of captured
  // arrays to `sums`.
  void ThroughScoreMod(Tile<A> ds, const Block& block, int64_t n, const Trace<A>& trace,
                       const CapturedSums<A>* sums) const {
    if (!programs_.score_grad.present()) return;
    programs_.score_grad.Begin(in_, b_, n, positions_.offset, block);
    programs_.score_grad.Gradient(trace.given, ds, sums);
  }

  // Replaces the tangent of X by the tangent of S, with the trace of S. Masked entries may have any values.
  void TangentFromProducts(Tile<A> ds, const Block& block, int64_t n, const Trace<A>& trace,
                           const Tangents& given) const {
    ThroughSoftCap(ds, block, trace);  // the soft cap: its own transpose
    if (p_.bias_tangent) {
      ForEachBias(given.bias_tangent, ds, block, n, [](A score, A bias) { return score + bias; });
    }
    if (!programs_.score_tangent.present()) return;
    programs_.score_tangent.Begin(in_, b_, n, positions_.offset, block);
    programs_.score_tangent.Tangent(trace.given, ds);
  }

  // Then replaces it by dX, the cotangent of X = τ Q Kᵀ.
  void ThroughSoftCap(Tile<A> ds, const Block& block, const Trace<A>& trace) const {
    if (!trace.slope.data) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = block.c0; c < block.c1; ++c) ds.row(r)[c] *= trace.slope.row(r)[c];
    }
  }

 private:
  static Range SegmentsOf(const int32_t* ids, int64_t count) {
    int32_t low = ids[0], high = ids[0];
    for (int64_t i = 1; i < count; ++i) {
      low = ids[i] < low ? ids[i] : low;
      high = ids[i] > high ? ids[i] : high;
    }
    return {double(low), double(high)};
  }

  // Does any row see a column of the block? Between the ranges of two rows there may be columns that no row sees.
  bool RangesMeet(const Block& block) const {
    for (int64_t r = 0; r < block.rows; ++r) {
      const KeyRange keys = RowKeys(positions_, block.i0 + r);
      if (Max(keys.lo, block.j0 + block.c0) < Min(keys.hi, block.j0 + block.c1)) return true;
    }
    return false;
  }

  // Do the ranges of segment ids of the rows and of the columns overlap?
  bool SegmentsMeet(const Block& block) const {
    const Range rows = SegmentsOf(in_.query_segment_ids + b_ * p_.q_len + block.i0, block.rows);
    const Range columns =
        SegmentsOf(in_.key_value_segment_ids + b_ * p_.kv_len + block.j0 + block.c0, block.c1 - block.c0);
    return rows.low <= columns.high && columns.low <= rows.high;
  }

  MaskBytes MaskOf(const Block& block, int64_t n) const {
    const HeadOffset offset(p_, p_.mask.array, b_, n);
    return {in_.mask + offset.At(block.i0, block.j0), offset.row_stride, offset.column_stride};
  }

  // Trims the block to the columns, in whole vectors, that the mask shows to any row. Returns whether it hides any
  // entry of the rest.
  static bool TrimToMask(Block* block, const MaskBytes& mask) {
    // A broadcast dimension is read once.
    const int64_t rows = mask.row_stride ? block->rows : 1;
    int64_t begin = mask.column_stride ? block->c0 : 0, end = mask.column_stride ? block->c1 : 1;
    uint8_t any[kTileColumns] = {}, every[kTileColumns];
    std::memset(every, 1, sizeof(every));
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* row = mask.data + r * mask.row_stride;
      for (int64_t c = begin; c < end; ++c) {
        any[c] |= row[c];
        every[c] &= row[c];
      }
    }
    while (begin < end && !any[begin]) ++begin;
    while (begin < end && !any[end - 1]) --end;
    if (begin == end) {
      block->rows = 0;
      return true;
    }
    if (mask.column_stride) {
      begin = block->c0 = begin / kLanes<A> * kLanes<A>;
      end = block->c1 = Min(RoundUp(end, kLanes<A>), block->c1);
    }
    bool hides = false;
    for (int64_t c = begin; c < end; ++c) hides |= !every[c];
    return hides;
  }

  void SoftCap(Tile<A> s, const Block& block, Tile<A> slope) const {
    const A cap = A(p_.score.logits_soft_cap), inverse = A(1 / p_.score.logits_soft_cap);
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
        const Vec<A> t = Tanh<A>(Load(s.row(r) + c) * inverse);
        Store(s.row(r) + c, t * cap);
        if (slope.data) Store(slope.row(r) + c, 1 - t * t);
      }
    }
  }

  void AddBias(Tile<A> s, const Block& block, int64_t n) const {
    ForEachBias(in_.bias, s, block, n, [](A score, A bias) { return score + bias; });
  }

  // A bias of -inf masks the entry, whatever score_mod returns.
  void ApplyBiasMask(Tile<A> s, const Block& block, int64_t n) const {
    ForEachBias(in_.bias, s, block, n, [](A score, A bias) { return bias == -kInfinity<A> ? -kInfinity<A> : score; });
  }

  // Replaces each score by f(score, bias). The array has the shape and the dtype of the bias.
  template <typename F>
  void ForEachBias(const void* array, Tile<A> s, const Block& block, int64_t n, F f) const {
    const HeadOffset offset(p_, p_.score.bias, b_, n);
    WithDType(p_.score.bias_dtype, [&](auto* type) {
      const auto* bias = static_cast<decltype(type)>(array);
      for (int64_t r = 0; r < block.rows; ++r) {
        const auto* from = bias + offset.At(block.i0 + r, block.j0);
        A* row = s.row(r);
        if (offset.column_stride) {
          for (int64_t c = block.c0; c < block.c1; ++c) row[c] = f(row[c], To<A>(from[c]));
        } else {
          for (int64_t c = block.c0; c < block.c1; ++c) row[c] = f(row[c], To<A>(from[0]));
        }
      }
    });
  }

  static void Copy(Tile<A> from, const Block& block, Tile<A> to) {
    const size_t bytes = size_t(RoundUp(block.c1 - block.c0, kLanes<A>)) * sizeof(A);
    for (int64_t r = 0; r < block.rows; ++r) std::memcpy(to.row(r) + block.c0, from.row(r) + block.c0, bytes);
  }

  static void ApplyMask(Tile<A> s, const Block& block, const MaskBytes& mask) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const uint8_t* visible = mask.data + r * mask.row_stride;
      A* row = s.row(r);
      if (mask.column_stride) {
        for (int64_t c = block.c0; c < block.c1; ++c) row[c] = visible[c] ? row[c] : -kInfinity<A>;
      } else if (!visible[0]) {
        for (int64_t c = block.c0; c < block.c1; ++c) row[c] = -kInfinity<A>;
      }
    }
  }

  void ApplySegments(Tile<A> s, const Block& block) const {
    const int32_t* rows = in_.query_segment_ids + b_ * p_.q_len + block.i0;
    const int32_t* columns = in_.key_value_segment_ids + b_ * p_.kv_len + block.j0;
    for (int64_t r = 0; r < block.rows; ++r) {
      A* row = s.row(r);
      for (int64_t c = block.c0; c < block.c1; ++c) row[c] = columns[c] == rows[r] ? row[c] : -kInfinity<A>;
    }
  }

  // The kind of the block that contains row i and column j (common/blocks.h).
  int32_t BlockKind(int64_t n, int64_t i, int64_t j) const {
    const Extent& extent = p_.mask.block_mask;
    const int64_t head = (extent.batch ? b_ * (extent.heads ? p_.q_heads : 1) : 0) + (extent.heads ? n : 0);
    const int32_t kind =
        in_.blocks[(head * p_.block_rows() + i / p_.mask.q_block) * p_.block_columns() + j / p_.mask.kv_block];
    return 0 <= kind && kind < kFirstElementMask + p_.mask.element_masks ? kind : kEmptyBlock;
  }

  void ApplyElementMask(Tile<A> s, const Block& block, int64_t n) const {
    const int32_t kind = BlockKind(n, block.i0, block.j0);
    if (kind < kFirstElementMask) return;
    const int64_t mask = (p_.mask.block_mask.batch ? b_ * p_.mask.element_masks : 0) + kind - kFirstElementMask;
    const int64_t words = p_.element_words(), column = block.j0 % p_.mask.kv_block;
    for (int64_t r = 0; r < block.rows; ++r) {
      const uint32_t* bits = in_.element_masks + (mask * p_.mask.q_block + (block.i0 + r) % p_.mask.q_block) * words;
      A* row = s.row(r);
      for (int64_t c = block.c0; c < block.c1; ++c) {
        if (!(bits[(column + c) / 32] >> ((column + c) % 32) & 1)) row[c] = -kInfinity<A>;
      }
    }
  }

  // Sets entries outside each row's range to -inf, up to a whole vector.
  void ApplyPositions(Tile<A> s, const Block& block) const {
    const int64_t end = RoundUp(block.c1, kLanes<A>);
    const KeyRange every = EveryRowKeys(positions_, block.i0 / merged_, (block.i0 + block.rows - 1) / merged_ + 1);
    if (every.lo <= block.j0 + block.c0 && every.hi >= block.j0 + end) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      const KeyRange keys = RowKeys(positions_, (block.i0 + r) / merged_);
      A* row = s.row(r);
      for (int64_t c = block.c0; c < Min(keys.lo - block.j0, end); ++c) row[c] = -kInfinity<A>;
      for (int64_t c = Max(keys.hi - block.j0, block.c0); c < end; ++c) row[c] = -kInfinity<A>;
    }
  }

  const Problem& p_;
  const Operands& in_;
  int64_t b_;
  Programs<A>& programs_;
  int64_t merged_;
  Positions positions_;
};

}  // namespace jax_flash::JAX_FLASH_ISA

// Ranges of tiles of S: tiles with visible entries, and fully visible tiles.
#pragma once

#include "semantics/mask.cuh"

namespace jax_flash {

__device__ __forceinline__ int SegmentBlocks(int positions) { return (positions + kSegmentBlock - 1) / kSegmentBlock; }

// Positions lo <= x < hi along the other dimension. Some row (or key) may see the positions in `any`. Every one sees
// all positions in `every`.
struct Visible {
  int any_lo, any_hi, every_lo, every_hi;
};

template <typename Range>
__device__ __forceinline__ Visible Combined(const Range& any, const Range& every, const SegmentBounds* bounds,
                                            int blocks) {
  // Clamp: offsets go up to 2^31, so a range may begin beyond every int
  const auto begin = [](int64_t lo) { return int(lo < 0x7FFFFFFF ? lo : 0x7FFFFFFF); };
  Visible visible = {begin(any.lo), int(any.hi), begin(every.lo), int(every.hi)};
  if (kMask || (kMaskMod && !kMaskModInBlocks)) visible.every_hi = visible.every_lo;
  if (kSegments) {
    int any_lo = visible.any_hi, any_hi = visible.any_lo;
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const SegmentBounds block = bounds[b];
      if (block.any_lo < block.any_hi) any_lo = min(any_lo, block.any_lo), any_hi = max(any_hi, block.any_hi);
      visible.every_lo = max(visible.every_lo, block.every_lo);
      visible.every_hi = min(visible.every_hi, block.every_hi);
    }
    visible.any_lo = max(visible.any_lo, any_lo);
    visible.any_hi = min(visible.any_hi, any_hi);
  }
  return visible;
}

// The keys that rows i0 <= i < i1 of one batch entry see. i0 is a multiple of kSegmentBlock, or all rows are in one
// such block.
__device__ __forceinline__ Visible KeysOf(const Params& p, const Positions& positions, int batch, int i0, int i1) {
  i1 = min(i1, p.q_len);
  const SegmentBounds* bounds =
      kSegments ? p.q_bounds + int64_t(batch) * SegmentBlocks(p.q_len) + i0 / kSegmentBlock : nullptr;
  return Combined(AnyRowKeys(positions, i0, i1), EveryRowKeys(positions, i0, i1), bounds, SegmentBlocks(i1 - i0));
}

// The rows that see keys j0 <= j < j1; `every`: the rows that see all of them. j0 is a multiple of kSegmentBlock.
__device__ __forceinline__ Visible RowsOf(const Params& p, const Positions& positions, int batch, int j0, int j1) {
  const SegmentBounds* bounds =
      kSegments ? p.kv_bounds + int64_t(batch) * SegmentBlocks(p.kv_len) + j0 / kSegmentBlock : nullptr;
  return Combined(AnyKeyRows(positions, j0, j1), EveryKeyRows(positions, j0, j1), bounds,
                  SegmentBlocks(min(j1, p.kv_len) - j0));
}

}  // namespace jax_flash

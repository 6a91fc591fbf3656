// Which entries of an accumulator may be attended to, for S and for its transpose, and how the others are hidden. A
// lane has two lines: rows of S, or keys of S^T (semantics/view.cuh).
#pragma once

#include "semantics/score.cuh"
#include "semantics/view.cuh"

namespace jax_flash {

// As far as positions tell: of each line the entries at begin <= offset < end from the lane's first.
template <bool kTransposed>
struct Within {
  // Rows beyond T have P = 0 anyway, since their L is infinite, unless the bias of another row makes them NaN.
  static constexpr bool kHasBegin = kTransposed || kWindow, kHasEnd = !kTransposed || kLocal || kBias;

  int begin[2], end[2];

  // Of a tile of `length` entries.
  __device__ __forceinline__ Within(const Positions& positions, const View<kTransposed>& view, int length) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kTransposed) {
        const int key = view.Key(h, 0);
        const RowRange rows = AnyKeyRows(positions, key, key + 1);
        begin[h] = rows.lo < rows.hi ? int(min(rows.lo - view.row, int64_t(length))) : length;
        end[h] = int(rows.hi - view.row);
      } else {
        const KeyRange keys = RowKeys(positions, view.Row(h, 0) / kPacked);
        begin[h] = int(min(keys.lo - view.key, int64_t(length)));
        end[h] = int(keys.hi) - view.key;
      }
    }
  }

  __device__ __forceinline__ bool Sees(int h, int x) const {
    return (!kHasBegin || begin[h] <= OffsetOf(x)) && (!kHasEnd || OffsetOf(x) < end[h]);
  }
  // Of the 32 entries from `offset` on, bit by bit.
  __device__ __forceinline__ uint32_t Word(int h, int offset) const {
    return (kHasBegin ? ~FirstBits(begin[h] - offset) : 0xFFFFFFFF) &
           (kHasEnd ? FirstBits(end[h] - offset) : 0xFFFFFFFF);
  }
};

// What else has to be looked up in memory, of a tile of kTile entries: a bit for each entry of a line.
template <bool kTransposed, int kTile>
struct Seen {
  static_assert(!kLookedUp || kTile <= 128);
  // A lane has two entries of each 8. Those of the first 32 are the first two bits of a byte, of the next 32 the next.
  static constexpr uint32_t kFirst32 = 0x03030303;
  __device__ __forceinline__ static constexpr int BitOf(int x) { return OffsetOf(x) % 32 + OffsetOf(x) / 32 * 2; }

  static constexpr int kEntriesAtOnce = 4;  // looked up beside the accumulators: all would not fit

  uint32_t line[2];

  __device__ __forceinline__ void Look(const Block<kTransposed>& block, const Entries& entries,
                                       const View<kTransposed>& view) {
    const int lane_offset = threadIdx.x % 4 * 2;
    const int line_in_block = (kTransposed ? view.key : view.row) % Block<kTransposed>::kLines;
    const int from = ((kTransposed ? view.row : view.key) - lane_offset) % Block<kTransposed>::kLength;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      line[h] = kBlockMask ? 0 : 0xFFFFFFFF;
#pragma unroll
      for (int offset = 0; kBlockMask && offset < kTile; offset += 32) {
        const uint32_t word = block.template Word<kTile>(line_in_block + 8 * h, from + offset);
        line[h] |= (word >> lane_offset & kFirst32) << offset / 32 * 2;
      }
#pragma unroll(kEntriesAtOnce)
      for (int x = 0; kEntryMasks && x < kTile / 4; ++x)
        line[h] &= ~(uint32_t(entries.Hidden(view.Row(h, x), view.Key(h, x))) << BitOf(x));
    }
  }

  // What positions hide is hidden too.
  __device__ __forceinline__ void And(const Within<kTransposed>& within) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t inside = 0;
#pragma unroll
      for (int offset = 0; offset < kTile; offset += 32)
        inside |= (within.Word(h, offset) & kFirst32) << offset / 32 * 2;
      line[h] &= inside;
    }
  }

  __device__ __forceinline__ bool Sees(int h, int x) const { return line[h] >> BitOf(x) & 1; }
  // Whether the warp's lines see all.
  __device__ __forceinline__ bool All() const {
    uint32_t all = 0;
#pragma unroll
    for (int x = 0; x < kTile / 4; ++x) all |= 1u << BitOf(x);
    return __all_sync(0xFFFFFFFFu, (line[0] & line[1] & all) == all);
  }
};

// S = -inf where an entry may not be attended to. `sees`: a Within or a Seen.
template <typename Sees, typename Accumulator>
__device__ __forceinline__ void Hide(const Sees& sees, Accumulator& S) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int x = 0; x < EntriesOfLine(S); ++x) {
      if (!sees.Sees(h, x)) At(S, h, x) = -Infinity();
    }
  }
}

}  // namespace jax_flash

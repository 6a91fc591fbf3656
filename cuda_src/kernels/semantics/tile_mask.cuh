// The visible entries of an accumulator, for S and for its transpose, and the masking of other entries. A lane has two
// lines: rows of S, or keys of S^T (semantics/view.cuh).
#pragma once

#include "semantics/score.cuh"
#include "semantics/view.cuh"

namespace jax_flash {

// The entries of line h that positions leave visible: begin <= offset < end, counted from the lane's first entry.
template <bool kTransposed>
struct VisibleRange {
  // Rows beyond T need no mask, because their infinite L makes P = 0. A bias or score_mod could make them NaN, so they
  // are masked then.
  static constexpr bool kHasBegin = kTransposed || kWindow, kHasEnd = !kTransposed || kLocal || kAddsToScores;

  int begin, end;

  // For a tile of `length` entries.
  __device__ __forceinline__ VisibleRange(const Positions& positions, const View<kTransposed>& view, int h,
                                          int length) {
    if constexpr (kTransposed) {
      const int key = view.Key(h, 0);
      const RowRange rows = AnyKeyRows(positions, key, key + 1);
      begin = rows.lo < rows.hi ? int(min(rows.lo - view.row, int64_t(length))) : length;
      end = int(rows.hi - view.row);
    } else {
      const KeyRange keys = RowKeys(positions, view.Row(h, 0) / kPacked);
      begin = int(min(keys.lo - view.key, int64_t(length)));
      end = int(keys.hi) - view.key;
    }
  }

  __device__ __forceinline__ bool Contains(int x) const {
    return (!kHasBegin || begin <= OffsetOf(x)) && (!kHasEnd || OffsetOf(x) < end);
  }
  // One bit for each of 32 entries, from `offset` on.
  __device__ __forceinline__ uint32_t Word(int offset) const {
    return (kHasBegin ? ~FirstBits(begin - offset) : 0xFFFFFFFF) & (kHasEnd ? FirstBits(end - offset) : 0xFFFFFFFF);
  }
};

// Sets the entries of line h that are not visible to -inf.
template <typename Accumulator, typename Contains>
__device__ __forceinline__ void MaskLine(Accumulator& S, int h, Contains contains) {
#pragma unroll
  for (int x = 0; x < EntriesOfLine(S); ++x) {
    if (!contains(x)) At(S, h, x) = -Infinity();
  }
}

// The visible entries of a tile of kTile entries, if any mask is in memory: one bit for each entry of a line.
template <bool kTransposed, int kTile>
struct TileMask {
  static_assert(!kMasksInMemory || kTile <= 128);
  static constexpr bool kBits = kBlockMask && !kMaskModInBlocks;  // do blocks have element masks?
  static constexpr int kLineWords = (kTile + 31) / 32, kWords = kBits ? kLineWords : 1;
  static constexpr int kEntriesAtOnce = 4;  // entries that are looked up together; all at once would spill
  // A lane has two of 8 entries. Its entries among the first 32 are bits 0 and 1 of each byte of a line, its entries
  // among the next 32 are bits 2 and 3, and so on.
  static constexpr uint32_t kFirst32 = 0x03030303;
  __device__ __forceinline__ static constexpr int BitOf(int x) { return OffsetOf(x) % 32 + OffsetOf(x) / 32 * 2; }

  uint32_t words[2][kWords];  // the bits of the block mask, until PackBits
  uint32_t line[2];

  // Loads the words of the block mask, which can arrive while S is computed. `line` is the lane's first line. The tile
  // begins at entry `from` of it.
  __device__ __forceinline__ void FetchBlock(const Block<kTransposed>& block, uint32_t line, uint32_t from) {
    if (!kBits) return;
    block.template Tile<kTile>(line % Block<kTransposed>::kLines, from % Block<kTransposed>::kLength, words);
  }

  // Converts the words to lines, which need fewer registers. Bits without an entry are arbitrary.
  __device__ __forceinline__ void PackBits() {
    if (!kBits) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) Put(w, words[h][w], &line[h]);
    }
  }

  // After PackBits: intersects with the other masks.
  __device__ __forceinline__ void Intersect(const Positions& positions, const Entries& entries,
                                            const View<kTransposed>& view) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const VisibleRange<kTransposed> range(positions, view, h, kTile);
      uint32_t visible = 0;
#pragma unroll
      for (int w = 0; w < kLineWords; ++w) visible |= (range.Word(32 * w) & kFirst32) << 2 * w;
      line[h] = kBits ? line[h] & visible : visible;
#pragma unroll(kEntriesAtOnce)
      for (int x = 0; kMask && !kMaskMod && x < kTile / 4; ++x)
        line[h] &= ~(uint32_t(entries.IsMasked(view.Row(h, x), view.Key(h, x))) << BitOf(x));
    }
    if (kSegments) IntersectSegments(entries, view);
#pragma unroll 1
    for (int w = 0; kMaskMod && w < kLineWords; ++w) EvaluateMaskMod(w, entries, view);
  }

  // Sets masked entries of S to -inf. It goes through a line byte by byte, since one R2P instruction makes predicates
  // from the bits of one byte.
  template <typename Accumulator>
  __device__ __forceinline__ void Apply(Accumulator& S) const {
    constexpr int kInByte = 2 * kLineWords;  // entries
#pragma unroll
    for (int i = 0; i < 2 * 4 * kInByte; ++i) {
      const int h = i / (4 * kInByte), x = i % kInByte / 2 * 8 + i / kInByte % 4 * 2 + i % 2;
      if (x < EntriesOfLine(S) && (line[h] >> BitOf(x) & 1) == 0) At(S, h, x) = -Infinity();
    }
  }

  // Are all entries of all lines of the warp visible?
  __device__ __forceinline__ bool AllVisible() const {
    uint32_t all = 0;
#pragma unroll
    for (int x = 0; x < kTile / 4; ++x) all |= 1u << BitOf(x);
    return __all_sync(0xFFFFFFFFu, (line[0] & line[1] & all) == all);
  }

 private:
  // Puts the bits of the w-th 32 entries into a line. Call it for w = 0, 1, ... in order.
  __device__ __forceinline__ static void Put(int w, uint32_t word, uint32_t* line) {
    const uint32_t those = kFirst32 << 2 * w, x = __funnelshift_r(word, word, LaneOffset() - 2 * w);
    *line = w == 0 ? x : (x & those) | (*line & ~those);
  }

  // Each lane loads the segment ids of one of every 32 positions along the lines. Then the warp loops over the distinct
  // ids of its lines, usually one or two, and finds the positions with that id by ballot.
  __device__ __forceinline__ void IntersectSegments(const Entries& entries, const View<kTransposed>& view) {
    constexpr uint32_t kAllLanes = 0xFFFFFFFF;
    int along[kLineWords], own[2];
#pragma unroll
    for (int w = 0; w < kLineWords; ++w) {
      const int at = int(threadIdx.x % 32) - LaneOffset() + 32 * w;
      along[w] = kTransposed ? entries.SegmentOfRow(view.row + at) : entries.SegmentOfKey(view.key + at);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      own[h] = kTransposed ? entries.SegmentOfKey(view.Key(h, 0)) : entries.SegmentOfRow(view.Row(h, 0));
    uint32_t left[2] = {kAllLanes, kAllLanes};  // lanes with a line that is still to be done
#pragma unroll 1
    while ((left[0] | left[1]) != 0) {
      const bool first = left[0] != 0;
      const int segment = __shfl_sync(kAllLanes, first ? own[0] : own[1], __ffs(first ? left[0] : left[1]) - 1);
      uint32_t has[kLineWords], visible = 0;
#pragma unroll
      for (int w = 0; w < kLineWords; ++w) has[w] = __ballot_sync(kAllLanes, along[w] == segment);
#pragma unroll
      for (int w = 0; w < kLineWords; ++w) Put(w, has[w], &visible);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (own[h] == segment) line[h] &= visible;
        left[h] &= ~__ballot_sync(kAllLanes, own[h] == segment);
      }
    }
  }

  // Evaluates mask_mod for the w-th 32 entries of both lines together, since both lines share most of its loads. They
  // have the bits of the first 32 entries, shifted. The loop is unrolled only for a short mask_mod, to limit code size.
  __device__ __forceinline__ void EvaluateMaskMod(int w, const Entries& entries, const View<kTransposed>& view) {
    constexpr int kCount = 2 * (kTile < 32 ? kTile / 4 : 8), kAtOnce = program::kLongMask ? 2 : kCount;
    uint32_t hidden[2] = {};
#pragma unroll(kAtOnce)
    for (int i = 0; i < kCount; ++i) {
      const int h = i % 2, x = 8 * w + i / 2;
      hidden[h] |= uint32_t(entries.IsMasked(view.Row(h, x), view.Key(h, x))) << OffsetOf(i / 2);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) line[h] &= ~(hidden[h] << 2 * w);
  }

  // The lane's first entry among 8.
  __device__ __forceinline__ static int LaneOffset() { return threadIdx.x % 4 * 2; }
};

// Masks entries where only positions hide keys.
template <bool kTransposed, typename Accumulator>
__device__ __forceinline__ void MaskOutside(const Positions& positions, const View<kTransposed>& view, Accumulator& S) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const VisibleRange<kTransposed> range(positions, view, h, 4 * EntriesOfLine(S));
    MaskLine(S, h, [&](int x) { return range.Contains(x); });
  }
}

}  // namespace jax_flash

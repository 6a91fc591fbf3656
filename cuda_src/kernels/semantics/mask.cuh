// The keys that a row may attend to: positions (causal, window, lengths, query offset), segment ids, the mask operand,
// a mask_mod and block masks. Add new kinds of masks here. scheduler/ derives from them which tiles are computed.
//
// Block masks are data, and may have any values. An invalid number never becomes an address; its block counts as empty.
#pragma once

#include "common/blocks.h"
#include "common/masking.h"
#include "config.cuh"
#include "ptx/types.cuh"
#include "semantics/program.cuh"
#include "semantics/view.cuh"

namespace jax_flash {

constexpr bool kCausal = kProblem.causal;
constexpr bool kWindow = kProblem.window || kProblem.ranges;  // can positions hide keys on both sides?
constexpr bool kLengths = kProblem.q_lengths || kProblem.kv_lengths;
constexpr bool kSegments = kProblem.segments;
constexpr bool kMask =
    kProblem.mask;  // the operand: in a split-KV forward, and in the kernel that converts it to a block mask
constexpr bool kBlockMask = kProblem.q_block > 0;
constexpr int kQBlock = kBlockMask ? kProblem.q_block : 16;
constexpr int kKVBlock = kBlockMask ? kProblem.kv_block : 16;

constexpr bool kListed = kBlockMask;  // do tiles come from block lists instead of ranges?
// Can keys to the left of a visible key be hidden? True with a window, packed sequences or segments.
constexpr bool kLocal = kWindow || kSegments;
// Do positions hide more than later keys?
constexpr bool kMoreThanCausal = kWindow || kLengths || kProblem.query_offset;
constexpr bool kMaskModInBlocks = kMaskMod && kBlockMask;  // does mask_mod decide in partial blocks?
// Do masks hide keys that do not follow from positions alone? They are in memory, or a mask_mod computes them.
constexpr bool kMasksInMemory = kSegments || kMask || kMaskMod || kBlockMask;

// --- Positions ---

// The position of the first query among the keys.
__device__ __forceinline__ int OffsetOf(const Params& p, int batch) {
  return kProblem.query_offset ? p.query_offset[batch] : 0;
}

// Are the positions of `count` rows, with the query offset, within the keys? Score programs need this where they assume
// that entries are within T and S.
__device__ __forceinline__ bool QueriesWithinKeys(const Params& p, int batch, int row, int count) {
  const int64_t first = int64_t(row) + OffsetOf(p, batch);
  return first >= 0 && first <= p.kv_len - count;
}

// The position of entry (i, j), as programs receive it.
__device__ __forceinline__ program::Entry EntryOf(const Params& p, int batch, int head, int i, int j) {
  const int first_key = kProblem.origin ? __ldg(p.origin + 1) : 0;
  return {batch, __ldg(Programs(p).program_batch + batch), __ldg(Programs(p).program_head + head),
          first_key + i + OffsetOf(p, batch), first_key + j};
}
template <bool kTransposed>
__device__ __forceinline__ program::Entry EntryOf(const Params& p, int batch, int head, const View<kTransposed>& view,
                                                  int h, int x) {
  program::Entry entry = EntryOf(p, batch, head, view.Row(h, x), view.Key(h, x));
  entry.rows = view.Row(h, x) - view.row;
  entry.keys = view.Key(h, x) - view.key;
  return entry;
}

__device__ __forceinline__ Positions PositionsOf(const Params& p, int batch) {
  Positions positions;
  positions.q_length = kProblem.q_lengths ? ClampLength(p.q_lengths[batch], p.q_len) : p.q_len;
  positions.kv_length = kProblem.kv_lengths ? ClampLength(p.kv_lengths[batch], p.kv_len) : p.kv_len;
  positions.offset = OffsetOf(p, batch);
  positions.causal = kCausal;
  positions.window_left = kWindow ? p.window_left : -1;
  positions.window_right = kWindow ? p.window_right : -1;
  positions.ranges = kProblem.ranges;
  positions.keys_of_rows = kProblem.ranges ? p.keys_of_rows + int64_t(batch) * p.q_len * 2 : nullptr;
  positions.rows_of_keys = kProblem.ranges ? p.rows_of_keys + int64_t(batch) * p.kv_len * 2 : nullptr;
  return positions;
}

// The first n of 32 bits, or none if n < 0.
__device__ __forceinline__ uint32_t FirstBits(int n) { return n >= 32 ? 0xFFFFFFFF : (1u << max(n, 0)) - 1; }

// --- Segment ids, the mask operand and mask_mod ---

// The offset of entry (i, j). Both strides fit in 32 bits, so each product is one multiplication.
template <typename T>
__device__ __forceinline__ int64_t Offset(const Broadcast<T>& x, int i, int j) {
  return int64_t(i) * int(x.row) + int64_t(j) * int(x.column);
}

// The masks of single entries, for one batch entry and head.
struct Entries {
  const Params& p;
  int batch, head;
  const int32_t *q_segments, *kv_segments;
  const uint8_t* mask;

  __device__ __forceinline__ Entries(const Params& p, int batch, int head)
      : p(p),
        batch(batch),
        head(head),
        q_segments(kSegments ? p.q_segments + int64_t(batch) * p.q_len : nullptr),
        kv_segments(kSegments ? p.kv_segments + int64_t(batch) * p.kv_len : nullptr),
        mask(kMask ? p.mask.data + batch * p.mask.batch + head * p.mask.head : nullptr) {}

  // Rows are packed rows. Indices beyond T and S are clamped; positions hide these entries.
  __device__ __forceinline__ int RowOf(int row) const { return min(row / kPacked, p.q_len - 1); }
  __device__ __forceinline__ int KeyOf(int j) const { return min(j, p.kv_len - 1); }

  __device__ __forceinline__ int SegmentOfRow(int row) const { return q_segments[RowOf(row)]; }
  __device__ __forceinline__ int SegmentOfKey(int j) const { return kv_segments[KeyOf(j)]; }

  // Does the mask operand or mask_mod hide entry (row, j)?
  __device__ __forceinline__ bool IsMasked(int row, int j) const {
    const int i = RowOf(row), next = row % kPacked;
    j = KeyOf(j);
    return (kMask && mask[next * p.mask.head + Offset(p.mask, i, j)] == 0) ||
           (kMaskMod && !program::MaskMod<true>(Programs(p), EntryOf(p, batch, head + next, i, j)));
  }
};

// --- Block masks ---

// Lengths are at least 1. Adding a large block size first would overflow an int.
__device__ __forceinline__ int BlockRows(const Params& p) { return (p.q_len - 1) / kQBlock + 1; }
__device__ __forceinline__ int BlockColumns(const Params& p) { return (p.kv_len - 1) / kKVBlock + 1; }

// The index of a head among the heads of the block mask. An int can count the block rows and columns of all heads:
// blocks have at least 16 rows and keys, and the plan refuses calls in which batch x heads x T / 16 or S / 16
// overflows.
__device__ __forceinline__ int HeadOfBlocks(const BlockMask& mask, int batch, int head) {
  return batch * mask.batch + head * mask.head;
}

// The kinds of the blocks of row i.
__device__ __forceinline__ const int32_t* KindsOfRow(const Params& p, const BlockMask& mask, int batch, int head,
                                                     int i) {
  const int64_t row = HeadOfBlocks(mask, batch, head) * BlockRows(p) + i / kQBlock;
  return mask.blocks + row * BlockColumns(p);
}

// The kind of column j's block, in such a row of kinds.
__device__ __forceinline__ int KindOfColumn(const int32_t* kinds, int j) { return kinds[j / kKVBlock]; }

// The kind of the block at (i, j); kFullBlock without a block mask.
__device__ __forceinline__ int KindOfBlock(const Params& p, int batch, int head, int i, int j) {
  return kBlockMask ? KindOfColumn(KindsOfRow(p, p.block_mask, batch, head, i), j) : kFullBlock;
}

// The elements of a block of this kind: the index of its element mask among the masks of all batch entries, or one of
// these constants. kByMaskMod: mask_mod decides. Its kind is the number after the last element mask.
constexpr int kAllElements = -1, kNoElements = -2, kByMaskMod = -3;
__device__ __forceinline__ int ElementsOf(const BlockMask& mask, int batch, int kind) {
  if (kind == kFullBlock) return kAllElements;
  if (kMaskModInBlocks && kind == kFirstElementMask + mask.element_mask_count) return kByMaskMod;
  if (!kBlockMask || kind < kFirstElementMask || kind - kFirstElementMask >= mask.element_mask_count)
    return kNoElements;
  return (mask.batch != 0 ? batch * mask.element_mask_count : 0) + kind - kFirstElementMask;
}

// A block with these elements. Lines of bits are rows of the element mask, or columns if kTransposed.
template <bool kTransposed>
class Block {
 public:
  static constexpr int kLines = kTransposed ? kKVBlock : kQBlock, kLength = kTransposed ? kQBlock : kKVBlock;

  __device__ __forceinline__ Block(const BlockMask& mask, int elements) : mask_(mask), elements_(elements) {}
  __device__ __forceinline__ Block(const BlockMask& mask, int batch, int kind)
      : Block(mask, ElementsOf(mask, batch, kind)) {}

  __device__ __forceinline__ bool Full() const { return elements_ == kAllElements; }
  __device__ __forceinline__ bool Empty() const { return elements_ == kNoElements; }

  // The visible ones of 16 entries of the line, from entry `from` on, a multiple of 16.
  __device__ __forceinline__ uint32_t Half(uint32_t line, uint32_t from) const {
    if (elements_ < 0) return Full() ? 0xFFFF : 0;
    return reinterpret_cast<const uint16_t*>(Bits())[line * (2 * kWords) + from / 16];
  }

  // The visible entries of a tile of lines `line` and `line` + 8: kTile entries from `from` on, 32 in a word.
  template <int kTile, int kTileWords>
  __device__ __forceinline__ void Tile(uint32_t line, uint32_t from, uint32_t (&words)[2][kTileWords]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (elements_ < 0) {
#pragma unroll
        for (int w = 0; w < kTileWords; ++w) words[h][w] = Full() ? 0xFFFFFFFF : 0;
      } else if constexpr (kLength % kTile == 0 && kTile % 32 == 0) {
        LoadWords(Bits() + int(line * kWords + from / 32) + 8 * h * kWords, words[h]);
      } else {
#pragma unroll
        for (int i = 0; i < kTile / 16; ++i) {
          const uint32_t half = Half(line + 8 * h, from + 16 * i);
          words[h][i / 2] = i % 2 == 0 ? half : words[h][i / 2] | half << 16;
        }
      }
    }
  }

 private:
  static constexpr int kWords = WordsOfLine(kLength);

  const BlockMask& mask_;
  const int elements_;

  // The bits of the block's element mask.
  __device__ __forceinline__ const uint32_t* Bits() const {
    return (kTransposed ? mask_.transposed_masks : mask_.element_masks) +
           uint64_t(uint32_t(elements_)) * (kLines * kWords);
  }
};

}  // namespace jax_flash

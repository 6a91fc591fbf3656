// Which keys a row may attend to: positions (causal, window, lengths, query offset), segment ids, the mask operand and
// block masks. Here is the place to add a kind of mask. Which tiles are computed at all follows from it in scheduler/.
//
// All of a block mask is data: a number that it does not have stands for nothing, never for an address.
#pragma once

#include "common/masking.h"
#include "config.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

constexpr bool kCausal = kProblem.causal;
constexpr bool kWindow = kProblem.window;
constexpr bool kLengths = kProblem.q_lengths || kProblem.kv_lengths;
constexpr bool kSegments = kProblem.segments;
constexpr bool kMask = kProblem.mask;
constexpr bool kBlockMask = kProblem.q_block > 0;
constexpr int kQBlock = kBlockMask ? kProblem.q_block : 16;
constexpr int kKVBlock = kBlockMask ? kProblem.kv_block : 16;

constexpr bool kLocal = kWindow || kSegments;  // keys may be hidden to the left of what is not
// Do positions decide more than that a row sees no later key?
constexpr bool kManyRanges = kWindow || kLengths || kProblem.query_offset;
constexpr bool kEntryMasks = kSegments || kMask;       // read entry by entry
constexpr bool kLookedUp = kEntryMasks || kBlockMask;  // must memory be asked which keys a row sees?

// --- Positions ---

__device__ __forceinline__ Positions PositionsOf(const Params& p, int batch) {
  Positions positions;
  positions.q_length = kProblem.q_lengths ? ClampLength(p.q_lengths[batch], p.q_len) : p.q_len;
  positions.kv_length = kProblem.kv_lengths ? ClampLength(p.kv_lengths[batch], p.kv_len) : p.kv_len;
  positions.offset = kProblem.query_offset ? p.query_offset[batch] : 0;
  positions.causal = kCausal;
  positions.window_left = kWindow ? p.window_left : -1;
  positions.window_right = kWindow ? p.window_right : -1;
  return positions;
}

// The first n of 32 bits; none if n < 0.
__device__ __forceinline__ uint32_t FirstBits(int n) { return n >= 32 ? 0xFFFFFFFF : (1u << max(n, 0)) - 1; }

// Of the 32 columns from `offset` on of a row that sees begin <= column < end: which it sees, bit by bit.
__device__ __forceinline__ uint32_t SeenBits(int begin, int end, int offset) {
  return FirstBits(end - offset) & (kWindow ? ~FirstBits(begin - offset) : 0xFFFFFFFF);
}
__device__ __forceinline__ bool Outside(int begin, int end, int column) {
  return column >= end || (kWindow && column < begin);
}

// --- Segment ids and the mask operand ---

// The offset of row i, column j. (Both strides fit in 32 bits, and one multiplication then does for each.)
template <typename T>
__device__ __forceinline__ int64_t Offset(const Broadcast<T>& x, int i, int j) {
  return int64_t(i) * int(x.row) + int64_t(j) * int(x.column);
}

// For one batch entry and head. Rows and columns are within T and S.
struct Entries {
  const Params& p;
  const int32_t *q_segments, *kv_segments;
  const uint8_t* mask;

  __device__ __forceinline__ Entries(const Params& p, int batch, int head)
      : p(p),
        q_segments(kSegments ? p.q_segments + int64_t(batch) * p.q_len : nullptr),
        kv_segments(kSegments ? p.kv_segments + int64_t(batch) * p.kv_len : nullptr),
        mask(kMask ? p.mask.data + batch * p.mask.batch + head * p.mask.head : nullptr) {}

  // Whether entry (i, j) is hidden by what is not a matter of positions; of the head `next` after this one.
  __device__ __forceinline__ bool Hidden(int i, int j, int next = 0) const {
    return (kSegments && q_segments[i] != kv_segments[j]) ||
           (kMask && mask[next * p.mask.head + Offset(p.mask, i, j)] == 0);
  }
};

// --- Block masks ---

constexpr int kEverything = 1;  // of the numbers for blocks

__device__ __forceinline__ int BlockRows(const Params& p) { return (p.q_len + kQBlock - 1) / kQBlock; }
__device__ __forceinline__ int BlockColumns(const Params& p) { return (p.kv_len + kKVBlock - 1) / kKVBlock; }

// Of the heads that the block mask has, the one that is meant. (An int counts their rows and columns of blocks, which
// are multiples of 16: the plan refuses batch x heads x T / 16 beyond it, and S likewise.)
__device__ __forceinline__ int HeadOfBlocks(const Params& p, int batch, int head) {
  return batch * p.block_mask.batch + head * p.block_mask.head;
}

// The numbers in a block mask for the blocks that row i of a head is in.
__device__ __forceinline__ const int32_t* KindsOfRow(const Params& p, int batch, int head, int i) {
  return p.block_mask.blocks + int64_t(HeadOfBlocks(p, batch, head) * BlockRows(p) + i / kQBlock) * BlockColumns(p);
}

// Of them that of the block that column j is in.
__device__ __forceinline__ int KindOfColumn(const int32_t* kinds, int j) { return kinds[j / kKVBlock]; }

// That of the block that row i, column j are in; everything without a block mask.
__device__ __forceinline__ int KindOfBlock(const Params& p, int batch, int head, int i, int j) {
  return kBlockMask ? KindOfColumn(KindsOfRow(p, batch, head, i), j) : kEverything;
}

// How far a tile of kTile rows, or columns, begins from where its block does.
template <int kTile>
__device__ __forceinline__ int RowInBlock(int row) {
  return kTile == kQBlock ? 0 : row % kQBlock;
}
template <int kTile>
__device__ __forceinline__ int ColumnInBlock(int column) {
  return kTile == kKVBlock ? 0 : column % kKVBlock;
}

// A block of this kind.
class Block {
 public:
  __device__ __forceinline__ Block(const Params& p, int batch, int kind) : kind_(kind) {
    const BlockMask& mask = p.block_mask;
    if (kBlockMask && kind_ >= kElements && kind_ - kElements < mask.element_mask_count) {
      const int64_t table = mask.batch != 0 ? int64_t(batch) * mask.element_mask_count : 0;
      elements_ = mask.element_masks + (table + kind_ - kElements) * (kQBlock * kWords);
    }
  }

  __device__ __forceinline__ bool Everything() const { return kind_ == kEverything; }
  __device__ __forceinline__ bool Nothing() const { return !Everything() && elements_ == nullptr; }

  // Which of the 16 columns from j on, a multiple of 16, row i may attend to: bit by bit.
  __device__ __forceinline__ uint32_t Columns(int i, int j) const {
    if (Everything()) return 0xFFFF;
    if (elements_ == nullptr) return 0;
    return reinterpret_cast<const uint16_t*>(elements_)[i % kQBlock * (2 * kWords) + j % kKVBlock / 16];
  }
  // Row i of the block, and a tile of kCols columns from j on, both of the block: which of the 32 columns (or of the 16
  // that are left) after the tile's first `offset` the row may attend to.
  template <int kCols>
  __device__ __forceinline__ uint32_t Word(int i, int j, int offset) const {
    if (Everything()) return 0xFFFFFFFF;
    if (elements_ == nullptr) return 0;
    if constexpr (kCols % 32 == 0 && kKVBlock % 32 == 0) return elements_[i * kWords + j / 32 + offset / 32];
    const auto* halves = reinterpret_cast<const uint16_t*>(elements_) + i * (2 * kWords) + j / 16 + offset / 16;
    return halves[0] | (offset + 16 < kCols ? halves[1] << 16 : 0);
  }

 private:
  static constexpr int kElements = 2;                  // from here on a kind is an element mask
  static constexpr int kWords = (kKVBlock + 31) / 32;  // a row of one

  const int kind_;
  const uint32_t* elements_ = nullptr;
};

}  // namespace jax_flash

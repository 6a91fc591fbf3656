// Kernels before a forward or backward with a mask operand or a mask_mod. They build a block mask. With it, the pass
// skips empty blocks and does not mask full ones (Algorithm 5). Other blocks of kMaskBlock x kMaskBlock entries are
// stored as bits, so a pass does not read the mask again. For a mask_mod without a mask operand there are no bits, and
// the pass evaluates mask_mod again in these blocks. If there is also a block mask operand, the result is the
// intersection.
//
// A dimension that the mask is broadcast over has one row, or column, of blocks for all: see `Span`.
#pragma once

#include "ptx/warp.cuh"
#include "semantics/mask.cuh"

namespace jax_flash {

constexpr int kSide = kMaskBlock;
constexpr int kWordsOfRow = kSide / 32;
constexpr int kWarps = kMaskThreads / 32;
constexpr bool kStoresBits = kMask || kBlockMask;  // otherwise the passes evaluate mask_mod in partial blocks

// A writable pointer to an array that only these kernels write.
template <typename T>
__device__ __forceinline__ T* Mutable(const T* array) {
  return const_cast<T*>(array);
}

// The block rows, or block columns, that one CTA writes: one, or all if they are equal.
struct Span {
  int first, count;
};

// The block that a CTA computes, and where it is written.
struct OutputBlock {
  int batch, head;  // in the resulting block mask; 0 where it is shared
  int kind;         // the kind that refers to its bits
  Span rows, columns;

  __device__ __forceinline__ explicit OutputBlock(const Params& p) {
    const int block_rows = (p.q_len + kSide - 1) / kSide, block_columns = (p.kv_len + kSide - 1) / kSide;
    const bool every_row = p.mask.row == 0 && !program::kMaskRows && !kBlockMask;
    const bool every_column = p.mask.column == 0 && !program::kMaskColumns && !kBlockMask;
    const int own_columns = every_column ? 1 : block_columns, own_rows = every_row ? 1 : block_rows;
    const int of_head = own_rows * own_columns, of_batch = of_head * (p.block_mask.head != 0 ? p.q_heads : 1);
    const int place = blockIdx.x % of_head;
    batch = blockIdx.x / of_batch;
    head = blockIdx.x % of_batch / of_head;
    kind = kFirstElementMask + (kStoresBits ? blockIdx.x % of_batch : 0);
    rows = {every_row ? 0 : place / own_columns, every_row ? block_rows : 1};
    columns = {every_column ? 0 : place % own_columns, every_column ? block_columns : 1};
  }
};

// One bit for each of 16 bytes: is it nonzero?
__device__ __forceinline__ uint32_t NotZero(uint4 x) {
  if (((x.x | x.y | x.z | x.w) & 0xFEFEFEFE) != 0) {  // a byte is not 0 or 1; XLA writes no such bytes
    for (uint32_t* word : {&x.x, &x.y, &x.z, &x.w})
      *word = (((*word & 0x7F7F7F7F) + 0x7F7F7F7F) | *word) >> 7 & 0x01010101;
  }
  return __dp4a(x.y, 0x80402010u, __dp4a(x.x, 0x08040201u, 0u)) | __dp4a(x.w, 0x80402010u, __dp4a(x.z, 0x08040201u, 0u))
                                                                      << 8;
}

// Reads 16 columns of row i of the mask, from column j on. Row i and column j are within T and S.
__device__ __forceinline__ uint4 Bytes(const Params& p, const OutputBlock& block, int i, int j) {
  const uint8_t* const row = p.mask.data + block.batch * p.mask.batch + block.head * p.mask.head + i * p.mask.row;
  if (p.mask.column != 0 && j + 16 <= p.kv_len && reinterpret_cast<size_t>(row + j) % 16 == 0) {
    return *reinterpret_cast<const uint4*>(row + j);
  }
  const auto word = [&](int from) {
    uint32_t bytes = 0;
#pragma unroll
    for (int x = 0; x < 4; ++x) bytes |= uint32_t(row[min(from + x, p.kv_len - 1) * p.mask.column]) << 8 * x;
    return bytes;
  };
  return {word(j), word(j + 4), word(j + 8), word(j + 12)};
}

// The entries among these 16 that the block mask operand leaves visible.
__device__ __forceinline__ uint32_t InGivenBlock(const Params& p, const OutputBlock& block, int i, int j) {
  if (!kBlockMask) return 0xFFFF;
  const int kind = KindOfColumn(KindsOfRow(p, p.given_blocks, block.batch, block.head, i), j);
  return Block<false>(p.given_blocks, block.batch, kind).Half(i % kQBlock, j % kKVBlock);
}

// The entries among them that mask_mod leaves visible. Columns beyond S are skipped.
__device__ __forceinline__ uint32_t InProgram(const Params& p, const OutputBlock& block, int i, int j) {
  if (!kMaskMod) return 0xFFFF;
  uint32_t bits = 0;
  for (int x = 0; x < min(16, p.kv_len - j); ++x) {
    bits |= (program::MaskMod<true>(Programs(p), EntryOf(p, block.batch, block.head, i, j + x)) & 1) << x;
  }
  return bits;
}

// Transposes a square of 32 x 32 bits. A lane passes the row of its number and receives the column of that number.
__device__ __forceinline__ uint32_t Transposed(uint32_t row) {
  uint32_t low = 0x0000FFFF;
#pragma unroll
  for (int s = 16; s > 0; s /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, row, s);
    row = threadIdx.x & s ? (row & ~low) | (other & ~low) >> s : (row & low) | (other & low) << s;
    low ^= low << s / 2;
  }
  return row;
}

// Transposes an element mask of `rows` rows, with all threads of the CTA.
__device__ __forceinline__ void Transpose(const uint32_t* from, uint32_t* to, int rows, int columns) {
  const int lane = threadIdx.x % 32, across = rows / 32, along = columns / 32;
  for (int square = threadIdx.x / 32; square < across * along; square += kWarps) {
    const int r = square / along, c = square % along;
    to[(32 * c + lane) * across + r] = Transposed(from[(32 * r + lane) * along + c]);
  }
}

// The lists of a head's block rows, or of its block columns.
struct Lists {
  int count, members;          // the number of lists, and the maximum length of one
  int next_list, next_member;  // strides in `blocks`, between lists and between members of a list
  int width;
  const int32_t* blocks;
  int32_t *lists, *counts;

  __device__ __forceinline__ Lists(const Params& p, int64_t head, bool of_rows) {
    const int rows = (p.q_len + kSide - 1) / kSide, columns = (p.kv_len + kSide - 1) / kSide;
    const BlockMask& made = p.block_mask;
    blocks = made.blocks + head * rows * columns;
    count = of_rows ? rows : columns, members = of_rows ? columns : rows;
    next_list = of_rows ? columns : 1, next_member = of_rows ? 1 : columns;
    width = kListHeader + members;
    lists = Mutable(of_rows ? made.row_lists : made.column_lists) + head * count * width;
    counts = p.mask_counts + head * (rows + columns) + (of_rows ? 0 : rows);
  }

  __device__ __forceinline__ int Count(int list) const {
    int n = 0;
#pragma unroll 8
    for (int x = 0; x < members; ++x) n += blocks[int64_t(list) * next_list + int64_t(x) * next_member] != kEmptyBlock;
    return n;
  }
  // The number of lists before this one: longer lists, and equally long ones with lower numbers.
  __device__ __forceinline__ int Rank(int list) const {
    const int own = counts[list];
    int rank = 0;
#pragma unroll 8
    for (int x = 0; x < count; ++x) rank += counts[x] > own || (counts[x] == own && x < list);
    return rank;
  }
  __device__ __forceinline__ void Write(int list) const {
    int32_t* to = lists + int64_t(Rank(list)) * width;
    *to++ = list;
    *to++ = counts[list];
#pragma unroll 8
    for (int x = 0; x < members; ++x) {
      if (blocks[int64_t(list) * next_list + int64_t(x) * next_member] != kEmptyBlock) *to++ = x;
    }
  }
};

// Computes blocks. There is one CTA for each block of the resulting mask, or for all equal ones.
extern "C" __global__ void __launch_bounds__(kMaskThreads, kMaskMod ? 1 : 6)
    jax_flash_mask_blocks(const __grid_constant__ KernelParams p) {
  constexpr int kChunks = kSide / 16, kRowsAtOnce = kMaskThreads / kChunks, kSteps = kSide / kRowsAtOnce;
  __shared__ uint32_t words[kSide * kWordsOfRow];
  const OutputBlock block(p);
  const int chunk = threadIdx.x % kChunks, j = block.columns.first * kSide + 16 * chunk;
  const auto row = [&](int step) { return step * kRowsAtOnce + int(threadIdx.x) / kChunks; };
  const auto there = [&](int step) {
    return block.rows.first * kSide + row(step) < p.q_len ? FirstBits(p.kv_len - j) & 0xFFFF : 0;
  };
  uint4 bytes[kSteps];  // all loads are in flight before the first use
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    bytes[s] = kMask && there(s) != 0 ? Bytes(p, block, block.rows.first * kSide + row(s), j) : uint4();
  bool any = false, every = true;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t bits = there(s);
    const int i = block.rows.first * kSide + row(s);
    if (kMask && bits != 0) bits &= NotZero(bytes[s]);
    if (bits != 0) bits &= InGivenBlock(p, block, i, j);
    if (bits != 0) bits &= InProgram(p, block, i, j);
    any |= bits != 0, every &= bits == there(s);
    reinterpret_cast<uint16_t*>(words)[row(s) * kChunks + chunk] = uint16_t(bits);
  }
  any = __syncthreads_or(any), every = __syncthreads_and(every);
  const int kind = !any ? kEmptyBlock : every ? kFullBlock : block.kind;
  const BlockMask& made = p.block_mask;
  uint32_t *const by_row = Mutable(made.element_masks), *const by_key = Mutable(made.transposed_masks);
  const int64_t from = int64_t(blockIdx.x) * (kSide * kWordsOfRow);  // the offset in the tables of bits
  for (int w = threadIdx.x; kind == block.kind && by_row != nullptr && w < kSide * kWordsOfRow; w += kMaskThreads)
    by_row[from + w] = words[w];
  if (kind == block.kind && by_key != nullptr) Transpose(words, by_key + from, kSide, kSide);
  const int columns = (p.kv_len + kSide - 1) / kSide, rows = (p.q_len + kSide - 1) / kSide;
  const int64_t head = HeadOfBlocks(made, block.batch, block.head);
  int32_t* const blocks = Mutable(made.blocks) + head * rows * columns;
  for (int64_t x = threadIdx.x; x < int64_t(block.rows.count) * block.columns.count; x += kMaskThreads) {
    const int64_t row = block.rows.first + x / block.columns.count;
    blocks[row * columns + block.columns.first + x % block.columns.count] = kind;
  }
}

// Writes the lists, the longest first. Each head of the resulting mask has two CTAs, for block rows and for block
// columns.
extern "C" __global__ void __launch_bounds__(kMaskThreads) jax_flash_mask_lists(const __grid_constant__ Params p) {
  const Lists lists(p, blockIdx.x / 2, blockIdx.x % 2 == 0);
  for (int x = threadIdx.x; x < lists.count; x += kMaskThreads) lists.counts[x] = lists.Count(x);
  __syncthreads();
  for (int x = threadIdx.x; x < lists.count; x += kMaskThreads) lists.Write(x);
}

// Transposes the element masks of the operand for Hopper's backward, with one CTA for each.
extern "C" __global__ void __launch_bounds__(kMaskThreads) jax_flash_mask_transpose(const __grid_constant__ Params p) {
  constexpr int kRowWords = WordsOfLine(kKVBlock), kColumnWords = WordsOfLine(kQBlock);
  const int64_t number = blockIdx.x;
  Transpose(p.block_mask.element_masks + number * (kQBlock * kRowWords),
            Mutable(p.block_mask.transposed_masks) + number * (kKVBlock * kColumnWords), kQBlock, kKVBlock);
}

}  // namespace jax_flash

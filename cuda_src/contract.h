// What the host and the kernels both rely on, said once: the arguments of a kernel, and the sizes in which both count.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jax_flash {

// --- Sizes ---

// Of a box of a tensor map: what is beside each other is always kBoxBytes. A box of K or V in the forward and of Q, dO,
// K or V in the backward has the rows of a tile; one of a result, and of Q in the forward, kBoxRows; one of the rows
// that the backward does alongside (hopper/backward_alongside.cuh) kAlongsideRows.
constexpr int kBoxBytes = 128, kBoxRows = 64, kAlongsideRows = 16;

// Queries of a head in the backward's scratch, and keys where dK and dV are added up there, are a multiple of this: no
// tile of the backward has more.
constexpr int kRowPadding = 128;
constexpr int kSumRows = 16;   // the f32 sums of dQ, dK and dV are in blocks of so many rows,
constexpr int kRowBlock = 64;  // of which Hopper's kernels before and after the backward do so many at a time

constexpr int kWarpgroup = 128;     // threads: a CTA on Hopper has one that loads, and its consumers
constexpr int kRowThreads = 256;    // of a block of the kernels before and after a backward
constexpr int kPairedKeys = 128;    // of a CTA of Hopper's backward, or of two in a cluster
constexpr int kMergeThreads = 256;  // of a block that merges parts of the keys, each a thread's: so many parts at most

constexpr int kSegmentBlock = 64;      // queries or keys of a SegmentBounds
constexpr int kSegmentThreads = 1024;  // of a block that finds
constexpr int kSegmentBlocks = 4;      // so many of them

// Threads that a row of O takes in the mma.sync kernels' backward_prepare: 8 elements each.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int LanesOfRow(int dim) {
  return dim <= 8 ? 1 : 2 * LanesOfRow((dim + 1) / 2);
}

// --- What a kernel is compiled for ---

// Kernels for GPUs from compute capability 8.0 on, and Hopper's own, for 9.0 alone: kernels/ampere and
// kernels/hopper.
enum class Family : int { kAmpere = 80, kHopper = 90 };

// The host writes one of each for every kernel, as the constants kProblem and kTiling of its header this_kernel.h
// (kernel_config.h). They hold what machine code depends on and nothing else: problems that differ in other things
// share a cubin. Each field is FIELD(type, name).

// What a problem has; what only the backward, or only its main kernel, asks for is 0 elsewhere.
#define JAX_FLASH_KERNEL_PROBLEM(FIELD)               \
  FIELD(DType, dtype)                                 \
  FIELD(DType, bias_dtype)                            \
  FIELD(int, qk_dim)                                  \
  FIELD(int, v_dim)                                   \
  FIELD(bool, causal)                                 \
  FIELD(bool, window)                                 \
  FIELD(bool, q_lengths)                              \
  FIELD(bool, kv_lengths)                             \
  FIELD(bool, segments)                               \
  FIELD(bool, query_offset)                           \
  FIELD(bool, mask)                                   \
  FIELD(int, q_block) /* 0: there is no block mask */ \
  FIELD(int, kv_block)                                \
  FIELD(bool, soft_cap)                               \
  FIELD(bool, dropout)                                \
  FIELD(bool, full_precision) /* of f32 */            \
  FIELD(bool, dlogsumexp)                             \
  FIELD(bool, dq) /* added up in f32 */               \
  FIELD(bool, dk)                                     \
  FIELD(bool, dv)

// What the plan has chosen.
#define JAX_FLASH_KERNEL_TILING(FIELD)                                                                            \
  FIELD(Family, family)                                                                                           \
  FIELD(int, rows)       /* queries of a tile of S */                                                             \
  FIELD(int, cols)       /* keys */                                                                               \
  FIELD(int, groups)     /* warps, or on Hopper warpgroups beside the one that loads */                           \
  FIELD(int, stages)     /* tiles in flight */                                                                    \
  FIELD(int, packed)     /* a forward over parts of the keys: heads whose rows share a tile; else 0 */            \
  FIELD(bool, alongside) /* Hopper's backward is all in one kernel; */                                            \
  FIELD(bool, sum_kv)    /* heads of Q that share keys are then computed one by one, dK and dV added up in f32 */ \
  FIELD(bool, together)  /* or they are walked together */

#define JAX_FLASH_MEMBER(type, name) type name;
struct KernelProblem {
  JAX_FLASH_KERNEL_PROBLEM(JAX_FLASH_MEMBER)
};
struct KernelTiling {
  JAX_FLASH_KERNEL_TILING(JAX_FLASH_MEMBER)
};
#undef JAX_FLASH_MEMBER

// --- Arguments ---

// A [B, N, T, S] operand with its strides in elements, 0 for a broadcast dimension.
template <typename T>
struct Broadcast {
  T* data;
  int64_t batch, head, row, column;
};

// What the 64 rows of Q of a block can see as far as segment ids tell: keys of `any` at most, all keys of `every`. (And
// the same for 64 keys and the rows that see them.)
struct SegmentBounds {
  int any_lo, any_hi, every_lo, every_hi;
};

// A mask of blocks (jax_flash/block_sparse.py).
struct BlockMask {
  const int32_t *blocks, *row_lists, *column_lists;
  const uint32_t* element_masks;
  int element_mask_count;       // of a batch entry
  int row_width, column_width;  // of the lists
  int batch, head;              // the next batch entry's or head's is so many heads further on; 0: it is the same
};

// Every kernel of a call has the same. What the problem does not have is null.
struct Params {
  int batch, q_heads, kv_heads, q_len, kv_len;
  const float* scale;  // τ
  float soft_cap;
  int64_t window_left, window_right;  // -1: unbounded

  const void *query, *key, *value;
  Broadcast<const void> bias;
  Broadcast<const uint8_t> mask;
  const int32_t *q_lengths, *kv_lengths, *q_segments, *kv_segments, *query_offset;
  SegmentBounds *q_bounds, *kv_bounds;  // scratch: [batch, block of 64 queries or keys]
  const uint32_t *seed, *batch_id, *head_id;
  uint32_t drop_threshold;  // in both halves, for what takes two entries at once
  float keep_scale;

  void* o;       // the forward's result, the backward's operand; so are
  float *l, *m;  // [batch, head, row]

  // The backward only.
  const void* d_o;
  const float* dlogsumexp;  // [batch, head, row]
  float *logsumexp, *d;     // scratch: what a kernel needs of m, l and D, in the kernel's own order
  float* dq_sum;            // scratch: dQ in f32, in the kernel's own order; and
  float *dk_sum, *dv_sum;   // if heads of Q that share keys are computed one by one (kSumKV), 0 at first
  void *dq, *dk, *dv;
  float* dbias;
  float* dbias_parts;  // scratch: the parts of dbias [parts, of its shape]; if there are several
  int parts;           // of dbias; of the keys in a forward over parts of them
  int scratch_heads;   // for how many heads scratch is used at a time, if hopper/backward_alongside.cuh does all
  int last_heads;      // of all heads the last, whose tiles may be taken together; no more than scratch_heads
  float* maximum;      // scratch: m, where the kernel on Hopper takes it apart (kMaximumApart)

  // The forward over parts of the keys only. Scratch, [part, batch, head, row]: what each part has for O, l and m.
  float *o_parts, *l_parts, *m_parts;

  BlockMask block_mask;

  // Scratch, 0 at first: what CTAs on Hopper count.
  int* taken;  // tiles, of which each CTA takes the next
  // In the backward: blocks of 64 rows of Q, likewise; of each head those that are prepared, and the tiles of keys
  // whose dQ has been added.
  int *rows_taken, *prepared, *added;
};

// A CUtensorMap: of a [batch, time, heads, dim] array, in boxes of rows of kBoxBytes, swizzled.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Hopper's kernels have these beside Params, in this order, each a parameter of its own (in a struct ptxas gives some
// kernels other registers). The map of an array that a call does not have is not looked at; *_rows have boxes of
// kAlongsideRows.
#define JAX_FLASH_FORWARD_MAPS(MAP) MAP(query) MAP(key) MAP(value) MAP(o)
#define JAX_FLASH_BACKWARD_MAPS(MAP) \
  MAP(query) MAP(key) MAP(value) MAP(d_o) MAP(dk) MAP(dv) MAP(o_rows) MAP(d_o_rows) MAP(dq_rows)

}  // namespace jax_flash

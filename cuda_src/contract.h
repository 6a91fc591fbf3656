// The contract between the host and the kernels: the arguments of kernels, and the sizes that both use.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/ops.h"

namespace jax_flash {

// --- Sizes ---

// Rows of a TMA box have kBoxBytes. The number of rows depends on the array. Boxes of K and V in the forward, and of Q,
// dO, K and V in the backward, have the rows of a tile. Boxes of results, and of Q in the forward, have kBoxRows. Boxes
// of the fused row kernels (hopper/backward_fused_rows.cuh) have kFusedBoxRows.
constexpr int kBoxBytes = 128, kBoxRows = 64, kFusedBoxRows = 16;

// In the backward's scratch, the queries of a head are padded to a multiple of this, and its keys too if dK and dV are
// summed there. No tile of the backward is larger.
constexpr int kRowPadding = 128;
constexpr int kSumRows = 16;   // rows of a block of the f32 sums of dQ, dK and dV
constexpr int kRowBlock = 64;  // rows of a block in Hopper's kernels before and after the backward

constexpr int kWarpgroup = 128;     // threads of a warpgroup; on Hopper a CTA has one producer, and its consumers
constexpr int kRowThreads = 256;    // threads of a CTA of the kernels before and after a backward
constexpr int kBackwardKeys = 128;  // keys of a CTA of Hopper's backward in 16 bits, or of a pair of CTAs (glossary)
constexpr int kMergeThreads = 256;  // threads of a CTA that merges parts of the keys
constexpr int kMinKVTiles = 4;      // minimum kv tiles of a part, if there are several parts

constexpr int kMaskBlock = 128;    // queries and keys of a block of a computed block mask
constexpr int kMaskThreads = 256;  // threads of a CTA that computes a block mask

constexpr int kSegmentBlock = 64;      // queries or keys of a SegmentBounds
constexpr int kSegmentThreads = 1024;  // threads of a CTA that computes SegmentBounds
constexpr int kSegmentBlocks = 4;      // SegmentBounds that a CTA computes

// The largest step of a loop over a head's queries or keys. Lengths are at most kMaxLength, so loop counters do not
// overflow an int.
constexpr int kMaxStep = 4096;
constexpr int kMaxLength = 0x7FFFFFFF - kMaxStep;

// Lanes for a row of O in Ampere's backward_prepare, with 8 elements each at a time.
JAX_FLASH_STATIC_HOST_DEVICE constexpr int LanesOfRow(int dim) {
  return dim <= 8 ? 1 : dim > 128 ? 32 : 2 * LanesOfRow((dim + 1) / 2);
}

// Wide head dims have kernels of their own, which go through tiles in slices of columns (ampere/slices.cuh). Warps that
// share rows divide a slice, and each has at least 16 columns.
constexpr int kMaxDim = 576, kWideSlice = 64;
JAX_FLASH_STATIC_HOST_DEVICE constexpr bool IsWide(int64_t dim) { return dim > 256; }
JAX_FLASH_STATIC_HOST_DEVICE constexpr int WideRowWarps(int rows) { return rows >= 32 ? 2 : 1; }
JAX_FLASH_STATIC_HOST_DEVICE constexpr int WideWarps(int rows) { return WideRowWarps(rows) * kWideSlice / 16; }

// --- Compile-time configuration ---

// The Ampere family (kernels/ampere) runs from compute capability 8.0 on. The Hopper family (kernels/hopper) runs only
// on 9.0.
enum class Family : int { kAmpere = 80, kHopper = 90 };

// A cap above 1000 amplifies tanh's error of 1e-7 too much.
enum class SoftCap : int { kNone, kUsual, kLarge };
JAX_FLASH_STATIC_HOST_DEVICE constexpr SoftCap SoftCapOf(double cap) {
  return cap > 1000 ? SoftCap::kLarge : cap > 0 ? SoftCap::kUsual : SoftCap::kNone;
}

// The host writes a header this_kernel.h for each kernel (kernel_config.h), with two structs of constants: kProblem,
// the properties of the problem, and kTiling, the tile sizes and variants. They hold exactly what machine code depends
// on, so problems that differ in other ways share a cubin.

// The fields of kProblem, FIELD(type, name, value). AddUnit in plan/plan.cc evaluates `value` for a problem `p`.
// Fields that only the backward, or only its main kernel, needs are 0 elsewhere. Properties of score programs are
// constants of another header, this_program.h.
#define JAX_FLASH_KERNEL_PROBLEM(FIELD)                                           \
  FIELD(DType, dtype, p.dtype)                                                    \
  FIELD(DType, bias_dtype, p.score.bias_dtype)                                    \
  FIELD(int, qk_dim, int(p.qk_dim))                                               \
  FIELD(int, v_dim, int(p.v_dim))                                                 \
  FIELD(bool, causal, p.mask.is_causal)                                           \
  FIELD(bool, window, p.mask.local_window_size.present())                         \
  FIELD(bool, q_lengths, p.mask.query_seq_lengths)                                \
  FIELD(bool, kv_lengths, p.mask.key_value_seq_lengths)                           \
  FIELD(bool, segments, p.mask.segment_ids)                                       \
  FIELD(int, page, int(p.page))       /* keys per page; 0: no pages */            \
  FIELD(bool, latent, ReadsLatent(p)) /* is the value the start of the key? */    \
  FIELD(bool, ranges, p.mask.ranges)                                              \
  FIELD(bool, query_offset, p.mask.query_offset)                                  \
  FIELD(bool, origin, p.origin)                                                   \
  FIELD(bool, dropout_tiles, p.dropout_tiles)                                     \
  FIELD(bool, mask, p.mask.array.present)                                         \
  FIELD(int, q_block, int(p.mask.q_block)) /* 0: no block mask */                 \
  FIELD(int, kv_block, int(p.mask.kv_block))                                      \
  FIELD(SoftCap, soft_cap, SoftCapOf(p.score.logits_soft_cap))                    \
  FIELD(bool, dropout, p.dropout())                                               \
  FIELD(bool, score_mod, p.score.score_mod.present())                             \
  FIELD(bool, mask_mod, p.mask.mask_mod.present())                                \
  FIELD(bool, score_grad, backward&& p.score.score_mod.present() && p.needs_ds()) \
  FIELD(bool, captured_gradients, main&& p.captured_gradients())                  \
  FIELD(bool, full_precision, p.dtype == DType::kF32 && p.full_precision)         \
  FIELD(bool, sinks, p.sinks.present)                                             \
  FIELD(bool, empty_rows, backward&& p.may_empty_rows)                            \
  FIELD(bool, unrounded, p.output_dtype() != p.dtype) /* o and dq are f32 */      \
  FIELD(bool, dlogsumexp, backward&& p.dlogsumexp)                                \
  FIELD(bool, dq, main&& SumsDQ(p)) /* summed in f32 */                           \
  FIELD(bool, dk, main&& p.dk)                                                    \
  FIELD(bool, dv, main&& p.dv)                                                    \
  FIELD(bool, query_tangent, tangent&& p.query_tangent)                           \
  FIELD(bool, key_tangent, tangent&& p.key_tangent)                               \
  FIELD(bool, value_tangent, tangent&& p.value_tangent)                           \
  FIELD(bool, bias_tangent, tangent&& p.bias_tangent)                             \
  FIELD(bool, sinks_tangent, tangent&& p.sinks_tangent)                           \
  FIELD(bool, score_tangent, tangent&& p.score.score_tangent.present())           \
  FIELD(bool, l_tangent, tangent&& p.l_tangent) /* a result */

// The fields of kTiling, which the plan chooses: FIELD(type, name).
#define JAX_FLASH_KERNEL_TILING(FIELD)                                                                     \
  FIELD(Family, family)                                                                                    \
  FIELD(int, rows)               /* queries of a tile of S */                                              \
  FIELD(int, cols)               /* keys */                                                                \
  FIELD(int, groups)             /* warps, or on Hopper consumer warpgroups */                             \
  FIELD(int, stages)             /* tiles in flight */                                                     \
  FIELD(bool, bias_tiles)        /* does TMA load the bias? */                                             \
  FIELD(int, packed)             /* split-KV forward: heads whose rows share a tile; else 0 */             \
  FIELD(bool, balanced)          /* split-KV by equal stretches of all keys (ampere/balanced_split.cuh) */ \
  FIELD(int, merged_rows)        /* rows of O that a CTA merges: 1, 2, 4 or 8 */                           \
  FIELD(bool, fused_rows)        /* does Hopper's backward fuse the row kernels? */                        \
  FIELD(bool, sum_kv)            /* then: query heads one by one, with dK and dV summed in f32? */         \
  FIELD(bool, interleaved_heads) /* else: loop over q tiles first, then over the heads of a group? */      \
  FIELD(bool, ordered)           /* does Hopper's backward add to dQ in a fixed order? */

#define JAX_FLASH_MEMBER(type, name, ...) type name;
struct KernelProblem {
  JAX_FLASH_KERNEL_PROBLEM(JAX_FLASH_MEMBER)
};
struct KernelTiling {
  JAX_FLASH_KERNEL_TILING(JAX_FLASH_MEMBER)
};

// --- Arguments ---

// A [B, N, T, S] operand with its strides in elements; 0 for broadcast dimensions.
template <typename T>
struct Broadcast {
  T* data;
  int64_t batch, head, row, column;
};

// The keys that a block of 64 queries can see by segment ids: at most the keys of `any`, and all keys of `every`. Also
// the rows that see a block of 64 keys.
struct SegmentBounds {
  int any_lo, any_hi, every_lo, every_hi;
};

// The parts of the keys of a q tile.
struct PartsOfTile {
  int first, count;
};

// The members of BlockMask, Params and SinkParams are FIELD(type, name, value). The host evaluates `value` from the
// problem `p`, its operands `in`, the forward's results, the cotangents, the gradients and the layout of scratch
// memory; `at` converts an offset to an address (custom_calls.cc). Absent arrays are null.

// A block mask (jax_flash/block_sparse.py), or the result of scheduler/mask_blocks.cuh.
#define JAX_FLASH_BLOCK_MASK(FIELD)                                                               \
  FIELD(const int32_t*, blocks, in.blocks)                                                        \
  FIELD(const int32_t*, row_lists, in.row_lists)                                                  \
  FIELD(const int32_t*, column_lists, in.column_lists)                                            \
  FIELD(const uint32_t*, element_masks, in.element_masks)                                         \
  FIELD(const uint32_t*, transposed_masks, at(layout.transposed_bits)) /* by key */               \
  FIELD(int, element_mask_count, int(p.mask.element_masks))            /* for each batch entry */ \
  FIELD(int, row_list_size, int(p.mask.row_list_size))                 /* size of a list */       \
  FIELD(int, column_list_size, int(p.mask.column_list_size))                                      \
  /* Strides in heads between batch entries and between heads; 0: shared. */                      \
  FIELD(int, batch, p.mask.block_mask.batch ? (p.mask.block_mask.heads ? int(p.q_heads) : 1) : 0) \
  FIELD(int, head, p.mask.block_mask.heads)

// The arguments of all kernels of a call.
#define JAX_FLASH_PARAMS(FIELD)                                                                                       \
  FIELD(int, batch, int(p.batch))                                                                                     \
  FIELD(int, q_heads, int(p.q_heads))                                                                                 \
  FIELD(int, kv_heads, int(p.kv_heads))                                                                               \
  FIELD(int, q_len, int(p.q_len))                                                                                     \
  FIELD(int, kv_len, int(p.kv_len))                                                                                   \
  FIELD(const float*, scale, static_cast<const float*>(in.scale)) /* τ */                                             \
  FIELD(float, soft_cap, float(p.score.logits_soft_cap))                                                              \
  FIELD(float, inverse_soft_cap, p.score.logits_soft_cap > 0 ? float(1 / p.score.logits_soft_cap) : 0.0f)             \
  FIELD(int64_t, window_left, p.mask.local_window_size.left) /* -1: unbounded */                                      \
  FIELD(int64_t, window_right, p.mask.local_window_size.right)                                                        \
  FIELD(const void*, query, in.query)                                                                                 \
  FIELD(const void*, key, p.page > 0 ? in.key_pages : in.key)                                                         \
  FIELD(const void*, value, p.page > 0 ? in.value_pages : in.value)                                                   \
  FIELD(Broadcast<const void>, bias, BroadcastOf(in.bias, p.score.bias, p))                                           \
  FIELD(Broadcast<const uint8_t>, mask, BroadcastOf(in.mask, p.mask.array, p))                                        \
  FIELD(const int32_t*, q_lengths, in.query_seq_lengths)                                                              \
  FIELD(const int32_t*, kv_lengths, in.key_value_seq_lengths)                                                         \
  FIELD(const int32_t*, q_segments, in.query_segment_ids)                                                             \
  FIELD(const int32_t*, kv_segments, in.key_value_segment_ids)                                                        \
  FIELD(const int32_t*, query_offset, in.query_offset)                                                                \
  FIELD(SegmentBounds*, q_bounds, at(layout.q_bounds)) /* [batch, block of 64 queries or keys] */                     \
  FIELD(SegmentBounds*, kv_bounds, at(layout.kv_bounds))                                                              \
  FIELD(const uint32_t*, seed, in.seed)                                                                               \
  FIELD(const uint32_t*, batch_id, in.batch_id)                                                                       \
  FIELD(const uint32_t*, head_id, in.head_id)                                                                         \
  /* In both halves, for comparisons of two entries at a time. */                                                     \
  FIELD(uint32_t, drop_threshold, uint32_t(p.drop_threshold) * 0x10001)                                               \
  FIELD(float, keep_scale, float(p.keep_scale()))                                                                     \
  FIELD(void*, o, forward.o)                                                                                          \
  FIELD(float*, l, static_cast<float*>(forward.l)) /* [batch, head, row] */                                           \
  FIELD(float*, m, static_cast<float*>(forward.m))                                                                    \
  FIELD(const void*, d_o, cotangents.d_o)                                                                             \
  FIELD(const float*, dlogsumexp, static_cast<const float*>(cotangents.dlogsumexp)) /* [batch, head, row] */          \
  /* L and D of each row, and dQ in f32, in the order of the kernel. */                                               \
  FIELD(float*, logsumexp, at(layout.logsumexp))                                                                      \
  FIELD(float*, d, at(layout.d))                                                                                      \
  FIELD(float*, dq_sum, at(layout.dq_sum))                                                                            \
  /* With kSumKV: sums of dK and dV, zeroed by the host. */                                                           \
  FIELD(float*, dk_sum, at(layout.dk_sum))                                                                            \
  FIELD(float*, dv_sum, at(layout.dv_sum))                                                                            \
  FIELD(void*, dq, gradients.dq)                                                                                      \
  FIELD(void*, dk, gradients.dk)                                                                                      \
  FIELD(void*, dv, gradients.dv)                                                                                      \
  FIELD(void*, dbias, gradients.dbias)                                                                                \
  FIELD(float*, dbias_parts, at(layout.dbias_parts)) /* [parts, shape of dbias], if there are several parts */        \
  /* The number of parts of dbias, or of split-KV; if balanced, of stretches. */                                      \
  FIELD(int, parts, layout.parts)                                                                                     \
  /* With kFusedRows: the number of heads with scratch at a time, */                                                  \
  FIELD(int, scratch_heads, layout.heads)                                                                             \
  /* and the number of last heads, whose kv tiles may be interleaved; at most scratch_heads. With kOrdered, the kv */ \
  /* tiles of all heads are interleaved, this many heads at a time. */                                                \
  FIELD(int, heads_at_a_time, layout.heads_at_a_time)                                                                 \
  FIELD(float*, maximum, at(layout.maximum)) /* m, with kSeparateMaximum on Hopper */                                 \
  /* Split-KV: O, l and m of each part, [part, batch, head, row]; if balanced, [part, kv head, row of the q tile]. */ \
  FIELD(float*, o_parts, at(layout.o_parts))                                                                          \
  FIELD(float*, l_parts, at(layout.l_parts))                                                                          \
  FIELD(float*, m_parts, at(layout.m_parts))                                                                          \
  FIELD(BlockMask, block_mask, block_mask(blocks_p, blocks_in))                                                       \
  FIELD(int*, mask_counts, at(layout.mask_counts))  /* scratch: the lengths of its lists */                           \
  FIELD(BlockMask, given_blocks, block_mask(p, in)) /* the operand; differs if a mask is converted */                 \
  /* Counters, zeroed by the host: the next tile, */                                                                  \
  FIELD(int*, tile_counter, at(layout.tile_counter))                                                                  \
  /* with kFusedRows the next block of 64 rows of Q, */                                                               \
  FIELD(int*, row_block_counter, at(layout.row_block_counter))                                                        \
  /* of each head the prepared blocks and the kv tiles added to dQ (with kOrdered, of each q tile and CTA). */        \
  FIELD(int*, prepared, at(layout.prepared))                                                                          \
  FIELD(int*, added, at(layout.added))                                                                                \
  FIELD(const int32_t*, origin, in.origin)       /* global index of the first row and key */                          \
  FIELD(const int32_t*, row_tiles, in.row_tiles) /* global index of each tile of 16 rows, or keys */                  \
  FIELD(const int32_t*, key_tiles, in.key_tiles)                                                                      \
  FIELD(const int32_t*, keys_of_rows, in.keys_of_rows)                                                                \
  FIELD(const int32_t*, rows_of_keys, in.rows_of_keys)                                                                \
  FIELD(const int32_t*, page_table, in.page_table) /* [batch, page of the entry's keys] */                            \
  FIELD(int, pages, int(p.pages))                                                                                     \
  FIELD(PartsOfTile*, tile_parts, at(layout.tile_parts)) /* [batch, q tile of a head], if balanced */                 \
  /* With kEmptyRows on Hopper: one bit for each row of Q, in the order of d. */                                      \
  FIELD(uint32_t*, empty_rows, at(layout.empty_rows))

struct BlockMask {
  JAX_FLASH_BLOCK_MASK(JAX_FLASH_MEMBER)
};
struct Params {
  JAX_FLASH_PARAMS(JAX_FLASH_MEMBER)
};

// The arguments of kernels with score programs: the ids of batch entries and heads, the captured arrays, and their
// gradients.
struct ProgramParams : Params {
  const int32_t *program_batch, *program_head;
  const void* captured[kMaxCaptured];
  float* dcaptured[kMaxCaptured];
};

// The arguments of kernels with sinks. A separate struct leaves the arguments of other kernels unchanged.
#define JAX_FLASH_SINK_PARAMS(FIELD)                                                                 \
  FIELD(Broadcast<const float>, sinks, BroadcastOf(static_cast<const float*>(in.sinks), p.sinks, p)) \
  FIELD(float*, dsinks, static_cast<float*>(gradients.dsinks)) /* [batch, head, row], or null */
struct SinkParams : ProgramParams {
  JAX_FLASH_SINK_PARAMS(JAX_FLASH_MEMBER)
};

// The arguments of the tangent pass.
#define JAX_FLASH_TANGENT_PARAMS(FIELD)                                                           \
  FIELD(const void*, query_tangent, tangents.query_tangent)                                       \
  FIELD(const void*, key_tangent, tangents.key_tangent)                                           \
  FIELD(const void*, value_tangent, tangents.value_tangent)                                       \
  FIELD(Broadcast<const void>, bias_tangent, BroadcastOf(tangents.bias_tangent, p.score.bias, p)) \
  FIELD(Broadcast<const float>, sinks_tangent,                                                    \
        BroadcastOf(static_cast<const float*>(tangents.sinks_tangent), p.sinks, p))               \
  FIELD(void*, o_tangent, tangent_results.o_tangent)                                              \
  FIELD(float*, l_tangent, static_cast<float*>(tangent_results.l_tangent)) /* [batch, head, row], or null */
struct TangentParams : SinkParams {
  JAX_FLASH_TANGENT_PARAMS(JAX_FLASH_MEMBER)
};
#undef JAX_FLASH_MEMBER

// Do the kernels read an operand, or the tangent of an operand (common/tables.h)? The plan does not compile if one is
// not listed, and refuses calls with one that is false here.
namespace reads {
constexpr bool query = true, key = true, value = true, scale = true, bias = true, mask = true, sinks = true;
constexpr bool key_pages = true, value_pages = true, page_table = true;
constexpr bool query_seq_lengths = true, key_value_seq_lengths = true, query_offset = true, origin = true;
constexpr bool row_tiles = true, key_tiles = true;
constexpr bool query_segment_ids = true, key_value_segment_ids = true, keys_of_rows = true, rows_of_keys = true;
constexpr bool blocks = true, row_lists = true, column_lists = true, element_masks = true;
constexpr bool seed = true, batch_id = true, head_id = true, program_batch = true, program_head = true;
constexpr bool query_tangent = true, key_tangent = true, value_tangent = true, bias_tangent = true;
constexpr bool sinks_tangent = true;
}  // namespace reads

// Do the kernels compute a gradient? The same for these.
namespace writes {
constexpr bool dq = true, dk = true, dv = true, dbias = true, dsinks = true;
}  // namespace writes

// A CUtensorMap of a [batch, time, heads, dim] array, with swizzled boxes of rows of kBoxBytes.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The tensor maps of Hopper's kernels, in this order. Each is a separate parameter, because ptxas allocates different
// registers for some kernels if they are in a struct. Maps of absent arrays are not used. *_rows have boxes of
// kFusedBoxRows.
#define JAX_FLASH_FORWARD_MAPS(MAP) MAP(query) MAP(key) MAP(value) MAP(o) MAP(bias)
#define JAX_FLASH_BACKWARD_MAPS(MAP) \
  MAP(query) MAP(key) MAP(value) MAP(d_o) MAP(dk) MAP(dv) MAP(o_rows) MAP(d_o_rows) MAP(dq_rows) MAP(bias)
#define JAX_FLASH_BACKWARD_BIAS_MAPS(MAP) MAP(query) MAP(key) MAP(value) MAP(d_o) MAP(bias) MAP(dbias)
#define JAX_FLASH_TANGENT_MAPS(MAP) \
  MAP(query) MAP(key) MAP(value) MAP(query_tangent) MAP(key_tangent) MAP(value_tangent)

}  // namespace jax_flash

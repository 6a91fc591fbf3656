// One attention problem: everything about a call that is static. `jax_flash/problem.py` writes it as the text attribute
// `problem` of a custom call. The handlers of every backend parse it with `Decode`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/blocks.h"
#include "common/dtype.h"
#include "common/program.h"
#include "common/tables.h"

namespace jax_flash {

constexpr int kProblemVersion = 10;  // of the text; increases when older readers would misread it
constexpr int kPageStep = 8;         // the size of a page is a multiple of this many keys
// A larger value would be NaN as a bfloat16; Hopper compares two entries at a time in this type.
constexpr int kMaxDropThreshold = 0x7F80;

// The dimensions of a [B, N, T, S] operand that have their full size; the others have size 1 and are broadcast.
struct Extent {
  bool present = false;
  bool batch = false, heads = false, rows = false, columns = false;
};

// The extent of an operand that is either full or absent, or a given extent.
constexpr Extent ExtentOf(bool present) { return {present, true, true, true, true}; }
constexpr Extent ExtentOf(const Extent& extent) { return extent; }

// The number of keys that a query sees before (left) and after (right) its own position; -1: unbounded.
struct WindowSize {
  int64_t left = -1, right = -1;
  bool present() const { return left >= 0 || right >= 0; }
};

// The tables below list every field in the order of Python's classes, FIELD(type, name, default). The default of a
// number is also its minimum. Python computes the first field of a problem.

// Which entries of the score matrix are visible (Mask in jax_flash/masks.py).
#define JAX_FLASH_MASK(FIELD)                                                                                  \
  FIELD(bool, is_causal, false)            /* key j is visible from position p = i + query_offset if j <= p */ \
  FIELD(WindowSize, local_window_size, {}) /* p - left <= j <= p + right */                                    \
  FIELD(bool, query_seq_lengths, false)    /* is the array present? also for the next four */                  \
  FIELD(bool, key_value_seq_lengths, false)                                                                    \
  FIELD(bool, query_offset, false)                                                                             \
  FIELD(bool, segment_ids, false)                                                                              \
  FIELD(bool, ranges, false)    /* replaces is_causal, local_window_size and query_seq_lengths */              \
  FIELD(Extent, array, {})      /* the operand `mask` */                                                       \
  FIELD(Extent, block_mask, {}) /* rows and columns always have their full size */                             \
  FIELD(int64_t, q_block, 0)    /* size of a block, multiples of 16 */                                         \
  FIELD(int64_t, kv_block, 0)                                                                                  \
  FIELD(int64_t, element_masks, 0) /* masks of partial blocks, for each batch entry */                         \
  FIELD(int64_t, row_list_size, 0) /* sizes of the lists of blocks */                                          \
  FIELD(int64_t, column_list_size, 0)                                                                          \
  FIELD(Program, mask_mod, {})

// Operations on a score, in this order: cap, bias, program (Score in jax_flash/scores.py).
#define JAX_FLASH_SCORE(FIELD)                                                     \
  FIELD(double, logits_soft_cap, 0) /* s <- cap tanh(s / cap); 0: none */          \
  FIELD(Extent, bias, {})           /* s <- s + bias */                            \
  FIELD(DType, bias_dtype, DType::kNone)                                           \
  FIELD(Program, score_mod, {})     /* s <- score_mod(s, ...) */                   \
  FIELD(Program, score_grad, {})    /* backward only: the gradient of score_mod */ \
  FIELD(Program, score_tangent, {}) /* tangent only: the tangent of score_mod */

#define JAX_FLASH_PROBLEM(FIELD)                                                                                      \
  FIELD(bool, may_empty_rows, false) /* may a row see no key, with l = 0? */                                          \
  FIELD(int64_t, batch, 0)           /* B */                                                                          \
  FIELD(int64_t, q_len, 0)           /* T */                                                                          \
  FIELD(int64_t, kv_len, 0)          /* S */                                                                          \
  FIELD(int64_t, q_heads, 0)         /* N */                                                                          \
  FIELD(int64_t, kv_heads, 0)        /* K, divides N: query head n reads key/value head n / (N / K) */                \
  FIELD(int64_t, qk_dim, 0)          /* D */                                                                          \
  FIELD(int64_t, v_dim, 0)           /* E */                                                                          \
  FIELD(DType, dtype, DType::kNone)                                                                                   \
  FIELD(Extent, sinks, {})                   /* an extra logit in the softmax of each row; by batch entry and head */ \
  FIELD(bool, origin, false)                 /* an offset of rows and keys in dropout and programs */                 \
  FIELD(bool, dropout_tiles, false)          /* dropout counts tiles of 16 rows and keys by tables, not by origin */  \
  FIELD(int64_t, page, 0)                    /* keys of a page, a multiple of kPageStep; 0: no pages */               \
  FIELD(int64_t, pages, 0)                   /* number of pages */                                                    \
  FIELD(bool, latent, false)                 /* forward only: the value is the start of the key, and no operand */    \
  FIELD(std::vector<Captured>, captured, {}) /* arrays that programs load from */                                     \
  FIELD(int64_t, drop_threshold, 0)          /* entries with 15 random bits below it are dropped; 0: no dropout */    \
  FIELD(bool, full_precision, false)         /* f32 only: no TF32 */                                                  \
  FIELD(bool, deterministic, false)          /* backward: bitwise reproducible gradients */                           \
  FIELD(bool, unrounded, false)              /* o and dq have the accumulation dtype */                               \
  FIELD(bool, dlogsumexp, false)             /* backward only: an operand, the cotangent of m + log ℓ */              \
  FIELD(bool, l_tangent, false)              /* tangent only: a result, the tangent of ℓ */

#define JAX_FLASH_MEMBER(type, name, value) type name = value;
struct Mask {
  JAX_FLASH_MASK(JAX_FLASH_MEMBER)
};

struct Score {
  JAX_FLASH_SCORE(JAX_FLASH_MEMBER)
};

// The gradients that a backward computes: bool dq, dk, …
struct RequestedGradients {
#define JAX_FLASH_FLAG(operand, gradient, ...) bool gradient = false;
  JAX_FLASH_DERIVATIVES(JAX_FLASH_FLAG)
#undef JAX_FLASH_FLAG
};

// The operands with a tangent in a tangent pass: bool query_tangent, key_tangent, …
struct MovingOperands {
#define JAX_FLASH_FLAG(operand, ...) bool operand##_tangent = false;
  JAX_FLASH_DERIVATIVES(JAX_FLASH_FLAG)
#undef JAX_FLASH_FLAG
};

// In the text and in Python, the bases are the fields `requested` and `moving`, after the other fields.
struct Problem : RequestedGradients, MovingOperands {
  JAX_FLASH_PROBLEM(JAX_FLASH_MEMBER)
  Mask mask;
  Score score;
#undef JAX_FLASH_MEMBER

  int64_t group() const { return q_heads / kv_heads; }
  // The number of pages of a batch entry.
  int64_t pages_of_entry() const { return page > 0 ? kv_len / page : 0; }
  // The dtype of sums and statistics, and on a CPU of dbias.
  DType accumulation_dtype() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  // The dtype of o and dq.
  DType output_dtype() const { return unrounded ? accumulation_dtype() : dtype; }
  DType o_dtype() const { return tangent() ? accumulation_dtype() : output_dtype(); }
  // The dtype of dbias on a GPU: the dtype of the bias if it has 16 bits.
  DType dbias_dtype() const { return BytesOf(score.bias_dtype) == 2 ? score.bias_dtype : DType::kF32; }
  // The size of a dim, by its letter; 1 if the array is broadcast over it. Letters stand for the sizes above. The
  // others are U and V for block_rows and block_columns, G for pages, A for page, M for pages_of_entry, R for
  // row_list_size, C for column_list_size, P for element_masks, Q for q_block, W for element_words, H and I for the
  // tiles of 16 rows and keys, X for the 2 words of a seed, and 1 for 1.
  int64_t size(char dim, const Extent& extent) const;
  // The number of elements of an array with these dims.
  int64_t elements(const char* dims, const Extent& extent) const;
  // The block rows and block columns of a block mask, and the 32-bit words of a row of an element mask.
  int64_t block_rows() const { return (q_len + mask.q_block - 1) / mask.q_block; }
  int64_t block_columns() const { return (kv_len + mask.kv_block - 1) / mask.kv_block; }
  int64_t element_words() const { return WordsOfLine(mask.kv_block); }
  // T and S, rounded up to whole blocks if there is a block mask.
  int64_t padded_q_len() const { return mask.block_mask.present ? block_rows() * mask.q_block : q_len; }
  int64_t padded_kv_len() const { return mask.block_mask.present ? block_columns() * mask.kv_block : kv_len; }
  bool dropout() const { return drop_threshold > 0; }
  // The elements of `captured` and their number, without standard library functions, for the CPU kernels.
  const Captured* captured_arrays() const;
  int64_t captured_count() const;
  // Is this the problem of a tangent? Do its scores have one?
  bool tangent() const;
  bool scores_move() const;
  bool programs() const { return score.score_mod.present() || mask.mask_mod.present(); }
  // Backward: does any requested gradient depend on dS? Do rows contribute to any?
  bool needs_ds() const;
  bool gradients_of_rows() const;
  // The dimensions that the result of mask_mod depends on.
  Extent mask_mod_extent() const;
  bool captured_gradients() const {
    return std::any_of(captured.begin(), captured.end(), [](const Captured& array) { return array.gradient; });
  }
  // The factor of kept entries of P, which makes the expectation exact.
  double keep_scale() const { return 32768.0 / double(32768 - drop_threshold); }
};

// Parses "version=10 batch=2 ... requested=dq,dk moving=none mask.is_causal=1 ... score.bias=b1ts ...". Every field
// must occur exactly once, and no others. Returns an error, or an empty string.
std::string Decode(std::string_view text, Problem* problem);

// The names of the fields and their Python types ("int", "float", "bool", "str", "Extent | None", "Program | None", …).
std::vector<std::pair<std::string, std::string>> ProblemFields();

}  // namespace jax_flash

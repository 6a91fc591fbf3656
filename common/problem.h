// One attention problem: everything about a call that is known before its buffers are. Python's `jax_flash/problem.py`
// writes it as the text attribute `problem` of a custom call, the handlers of every backend read it back with `Decode`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/dtype.h"

namespace jax_flash {

// Which dimensions of a [B, N, T, S] operand are there in full; the others have size 1 and are broadcast.
struct Extent {
  bool present = false;
  bool batch = false, heads = false, rows = false, columns = false;
};

struct Problem {
  int64_t batch = 0;     // B
  int64_t q_len = 0;     // T
  int64_t kv_len = 0;    // S
  int64_t q_heads = 0;   // N
  int64_t kv_heads = 0;  // K, divides N: query head n reads key/value head n / (N / K)
  int64_t qk_dim = 0;    // D
  int64_t v_dim = 0;     // E
  DType dtype = DType::kNone;

  double soft_cap = 0;                          // s <- cap tanh(s / cap) before the bias is added; 0: none
  bool causal = false;                          // key j is seen from position p = i + query_offset iff j <= p
  int64_t window_left = -1, window_right = -1;  // p - left <= j <= p + right; -1: unbounded

  DType bias_dtype = DType::kNone;
  Extent bias, mask;
  bool q_lengths = false, kv_lengths = false, segments = false, query_offset = false;

  // A mask of blocks of q_block x kv_block entries (multiples of 16), per batch entry and head or shared.
  Extent block_mask;  // its rows and columns are always there
  int64_t q_block = 0, kv_block = 0;
  int64_t element_masks = 0;              // of blocks that are neither empty nor full
  int64_t row_list = 0, column_list = 0;  // widths of the lists of blocks

  int64_t drop_threshold = 0;   // of 2^15: an entry is kept iff its 15 random bits are >= it; 0: no dropout
  bool full_precision = false;  // f32 only: no reduced-precision matrix units
  bool deterministic = false;   // the backward: the same bits in every run

  // The backward only.
  bool dlogsumexp = false;                                 // an operand: the cotangent of m + log ℓ
  bool dq = false, dk = false, dv = false, dbias = false;  // the results asked for

  int64_t group() const { return q_heads / kv_heads; }
  // Of the block mask: its rows and columns of blocks, and the 32-bit words of a row of an element mask.
  int64_t block_rows() const { return (q_len + q_block - 1) / q_block; }
  int64_t block_columns() const { return (kv_len + kv_block - 1) / kv_block; }
  int64_t element_words() const { return (kv_block + 31) / 32; }
  bool window() const { return window_left >= 0 || window_right >= 0; }
  bool dropout() const { return drop_threshold > 0; }
  // What a kept entry of P is multiplied with, so that the expectation is exact.
  double keep_scale() const { return 32768.0 / double(32768 - drop_threshold); }
};

// Reads "version=5 batch=2 q_len=128 ...". Every field must be there exactly once and nothing else.
// Returns an empty string, or what is wrong with the text.
std::string Decode(std::string_view text, Problem* problem);

}  // namespace jax_flash

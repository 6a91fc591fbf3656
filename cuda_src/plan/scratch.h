// The layout of the scratch memory of a pass: one buffer, the last result of a call, which all its kernels share.
#pragma once

#include <cstdint>

namespace jax_flash {

// Offsets of arrays in the buffer; -1: the plan has no such array. Code that adds a launch reserves the arrays of the
// launch. A head has a multiple of kRowPadding rows of Q. Arrays have rows for all heads of all batch entries, or for
// `heads` heads, which are reused in turn.
struct Scratch {
  int64_t q_bounds = -1, kv_bounds = -1;  // SegmentBounds [batch, block of kSegmentBlock]
  // The arrays of the block mask that is computed from a mask or a mask_mod (mask_blocks.h), and its element masks.
  int64_t blocks = -1, listed_rows = -1, listed_columns = -1, mask_bits = -1;
  int64_t transposed_bits = -1;                       // transposed element masks of this block mask, or of the operand
  int64_t mask_counts = -1;                           // s32 [head of the block mask, its rows and columns]
  int64_t logsumexp = -1, d = -1, maximum = -1;       // f32 [head, row]
  int64_t empty_rows = -1;                            // one bit [head, row]
  int64_t dq_sum = -1;                                // f32 [head, row, query's dim]
  int64_t dbias_parts = -1;                           // f32 [parts, shape of the bias]
  int64_t o_parts = -1;                               // f32 [row of a part of the keys, value's dim]; see contract.h
  int64_t l_parts = -1, m_parts = -1;                 // f32 [row of a part of the keys]
  int64_t tile_parts = -1;                            // PartsOfTile [batch, tile of Q]
  int64_t tile_counter = -1, row_block_counter = -1;  // one s32 each: see contract.h
  int64_t prepared = -1, added = -1;                  // s32 [batch, head]; see contract.h
  int64_t dk_sum = -1, dv_sum = -1;                   // f32 [batch, key's head, padded key, dim]
  int parts = 1;                                      // of the bias, or of the keys, or stretches of the keys
  int heads = 0, heads_at_a_time = 0;                 // see contract.h
  int64_t bytes = 0;                                  // size of the buffer

  // Reserves an array, if no launch before has reserved it.
  void Reserve(int64_t Scratch::* array, int64_t size) {
    if (this->*array >= 0) return;
    this->*array = bytes;
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr int64_t kAlignment = 256;
};

}  // namespace jax_flash

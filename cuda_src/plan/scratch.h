// The scratch memory that the kernels of a pass share: one buffer, the last result of a call.
#pragma once

#include <cstdint>

#include "cuda_src/plan/plan.h"

namespace jax_flash {

// The offsets of what is in it on one GPU; -1: not needed. Of the rows of Q a head has as many as kRowPadding makes of
// them, and there are all heads of all batch entries, or `heads` that are used in turn.
struct Scratch {
  int64_t q_bounds = -1, kv_bounds = -1;  // SegmentBounds [batch, block of kSegmentBlock]
  // Of a mask that is made into a block mask: the latter's arrays, as if it were an operand (mask_blocks.h); and
  // element masks transposed, of it or of the operand.
  int64_t blocks = -1, listed_rows = -1, listed_columns = -1, mask_bits = -1, transposed_bits = -1;
  int64_t mask_counts = -1;                      // s32 [head of the block mask, its rows and columns]
  int64_t logsumexp = -1, d = -1, maximum = -1;  // f32 [head, row]
  int64_t empty_rows = -1;                       // a bit [head, row]
  int64_t dq_sum = -1;                           // f32 [head, row, query's dim]
  int64_t dbias_parts = -1;                      // f32 [parts, shape of the bias]
  int64_t o_parts = -1;                          // f32 [row of a part of the keys, value's dim]; see contract.h
  int64_t l_parts = -1, m_parts = -1;            // f32 [row of a part of the keys]
  int64_t tile_parts = -1;                       // PartsOfTile [batch, tile of Q]
  int64_t taken = -1, rows_taken = -1;           // s32, one each: see contract.h
  int64_t prepared = -1, added = -1;             // s32 [batch, head]
  int64_t dk_sum = -1, dv_sum = -1;              // f32 [batch, key's head, key padded likewise, dim]
  int64_t zero_bytes = 0;                        // from `taken` on, the sums included: they are 0 at first
  int parts = 1;                                 // of the bias, or of the keys, or stretches of them
  int heads = 0, last_heads = 0;                 // see contract.h
  int64_t bytes = 0;
};
Scratch ScratchOf(const Problem& problem, Pass pass, const Target& target);

// As many bytes as any of these GPUs needs; if there are none, as any GPU may need.
int64_t ScratchBytes(const Problem& problem, Pass pass, const std::vector<Target>& targets);

}  // namespace jax_flash

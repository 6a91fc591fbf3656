// The buffers of the two custom calls, checked against the problem (docs/architecture.md lists their shapes). What the
// problem does not have is null.
#pragma once

#include <cstdint>

#include "common/program.h"

namespace jax_flash {

// The operands of both calls, in their order: OPERAND(type, name, dtype, dims, there). `dtype` is that of the elements
// where the type is void. `dims` has a letter for each dim (Problem::size), as in Python's DIMS. `there` says whether
// the problem `p` has the operand; it is an extent if the operand may be broadcast.
#define JAX_FLASH_OPERANDS(OPERAND)                                                                     \
  OPERAND(void, query, p.dtype, "BTND", true)                                                           \
  OPERAND(void, key, p.dtype, "BSKD", p.page == 0)                                                      \
  OPERAND(void, value, p.dtype, "BSKE", p.page == 0)                                                    \
  OPERAND(void, scale, p.accumulation_dtype(), "", true)                                                \
  OPERAND(void, key_pages, p.dtype, "GAKD", p.page > 0)                                                 \
  OPERAND(void, value_pages, p.dtype, "GAKE", p.page > 0)                                               \
  OPERAND(int32_t, page_table, DType::kNone, "BM", p.page > 0)                                          \
  OPERAND(void, bias, p.bias_dtype, "BNTS", p.bias)                                                     \
  OPERAND(uint8_t, mask, DType::kNone, "BNTS", p.mask)                                                  \
  OPERAND(void, sinks, p.accumulation_dtype(), "BNTS", p.sinks)                                         \
  OPERAND(int32_t, q_lengths, DType::kNone, "B", p.q_lengths)                                           \
  OPERAND(int32_t, kv_lengths, DType::kNone, "B", p.kv_lengths)                                         \
  OPERAND(int32_t, q_segments, DType::kNone, "BT", p.segments)                                          \
  OPERAND(int32_t, kv_segments, DType::kNone, "BS", p.segments)                                         \
  OPERAND(int32_t, keys_of_rows, DType::kNone, "BTX", p.ranges)                                         \
  OPERAND(int32_t, rows_of_keys, DType::kNone, "BSX", p.ranges)                                         \
  OPERAND(int32_t, query_offset, DType::kNone, "B", p.query_offset)                                     \
  OPERAND(int32_t, origin, DType::kNone, "X", p.origin)                                                 \
  OPERAND(int32_t, blocks, DType::kNone, "BNUV", p.block_mask)                                          \
  OPERAND(int32_t, row_lists, DType::kNone, "BNUR", p.block_mask)                                       \
  OPERAND(int32_t, column_lists, DType::kNone, "BNVC", p.block_mask)                                    \
  OPERAND(uint32_t, element_masks, DType::kNone, "BPQW", p.element_masks > 0 ? p.block_mask : Extent()) \
  OPERAND(uint32_t, seed, DType::kNone, "BX", p.dropout())                                              \
  OPERAND(uint32_t, batch_id, DType::kNone, "B", p.dropout())                                           \
  OPERAND(uint32_t, head_id, DType::kNone, "N", p.dropout())                                            \
  OPERAND(int32_t, program_batch, DType::kNone, "B", p.programs())                                      \
  OPERAND(int32_t, program_head, DType::kNone, "N", p.programs())

struct Operands {
#define JAX_FLASH_MEMBER(type, name, ...) const type* name;
  JAX_FLASH_OPERANDS(JAX_FLASH_MEMBER)
#undef JAX_FLASH_MEMBER
  const void* captured[kMaxCaptured] = {};  // after those: what the programs load from, [B or 1, size]
};

struct ForwardResults {
  void *o, *l, *m;
};

// What the backward reads beside the operands.
struct Cotangents {
  const void *o, *l, *m, *d_o, *dlogsumexp;
};

struct BackwardResults {
  void *dq, *dk, *dv, *dbias;
  void* dsinks;                       // what each row adds to the gradient of the sinks, [B, N, T]
  void* captured[kMaxCaptured] = {};  // their gradients, of the accumulation dtype
};

}  // namespace jax_flash

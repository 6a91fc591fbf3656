// The arrays of the three custom calls. These tables declare each array once. The structs in arrays.h, the flags of
// gradients and tangents in `Problem`, the checks of buffers (buffers.cc), Python's jax_flash/operands.py and the table
// in docs/contract.md follow from them.
#pragma once

namespace jax_flash {

// The columns of the tables:
//   type    of the elements; void: their dtype is in the next column
//   name    in C++ and in Python
//   dtype   of the elements, for the problem `p`
//   dims    a letter for each dim (Problem::size), or 1
//   there   whether the problem `p` has the array; an Extent if the array may be broadcast

// The operands of all calls, in order. The arrays that programs capture come after them.
#define JAX_FLASH_OPERANDS(OPERAND)                                                                               \
  OPERAND(void, query, p.dtype, "BTND", true)                                                                     \
  OPERAND(void, key, p.dtype, "BSKD", p.page == 0)                                                                \
  OPERAND(void, value, p.dtype, "BSKE", p.page == 0 && !p.latent)                                                 \
  OPERAND(void, scale, p.accumulation_dtype(), "", true)                                                          \
  OPERAND(void, key_pages, p.dtype, "GAKD", p.page > 0)                                                           \
  OPERAND(void, value_pages, p.dtype, "GAKE", p.page > 0 && !p.latent)                                            \
  OPERAND(int32_t, page_table, DType::kNone, "BM", p.page > 0)                                                    \
  OPERAND(void, bias, p.score.bias_dtype, "BNTS", p.score.bias)                                                   \
  OPERAND(uint8_t, mask, DType::kNone, "BNTS", p.mask.array)                                                      \
  OPERAND(void, sinks, p.accumulation_dtype(), "BN11", p.sinks)                                                   \
  OPERAND(int32_t, query_seq_lengths, DType::kNone, "B", p.mask.query_seq_lengths)                                \
  OPERAND(int32_t, key_value_seq_lengths, DType::kNone, "B", p.mask.key_value_seq_lengths)                        \
  OPERAND(int32_t, query_segment_ids, DType::kNone, "BT", p.mask.segment_ids)                                     \
  OPERAND(int32_t, key_value_segment_ids, DType::kNone, "BS", p.mask.segment_ids)                                 \
  OPERAND(int32_t, keys_of_rows, DType::kNone, "BTX", p.mask.ranges)                                              \
  OPERAND(int32_t, rows_of_keys, DType::kNone, "BSX", p.mask.ranges)                                              \
  OPERAND(int32_t, query_offset, DType::kNone, "B", p.mask.query_offset)                                          \
  OPERAND(int32_t, row_tiles, DType::kNone, "H", p.dropout_tiles)                                                 \
  OPERAND(int32_t, key_tiles, DType::kNone, "I", p.dropout_tiles)                                                 \
  OPERAND(int32_t, origin, DType::kNone, "X", p.origin)                                                           \
  OPERAND(int32_t, blocks, DType::kNone, "BNUV", p.mask.block_mask)                                               \
  OPERAND(int32_t, row_lists, DType::kNone, "BNUR", p.mask.block_mask)                                            \
  OPERAND(int32_t, column_lists, DType::kNone, "BNVC", p.mask.block_mask)                                         \
  OPERAND(uint32_t, element_masks, DType::kNone, "BPQW", p.mask.element_masks > 0 ? p.mask.block_mask : Extent()) \
  OPERAND(uint32_t, seed, DType::kNone, "BX", p.dropout())                                                        \
  OPERAND(uint32_t, batch_id, DType::kNone, "B", p.dropout())                                                     \
  OPERAND(uint32_t, head_id, DType::kNone, "N", p.dropout())                                                      \
  OPERAND(int32_t, program_batch, DType::kNone, "B", p.programs())                                                \
  OPERAND(int32_t, program_head, DType::kNone, "N", p.programs())

// The results of the forward. They are also operands of the backward and of the tangent, after the operands above. The
// tangent takes O before it is rounded.
#define JAX_FLASH_FORWARD_RESULTS(RESULT)              \
  RESULT(void, o, p.o_dtype(), "BTNE", true)           \
  RESULT(void, l, p.accumulation_dtype(), "BNT", true) \
  RESULT(void, m, p.accumulation_dtype(), "BNT", true)

// The last operands of the backward. (Python's name of d_o is do.)
#define JAX_FLASH_COTANGENTS(OPERAND)       \
  OPERAND(void, d_o, p.dtype, "BTNE", true) \
  OPERAND(void, dlogsumexp, p.accumulation_dtype(), "BNT", p.dlogsumexp)

// The role of an operand with a derivative: what it affects.
enum class Role {
  kScores,   // the scores, and only through them the results
  kValues,   // the products of P and V
  kOnceARow  // the results of a row, once, after all of its scores
};

// The operands with derivatives, in the order of their gradients. The columns:
//   operand, gradient    names; the name of the tangent is operand_tangent
//   role                 of the operand
//   dtype                of the gradient, a result of the backward
//   tangent_dtype        of the tangent, an operand of the tangent pass
// They have the dims of the operand, except for gradients of operands with kOnceARow: each row writes its contribution,
// with dims BNT, and Python sums them. The problem has a flag for each gradient and each tangent. Captured arrays come
// last. Their tangents are captured arrays themselves: score_tangent reads them. If the scale is differentiated, its
// tangent is a part of the query's, which then has the accumulation dtype.
#define JAX_FLASH_DERIVATIVES(DERIVATIVE)                                  \
  DERIVATIVE(query, dq, Role::kScores, p.output_dtype(), p.output_dtype()) \
  DERIVATIVE(key, dk, Role::kScores, p.dtype, p.dtype)                     \
  DERIVATIVE(value, dv, Role::kValues, p.dtype, p.dtype)                   \
  DERIVATIVE(bias, dbias, Role::kScores, dbias_dtype, p.score.bias_dtype)  \
  DERIVATIVE(sinks, dsinks, Role::kOnceARow, p.accumulation_dtype(), p.accumulation_dtype())

// The results of the tangent: those of o and l. (m is a constant.)
#define JAX_FLASH_TANGENT_RESULTS(RESULT)                 \
  RESULT(void, o_tangent, p.output_dtype(), "BTNE", true) \
  RESULT(void, l_tangent, p.accumulation_dtype(), "BNT", p.l_tangent)

}  // namespace jax_flash

// The arrays of the three custom calls. These tables declare each array once. The structs below, the checks of buffers
// (buffers.cc), Python's jax_flash/operands.py and the table in docs/contract.md follow from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"

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

// The results of the forward. They are also operands of the backward and of the tangent, after the operands above.
#define JAX_FLASH_FORWARD_RESULTS(RESULT)              \
  RESULT(void, o, p.output_dtype(), "BTNE", true)      \
  RESULT(void, l, p.accumulation_dtype(), "BNT", true) \
  RESULT(void, m, p.accumulation_dtype(), "BNT", true)

// The last operands of the backward. (Python's name of d_o is do.)
#define JAX_FLASH_COTANGENTS(OPERAND)       \
  OPERAND(void, d_o, p.dtype, "BTNE", true) \
  OPERAND(void, dlogsumexp, p.accumulation_dtype(), "BNT", p.dlogsumexp)

// The results of the backward, each the gradient of an operand: GRADIENT(operand, name, dtype, dims, there). Each row
// writes its part of dsinks, and Python sums them. The gradients of captured arrays come after them.
#define JAX_FLASH_GRADIENTS(GRADIENT)                                           \
  GRADIENT(query, dq, p.output_dtype(), "BTND", p.dq)                           \
  GRADIENT(key, dk, p.dtype, "BSKD", p.dk)                                      \
  GRADIENT(value, dv, p.dtype, "BSKE", p.dv)                                    \
  GRADIENT(bias, dbias, dbias_dtype, "BNTS", p.dbias ? p.score.bias : Extent()) \
  GRADIENT(sinks, dsinks, p.accumulation_dtype(), "BNT", p.dsinks)

// The last operands of the tangent, each the tangent of an operand: TANGENT(operand, name, dtype, dims, there). The
// tangents of captured arrays are captured arrays themselves: score_tangent reads them. If the scale is differentiated,
// its tangent is a part of the query's, which then has the accumulation dtype.
#define JAX_FLASH_TANGENTS(TANGENT)                                                                 \
  TANGENT(query, query_tangent, p.output_dtype(), "BTND", p.query_tangent)                          \
  TANGENT(key, key_tangent, p.dtype, "BSKD", p.key_tangent)                                         \
  TANGENT(value, value_tangent, p.dtype, "BSKE", p.value_tangent)                                   \
  TANGENT(bias, bias_tangent, p.score.bias_dtype, "BNTS", p.bias_tangent ? p.score.bias : Extent()) \
  TANGENT(sinks, sinks_tangent, p.accumulation_dtype(), "BN11", p.sinks_tangent ? p.sinks : Extent())

// The results of the tangent: those of o and l. (m is a constant.)
#define JAX_FLASH_TANGENT_RESULTS(RESULT)                 \
  RESULT(void, o_tangent, p.output_dtype(), "BTNE", true) \
  RESULT(void, l_tangent, p.accumulation_dtype(), "BNT", true)

// The buffers of a call. Arrays that the problem does not have are null.
#define JAX_FLASH_OPERAND(type, name, ...) const type* name;
#define JAX_FLASH_RESULT(type, name, ...) void* name;
struct Operands {
  JAX_FLASH_OPERANDS(JAX_FLASH_OPERAND)
  const void* captured[kMaxCaptured] = {};  // [B or 1, elements]
};

struct ForwardResults {
  JAX_FLASH_FORWARD_RESULTS(JAX_FLASH_RESULT)
};

struct Cotangents {
  JAX_FLASH_FORWARD_RESULTS(JAX_FLASH_OPERAND)
  JAX_FLASH_COTANGENTS(JAX_FLASH_OPERAND)
};

struct BackwardResults {
  JAX_FLASH_GRADIENTS(JAX_FLASH_RESULT)
  void* captured[kMaxCaptured] = {};  // in the accumulation dtype
};

struct Tangents {
  JAX_FLASH_FORWARD_RESULTS(JAX_FLASH_OPERAND)
#define JAX_FLASH_TANGENT(operand, name, ...) const void* name;
  JAX_FLASH_TANGENTS(JAX_FLASH_TANGENT)
#undef JAX_FLASH_TANGENT
};

struct TangentResults {
  JAX_FLASH_TANGENT_RESULTS(JAX_FLASH_RESULT)
};
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_RESULT

// An array as Python sees it.
struct ArrayDeclaration {
  std::string name, dims;
  bool broadcast;                       // may dims have size 1?
  std::string gradient, gradient_dims;  // empty if the array has no gradient
};
std::vector<ArrayDeclaration> DeclaredOperands();
// The forward's results, the cotangents, and the operands and results of the tangent.
std::vector<ArrayDeclaration> DeclaredResults();

// Does a requested gradient have a value for each row of Q (sinks)? Its dims are BNT.
bool HasGradientPerRow(const Problem& p);

// The bytes of all operands and results of a pass, without captured arrays and their gradients.
int64_t BytesOfArrays(const Problem& p, bool backward);

}  // namespace jax_flash

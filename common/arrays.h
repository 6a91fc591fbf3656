// The arrays of the three custom calls, from the tables in tables.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/problem.h"
#include "common/tables.h"

namespace jax_flash {

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
#define JAX_FLASH_GRADIENT(operand, gradient, ...) void* gradient;
  JAX_FLASH_DERIVATIVES(JAX_FLASH_GRADIENT)
#undef JAX_FLASH_GRADIENT
  void* captured[kMaxCaptured] = {};  // in the accumulation dtype
};

struct Tangents {
  JAX_FLASH_FORWARD_RESULTS(JAX_FLASH_OPERAND)
#define JAX_FLASH_TANGENT(operand, ...) const void* operand##_tangent;
  JAX_FLASH_DERIVATIVES(JAX_FLASH_TANGENT)
#undef JAX_FLASH_TANGENT
};

struct TangentResults {
  JAX_FLASH_TANGENT_RESULTS(JAX_FLASH_RESULT)
};
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_RESULT

// The dims and the extent of each operand, as in operands::query::kDims.
namespace operands {
#define JAX_FLASH_OPERAND(type, name, dtype, dims, there)                           \
  struct name {                                                                     \
    static constexpr const char* kDims = dims;                                      \
    static Extent Of([[maybe_unused]] const Problem& p) { return ExtentOf(there); } \
  };
JAX_FLASH_OPERANDS(JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
}  // namespace operands

// The dims and the extent of the gradient of an operand.
constexpr const char* GradientDims(Role role, const char* dims) { return role == Role::kOnceARow ? "BNT" : dims; }
constexpr Extent GradientExtent(Role role, const Extent& operand) {
  return role == Role::kOnceARow ? ExtentOf(operand.present) : operand;
}

// Does an operand other than the query have values for heads or rows, and affect scores?
bool HasScoreOperandOfRows(const Problem& p);

// An operand as Python sees it.
struct OperandDeclaration {
  std::string name, dims;
  bool broadcast;        // may dims have size 1?
  std::string gradient;  // empty if it has none
  Role role;
};
std::vector<OperandDeclaration> DeclaredOperands();
// Names and dims of the forward's results, the cotangents, and the operands and results of the tangent.
std::vector<std::pair<std::string, std::string>> DeclaredResults();

// The bytes of all operands and results of a pass, without captured arrays and their gradients.
int64_t BytesOfArrays(const Problem& p, bool backward);

}  // namespace jax_flash

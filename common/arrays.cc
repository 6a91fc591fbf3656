#include "common/arrays.h"

#include <string_view>
#include <type_traits>

namespace jax_flash {
namespace {

// The size of an element of an array of T. If T is void, it has this dtype.
template <typename T>
int64_t SizeOf(DType dtype) {
  if constexpr (std::is_void_v<T>) {
    return BytesOf(dtype);
  } else {
    return sizeof(T);
  }
}

}  // namespace

bool HasScoreOperandOfRows(const Problem& p) {
  const auto of_rows = [](std::string_view operand, std::string_view dims) {
#define ONCE_A_ROW(operand_, gradient, role, ...) || (operand == #operand_ && role == Role::kOnceARow)
    const bool elsewhere = operand == "query" JAX_FLASH_DERIVATIVES(ONCE_A_ROW);
#undef ONCE_A_ROW
    return !elsewhere && dims.find_first_of("NT") != dims.npos;
  };
#define CHECK(type, name, dtype, dims, there) \
  if (ExtentOf(there).present && of_rows(#name, dims)) return true;
  JAX_FLASH_OPERANDS(CHECK)
#undef CHECK
  return false;
}

std::vector<OperandDeclaration> DeclaredOperands() {
  const Problem p;
#define ENTRY(type, name, dtype, dims, there) \
  {#name, dims, std::is_same_v<std::decay_t<decltype(there)>, Extent>, "", Role::kScores},
  std::vector<OperandDeclaration> declared = {JAX_FLASH_OPERANDS(ENTRY)};
#undef ENTRY
  const auto add_gradient = [&](std::string_view operand, const char* gradient, Role role) {
    for (OperandDeclaration& x : declared) {
      if (x.name == operand) x.gradient = gradient, x.role = role;
    }
  };
#define ADD(operand, gradient, role, ...) add_gradient(#operand, #gradient, role);
  JAX_FLASH_DERIVATIVES(ADD)
#undef ADD
  return declared;
}

std::vector<std::pair<std::string, std::string>> DeclaredResults() {
#define ENTRY(type, name, dtype, dims, there) {#name, dims},
#define TANGENT(operand, ...) {#operand "_tangent", operands::operand::kDims},
  return {JAX_FLASH_FORWARD_RESULTS(ENTRY) JAX_FLASH_COTANGENTS(ENTRY) JAX_FLASH_DERIVATIVES(TANGENT)
              JAX_FLASH_TANGENT_RESULTS(ENTRY)};
#undef TANGENT
#undef ENTRY
}

int64_t BytesOfArrays(const Problem& p, bool backward) {
  const DType dbias_dtype = p.accumulation_dtype();
  int64_t bytes = 0;
  const auto add = [&](const char* dims, const Extent& extent, int64_t size) {
    if (extent.present) bytes += p.elements(dims, extent) * size;
  };
#define ADD(type, name, dtype, dims, there) add(dims, ExtentOf(there), SizeOf<type>(dtype));
#define ADD_GRADIENT(operand, gradient, role, dtype, tangent_dtype) \
  if (p.gradient)                                                   \
    add(GradientDims(role, operands::operand::kDims), GradientExtent(role, operands::operand::Of(p)), BytesOf(dtype));
  JAX_FLASH_OPERANDS(ADD)
  JAX_FLASH_FORWARD_RESULTS(ADD)
  if (backward) {
    JAX_FLASH_COTANGENTS(ADD)
    JAX_FLASH_DERIVATIVES(ADD_GRADIENT)
  }
#undef ADD
#undef ADD_GRADIENT
  return bytes;
}

}  // namespace jax_flash

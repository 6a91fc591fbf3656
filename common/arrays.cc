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

std::vector<ArrayDeclaration> DeclaredOperands() {
  const Problem p;
#define ENTRY(type, name, dtype, dims, there) \
  {#name, dims, std::is_same_v<std::decay_t<decltype(there)>, Extent>, "", ""},
  std::vector<ArrayDeclaration> operands = {JAX_FLASH_OPERANDS(ENTRY)};
  const auto add_gradient = [&](std::string_view operand, const char* name, const char* dims) {
    for (ArrayDeclaration& x : operands) {
      if (x.name == operand) x.gradient = name, x.gradient_dims = dims;
    }
  };
#define ADD(operand, name, dtype, dims, there) add_gradient(#operand, #name, dims);
  JAX_FLASH_GRADIENTS(ADD)
#undef ADD
  return operands;
}

std::vector<ArrayDeclaration> DeclaredResults() {
  const Problem p;
#define TANGENT(operand, name, dtype, dims, there) ENTRY(void, name, dtype, dims, there)
  return {JAX_FLASH_FORWARD_RESULTS(ENTRY) JAX_FLASH_COTANGENTS(ENTRY) JAX_FLASH_TANGENTS(TANGENT)
              JAX_FLASH_TANGENT_RESULTS(ENTRY)};
#undef TANGENT
#undef ENTRY
}

bool HasGradientPerRow(const Problem& p) {
#define PER_ROW(operand, name, dtype, dims, there) || (p.name && std::string_view(dims) == "BNT")
  return false JAX_FLASH_GRADIENTS(PER_ROW);
#undef PER_ROW
}

int64_t BytesOfArrays(const Problem& p, bool backward) {
  const DType dbias_dtype = p.accumulation_dtype();
  int64_t bytes = 0;
  const auto add = [&](const char* dims, const Extent& extent, int64_t size) {
    if (extent.present) bytes += p.elements(dims, extent) * size;
  };
#define ADD(type, name, dtype, dims, there) add(dims, ExtentOf(there), SizeOf<type>(dtype));
#define ADD_GRADIENT(operand, name, dtype, dims, there) add(dims, ExtentOf(there), BytesOf(dtype));
  JAX_FLASH_OPERANDS(ADD)
  JAX_FLASH_FORWARD_RESULTS(ADD)
  if (backward) {
    JAX_FLASH_COTANGENTS(ADD)
    JAX_FLASH_GRADIENTS(ADD_GRADIENT)
  }
#undef ADD
#undef ADD_GRADIENT
  return bytes;
}

}  // namespace jax_flash

#include "cuda_src/kernel_config.h"

#include <stdexcept>
#include <type_traits>

namespace jax_flash {
namespace {

// f(type, name, field) for every field, in order.
#define VISIT(type, name, ...) f(#type, #name, x.name);
template <typename X, typename Function>
void ForEachFieldOfProblem(X& x, Function f) {
  JAX_FLASH_KERNEL_PROBLEM(VISIT)
}
template <typename X, typename Function>
void ForEachFieldOfTiling(X& x, Function f) {
  JAX_FLASH_KERNEL_TILING(VISIT)
}
#undef VISIT
template <typename X, typename Function>
void ForEachField(X& x, Function f) {
  ForEachFieldOfProblem(x.problem, f);
  ForEachFieldOfTiling(x.tiling, f);
}

}  // namespace

std::string ThisKernel(const KernelConfig& config) {
  std::string text = "#pragma once\n";
  // The preprocessor composes the text of PTX. It needs dtypes as numbers.
  text += "#define JAX_FLASH_DTYPE " + std::to_string(int(config.problem.dtype)) + "\n";
  text += "#include \"cuda_src/contract.h\"\nnamespace jax_flash {\n";
  const auto value = [&](const char* type, const char* name, auto field) {
    text += std::string("  /* ") + name + " */ " + type + "(" + std::to_string(int(field)) + "),\n";
  };
  text += "constexpr KernelProblem kProblem = {\n";
  ForEachFieldOfProblem(config.problem, value);
  text += "};\nconstexpr KernelTiling kTiling = {\n";
  ForEachFieldOfTiling(config.tiling, value);
  return text + "};\n}  // namespace jax_flash\n";
}

KernelFields FieldsOf(const KernelConfig& config) {
  KernelFields fields;
  ForEachField(config, [&](const char*, const char* name, auto field) { fields[name] = int(field); });
  return fields;
}

KernelConfig ConfigOf(const KernelFields& fields) {
  KernelConfig config;
  size_t found = 0;
  ForEachField(config, [&](const char*, const char* name, auto& field) {
    const auto given = fields.find(name);
    if (given == fields.end()) throw std::invalid_argument("a kernel without the field " + std::string(name));
    field = std::decay_t<decltype(field)>(given->second);
    ++found;
  });
  if (found != fields.size()) throw std::invalid_argument("fields that a kernel does not have");
  return config;
}

}  // namespace jax_flash

// The compile-time configuration of a kernel (cuda_src/contract.h): as the generated header this_kernel.h, and as names
// and numbers for Python.
#pragma once

#include <map>
#include <string>

#include "cuda_src/contract.h"

namespace jax_flash {

struct KernelConfig {
  KernelProblem problem = {};
  KernelTiling tiling = {};
};

// The text of this_kernel.h.
std::string ThisKernel(const KernelConfig& config);

using KernelFields = std::map<std::string, int>;
KernelFields FieldsOf(const KernelConfig& config);
// Throws std::invalid_argument if the names differ from the fields of a KernelConfig.
KernelConfig ConfigOf(const KernelFields& fields);

}  // namespace jax_flash

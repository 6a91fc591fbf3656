// What a kernel is compiled for (cuda_src/contract.h), as the one header that is written for it, and as names and
// numbers for Python.
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
// Throws std::invalid_argument if they are not just the fields of a KernelConfig.
KernelConfig ConfigOf(const KernelFields& fields);

}  // namespace jax_flash

// Handlers of the custom calls for platform cpu, which `bindings.cc` passes to Python.
#pragma once

#include <string_view>

namespace jax_flash {

// XLA_FFI_Handler*
void* CpuForwardHandler();
void* CpuBackwardHandler();
void* CpuTangentHandler();

// The instruction set of the kernels in use: "portable", "avx2" or "avx512".
std::string_view CpuIsa();

}  // namespace jax_flash

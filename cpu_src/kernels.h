// The passes, compiled once for each instruction set.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "cpu_src/workers.h"

#define JAX_FLASH_DECLARE_KERNELS(isa)                                                                 \
  namespace isa {                                                                                      \
  void Forward(const Problem&, const Operands&, const ForwardResults&, Workers&);                      \
  void Backward(const Problem&, const Operands&, const Cotangents&, const BackwardResults&, Workers&); \
  void Tangent(const Problem&, const Operands&, const Tangents&, const TangentResults&, Workers&);     \
  }

namespace jax_flash {

JAX_FLASH_DECLARE_KERNELS(portable)
#if defined(__x86_64__)
JAX_FLASH_DECLARE_KERNELS(avx2)
JAX_FLASH_DECLARE_KERNELS(avx512)
#endif

}  // namespace jax_flash

#undef JAX_FLASH_DECLARE_KERNELS

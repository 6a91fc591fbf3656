// mma.sync: a warp multiplies 16 x k by k x 8 into f32 registers. k is 32 bytes: 16 elements of 16 bits, or 8 elements
// of f32, which are truncated to TF32. PTX ISA 9.7.14.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// c += a b. The instruction ignores the lower 13 bits of f32 elements. PTX ISA 9.7.14.5.14.
__device__ __forceinline__ void MmaSync(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kDType == DType::kF32) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." JAX_FLASH_PTX_TYPE "." JAX_FLASH_PTX_TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace jax_flash

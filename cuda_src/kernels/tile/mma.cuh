// mma.sync: a warp multiplies 16 x k by k x 8 into f32 registers. k is 32 bytes: 16 elements of 16 bits, or 8 of f32,
// taken as TF32. PTX ISA 9.7.14.
#pragma once

#include "config.cuh"
#include "tile/types.cuh"

namespace jax_flash {

// ldmatrix.x4: four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8 and gets the
// (l % 4)-th 4 bytes of row l / 4 of each. PTX ISA 9.7.14.5.15.
__device__ __forceinline__ void Ldmatrix(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix of 16-bit elements transposed.
__device__ __forceinline__ void LdmatrixTransposed(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// cvt.rna.tf32.f32: to 11 significant bits. PTX ISA 9.7.9.22.
__device__ __forceinline__ uint32_t RoundTF32(uint32_t x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
}

// c += a b; of f32 only the upper 19 bits are looked at. PTX ISA 9.7.14.5.14.
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

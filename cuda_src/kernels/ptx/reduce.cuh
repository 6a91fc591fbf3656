// Atomic additions to HBM. PTX ISA 9.7.13.7.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// A lane adds 16 bytes at a time on Hopper and later, and 4 bytes before. The 128 elements of a 16 x 8 part of an
// accumulator are stored as [lane][4], or before Hopper as [4][lane]. Then the additions of a warp are coalesced.
#if __CUDA_ARCH__ >= 900
constexpr bool kAddsFour = true;
#else
constexpr bool kAddsFour = false;
#endif

// red.global.add.f32
__device__ __forceinline__ void AddToGlobal(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}

// The same if `counts`, by a predicate: a branch would keep the compiler from sharing addresses.
__device__ __forceinline__ void AddToGlobalIf(bool counts, float* sum, float x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.f32 [%0], %1;\n}" ::"l"(sum),
               "f"(x), "r"(int(counts))
               : "memory");
}

// A whole warp adds c to the 128 elements at `sum`.
__device__ __forceinline__ void AddToGlobal(float* sum, const float (&c)[4]) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum + 4 * lane), "f"(c[0]), "f"(c[1]),
               "f"(c[2]), "f"(c[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum + 32 * i + lane), "f"(c[i]) : "memory");
#endif
}

// Loads columns 0 to 7 of rows `row` and row + 8 of such a sum.
__device__ __forceinline__ void LoadSum(const float* sum, int row, float (&x)[2][8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 y = reinterpret_cast<const float4*>(sum)[kAddsFour ? row * 4 + i : i * 8 + row];
    const float z[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int lane = kAddsFour ? i : k, element = kAddsFour ? k : i;
      x[element / 2][2 * lane + element % 2] = z[k];
    }
  }
}

}  // namespace jax_flash

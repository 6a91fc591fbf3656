// Hints for the compiler.
#pragma once

#include <cstdint>

namespace jax_flash {

// Returns x, which must be equal in all lanes. The compiler then keeps values that depend on x in uniform registers,
// and branches on them uniformly.
__device__ __forceinline__ int Uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
// The same if only the first lane of a warp is active.
__device__ __forceinline__ int UniformSingleLane(int x) { return __shfl_sync(1u, x, 0); }

// Returns false, but ptxas cannot prove it, and moves no code across a branch on the result. Use it where code moved
// ahead would need registers that are not free.
__device__ __forceinline__ bool OpaqueFalse() { return __any_sync(0xFFFFFFFFu, false); }

// Returns x, but the compiler cannot compute anything from it earlier. Use it in a loop of a thread with few registers.
__device__ __forceinline__ int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float Opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// Keeps the compiler from moving reads and writes of these registers across this point.
template <int kCount>
__device__ __forceinline__ void Pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
// The same at the end of a branch. The compiler cannot merge the code of branches with different numbers.
template <int kNumber, int kCount>
__device__ __forceinline__ void PinDistinct(float (&registers)[kCount]) {
  Pin(registers);
  asm volatile("" ::"n"(kNumber) : "memory");
}
template <int kCount>
__device__ __forceinline__ void Pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

}  // namespace jax_flash

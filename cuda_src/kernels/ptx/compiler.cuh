// What is said to the compiler rather than to the machine.
#pragma once

#include <cstdint>

namespace jax_flash {

// x, which is the same in all lanes. The compiler is told so, and keeps what depends on it in uniform registers and
// branches.
__device__ __forceinline__ int Uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
// The same where only the first lane of a warp is there.
__device__ __forceinline__ int UniformOfOne(int x) { return __shfl_sync(1u, x, 0); }

// False, but ptxas cannot know that, and moves nothing across a branch that depends on it. For places where it has no
// registers to work ahead.
__device__ __forceinline__ bool Never() { return __any_sync(0xFFFFFFFFu, false); }

// x, but the compiler works out nothing from it before that is needed. For a thread that has few registers, in a loop.
__device__ __forceinline__ int Fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float Fresh(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// Keeps the compiler from moving reads or writes of an accumulator, or other registers, across this point.
template <int kCount>
__device__ __forceinline__ void Pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
// The same at the end of a branch, of which the compiler must not share code with one that has another number.
template <int kNumber, int kCount>
__device__ __forceinline__ void PinApart(float (&registers)[kCount]) {
  Pin(registers);
  asm volatile("" ::"n"(kNumber) : "memory");
}
template <int kCount>
__device__ __forceinline__ void Pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

}  // namespace jax_flash

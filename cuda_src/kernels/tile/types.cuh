// What every kernel file needs: the 16-bit element type of the problem and a few words of the machine.
#pragma once

#include <cstdint>

// The element type of Q, K, V, O and their gradients: bf16 or f16, given by the host when it compiles the kernel.
#ifndef JAX_FLASH_DTYPE
#define JAX_FLASH_DTYPE "bf16"
#endif

namespace jax_flash {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kWarpgroup = 128;  // threads

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float Infinity() { return __int_as_float(0x7F800000); }

// cvt.rn.*x2.f32: two floats to one register, `low` in its low half. PTX ISA 9.7.9.22.
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn." JAX_FLASH_DTYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The same, negative numbers to 0.
__device__ __forceinline__ uint32_t PackRelu(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu." JAX_FLASH_DTYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The inverse of Pack, exact.
__device__ __forceinline__ float2 Unpack(uint32_t packed) {
  float2 x;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.f32." JAX_FLASH_DTYPE " %0, l;\ncvt.f32." JAX_FLASH_DTYPE " %1, h;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(packed));
  return x;
}

// ex2.approx: one MUFU operation. PTX ISA 9.7.3.21.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jax_flash

// Element types, conversions and fast math, for all kernels.
#pragma once

#include <cstdint>

#include "cuda_src/contract.h"
#include "this_kernel.h"

// The 16-bit type of Q, K, V, O and their gradients in PTX instructions.
#if JAX_FLASH_DTYPE == 1
#define JAX_FLASH_PTX_TYPE "f16"
#else
#define JAX_FLASH_PTX_TYPE "bf16"
#endif

namespace jax_flash {

constexpr float kLog2e = 1.4426950408889634f;

constexpr int kElementBytes = BytesOf(DType(JAX_FLASH_DTYPE));  // of Q, K, V, O and their gradients
static_assert(kElementBytes == 2 || kElementBytes == 4);        // 4: f32, multiplied as TF32
constexpr int kStep = 32 / kElementBytes;                       // the k of one mma or wgmma

// The preprocessor, which chooses the text of PTX, sees types only as numbers.
static_assert(int(DType::kF16) == 1 && int(DType::kF32) == 3);

// compute-sanitizer's racecheck (tools/sanitize.py) treats the lanes of a warp as independent threads. With this flag
// every lane arrives where usually one lane arrives for its warp, and ptxas keeps warp barriers that it would otherwise
// remove.
#ifdef JAX_FLASH_RACECHECK
constexpr bool kRacecheck = true;
#else
constexpr bool kRacecheck = false;
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float Infinity() { return __int_as_float(0x7F800000); }

// cvt.rn.*x2.f32: packs two floats into one register, `low` into its low half. PTX ISA 9.7.9.22.
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn." JAX_FLASH_PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The same, with negative numbers replaced by 0.
__device__ __forceinline__ uint32_t PackRelu(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu." JAX_FLASH_PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.*.tf32.f32: rounds to the nearest TF32 number. From sm_90 on ties go to even, as with TMA, because the backward
// must recompute the same scores as the forward. PTX ISA 9.7.9.22.
__device__ __forceinline__ uint32_t RoundTF32(uint32_t x) {
  uint32_t y;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
#endif
  return y;
}

// The inverse of Pack, which is exact.
__device__ __forceinline__ float2 Unpack(uint32_t packed) {
  float2 x;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.f32." JAX_FLASH_PTX_TYPE " %0, l;\ncvt.f32." JAX_FLASH_PTX_TYPE " %1, h;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(packed));
  return x;
}

// Loads consecutive words. If kCount is a power of two, the address must be a multiple of their size.
template <int kCount>
__device__ __forceinline__ void LoadWords(const uint32_t* from, uint32_t (&words)[kCount]) {
  struct alignas(kCount % 3 == 0 ? 4 : 4 * kCount) Words {
    uint32_t x[kCount];
  };
  const Words there = *reinterpret_cast<const Words*>(from);
#pragma unroll
  for (int w = 0; w < kCount; ++w) words[w] = there.x[w];
}

// Element i of an array of any float type.
template <DType kType>
__device__ __forceinline__ float Load(const void* data, int64_t i) {
  if constexpr (kType == DType::kF16) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<const uint16_t*>(data)[i]));
    return x;
  } else if constexpr (kType == DType::kBF16) {
    return __uint_as_float(uint32_t(static_cast<const uint16_t*>(data)[i]) << 16);
  } else if constexpr (kType == DType::kF64) {
    return float(static_cast<const double*>(data)[i]);
  } else {
    return static_cast<const float*>(data)[i];
  }
}

// The inverse of Load, rounded to nearest. Not for f64.
template <DType kType>
__device__ __forceinline__ void Store(void* data, int64_t i, float x) {
  if constexpr (kType == DType::kF16) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(static_cast<uint16_t*>(data)[i]) : "f"(x));
  } else if constexpr (kType == DType::kBF16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(static_cast<uint16_t*>(data)[i]) : "f"(x));
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

// Compares each half of x with the same half of `bound`, as bfloat16. A half of the result has all bits set if that
// half of x is NaN or its magnitude is at least the magnitude of `bound`. Otherwise it is 0. For Hopper. PTX ISA
// 9.7.4.6, 9.7.7.1.
__device__ __forceinline__ uint32_t NotBelow(uint32_t x, uint32_t bound) {
  asm("abs.bf16x2 %0, %0;" : "+r"(x));
  asm("set.geu.u32.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(bound));
  return x;
}

// ex2.approx: one MUFU operation. PTX ISA 9.7.3.21.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx: one MUFU operation. PTX ISA 9.7.3.20.
__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx: one MUFU operation, 1 ulp. PTX ISA 9.7.3.13.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jax_flash

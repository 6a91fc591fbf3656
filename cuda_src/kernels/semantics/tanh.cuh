// tanh(u) for 16-bit elements, from y = 2 u / kSmall, in which a multiplication is left out.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

constexpr float kSmall = 0.625f;

// Where |u| < kSmall: the polynomial of degree 9 that is nearest, to an absolute error of 1e-7. It does without the
// MUFU, which has 16 operations in the time in which there are 128 of these.
__device__ __forceinline__ float SmallTanh(float y) {
  const float z = y * y;
  return y * fmaf(z, fmaf(z, fmaf(z, fmaf(z, 4.2317976e-7f, -1.5047184e-5f), 3.9643078e-4f), -1.0172081e-2f), 0.3125f);
}

// Of any size, 1 - 2 / (1 + exp(2 u)): to an absolute error of 2e-7.
__device__ __forceinline__ float AnyTanh(float y) {
  return fmaf(-2.0f, Reciprocal(1.0f + Exp2(y * (kSmall * kLog2e))), 1.0f);
}

}  // namespace jax_flash

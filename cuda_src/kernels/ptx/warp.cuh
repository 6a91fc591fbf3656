// Warps and warpgroups: register allocation, named barriers, moves of 8x8 matrices, reductions.
#pragma once

#include "ptx/compiler.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// setmaxnreg: releases registers, or requests them. PTX ISA 9.7.19.5.
template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// barrier.cta.sync / arrive: named barrier `id` of `threads` threads. PTX ISA 9.7.13.1.
__device__ __forceinline__ void BarrierSync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void BarrierArrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.warp.sync of all lanes. ptxas removes it where lanes are converged, if the mask is a constant with all lanes.
// With kRacecheck the mask is computed, and ptxas keeps the barrier.
__device__ __forceinline__ void SyncWarp() {
  uint32_t all = 0xFFFFFFFF;
  if constexpr (kRacecheck) {
    uint32_t below, others;
    asm("mov.u32 %0, %%lanemask_lt;\nmov.u32 %1, %%lanemask_ge;" : "=r"(below), "=r"(others));
    all = below | others;
  }
  __syncwarp(all);
}

// ld.shared. NVRTC needs 15 seconds to optimise hundreds of such loads in C++ for sm_100. PTX ISA 9.7.9.8.
__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// ldmatrix.x4: loads four matrices of 8 rows of 16 bytes. Lane l passes the address of row l % 8 of matrix l / 8. It
// receives the (l % 4)-th 4 bytes of row l / 4 of each matrix. PTX ISA 9.7.14.5.15.
__device__ __forceinline__ void Ldmatrix(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// The same, with each matrix of 16-bit elements transposed.
__device__ __forceinline__ void LdmatrixTransposed(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// stmatrix.x4: lane l passes the address of row l % 8 of matrix l / 8. PTX ISA 9.7.14.5.16.
__device__ __forceinline__ void Stmatrix(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// movmatrix: transposes an 8x8 matrix of 16-bit elements held across the warp. PTX ISA 9.7.14.5.17.
__device__ __forceinline__ uint32_t Movmatrix(uint32_t a) {
  uint32_t t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(a));
  return t;
}

// Reduces over groups of kLanes consecutive lanes; every lane gets the result. Four lanes share a row of an
// accumulator.
template <int kLanes, typename T, typename Combine>
__device__ __forceinline__ T LaneReduce(T x, Combine combine) {
#pragma unroll
  for (int s = 1; s < kLanes; s *= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, s));
  return x;
}
template <int kLanes, typename T>
__device__ __forceinline__ T LaneSum(T x) {
  return LaneReduce<kLanes>(x, [](T a, T b) { return a + b; });
}
template <int kLanes>
__device__ __forceinline__ float LaneMax(float x) {
  return LaneReduce<kLanes>(x, [](float a, float b) { return fmaxf(a, b); });
}

// The inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int LanePrefixSum(int x) {
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
    const int below = __shfl_up_sync(0xFFFFFFFFu, x, s);
    if (threadIdx.x % 32 >= s) x += below;
  }
  return x;
}

}  // namespace jax_flash

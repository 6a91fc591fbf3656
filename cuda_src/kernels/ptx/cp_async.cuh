// cp.async: asynchronous copies of 16 bytes from HBM to shared memory. PTX ISA 9.7.9.25.3.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// Bypasses the L1. If not `valid`, it reads nothing and writes zeros.
__device__ __forceinline__ void CpAsync(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Makes one group of all copies since the last commit.
__device__ __forceinline__ void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest `kPending` groups of this thread are complete. Other threads need a barrier after it.
template <int kPending>
__device__ __forceinline__ void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_flash

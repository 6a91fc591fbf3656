// cp.async: 16 bytes at a time from HBM to shared memory, in the background. PTX ISA 9.7.9.25.3.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// Past L1. Where not `valid`, zeros come and nothing is read.
__device__ __forceinline__ void CpAsync(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// What was issued since the last commit becomes a group.
__device__ __forceinline__ void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the latest `kPending` groups of this thread have come. (A barrier tells the other threads.)
template <int kPending>
__device__ __forceinline__ void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_flash

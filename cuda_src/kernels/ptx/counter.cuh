// Counters in HBM, by which CTAs wait for each other. PTX ISA 9.7.9.8, 9.7.13.7, 9.7.13.4.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// red.release.gpu: counts 1, by the threads that have `elected`. Who waits for it sees what they have done before.
__device__ __forceinline__ void Count(int* counter, bool elected) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p red.release.gpu.global.add.u32 [%0], 1;\n}" ::"l"(counter),
      "r"(int(elected))
      : "memory");
}

// Waits until `count` have been counted: looks by ld.relaxed, since ld.acquire empties the L1, which it does once.
// Sleeps for so many nanoseconds between two looks.
template <int kSleep = 500>
__device__ __forceinline__ void WaitForCount(const int* counter, int count) {
  while (true) {
    int there;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    if (there >= count) break;
    asm volatile("nanosleep.u32 %0;" ::"n"(kSleep));
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// fence.proxy.async: between what threads read and write in HBM and what TMA does.
__device__ __forceinline__ void FenceProxyAsyncGlobal() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace jax_flash

// Counters in HBM, which CTAs use to wait for each other. PTX ISA 9.7.9.8, 9.7.13.7, 9.7.13.4.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// red.release.gpu: adds 1, by the threads with `elected`. A thread that waits for the count sees their earlier writes.
__device__ __forceinline__ void Count(int* counter, bool elected) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p red.release.gpu.global.add.u32 [%0], 1;\n}" ::"l"(counter),
      "r"(int(elected))
      : "memory");
}

// Waits until the counter is at least `count`. It polls with ld.relaxed, because each ld.acquire invalidates the L1;
// one fence at the end is enough. It sleeps kSleep nanoseconds between two loads.
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

// fence.proxy.async: orders generic accesses to HBM and accesses by TMA.
__device__ __forceinline__ void FenceProxyAsyncGlobal() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace jax_flash

// mbarrier: shared-memory barriers that also count the bytes of asynchronous copies. PTX ISA 9.7.13.15.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// mbarrier.init: a phase completes after `arrivals` arrivals and the bytes that they announced.
__device__ __forceinline__ void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals));
}

// fence.mbarrier_init: makes the initialised barriers visible to TMA.
__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive, by the threads with `elected`.
__device__ __forceinline__ void MbarrierArrive(uint64_t* barrier, bool elected = true) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(SharedAddress(barrier)),
      "r"(int(elected))
      : "memory");
}

// ArrivesForWarp: does this lane arrive for its warp? Lane 0 does, after a warp barrier; with kRacecheck (types.cuh)
// every lane does. ArrivalsOf returns the count for MbarrierInit if this number of warps arrives.
__device__ __forceinline__ bool ArrivesForWarp(int lane) { return kRacecheck || lane == 0; }
__host__ __device__ constexpr uint32_t ArrivalsOf(int warps) { return kRacecheck ? 32 * warps : warps; }

// mbarrier.arrive.expect_tx: arrives, and makes the phase wait for `bytes` of asynchronous copies.
__device__ __forceinline__ void MbarrierArriveExpectTx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity: blocks until the phase of this parity has completed.
__device__ __forceinline__ void MbarrierWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// A position in a ring of `kCount` buffers, and the parity of their barriers in this round.
template <int kCount>
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++index == kCount) index = 0, parity ^= 1;
  }
  __device__ __forceinline__ Ring After() const {
    return index + 1 < kCount ? Ring{index + 1, parity} : Ring{0, parity ^ 1};
  }
  __device__ __forceinline__ Ring Before() const {
    return index > 0 ? Ring{index - 1, parity} : Ring{kCount - 1, parity ^ 1};
  }
};

// The same as one integer, for threads with few registers.
template <int kCount>
struct PackedRing {
  uint32_t position = 0;  // in two rounds of the ring

  __device__ __forceinline__ int Index() const { return position % kCount; }
  __device__ __forceinline__ uint32_t Parity() const { return position / kCount; }
  __device__ __forceinline__ void Next() { position = (position + 1) % (2 * kCount); }
  __device__ __forceinline__ PackedRing After() const { return {(position + 1) % (2 * kCount)}; }
};

// A ring of buffers that the warpgroups use in turn. Each warpgroup has barriers of its own that tell when its buffers
// are full. At common barriers it would miss phases, and their parity would be ambiguous.
template <int kCount>
struct RingInTurns {
  int index = 0;
  uint32_t parities = 0;  // one bit for each buffer

  __device__ __forceinline__ void Wait(uint64_t (&full)[kCount]) {
    MbarrierWait(&full[index], parities >> index & 1);
    parities ^= 1u << index;
  }
  template <int kSteps = 1>
  __device__ __forceinline__ void Next() {
    index += kSteps % kCount;
    if (index >= kCount) index -= kCount;
  }
};

}  // namespace jax_flash

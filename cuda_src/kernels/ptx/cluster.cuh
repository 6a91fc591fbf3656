// Clusters of two CTAs that access each other's shared memory. PTX ISA 9.7.13.4, 9.7.8.20, 9.7.9.8, 9.7.9.25.5.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// %cluster_ctarank: 0 or 1
__device__ __forceinline__ int ClusterRank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster: all threads of both CTAs.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// mapa: the address of the same shared memory in the other CTA.
__device__ __forceinline__ uint32_t PeerAddress(const void* shared) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(shared)), "r"(ClusterRank() ^ 1));
  return address;
}

// ld.shared::cluster: the value at this place of the other CTA's shared memory.
__device__ __forceinline__ int PeerLoad(const int* shared) {
  int x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(PeerAddress(shared)) : "memory");
  return x;
}

// mbarrier.arrive on the other CTA's barrier, by the threads with `elected`.
__device__ __forceinline__ void PeerArrive(uint64_t* barrier, bool elected) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n}" ::"r"(PeerAddress(barrier)),
      "r"(int(elected))
      : "memory");
}

// cp.async.bulk: copies contiguous bytes to `to` in the other CTA. The other CTA's `barrier` counts the bytes.
__device__ __forceinline__ void PeerCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   PeerAddress(to)),
               "r"(SharedAddress(from)), "r"(bytes), "r"(PeerAddress(barrier))
               : "memory");
}

}  // namespace jax_flash

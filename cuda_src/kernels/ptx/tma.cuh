// TMA: copies tiles between HBM and shared memory. A tensor map describes the tensor. PTX ISA 9.7.9.27.
// All tensors here are [d, time, head, batch], innermost first. A box has rows of kBoxBytes, with the 128-byte swizzle.
#pragma once

#include "ptx/types.cuh"

namespace jax_flash {

// Declares a tensor map as a parameter of a kernel (cuda_src/contract.h).
#define JAX_FLASH_MAP(name) , const __grid_constant__ jax_flash::TensorMap name##_map

constexpr int kBoxColumns = kBoxBytes / kElementBytes;

// The boxes of a tile with `dim` columns. TMA fills columns beyond the head dim with zeros.
__host__ __device__ constexpr int Boxes(int dim) { return (dim + kBoxColumns - 1) / kBoxColumns; }

// The address of a lane's row for ldmatrix.x4 or stmatrix.x4, in 16 rows of a box, at the c-th 32 bytes of each row.
__device__ __forceinline__ uint32_t MatricesOf(const void* rows, int lane, int c) {
  return (SharedAddress(rows) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16) ^ c * 32;
}

// cp.async.bulk.tensor, HBM to shared memory. `barrier` counts the bytes.
__device__ __forceinline__ void TmaLoad(void* shared, const TensorMap* map, uint64_t* barrier, int d, int time,
                                        int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(d), "r"(time), "r"(head), "r"(batch)
      : "memory");
}

// The same to both CTAs of a cluster (multicast): to the same address in each, and with the same barrier of each.
__device__ __forceinline__ void TmaLoadToPair(void* shared, const TensorMap* map, uint64_t* barrier, int d, int time,
                                              int head, int batch) {
  constexpr uint16_t kBoth = 0b11;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(d), "r"(time), "r"(head), "r"(batch), "h"(kBoth)
      : "memory");
}

// cp.async.bulk.tensor, shared memory to HBM, in the bulk group of this thread.
__device__ __forceinline__ void TmaStore(const TensorMap* map, const void* shared, int d, int time, int head,
                                         int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(SharedAddress(shared)), "r"(d), "r"(time), "r"(head), "r"(batch)
               : "memory");
}

// cp.async.bulk: contiguous bytes (a multiple of 16), HBM to shared memory.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// cp.async.bulk: contiguous bytes (a multiple of 16), shared memory to HBM, in the bulk group of this thread.
__device__ __forceinline__ void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(SharedAddress(shared)),
               "r"(bytes)
               : "memory");
}

// cp.async.bulk.prefetch.tensor: HBM to L2.
__device__ __forceinline__ void TmaPrefetch(const TensorMap* map, int d, int time, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(d), "r"(time),
               "r"(head), "r"(batch)
               : "memory");
}

// cp.reduce.async.bulk: adds contiguous f32 from shared memory to HBM, by the one thread with `elected`.
__device__ __forceinline__ void BulkReduceAdd(bool elected, float* global, const float* shared, uint32_t bytes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n}" ::"l"(global),
      "r"(SharedAddress(shared)), "r"(bytes), "r"(int(elected))
      : "memory");
}

// cp.async.bulk.commit_group: makes one group of this thread's stores and additions since the last commit.
__device__ __forceinline__ void TmaCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: waits until all but the latest `kPending` groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void TmaWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: waits until all groups are complete and their writes are visible.
__device__ __forceinline__ void TmaWaitAll() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// fence.proxy.async: makes this thread's writes to shared memory visible to TMA and the tensor cores. It also orders
// this thread's earlier reads before their later writes.
__device__ __forceinline__ void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace jax_flash

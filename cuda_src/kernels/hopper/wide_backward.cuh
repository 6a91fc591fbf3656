// The Hopper kernels for dK and dV of wide heads (hopper/wide_gradient.cuh). ampere/backward_prepare.cuh has computed L
// and D. The host launches, for each gradient that is requested, at most one CTA for each SM, in clusters of kCluster,
// with kThreads threads and `jax_flash_shared_bytes` of shared memory. TMA boxes have 64 rows.
#pragma once

#include "hopper/wide_gradient.cuh"

namespace jax_flash::hopper::wide_gradient {

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared<Gradient::kKey>) > sizeof(Shared<Gradient::kValue>)
                                                         ? sizeof(Shared<Gradient::kKey>)
                                                         : sizeof(Shared<Gradient::kValue>);

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    jax_flash_backward_key(const __grid_constant__ KernelParams p JAX_FLASH_BACKWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if constexpr (kDK) Run<Gradient::kKey>(p, memory, &key_map, &value_map, &query_map, &d_o_map, &query_map, &dk_map);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    jax_flash_backward_value(const __grid_constant__ KernelParams p JAX_FLASH_BACKWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if constexpr (kDV) Run<Gradient::kValue>(p, memory, &key_map, nullptr, &query_map, nullptr, &d_o_map, &dv_map);
}

}  // namespace jax_flash::hopper::wide_gradient

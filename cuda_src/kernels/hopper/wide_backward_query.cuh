// The Hopper kernel for dQ of wide heads (hopper/wide_gradient.cuh), as hopper/wide_backward.cuh. TMA boxes of dQ have
// kFusedBoxRows.
#pragma once

#include "hopper/wide_gradient.cuh"

namespace jax_flash::hopper::wide_gradient {

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared<Gradient::kQuery>);

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    jax_flash_backward_query(const __grid_constant__ KernelParams p JAX_FLASH_BACKWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Run<Gradient::kQuery>(p, memory, &query_map, &d_o_map, &key_map, &value_map, &key_map, &dq_rows_map);
}

}  // namespace jax_flash::hopper::wide_gradient

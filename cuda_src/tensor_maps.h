// The tensor maps of Hopper's kernels (cuda_src/contract.h).
#pragma once

#include "common/problem.h"
#include "cuda_src/contract.h"

namespace jax_flash {

#define JAX_FLASH_MEMBER(name) TensorMap name;
struct ForwardMaps {
  JAX_FLASH_FORWARD_MAPS(JAX_FLASH_MEMBER)
};
struct BackwardMaps {
  JAX_FLASH_BACKWARD_MAPS(JAX_FLASH_MEMBER)
};
struct BackwardBiasMaps {
  JAX_FLASH_BACKWARD_BIAS_MAPS(JAX_FLASH_MEMBER)
};
struct TangentMaps {
  JAX_FLASH_TANGENT_MAPS(JAX_FLASH_MEMBER)
};
#undef JAX_FLASH_MEMBER

ForwardMaps ForwardMapsOf(const Problem& problem, const Params& params, const KernelTiling& tiling);
BackwardMaps BackwardMapsOf(const Problem& problem, const Params& params, const KernelTiling& tiling);
BackwardBiasMaps BackwardBiasMapsOf(const Problem& problem, const Params& params, const KernelTiling& tiling);
TangentMaps TangentMapsOf(const Problem& problem, const TangentParams& params, const KernelTiling& tiling);

}  // namespace jax_flash

// What a plan has to know of a GPU.
#pragma once

#include <string>
#include <vector>

#include "cuda_src/driver.h"

namespace jax_flash {

struct Target {
  int capability;       // 10 major + minor
  int multiprocessors;  // kMostMultiprocessors at most
  int shared;           // KiB of shared memory that a block may have
  bool hopper;          // are Hopper's own kernels taken where they fit?
};

// A plan counts on no more multiprocessors, so that there is scratch memory that does for every GPU.
constexpr int kMostMultiprocessors = 192;

// `arch`: "sm_80", "sm_90a", ... With no number of multiprocessors it is that of the GPU that most often has the
// architecture: 108 (A100), 132 (H100, H200) or 148 (B200), and 132 of others. JAX_FLASH_CUDA_KERNELS=sm80 has Hopper
// take the kernels that all GPUs have. Throws std::invalid_argument for what there are no kernels for.
Target TargetOf(const std::string& arch, int multiprocessors = 0);
Target TargetOf(const Device& device);

// Those of the GPUs of this process that there are kernels for; none without a driver.
std::vector<Target> LocalTargets();

// Those of them that kernels for `arch` are compiled for; if there are none, the usual one.
std::vector<Target> TargetsOf(const std::string& arch);

// What NVRTC compiles for to run on a GPU of this compute capability. Throws std::invalid_argument if there is nothing.
std::string ArchOf(int major, int minor);

}  // namespace jax_flash

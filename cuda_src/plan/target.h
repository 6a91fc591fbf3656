// Properties of a GPU for the plan.
#pragma once

#include <string>
#include <vector>

#include "cuda_src/driver.h"

namespace jax_flash {

struct Target {
  int capability;       // 10 major + minor
  int multiprocessors;  // at most kMaxMultiprocessors
  int shared;           // KiB of shared memory that a CTA may have
  bool hopper;          // are Hopper's kernels used where they fit?
};

// Plans use at most this number of SMs. So a bound of the scratch memory over all GPUs exists.
constexpr int kMaxMultiprocessors = 192;

// `arch`: "sm_80", "sm_90a", ... Without a number of SMs, it is 108 for sm_80 (A100), 148 for sm_100 (B200), and 132
// for others (H100, H200). JAX_FLASH_CUDA_KERNELS=sm80 selects Ampere's kernels on Hopper. Throws std::invalid_argument
// for unsupported architectures.
Target TargetOf(const std::string& arch, int multiprocessors = 0);
Target TargetOf(const Device& device);

// The supported GPUs of this process; empty without a driver.
std::vector<Target> LocalTargets();

// The local targets that run code for `arch`; if there are none, its default target.
std::vector<Target> TargetsOf(const std::string& arch);

// The architecture that NVRTC compiles for, to run on this compute capability. Throws std::invalid_argument if there is
// none.
std::string ArchOf(int major, int minor);

}  // namespace jax_flash

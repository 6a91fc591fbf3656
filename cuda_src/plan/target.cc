#include "cuda_src/plan/target.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace jax_flash {
namespace {

// CUDA C++ Programming Guide, "Compute Capabilities".
int SharedOf(int capability) {
  if (capability == 80 || capability == 87) return 163;
  if (capability < 90 || capability >= 120) return 99;
  return 227;
}

// The devices of this process that the kernels support.
std::vector<Device> LocalDevices() {
  std::vector<Device> devices;
  try {
    for (const Device& device : CudaDevices()) {
      if (device.major >= 8) devices.push_back(device);
    }
  } catch (const std::runtime_error&) {  // no driver
  }
  return devices;
}

int DefaultMultiprocessors(int capability) {
  if (capability == 80) return 108;
  if (capability == 100) return 148;
  return 132;
}

}  // namespace

Target TargetOf(const std::string& arch, int multiprocessors) {
  const int capability = std::atoi(arch.c_str() + arch.find('_') + 1);
  if (capability < 80) throw std::invalid_argument(arch + ": the kernels need compute capability 8.0 or later");
  const char* const variable = std::getenv("JAX_FLASH_CUDA_KERNELS");
  const std::string forced = variable ? variable : "";  // an empty variable counts as unset
  if (!forced.empty() && forced != "sm80") {
    throw std::invalid_argument("JAX_FLASH_CUDA_KERNELS=" + forced + ": the only value is sm80");
  }
  if (multiprocessors <= 0) multiprocessors = DefaultMultiprocessors(capability);
  return {capability, std::min(multiprocessors, kMaxMultiprocessors), SharedOf(capability),
          capability == 90 && forced.empty()};
}

Target TargetOf(const Device& device) {
  return TargetOf("sm_" + std::to_string(10 * device.major + device.minor), device.multiprocessors);
}

std::vector<Target> LocalTargets() {
  std::vector<Target> targets;
  for (const Device& device : LocalDevices()) targets.push_back(TargetOf(device));
  return targets;
}

std::vector<Target> TargetsOf(const std::string& arch) {
  std::vector<Target> targets;
  for (const Device& device : LocalDevices()) {
    if (ArchOf(device.major, device.minor) == arch) targets.push_back(TargetOf(device));
  }
  if (targets.empty()) targets.push_back(TargetOf(arch));
  return targets;
}

std::string ArchOf(int major, int minor) {
  const Nvrtc& nvrtc = CudaNvrtc();
  const int capability = 10 * major + minor;
  int best = 0;  // a cubin runs on later GPUs of the same major capability
  for (const int arch : nvrtc.archs) {
    if (arch / 10 == major && arch <= capability) best = std::max(best, arch);
  }
  const std::string text = std::to_string(major) + "." + std::to_string(minor);
  if (major < 8) throw std::invalid_argument("a GPU of compute capability " + text + ": the kernels need 8.0 or later");
  if (best == 0) {
    throw std::invalid_argument("NVRTC " + std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) + " (" +
                                nvrtc.path + ") does not compile for a GPU of compute capability " + text +
                                ": install a newer one (pip install --upgrade nvidia-cuda-nvrtc)");
  }
  return "sm_" + std::to_string(best) + (best == 90 ? "a" : "");
}

}  // namespace jax_flash

#include "cuda_src/driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace jax_flash {
namespace {

constexpr int kMultiprocessorCount = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_*

std::function<std::string()> nvrtc_finder;

template <typename Function>
void Find(void* library, const char* library_name, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (!*function) {
    throw std::runtime_error(std::string(library_name) + " has no " + name +
                             ": it is too old. CUDA 12 is the oldest supported");
  }
}

Driver LoadDriver() {
  constexpr char kName[] = "libcuda.so.1";
  void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(std::string("the CUDA driver was not found: ") + dlerror() +
                             ". Searched for libcuda.so.1 on the dynamic linker's path and in LD_LIBRARY_PATH. The "
                             "NVIDIA driver installs it, "
                             "not a Python package");
  }
  Driver driver;
#define FIND(name) Find(library, kName, #name, &driver.name)
  FIND(cuInit);
  FIND(cuDriverGetVersion);
  FIND(cuGetErrorString);
  FIND(cuDeviceGetCount);
  FIND(cuDeviceGetAttribute);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuCtxPushCurrent_v2);
  FIND(cuCtxPopCurrent_v2);
  FIND(cuModuleLoadData);
  FIND(cuModuleGetFunction);
  FIND(cuFuncSetAttribute);
  FIND(cuLaunchKernel);
  FIND(cuMemsetD8Async);
  FIND(cuMemsetD32Async);
  FIND(cuTensorMapEncodeTiled);
#undef FIND
  return driver;
}

// Opens NVRTC at the finder's path, or else where the dynamic linker finds it. On a GPU, JAX's plugin may have loaded
// it already.
void* OpenNvrtc(std::string* path) {
  std::string looked;
  if (nvrtc_finder) {
    try {
      *path = nvrtc_finder();
      if (void* library = dlopen(path->c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
      looked = dlerror();
    } catch (const std::exception& error) {
      looked = error.what();
    }
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
    *path = name;
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    looked += (looked.empty() ? "" : "; ") + std::string(dlerror());
  }
  throw std::runtime_error("NVRTC, the CUDA run-time compiler (libnvrtc.so.13 or .12), was not found. Looked for in " +
                           looked + ". Install it with JAX for the GPU: pip install \"jax[cuda13]\" (or jax[cuda12])");
}

Nvrtc LoadNvrtc() {
  Nvrtc nvrtc;
  void* const library = OpenNvrtc(&nvrtc.path);
#define FIND(name) Find(library, nvrtc.path.c_str(), #name, &nvrtc.name)
  FIND(nvrtcVersion);
  FIND(nvrtcGetNumSupportedArchs);
  FIND(nvrtcGetSupportedArchs);
  FIND(nvrtcCreateProgram);
  FIND(nvrtcCompileProgram);
  FIND(nvrtcGetProgramLogSize);
  FIND(nvrtcGetProgramLog);
  FIND(nvrtcGetCUBINSize);
  FIND(nvrtcGetCUBIN);
  FIND(nvrtcDestroyProgram);
#undef FIND
  int count = 0;
  if (nvrtc.nvrtcVersion(&nvrtc.major, &nvrtc.minor) || nvrtc.nvrtcGetNumSupportedArchs(&count)) {
    throw std::runtime_error(nvrtc.path + " does not work: nvrtcVersion failed");
  }
  nvrtc.archs.resize(count);
  nvrtc.nvrtcGetSupportedArchs(nvrtc.archs.data());
  return nvrtc;
}

}  // namespace

const Driver& CudaDriver() {
  static const Driver driver = LoadDriver();  // tried again after an exception
  return driver;
}

const Nvrtc& CudaNvrtc() {
  static const Nvrtc nvrtc = LoadNvrtc();
  return nvrtc;
}

void SetNvrtcFinder(std::function<std::string()> finder) { nvrtc_finder = std::move(finder); }

void Check(int result, const char* call) {
  if (result == 0) return;
  const char* text = nullptr;
  CudaDriver().cuGetErrorString(result, &text);
  throw std::runtime_error(std::string(call) + ": " + (text ? text : "error") + " (" + std::to_string(result) + ")");
}

const std::vector<Device>& CudaDevices() {
  static const std::vector<Device> devices = [] {
    const Driver& driver = CudaDriver();
    Check(driver.cuInit(0), "cuInit");
    int count = 0;
    Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
    std::vector<Device> found(count);
    for (int i = 0; i < count; ++i) {
      const auto get = [&](int attribute, int* value) {
        Check(driver.cuDeviceGetAttribute(value, attribute, i), "cuDeviceGetAttribute");
      };
      get(kCapabilityMajor, &found[i].major);
      get(kCapabilityMinor, &found[i].minor);
      get(kMultiprocessorCount, &found[i].multiprocessors);
    }
    return found;
  }();
  return devices;
}

}  // namespace jax_flash

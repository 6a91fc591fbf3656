// The used parts of the CUDA driver (libcuda) and of NVRTC. Both are opened when they are first needed, so the build
// and the import need no CUDA. Signatures and numbers match cuda.h and nvrtc.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda_src/contract.h"

namespace jax_flash {

struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorString)(int result, const char** text);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuCtxPushCurrent_v2)(void* context);
  int (*cuCtxPopCurrent_v2)(void** context);
  int (*cuModuleLoadData)(void** module, const void* image);
  int (*cuModuleGetFunction)(void** function, void* module, const char* name);
  int (*cuFuncSetAttribute)(void* function, int attribute, int value);
  int (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                        void** extra);
  int (*cuMemsetD8Async)(uint64_t address, unsigned char value, size_t count, void* stream);
  int (*cuMemsetD32Async)(uint64_t address, unsigned value, size_t count, void* stream);
  int (*cuTensorMapEncodeTiled)(TensorMap* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int l2_promotion, int out_of_bounds_fill);
};

struct Nvrtc {
  int (*nvrtcVersion)(int* major, int* minor);
  int (*nvrtcGetNumSupportedArchs)(int* count);
  int (*nvrtcGetSupportedArchs)(int* archs);
  int (*nvrtcCreateProgram)(void** program, const char* source, const char* name, int header_count,
                            const char* const* headers, const char* const* header_names);
  int (*nvrtcCompileProgram)(void* program, int option_count, const char* const* options);
  int (*nvrtcGetProgramLogSize)(void* program, size_t* size);
  int (*nvrtcGetProgramLog)(void* program, char* log);
  int (*nvrtcGetCUBINSize)(void* program, size_t* size);
  int (*nvrtcGetCUBIN)(void* program, char* cubin);
  int (*nvrtcDestroyProgram)(void** program);

  std::string path;
  int major, minor;
  std::vector<int> archs;  // architectures that it compiles for: 80 is sm_80
};

// If the library is not found, these throw std::runtime_error. Its message names the searched places and the package to
// install.
const Driver& CudaDriver();
const Nvrtc& CudaNvrtc();

// A function that finds NVRTC: it returns the path of the library or throws. bindings.cc sets it, because Python finds
// packages.
void SetNvrtcFinder(std::function<std::string()> finder);

// If a call failed, throws std::runtime_error with the driver's text: Check(CudaDriver().cuInit(0), "cuInit").
void Check(int result, const char* call);

struct Device {
  int major, minor;  // compute capability
  int multiprocessors;
};

// The devices of this process, in the driver's order.
const std::vector<Device>& CudaDevices();

}  // namespace jax_flash

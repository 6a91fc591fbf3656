// The part of the CUDA driver that cuda_src/driver.h uses. There is one GPU, of the architecture JAX_FLASH_EMULATE.
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "compiler.h"
#include "machine.h"
#include "tensor_map.h"

namespace {

// The number of SMs: JAX_FLASH_EMULATE_MULTIPROCESSORS, or by default as on an H100 or H200.
int Multiprocessors() {
  const char* const count = std::getenv("JAX_FLASH_EMULATE_MULTIPROCESSORS");
  return count ? std::atoi(count) : 132;
}

enum Result { kSuccess = 0, kInvalidValue = 1, kNotFound = 500, kLaunchFailed = 719 };
std::string failure;

int Failed(Result result, std::string text) {
  failure = std::move(text);
  return result;
}

int Capability() {
  const char* const arch = std::getenv("JAX_FLASH_EMULATE");  // sm_90
  return arch ? std::atoi(arch + std::strcspn(arch, "0123456789")) : 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

int cuGetErrorString(int, const char** text) {
  *text = failure.c_str();
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kMultiprocessorCount = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;
  *value = attribute == kMultiprocessorCount ? Multiprocessors()
           : attribute == kCapabilityMajor   ? Capability() / 10
           : attribute == kCapabilityMinor   ? Capability() % 10
                                             : 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void**, int) { return kSuccess; }
int cuCtxPushCurrent_v2(void*) { return kSuccess; }
int cuCtxPopCurrent_v2(void**) { return kSuccess; }

// An emulated cubin is an object file. Its ELF header gives its size. This links and opens it.
int cuModuleLoadData(void** module, const void* image) {
  const Elf64_Ehdr& elf = *static_cast<const Elf64_Ehdr*>(image);
  const emulator::TemporaryFolder folder;
  const std::string object = folder.path + "/kernel.o", library = folder.path + "/kernel.so";
  emulator::WriteFile(object, {static_cast<const char*>(image), elf.e_shoff + elf.e_shnum * elf.e_shentsize});
  // The process has the libraries that a kernel uses.
  const std::string log = emulator::Run("g++ -shared -nodefaultlibs " + object + " -o " + library, folder.path);
  if (!log.empty()) return Failed(kInvalidValue, log);
  *module = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  return *module ? kSuccess : Failed(kInvalidValue, dlerror());
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = dlsym(module, (std::string("emulated_") + name).c_str());
  return *function ? kSuccess : Failed(kNotFound, "no such kernel");
}

int cuFuncSetAttribute(void*, int, int) { return kSuccess; }

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** parameters, void**) {
  if (grid_y * grid_z * block_y * block_z != 1) return Failed(kInvalidValue, "grids have one dimension here");
  const auto& kernel = *static_cast<const emulator::Kernel*>(function);
  const std::string error = emulator::Launch(kernel, grid_x, block_x, shared_bytes, parameters);
  return error.empty() ? kSuccess : Failed(kLaunchFailed, error);
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void*) {
  std::memset(reinterpret_cast<void*>(address), value, count);
  return kSuccess;
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void*) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(address)[i] = value;
  return kSuccess;
}

int cuTensorMapEncodeTiled(void* encoded, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int, int fill) {
  constexpr int kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9, kTFloat32 = 11, kSwizzle128 = 3;
  const int element_bytes = type == kFloat16 || type == kBfloat16 ? 2 : type == kFloat32 || type == kTFloat32 ? 4 : 0;
  if (element_bytes == 0 || rank != 4 || interleave != 0 || swizzle != kSwizzle128 || fill != 0 ||
      box[0] * element_bytes != 128 || box[1] < 1 || box[1] > 256 || box[2] != 1 || box[3] != 1) {
    return Failed(kInvalidValue, "the emulator does not support this tensor map");
  }
  emulator::TensorMap map = {
      static_cast<uint8_t*>(address), {}, {uint64_t(element_bytes)}, box[1], element_bytes, type == kTFloat32};
  bool valid = reinterpret_cast<uint64_t>(address) % 16 == 0;
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i];
    if (i > 0) map.strides[i] = strides[i - 1];
    valid &= sizes[i] >= 1 && sizes[i] <= uint64_t(1) << 32 && element_strides[i] == 1;
    valid &= i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < uint64_t(1) << 40);
  }
  if (!valid) return Failed(kInvalidValue, "a tensor map's address, sizes or strides");
  std::memcpy(encoded, &map, sizeof map);
  return kSuccess;
}

}  // extern "C"

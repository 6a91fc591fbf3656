// Just-in-time compilation: NVRTC compiles the kernels' sources, which are in this binary, for one GPU architecture.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda_src/kernel_config.h"

namespace jax_flash {

// A file of cuda_src/kernels, and what it is compiled for.
struct Unit {
  std::string file;
  KernelConfig config;
  std::string programs;  // the text of this_program.h (program_source.h)
};

// The largest spill, as stores and loads of all kernels of a file, that costs less than other tiles do. With a spill of
// 32 bytes, two backwards were 1.3 times as fast as with the next tiles (docs/design/compiling.md).
constexpr int64_t kToleratedSpill = 32;

// What ptxas reports about the kernels of a file.
struct Faults {
  bool serialized = false;  // wgmmas wait for each other
  int64_t spilled = 0;      // bytes that are stored to local memory and loaded from it, for lack of registers

  // Do they cost more than other tiles do?
  bool Any() const { return serialized || spilled > kToleratedSpill; }
  // Serialized wgmmas are worse than any spill.
  bool operator<(const Faults& other) const {
    return std::tie(serialized, spilled) < std::tie(other.serialized, other.spilled);
  }
};

// "24 bytes of registers would be spilled"; empty if there are no faults.
std::string TextOf(const Faults& faults);

struct Kernels {
  std::string cubin;
  Faults faults;
};

struct Compilation {
  Kernels kernels;
  std::string log;  // warnings, and ptxas' report of registers and spills
  double seconds;   // of processor time
};

// Compiles a unit without any cache. `arch`: "sm_80", "sm_90a", ... JAX_FLASH_NVRTC_OPTIONS adds compiler options,
// separated by spaces. If they change, loaded problems keep their kernels. Throws std::runtime_error.
Compilation CompileUnit(const Unit& unit, const std::string& arch);

// The kernels of a unit: from memory, from the cache directory, or compiled. Safe with many threads and processes.
//
// The directory is JAX_FLASH_CACHE_DIR (empty: none), by default jax_flash in the user's cache directory. The name of
// an entry is a hash of everything that it depends on. Damaged entries are ignored. So are files that are not regular,
// larger than 64 MiB, or owned by users other than this one and root. Without write access, each process compiles its
// kernels.
const Kernels& CachedKernels(const Unit& unit, const std::string& arch);

// CachedKernels of several units, compiled at the same time.
void CacheKernels(const std::vector<Unit>& units, const std::string& arch);

// Does the cache directory have the kernels of a unit?
bool IsKept(const Unit& unit, const std::string& arch);

// The directory, empty if there is none.
std::string CacheDirectory();

// The dynamic shared memory of a cubin's kernel: its constant `jax_flash_shared_bytes`, or 0.
int SharedBytes(std::string_view cubin);

// The CUmodule of a unit on a device, loaded once. The device's primary context must be current.
void* LoadedModule(const Unit& unit, const std::string& arch, int device);

}  // namespace jax_flash

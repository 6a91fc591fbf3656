#include "cuda_src/jit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda_src/driver.h"
#include "cuda_src/sources.h"

namespace jax_flash {
namespace {

namespace fs = std::filesystem;

// NVRTC has no standard headers, so these types are defined here.
constexpr char kStdint[] =
    "typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;\n"
    "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;\n"
    "typedef unsigned long long uint64_t;\n";

std::vector<std::string> Options(const std::string& arch) {
  std::vector<std::string> options = {"-arch=" + arch, "-std=c++17", "--ptxas-options=-v"};
  const char* const more = std::getenv("JAX_FLASH_NVRTC_OPTIONS");
  const std::string_view text = more ? more : "";
  for (size_t begin, end = 0; (begin = text.find_first_not_of(' ', end)) != text.npos;) {
    end = std::min(text.find(' ', begin), text.size());
    options.emplace_back(text.substr(begin, end - begin));
  }
  return options;
}

// Everything that a cubin depends on.
std::string Key(const Unit& unit, const std::string& arch) {
  const Nvrtc& nvrtc = CudaNvrtc();
  std::string key = "jax_flash 4\n" + ThisKernel(unit.config) + unit.programs + "sources " + kSourcesHash + "\nnvrtc " +
                    std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) + "\n" + unit.file;
  for (const std::string& option : Options(arch)) key += " " + option;
  return key;
}

// FNV-1a.
uint64_t Hash(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001B3u;
  return hash;
}

// --- The cache directory ---

// An entry: its key, ptxas' report, the cubin's size and a checksum as text, an empty line, the cubin.

fs::path EntryPath(const std::string& key) {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.cubin", static_cast<unsigned long long>(Hash(key)));
  return fs::path(CacheDirectory()) / name;
}

std::string Header(const std::string& key, const Kernels& kernels) {
  const std::string text = key + "\nserialized " + std::to_string(kernels.faults.serialized) + "\nspilled " +
                           std::to_string(kernels.faults.spilled) + "\nbytes " + std::to_string(kernels.cubin.size());
  return text + "\nchecksum " + std::to_string(Hash(text + kernels.cubin)) + "\n\n";
}

// Cubins have some hundred KB, or some MB with line numbers.
constexpr off_t kMaxEntryBytes = off_t(64) << 20;

// Returns the bytes of an open file if it can be an entry: a regular file of limited size, owned by this user or root.
// Files of other users are ignored, because a GPU runs the contents.
std::string EntryBytes(int file) {
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > kMaxEntryBytes) return "";
  if (status.st_uid != geteuid() && status.st_uid != 0) return "";
  std::string bytes(size_t(status.st_size), '\0');
  bytes.resize(size_t(std::max<ssize_t>(read(file, bytes.data(), bytes.size()), 0)));
  return bytes;
}

// The number in a header's line that begins with this name, or 0.
int64_t NumberOf(std::string_view header, const std::string& name) {
  const size_t at = header.rfind("\n" + name + " ");
  return at == header.npos ? 0 : std::strtoll(header.data() + at + name.size() + 2, nullptr, 10);
}

std::optional<Kernels> ReadEntry(const std::string& key) {
  if (CacheDirectory().empty()) return std::nullopt;
  // O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
  const int file = open(EntryPath(key).c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  const std::string entry = EntryBytes(file);
  close(file);
  const size_t end = entry.find("\n\n");
  if (end == std::string::npos) return std::nullopt;
  const std::string header = entry.substr(0, end + 2);
  const Faults faults = {NumberOf(header, "serialized") != 0, NumberOf(header, "spilled")};
  Kernels kernels = {entry.substr(end + 2), faults};
  if (header != Header(key, kernels)) return std::nullopt;
  return kernels;
}

void WriteEntry(const std::string& key, const Kernels& kernels) {
  if (CacheDirectory().empty()) return;
  const fs::path path = EntryPath(key);
  std::error_code ignored;
  fs::create_directories(path.parent_path(), ignored);
  // Not mkstemp, because its files are private to this user. Here the umask decides who can read them.
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string temporary = path.string() + "." + std::to_string(getpid()) + "." + std::to_string(now);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return;
  const std::string entry = Header(key, kernels) + kernels.cubin;
  const bool written = write(file, entry.data(), entry.size()) == ssize_t(entry.size());
  // A reader sees the whole entry or none.
  if (close(file) != 0 || !written || std::rename(temporary.c_str(), path.c_str()) != 0) unlink(temporary.c_str());
}

// --- ELF ---

template <typename T>
T Read(std::string_view bytes, size_t at) {
  if (at > bytes.size() || bytes.size() - at < sizeof(T)) throw std::runtime_error("a cubin is not ELF");
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

struct Section {
  uint32_t type, link;
  uint64_t offset, size;
};

Section SectionAt(std::string_view elf, int index) {
  const size_t at = Read<uint64_t>(elf, 40) + size_t(index) * Read<uint16_t>(elf, 58);
  return {Read<uint32_t>(elf, at + 4), Read<uint32_t>(elf, at + 40), Read<uint64_t>(elf, at + 24),
          Read<uint64_t>(elf, at + 32)};
}

// Older versions of ptxas serialize the forward's wgmmas (warning C7515). Version 12.6 lacks some instructions.
constexpr std::pair<int, int> kOldestForHopper = {12, 9};

// The spills and serialized wgmmas in a log. The warning has no number in some versions of ptxas, so its text is
// matched.
Faults FaultsIn(std::string_view log) {
  constexpr std::string_view kSpill = " bytes spill";
  Faults faults = {log.find("wgmma.mma_async instructions are serialized") != log.npos, 0};
  for (size_t at = log.find(kSpill); at != log.npos; at = log.find(kSpill, at + 1)) {
    const size_t number = log.find_last_not_of("0123456789", at - 1) + 1;
    faults.spilled += std::strtoll(log.data() + number, nullptr, 10);
  }
  return faults;
}

// The processor time of this thread, which does not depend on the machine's load.
double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

}  // namespace

std::string TextOf(const Faults& faults) {
  if (faults.serialized) return "wgmmas would wait for each other";
  return faults.spilled == 0 ? "" : std::to_string(faults.spilled) + " bytes of registers would be spilled";
}

Compilation CompileUnit(const Unit& unit, const std::string& arch) {
  const Nvrtc& nvrtc = CudaNvrtc();
  const std::string compiler =
      "NVRTC " + std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) + " (" + nvrtc.path + ")";
  if (unit.config.tiling.family == Family::kHopper && std::make_pair(nvrtc.major, nvrtc.minor) < kOldestForHopper) {
    throw std::runtime_error(compiler + " is too old for Hopper's kernels, which need " +
                             std::to_string(kOldestForHopper.first) + "." + std::to_string(kOldestForHopper.second) +
                             " or later: pip install --upgrade nvidia-cuda-nvrtc-cu12, or jax[cuda13]; or set " +
                             "JAX_FLASH_CUDA_KERNELS=sm80 to use slower kernels");
  }
  std::vector<const char*> headers = {kStdint}, names = {"cstdint"}, options;
  for (const Source& source : kSources) headers.push_back(source.text), names.push_back(source.name);
  const std::string this_kernel = ThisKernel(unit.config);
  headers.push_back(this_kernel.c_str()), names.push_back("this_kernel.h");
  headers.push_back(unit.programs.c_str()), names.push_back("this_program.h");
  const std::vector<std::string> arguments = Options(arch);
  for (const std::string& argument : arguments) options.push_back(argument.c_str());

  const double start = ThreadSeconds();
  const std::string source = "#include \"" + unit.file + "\"\n";
  void* program = nullptr;
  if (nvrtc.nvrtcCreateProgram(&program, source.c_str(), "jax_flash.cu", int(headers.size()), headers.data(),
                               names.data()) != 0) {
    throw std::runtime_error("nvrtcCreateProgram failed");
  }
  const auto destroy = [&](void* p) { nvrtc.nvrtcDestroyProgram(&p); };
  const std::unique_ptr<void, decltype(destroy)> owner(program, destroy);
  const int result = nvrtc.nvrtcCompileProgram(program, int(options.size()), options.data());
  Compilation done;
  size_t size = 0;
  nvrtc.nvrtcGetProgramLogSize(program, &size);
  done.log.resize(size);
  nvrtc.nvrtcGetProgramLog(program, done.log.data());
  done.log.resize(std::strlen(done.log.c_str()));
  if (result != 0) {
    throw std::runtime_error(compiler + " could not compile " + unit.file + " for " + arch + ":\n" + done.log);
  }
  nvrtc.nvrtcGetCUBINSize(program, &size);
  done.kernels.cubin.resize(size);
  nvrtc.nvrtcGetCUBIN(program, done.kernels.cubin.data());
  done.kernels.faults = FaultsIn(done.log);
  done.seconds = ThreadSeconds() - start;
  return done;
}

const Kernels& CachedKernels(const Unit& unit, const std::string& arch) {
  struct Entry {
    std::mutex mutex;
    Kernels kernels;
  };
  static std::mutex mutex;
  static auto& entries = *new std::map<std::string, Entry>();  // never destroyed: threads may outlive main
  const std::string key = Key(unit, arch);
  Entry* entry;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    entry = &entries[key];
  }
  const std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->kernels.cubin.empty()) {
    if (std::optional<Kernels> kernels = ReadEntry(key)) {
      entry->kernels = std::move(*kernels);
    } else {
      entry->kernels = CompileUnit(unit, arch).kernels;
      WriteEntry(key, entry->kernels);
    }
  }
  return entry->kernels;
}

void CacheKernels(const std::vector<Unit>& units, const std::string& arch) {
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < units.size(); ++i) {
    others.push_back(std::async(std::launch::async, [&, i] { CachedKernels(units[i], arch); }));
  }
  if (!units.empty()) CachedKernels(units[0], arch);
  for (std::future<void>& other : others) other.get();
}

bool IsKept(const Unit& unit, const std::string& arch) { return ReadEntry(Key(unit, arch)).has_value(); }

std::string CacheDirectory() {
  if (const char* directory = std::getenv("JAX_FLASH_CACHE_DIR")) return directory;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache)
    return (fs::path(cache) / "jax_flash").string();
  if (const char* home = std::getenv("HOME"); home && *home) return (fs::path(home) / ".cache/jax_flash").string();
  return "";
}

int SharedBytes(std::string_view cubin) {
  constexpr std::string_view kName("jax_flash_shared_bytes\0", 23);
  const int count = Read<uint16_t>(cubin, 60);
  for (int i = 0; i < count; ++i) {
    const Section table = SectionAt(cubin, i);
    if (table.type != 2) continue;  // SHT_SYMTAB
    const Section names = SectionAt(cubin, int(table.link));
    for (size_t at = table.offset; at < table.offset + table.size; at += 24) {
      const size_t name = names.offset + Read<uint32_t>(cubin, at);
      if (name > cubin.size() || cubin.substr(name, kName.size()) != kName) continue;
      const Section section = SectionAt(cubin, Read<uint16_t>(cubin, at + 6));
      return Read<int32_t>(cubin, section.offset + Read<uint64_t>(cubin, at + 8));
    }
  }
  return 0;
}

void* LoadedModule(const Unit& unit, const std::string& arch, int device) {
  static std::mutex mutex;
  static auto& modules = *new std::map<std::pair<std::string, int>, void*>();
  const std::string& cubin = CachedKernels(unit, arch).cubin;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& module = modules[{Key(unit, arch), device}];
  if (!module) {
    const int result = CudaDriver().cuModuleLoadData(&module, cubin.data());
    if (result != 0) {
      module = nullptr;
      int version = 0;
      CudaDriver().cuDriverGetVersion(&version);
      Check(result,
            ("loading " + unit.file + ", compiled for " + arch + " by NVRTC " + std::to_string(CudaNvrtc().major) +
             " (" + CudaNvrtc().path + "), into a driver for CUDA " + std::to_string(version / 1000))
                .c_str());
    }
  }
  return module;
}

}  // namespace jax_flash

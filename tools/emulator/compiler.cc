// The part of NVRTC that cuda_src/driver.h uses. g++ compiles the kernels after a few changes of their text: `asm`
// statements become calls of ptx.cc, and syntax that only CUDA has becomes C++.
#include "compiler.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <regex>
#include <vector>

namespace emulator {

TemporaryFolder::TemporaryFolder() : path(std::filesystem::temp_directory_path() / "jax_flash_emulator.XXXXXX") {
  if (!mkdtemp(path.data())) abort();
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

void WriteFile(const std::string& path, std::string_view text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary).write(text.data(), text.size());
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string Run(const std::string& command, const std::string& folder) {
  const std::string log = folder + "/log";
  if (std::system((command + " > " + log + " 2>&1").c_str()) == 0) return "";
  return command + ":\n" + ReadFile(log);
}

namespace {

// asm volatile("text" : "=r"(x) : "r"(y) : "memory") becomes EMULATED_PTX("text", "=r"(x), "r"(y), "memory").
std::string WithoutAsm(const std::string& text) {
  static const std::regex statement(R"(\basm( volatile)?\()");
  std::string result;
  auto rest = text.cbegin();
  for (std::smatch match; std::regex_search(rest, text.cend(), match, statement);) {
    result.append(rest, match[0].first);
    result += "EMULATED_PTX(";
    rest = match[0].second;
    char before = '(';  // the last character that is not blank
    bool quoted = false;
    for (int depth = 1; depth > 0; ++rest) {
      char c = *rest;
      if (c == '"' && before != '\\') quoted = !quoted;
      if (!quoted) depth += (c == '(') - (c == ')');
      if (!quoted && depth == 1 && c == ':') {
        if (before == ',') continue;
        c = ',';
      }
      result += c;
      if (!std::isspace(static_cast<unsigned char>(c)) && (quoted || c != '\\')) before = c;
    }
  }
  return result.append(rest, text.cend());
}

std::string Translated(std::string text) {
  text = WithoutAsm(text);
  // "=r"(x)
  text = std::regex_replace(text, std::regex(R"re("[=+]?[rflhn]"\()re"), "emulator::Operand(");
  // extern __shared__ __align__(16) uint8_t memory[];
  text = std::regex_replace(text, std::regex(R"(extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];)"),
                            "$1* const $2 = reinterpret_cast<$1*>(emulator::DynamicShared());");
  // Registers every kernel, with the size of its clusters.
  static const std::regex kernel(
      R"(__global__ void[^;{]*?(?:__cluster_dims__\(([^,]*),[^)]*\)\s*)?(\bjax_flash_\w+)\()");
  std::string kernels;
  for (std::sregex_iterator i(text.begin(), text.end(), kernel), end; i != end; ++i) {
    kernels += "EMULATED_KERNEL(" + (*i)[2].str() + ", " + ((*i)[1].matched ? (*i)[1].str() : "1") + ")\n";
  }
  // A file has at most one namespace, which contains its kernels.
  std::smatch space;
  if (!kernels.empty() && std::regex_search(text, space, std::regex(R"(\nnamespace ([\w:]+) \{\n)")))
    kernels = "namespace " + space[1].str() + " {\n" + kernels + "}\n";
  return text + kernels;
}

struct Program {
  std::string source, log, object;
  std::vector<std::pair<std::string, std::string>> headers;
};

// The headers this_kernel.h and this_program.h differ between kernels.
bool DiffersBetweenKernels(const std::string& name) { return name.rfind("this_", 0) == 0; }

// Returns a folder with the other headers, translated once per process.
const std::string& CommonHeaders(const Program& program) {
  static std::mutex mutex;
  static std::map<std::string, TemporaryFolder> folders;
  std::string key;
  for (const auto& [name, text] : program.headers) {
    if (!DiffersBetweenKernels(name)) key += name + "\n" + text;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, made] = folders.try_emplace(std::move(key));
  const std::string& folder = found->second.path;
  for (const auto& [name, text] : program.headers) {
    if (made && !DiffersBetweenKernels(name)) WriteFile(folder + "/" + name, Translated(text));
  }
  return folder;
}

}  // namespace
}  // namespace emulator

using emulator::Program;

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}

static const int kArchs[] = {80, 86, 89, 90, 100, 120};

int nvrtcGetNumSupportedArchs(int* count) {
  *count = int(std::size(kArchs));
  return 0;
}

int nvrtcGetSupportedArchs(int* archs) {
  std::copy(std::begin(kArchs), std::end(kArchs), archs);
  return 0;
}

int nvrtcCreateProgram(void** program, const char* source, const char*, int header_count, const char* const* headers,
                       const char* const* header_names) {
  Program* const created = new Program{source, "", "", {}};
  for (int i = 0; i < header_count; ++i) {
    if (std::strcmp(header_names[i], "cstdint") != 0) created->headers.emplace_back(header_names[i], headers[i]);
  }
  *program = created;
  return 0;
}

int nvrtcCompileProgram(void* program, int option_count, const char* const* options) {
  Program& p = *static_cast<Program*>(program);
  const emulator::TemporaryFolder folder;
  for (const auto& [name, text] : p.headers) {
    if (emulator::DiffersBetweenKernels(name)) {
      emulator::WriteFile(folder.path + "/" + name, emulator::Translated(text));
    }
  }
  emulator::WriteFile(folder.path + "/kernel.cc", p.source);
  std::string command = EMULATOR_COMPILER;
  for (int i = 0; i < option_count; ++i) {
    const std::string option = options[i];
    if (option.rfind("-D", 0) == 0) command += " " + option;
    if (option.rfind("-arch=sm_", 0) == 0) command += " -D__CUDA_ARCH__=" + std::to_string(std::atoi(&option[9]) * 10);
  }
  const std::string object = folder.path + "/kernel.o";
  command += " -I" + folder.path + " -I" + emulator::CommonHeaders(p);
  command += " -c " + folder.path + "/kernel.cc -o " + object;
  p.log = emulator::Run(command, folder.path);
  p.object = emulator::ReadFile(object);
  return p.log.empty() ? 0 : 6;  // NVRTC_ERROR_COMPILATION
}

int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = static_cast<Program*>(program)->log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, static_cast<Program*>(program)->log.c_str());
  return 0;
}

int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = static_cast<Program*>(program)->object.size();
  return 0;
}

int nvrtcGetCUBIN(void* program, char* cubin) {
  const std::string& object = static_cast<Program*>(program)->object;
  object.copy(cubin, object.size());
  return 0;
}

int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  return 0;
}

}  // extern "C"

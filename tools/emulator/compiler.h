// Files and commands of the emulated compiler and driver.
#pragma once

#include <string>
#include <string_view>

namespace emulator {

struct TemporaryFolder {
  std::string path;

  TemporaryFolder();
  ~TemporaryFolder();
};

void WriteFile(const std::string& path, std::string_view text);
std::string ReadFile(const std::string& path);

// Runs a command. Returns "", or its output if it failed.
std::string Run(const std::string& command, const std::string& folder);

}  // namespace emulator

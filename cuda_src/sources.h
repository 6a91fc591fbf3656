// The kernels' sources, which CMake embeds in the binary (cuda_src/sources.cmake).
#pragma once

namespace jax_flash {

struct Source {
  const char *name, *text;  // name: as in an #include
};

struct SourceList {
  const Source *first, *last;
  const Source* begin() const { return first; }
  const Source* end() const { return last; }
};

extern const SourceList kSources;
extern const char kSourcesHash[];  // of all names and texts

}  // namespace jax_flash

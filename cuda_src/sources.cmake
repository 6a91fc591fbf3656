# cmake -D OUTPUT=sources.cc -D ROOT=... -D FILES="a;b" -P sources.cmake
# Writes the C++ file that has the text of the kernels' sources (cuda_src/sources.h).
set(entries "")
set(all "")
foreach(file IN LISTS FILES)
  file(READ "${ROOT}/${file}" text)
  string(REGEX REPLACE "^cuda_src/kernels/" "" name "${file}")
  string(APPEND entries "    {\"${name}\", R\"jax_flash(${text})jax_flash\"},\n")
  string(APPEND all "${name}\n${text}")
endforeach()
string(SHA256 hash "${all}")
file(WRITE "${OUTPUT}" "#include \"cuda_src/sources.h\"

namespace jax_flash {
static const Source kEntries[] = {
${entries}};
const SourceList kSources = {kEntries, kEntries + sizeof(kEntries) / sizeof(kEntries[0])};
const char kSourcesHash[] = \"${hash}\";
}  // namespace jax_flash
")

"""Builds libraries that replace NVRTC. They compile nothing and report the given spills."""

from __future__ import annotations

import pathlib
import subprocess

SOURCE = """
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const unsigned char cubin[] = {%(cubin)s};
static __thread char report[300];
static int field(const char* text, const char* name) {
  const char* found = strstr(text, name);
  return found ? atoi(strchr(found + strlen(name), '(') + 1) : 0;
}
int nvrtcVersion(int* major, int* minor) { *major = %(major)d, *minor = %(minor)d; return 0; }
int nvrtcCreateProgram(void** program, const char* source, const char* name, int count, const char* const* texts,
                       const char* const* names) {
  for (int i = 0; i < count; ++i) {
    if (strcmp(names[i], "this_kernel.h") != 0) continue;
    const char* tiling = strstr(texts[i], "kTiling");
    const int hopper = field(tiling, "family") == 90, rows = field(tiling, "rows"), cols = field(tiling, "cols");
    const int interleaved_heads = field(tiling, "interleaved_heads");
    sprintf(report, "%%s%%d bytes spill stores, %%d bytes spill loads",
            (%(serialized)s) ? "wgmma.mma_async instructions are serialized due to...\\n" : "", (%(spilled)s) / 2,
            (%(spilled)s) / 2);
    FILE* const compiled = fopen(getenv("COMPILED") ? getenv("COMPILED") : "/dev/null", "a");
    fprintf(compiled, "%%d x %%d\\n", rows, cols);
    fclose(compiled);
  }
  return 0;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) { return 0; }
int nvrtcGetProgramLogSize(void* program, size_t* size) { *size = sizeof report; return 0; }
int nvrtcGetProgramLog(void* program, char* log) { strcpy(log, report); return 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { *size = sizeof cubin; return 0; }
int nvrtcGetCUBIN(void* program, char* to) { memcpy(to, cubin, sizeof cubin); return 0; }
int nvrtcDestroyProgram(void** program) { return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 0; return 0; }
int nvrtcGetSupportedArchs(int* archs) { return 0; }
"""


def build(
    library: pathlib.Path,
    version: tuple[int, int] = (13, 0),
    cubin: bytes = b"\0",
    spilled: str = "0",
    serialized: str = "0",
) -> None:
    """Build the library.

    Args:
      cubin: the bytes that it returns for every kernel.
      spilled: a C expression for the bytes that a kernel spills.
      serialized: a C expression for whether the kernel's wgmmas are serialized.

    The expressions may use `hopper` (is the kernel for Hopper?), `interleaved_heads`, and the tile sizes `rows` and
    `cols`.
    The library appends the tile sizes to the file that the environment variable COMPILED names.
    """
    major, minor = version
    values = {"major": major, "minor": minor, "cubin": ",".join(map(str, cubin))}
    code = library.with_suffix(".c")
    code.write_text(SOURCE % (values | {"spilled": spilled, "serialized": serialized}))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, code], check=True)

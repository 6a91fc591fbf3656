"""Emulates a GPU: compiles the CUDA kernels for this CPU and runs them through the real host code (README.md).

Call `install("sm_90")` before importing `jax_flash`. Platform "cpu" then has the custom calls of "cuda".
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess

FOLDER = pathlib.Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / "emulator"
COMMON = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS = [*COMMON, "-O3", "-flto=auto", "-fno-semantic-interposition", "-shared", "-Wl,-Bsymbolic", "-Wall", "-Wextra"]
# Optimising a kernel takes g++ longer than the kernel runs.
KERNEL_FLAGS = [*COMMON, "-O0", "-fno-gnu-unique", "-fno-threadsafe-statics", "-ftrivial-auto-var-init=pattern", "-w"]
ARCHS = ("sm_80", "sm_90")


def missing() -> str:
    """Return why the emulator cannot run here; empty if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the emulator runs on x86-64 Linux"
    return "" if shutil.which("g++") else "the emulator needs g++"


def build() -> pathlib.Path:
    """Build the library with the driver, the compiler and the machine, in a folder that depends on the sources."""
    import jax
    import jaxlib

    sources = sorted([*FOLDER.glob("*.cc"), *FOLDER.glob("*.h")])
    text = b"".join(source.read_bytes() for source in sources)
    text += repr([FLAGS, KERNEL_FLAGS, jaxlib.__version__]).encode()
    folder = BUILD / hashlib.sha256(text).hexdigest()[:16]
    library = folder / "libcuda.so.1"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the build
        if not library.exists():
            made = folder / "unfinished"
            header = shutil.copy(FOLDER / "cuda.h", folder)  # g++ looks for the precompiled header in its folder
            subprocess.run(["g++", *KERNEL_FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
            compiler = " ".join(["g++", *KERNEL_FLAGS, "-include", header])
            command = ["g++", *FLAGS, f'-DEMULATOR_COMPILER="{compiler}"', "-isystem", jax.ffi.include_dir()]
            command += [*(s for s in sources if s.suffix == ".cc"), "-Wl,-soname,libcuda.so.1", "-ldl", "-o", made]
            subprocess.run(command, check=True)
            made.rename(library)
    return library


def install(arch: str) -> None:
    if arch not in ARCHS:
        raise ValueError(f"JAX_FLASH_EMULATE={arch} must be one of {', '.join(ARCHS)}")
    if reason := missing():
        raise RuntimeError(reason)
    library = build()
    os.environ |= {"JAX_FLASH_EMULATE": arch, "JAX_FLASH_CACHE_DIR": str(library.parent), "JAX_PLATFORMS": "cpu"}
    emulator = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # later loads find it by its soname

    import jax

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handlers = {
        "jax_flash_forward": emulator.EmulatedForward,
        "jax_flash_backward": emulator.EmulatedBackward,
        "jax_flash_tangent": emulator.EmulatedTangent,
    }
    register = jax.ffi.register_ffi_target

    def register_emulated(target, handler, platform):
        if platform == "cpu":
            handler = jax.ffi.pycapsule(handlers[target])
        else:
            for stage, name in enumerate(("instantiate", "initialize", "execute")):
                address = ctypes.c_void_p(pointer(handler[name], None))
                emulator.EmulatorSetHandler(list(handlers).index(target), stage, address)
        register(target, handler, platform=platform)

    jax.ffi.register_ffi_target = register_emulated
    from jax.interpreters import mlir

    import jax_flash.cuda
    from jax_flash import custom_calls

    jax.ffi.register_ffi_target = register
    jax_flash.cuda.find_nvrtc = lambda: str(library)

    # The CPU uses the lowering for CUDA, including scratch and refusals.
    mlir.register_lowering(custom_calls._platforms, custom_calls._lower_cuda, platform="cpu")
    refusal = custom_calls.refusal
    custom_calls.refusal = lambda problem, platform, *moving: refusal(
        problem, "cuda" if platform == "cpu" else platform, *moving
    )

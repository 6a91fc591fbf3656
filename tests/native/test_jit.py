"""Compilation and caching of CUDA kernels, and loading of NVRTC and libcuda. These tests need no GPU."""

import ctypes
import os
import pathlib
import struct
import subprocess
import sys

import compiling
import fake_nvrtc
import jax
import jax.numpy as jnp
import pytest
from plans import BASE, fields, problem

from jax_flash import _native


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- compiling ---


def test_planned_kernel_compiles(nvrtc):
    ((file, kernel, unit),) = _native.cuda_plan(BASE.encode(), False, "sm_90a")
    cubin, log, seconds, shared_bytes = _native.cuda_compile(file, unit, "sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert kernel in log and "registers" in log
    assert 0 < seconds
    assert 50_000 < shared_bytes <= 227 * 1024


def test_compile_error_has_log(nvrtc):
    with pytest.raises(RuntimeError, match=r"could not compile hopper/forward.cuh for sm_90a:\n.*assertion failed"):
        _native.cuda_compile("hopper/forward.cuh", fields() | {"rows": 65}, "sm_90a")


def test_missing_and_unknown_fields_are_refused():
    for changed, message in (({}, "without the field dtype"), (fields() | {"colour": 3}, "does not have")):
        with pytest.raises(ValueError, match=message):
            _native.cuda_compile("hopper/forward.cuh", changed, "sm_90a")


def test_options_from_the_environment(nvrtc, monkeypatch):
    def cubin(options):
        monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", options)
        return _native.cuda_compile("scheduler/segments.cuh", unit, "sm_80")[0]

    file, _, unit = _native.cuda_plan(problem(segment_ids=True).encode(), False, "sm_80")[0]
    assert file == "scheduler/segments.cuh"
    assert b".debug_line" not in cubin("  ")
    assert b".debug_line" in cubin("  -lineinfo -DNOBODY=1")
    with pytest.raises(RuntimeError, match=r"could not compile scheduler/segments.cuh for sm_80:\n.*--nonsense"):
        cubin("--nonsense")


def test_architectures(nvrtc):
    assert _native.cuda_arch(8, 0) == "sm_80"
    assert _native.cuda_arch(8, 9) == "sm_89"
    assert _native.cuda_arch(9, 0) == "sm_90a"
    with pytest.raises(ValueError, match="capability 7.5: the kernels need 8.0"):
        _native.cuda_arch(7, 5)
    with pytest.raises(ValueError, match=r"does not compile for .* 99.0.*newer"):
        _native.cuda_arch(99, 0)


# --- the cache directory ---


def exit_code(directory: object, text: str = BASE.encode(), arch: str = "sm_80", **limits: int) -> int | None:
    """Compile in a new process and return its exit code."""
    process = compiling.start(directory, text, arch, **limits)
    process.join(timeout=300)
    return process.exitcode


def fill(directory: object, *args: str) -> dict[pathlib.Path, tuple[int, int]]:
    """Compile in a new process. Return the times of modification and sizes of the files in the cache directory."""
    assert exit_code(directory, *args) == 0
    files = pathlib.Path(directory).glob("*") if directory else ()
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_second_process_uses_cached_cubin(nvrtc, tmp_path):
    first = fill(tmp_path / "new" / "folder")
    assert len(first) == 1
    assert fill(tmp_path / "new" / "folder") == first


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_umask_applies_to_entries(nvrtc, tmp_path, umask, mode):
    assert exit_code(tmp_path, umask=umask) == 0
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [mode]


@pytest.mark.parametrize(
    "damage",
    [lambda entry: b"", lambda entry: entry[:-1], lambda entry: entry[:-9] + b"?" + entry[-8:], lambda entry: b"\n\n"],
    ids=["empty", "truncated", "another byte", "no header"],
)
def test_damaged_entry_is_recompiled(nvrtc, tmp_path, damage):
    ((path, _),) = fill(tmp_path).items()
    entry = path.read_bytes()
    path.write_bytes(damage(entry))
    fill(tmp_path)
    assert path.read_bytes()[:200] == entry[:200]
    assert path.stat().st_size == len(entry)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.touch() or os.truncate(path, 1 << 40),
    ],
    ids=["a FIFO", "an endless device", "a huge sparse file"],
)
def test_special_file_is_replaced(nvrtc, tmp_path, make):
    """Compilation does not block on such a file, and does not read it to its end."""
    ((path, (_, size)),) = fill(tmp_path).items()
    path.unlink()
    make(path)
    ((_, (_, replaced)),) = fill(tmp_path).items()
    assert path.is_file() and not path.is_symlink() and replaced == size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_entry_of_another_user_is_replaced(nvrtc, tmp_path):
    ((path, _),) = fill(tmp_path).items()
    os.chown(path, 12345, -1)
    fill(tmp_path)
    assert path.stat().st_uid == 0


def test_entry_with_another_key_is_replaced(nvrtc, tmp_path):
    """An entry of another kernel under the same name simulates a collision of hashes."""
    ((path, _),) = fill(tmp_path).items()
    (other,) = set(fill(tmp_path, problem(is_causal=True).encode())) - {path}
    entry = path.read_bytes()
    path.write_bytes(other.read_bytes())
    fill(tmp_path)
    assert path.read_bytes()[:200] == entry[:200]


def test_cache_key(nvrtc, monkeypatch, tmp_path):
    changes = [(), (problem(is_causal=True).encode(),), (BASE.encode(), "sm_89"), (problem(qk_dim=72).encode(),)]
    assert [len(fill(tmp_path, *args)) for args in changes] == [1, 2, 3, 4]
    monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", "-lineinfo")
    assert len(fill(tmp_path)) == 5
    monkeypatch.undo()
    # Other fields of the problem do not change the kernel.
    assert len(fill(tmp_path, problem(batch=3, q_heads=16, drop_threshold=0).encode())) == 5
    (path, *_) = tmp_path.iterdir()
    header = path.read_bytes().partition(b"\n\n")[0].decode()
    _, major, minor = nvrtc
    assert f"nvrtc {major}.{minor}\n" in header and "ampere/forward.cuh -arch=sm_8" in header and "sources " in header


@pytest.mark.parametrize("directory", ["", "/dev/null/cache"], ids=["none", "unwritable"])
def test_kernels_compile_without_cache_directory(nvrtc, directory):
    assert fill(directory) == {}


def test_full_disk_only_prevents_caching(nvrtc, tmp_path, monkeypatch):
    """A limit on the size of files makes writes fail after some bytes, as a full disk does."""
    assert exit_code(tmp_path, file_size=4096) == 0
    assert list(tmp_path.iterdir()) == []


def test_concurrent_processes(nvrtc, tmp_path):
    processes = [compiling.start(tmp_path, BASE.encode(), "sm_80") for _ in range(4)]
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]  # and no temporary file
    assert len(fill(tmp_path)) == 1


def test_default_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.cuda_cache_directory() == str(tmp_path / "jax_flash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert _native.cuda_cache_directory() == "/home/ada/.cache/jax_flash"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "/var/kernels")
    assert _native.cuda_cache_directory() == "/var/kernels"


# --- libraries ---


def test_import_loads_no_cuda_library():
    script = """
import jax_flash, jax_flash.nnx
assert not [line for line in open("/proc/self/maps") if "libcuda" in line or "nvrtc" in line]
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.skipif(can_load("libnvrtc.so.13") or can_load("libnvrtc.so.12"), reason="the system has an NVRTC")
def test_missing_nvrtc_error():
    script = """
import jax_flash.cuda
from jax_flash import _native
def find_nvrtc():
    raise RuntimeError("the folders A and B")
jax_flash.cuda.find_nvrtc = find_nvrtc
try:
    _native.cuda_cache(__import__("sys").argv[1], False, "sm_80")
except RuntimeError as error:
    print(error)
"""
    run = [sys.executable, "-c", script, BASE.encode()]
    message = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
    for part in ("libnvrtc.so.13", "the folders A and B", 'pip install "jax[cuda13]"'):
        assert part in message


COMPILE = """
import sys
import jax_flash.cuda
from jax_flash import _native
jax_flash.cuda.find_nvrtc = lambda: sys.argv[1]
file, _, unit = _native.cuda_plan(sys.argv[2], False, "sm_90a")[0]
try:
    _native.cuda_compile(file, unit, "sm_90a")
except RuntimeError as error:
    print(error)
"""


def error_of(library: pathlib.Path, version: tuple[int, int], cubin: bytes = b"\0") -> str:
    """Return the error from compiling with a fake NVRTC that has this version and returns this cubin."""
    fake_nvrtc.build(library, version, cubin)
    run = [sys.executable, "-c", COMPILE, str(library), BASE.encode()]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_old_nvrtc_error_for_hopper(tmp_path):
    library = tmp_path / "libnvrtc.so"
    message = error_of(library, (12, 8))
    for part in (f"NVRTC 12.8 ({library})", "12.9 or later", "nvidia-cuda-nvrtc-cu12", "JAX_FLASH_CUDA_KERNELS=sm80"):
        assert part in message


@pytest.mark.parametrize("sections", [64, 2**40, 2**64 - 8], ids=["at the end", "far behind it", "before the start"])
def test_cubin_with_sections_outside_the_file(tmp_path, sections):
    """The ELF reader stays within the cubin."""
    elf = struct.pack("<40xQ10xHH2x", sections, 64, 1)
    assert len(elf) == 64
    assert error_of(tmp_path / "libnvrtc.so", (13, 0), elf) == "a cubin is not ELF\n"


@pytest.mark.skipif(can_load("libcuda.so.1"), reason="there is a driver")
def test_missing_driver_error():
    """Call the handlers for CUDA, registered under another name on the CPU."""
    handlers = _native.registrations()["CUDA"]["jax_flash_forward"]
    jax.ffi.register_ffi_target("jax_flash_forward_without_driver", handlers, platform="cpu")
    q, kv = jnp.zeros((2, 512, 8, 64), jnp.bfloat16), jnp.zeros((2, 512, 4, 64), jnp.bfloat16)
    statistics = jax.ShapeDtypeStruct((2, 8, 512), jnp.float32)
    call = jax.ffi.ffi_call("jax_flash_forward_without_driver", [q, statistics, statistics])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jax_flash_forward: .*driver.*libcuda\.so\.1"):
        call(q, kv, kv, problem=BASE.encode())

"""A few cases of every kernel, and what the emulator says of kernels that are broken. tests/test_emulator.py runs this
file in processes in which the CPU is a GPU: JAX_FLASH_EMULATE=sm_90 pytest tests/emulator/checks.py
"""

import ctypes
import pathlib
import re

import pytest
from cases import Case
from test_accuracy import by_numpy, check

import emulator

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "cuda_src" / "kernels"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(B=1, T=300, S=400, D=64, E=64, causal=True, offset=True), "bfloat16"),
        (Case(B=1, T=300, S=400, D=128, E=128, window=(150, 20), segments=True), "float16"),
        (Case(B=1, T=150, S=200, N=2, K=1, D=256, E=256, causal=True, dropout=0.2), "bfloat16"),
        (Case(T=70, S=90, D=72, E=40, bias="1nts", mask="b11s", dropout=0.1), "bfloat16"),
        (Case(T=70, S=90, D=64, E=64, soft_cap=2.0, lengths=True, deterministic=True), "bfloat16"),
        (Case(T=70, S=90, D=40, E=64, causal=True, bias="bn1s", deterministic=True), "float32"),
        (Case(T=3, S=1100, N=8, causal=True, offset=True, lengths=True, dropout=0.2), "bfloat16"),
        (Case(T=16, S=1100, N=3, K=1, D=64, E=40, mask="1n1s", bias="bnts", segments=True), "float32"),
    ],
    ids=str,
)
def test_case(case, dtype):
    check(case, dtype, by_numpy)


# --- Broken kernels ---


def launch(body: str) -> str:
    """The error of a block of 128 threads with 4 KiB of shared memory."""
    source = f"""
#pragma once
#include "tile/cluster.cuh"
#include "tile/cp_async.cuh"
#include "tile/mbarrier.cuh"
#include "tile/tma.cuh"
#include "tile/warp.cuh"
#include "tile/wgmma.cuh"
struct Shared {{ alignas(1024) uint8_t tile[2048]; alignas(16) uint8_t bytes[2032]; uint64_t barrier; }};
extern "C" __global__ void jax_flash_test(const __grid_constant__ uint4 zeros) {{
  using namespace jax_flash;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) MbarrierInit(&shared.barrier, 1);
  __syncthreads();
  {body}
}}
"""
    library = ctypes.CDLL(str(emulator.build()))
    headers = {str(path.relative_to(KERNELS)): path.read_text() for path in KERNELS.glob("tile/*")}
    headers |= {"common/dtype.h": (ROOT / "common/dtype.h").read_text(), "test.cuh": source}

    def strings(texts):
        return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

    program, module, kernel, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), b'#include "test.cuh"', None, len(headers), strings(headers.values()), strings(headers)
    )
    failed = library.nvrtcCompileProgram(program, 2, strings(["-arch=sm_90a", "-DJAX_FLASH_DTYPE=2"]))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert not library.cuModuleLoadData(ctypes.byref(module), cubin)
    assert not library.cuModuleGetFunction(ctypes.byref(kernel), module, b"jax_flash_test")
    zeros = ctypes.create_string_buffer(16)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(zeros))
    error = ctypes.c_char_p()
    if library.cuLaunchKernel(kernel, 1, 1, 1, 128, 1, 1, 4096, None, arguments, None):
        library.cuGetErrorString(0, ctypes.byref(error))
    return (error.value or b"").decode()


LOAD = """
  if (threadIdx.x == 0) {{
    MbarrierArriveExpectTx(&shared.barrier, {});
    BulkLoad(shared.bytes, &zeros, 16, &shared.barrier);
  }}
"""
WGMMA = """
  for (int i = threadIdx.x; i < 2048; i += 128) shared.tile[i] = 0;
  FenceProxyAsync();
  __syncthreads();
  float C[4] = {};
  const uint64_t a = Descriptor(shared.tile, 0);
  WgmmaFence();
  Wgmma<8>::SS<Major::kMN, Major::kK>(C, a, a, 1);
  WgmmaCommit();
"""


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", ""),
        (LOAD.format(16) + "MbarrierWait(&shared.barrier, 0);", ""),
        (
            LOAD.format(32) + "MbarrierWait(&shared.barrier, 0);",
            "threads 0-127 wait for mbarrier .* 16 bytes are to come",
        ),
        (LOAD.format(16) + "MbarrierArrive(&shared.barrier);", "one arrival too many"),
        (LOAD.format(16), "ended before their copies"),
        ("MbarrierWait((uint64_t*)shared.bytes, 0);", "not initialised"),
        ("if (threadIdx.x > 0) __syncthreads();", "deadlock: .* threads 1-127 wait for barrier 0"),
        ("BarrierSync(1, threadIdx.x < 64 ? 64 : 128);", "barrier 1 of .* threads"),
        ("if (threadIdx.x % 2) __syncwarp(); else SetMaxRegistersDown<24>();", "other lanes of the warp at"),
        ("CpAsync(SharedAddress(shared.bytes) + 8, &zeros, true);", "no multiple of 16"),
        ("CpAsync(SharedAddress(memory) + 4096, &zeros, true);", "16 bytes at 4096"),
        ("memory[5000 + threadIdx.x] = 0;", r"touched byte 5\d\d\d of the 4096 of shared memory"),
        ("*(int*)0 = 0;", "touched address"),
        ("ClusterRank(); PeerArrive(&shared.barrier, true);", "block 1 of the cluster"),
        ('asm volatile("tcgen05.alloc 32;" ::: "memory");', "no tcgen05.alloc"),
        (WGMMA + "WgmmaWait<0>(); memory[threadIdx.x] = C[0] == 0.0f ? 0 : 1;", ""),
        (WGMMA + "shared.tile[threadIdx.x] = 1; WgmmaWait<0>();", "operand has changed"),
        (WGMMA + "if (C[0] == 0) *(int*)0 = 0;", ""),
        (WGMMA.replace("WgmmaFence();", ""), "without wgmma.fence"),
        (WGMMA.replace("FenceProxyAsync();", ""), "operand at .* without fence.proxy.async"),
        (
            "shared.bytes[0] = 0; BulkReduceAdd(true, (float*)&zeros, (float*)shared.bytes, 16);",
            "without fence.proxy.async",
        ),
    ],
)
def test_broken_kernel(body, error):
    assert re.search(error, launch(body), re.DOTALL) if error else launch(body) == ""

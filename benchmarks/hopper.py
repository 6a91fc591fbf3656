"""Attention on a Hopper GPU: the kernels of cuda_src/kernels against cuDNN, called through PyTorch.

    python benchmarks/hopper.py                                       # the first two tables of docs/performance.md
    python benchmarks/hopper.py --dropout 0.1 --lengths 4096          # its third
    python benchmarks/hopper.py --passes forward --head-dims 128 --lengths 1024 4096

It compiles the kernels with NVRTC and launches them directly, until the library's handlers do. Every variant is first
checked, with and without dropout, against float64 at a small shape. bfloat16, 16k tokens in a batch, heads x head dim =
2048; both are timed in turn, and rates are at the median time, counted as in the FlashAttention papers (half if
causal). The backward includes the two small kernels around the main one.
"""

import argparse
import ctypes
import functools
import importlib
import itertools
import math
import multiprocessing
import os
import pathlib
import runpy
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import measure
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).parents[1]
TOKENS, WIDTH = 16384, 2048  # batch x N, heads x head dim
WARMUP, ROUNDS = 3, 15
BFLOAT16, SWIZZLE_128B, L2_PROMOTION_128B, MAX_DYNAMIC_SHARED = 9, 3, 2, 8  # of cuda.h
STDINT = b"".join(
    f"typedef {sign}{type} {name}int{bits}_t;\n".encode()
    for bits, type in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    for sign, name in (("signed ", ""), ("unsigned ", "u"))
)


class Variant(NamedTuple):
    """What a kernel is compiled for. `size`: the columns of a tile of the forward, the rows of one of the backward."""

    backward: bool
    dim: int
    causal: bool
    dropout: bool
    size: int
    consumers: int
    stages: int


# The fastest tiles: backward, head dim, dropout, longest N -> size, consumers, stages. The first that fits is taken.
TILES: list[tuple[bool, int, bool, float, tuple[int, int, int]]] = [
    (False, 64, False, 1024, (64, 4, 4)),
    (False, 64, False, math.inf, (128, 3, 2)),
    (False, 64, True, math.inf, (128, 2, 3)),
    (False, 128, False, math.inf, (128, 2, 2)),
    (False, 128, True, math.inf, (128, 2, 2)),
    (False, 256, False, math.inf, (64, 2, 2)),
    (False, 256, True, math.inf, (80, 2, 2)),
    (True, 64, False, math.inf, (128, 2, 2)),
    (True, 64, True, math.inf, (128, 2, 2)),
    (True, 128, False, math.inf, (64, 2, 2)),
    (True, 128, True, math.inf, (64, 2, 2)),
]


def choose(backward: bool, dim: int, causal: bool, dropout: bool, length: int) -> Variant | None:
    for *case, longest, tile in TILES:
        if case == [backward, dim, dropout] and length <= longest:
            return Variant(backward, dim, causal, dropout, *tile)
    return None


@functools.cache
def nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path)


def compile_kernels(variant: Variant) -> bytes:
    defines = {
        "HEAD_DIM": variant.dim,
        "ROWS" if variant.backward else "COLS": variant.size,
        "CONSUMERS": variant.consumers,
        "STAGES": variant.stages,
        "CAUSAL": int(variant.causal),
        "DROPOUT": int(variant.dropout),
    }
    options = ["-arch=sm_90a", "-std=c++17", f"-I{ROOT / 'cuda_src/kernels'}", f"-I{ROOT}"]
    arguments = [option.encode() for option in options + [f"-DJAX_FLASH_{name}={x}" for name, x in defines.items()]]
    source = f'#include "{"backward" if variant.backward else "forward"}_sm90.cuh"\n'.encode()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers, names = (ctypes.c_char_p * 1)(STDINT), (ctypes.c_char_p * 1)(b"cstdint")
    library = nvrtc()
    if library.nvrtcCreateProgram(ctypes.byref(program), source, b"attention.cu", 1, headers, names):
        raise RuntimeError("nvrtcCreateProgram failed")
    status = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    get_size, get = (
        ("nvrtcGetProgramLogSize", "nvrtcGetProgramLog") if status else ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    )
    library[get_size](program, ctypes.byref(size))
    output = ctypes.create_string_buffer(size.value)
    library[get](program, output)
    if status:
        raise RuntimeError(f"{variant}: {output.value.decode()}")
    return output.raw


@functools.cache
def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver(function: str, *arguments: object) -> None:
    if status := getattr(libcuda(), function)(*arguments):
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'').decode()}")


class TensorMap(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def tensor_map(x: torch.Tensor, rows: int) -> TensorMap:
    """The map of `x` [B, T, N, D], for boxes of `rows` x 64."""
    batch, length, heads, dim = x.shape
    memory = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    dims = (ctypes.c_uint64 * 4)(dim, length, heads, batch)
    strides = (ctypes.c_uint64 * 3)(*(x.element_size() * x.stride(axis) for axis in (1, 2, 0)))
    box, steps = (ctypes.c_uint32 * 4)(64, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    layout = (ctypes.c_void_p(x.data_ptr()), dims, strides, box, steps, 0, SWIZZLE_128B, L2_PROMOTION_128B, 0)
    driver("cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), BFLOAT16, 4, *layout)
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, 128))


def parameters(pointers: list[str], **values: Any) -> ctypes.Structure:
    """The struct that is the first argument of every kernel of a pass."""
    fields: list[tuple[str, Any]] = [
        (name, ctypes.c_int) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
    ]
    fields += [("scale", ctypes.c_float), *((name, ctypes.c_void_p) for name in pointers)]
    fields += [("drop_threshold", ctypes.c_uint32), ("keep_scale", ctypes.c_float)]
    return type("Parameters", (ctypes.Structure,), {"_fields_": fields})(
        **{name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    )


class Dropout(NamedTuple):
    """The operands that decide the mask; an entry is kept iff its 16 random bits are at least the threshold."""

    seed: torch.Tensor
    batch_id: torch.Tensor
    head_id: torch.Tensor
    drop_threshold: int
    keep_scale: float

    @staticmethod
    def create(batch: int, heads: int, rate: float) -> "Dropout":
        threshold = round(rate * 65536)
        seed = torch.randint(2**31 - 1, (batch, 2), dtype=torch.int32, device="cuda")
        b, n = (torch.arange(size, dtype=torch.int32, device="cuda") + 3 for size in (batch, heads))
        return Dropout(seed, b, n, threshold, 65536 / (65536 - threshold))

    def factors(self, rows: int, columns: int) -> torch.Tensor:
        """Z of the paper [B, N, rows, columns], by the mask's specification."""
        random_bits = runpy.run_path(str(ROOT / "jax_flash" / "dropout.py"))["random_bits"]
        operands = [x.cpu().numpy().astype(np.uint32) for x in self[:3]]
        bits = np.asarray(random_bits(*operands, (rows, columns)))
        return torch.from_numpy((bits >= self.drop_threshold) * self.keep_scale).cuda()


class Kernels:
    """The kernels of one variant. `prepare` makes a call and what it will have written."""

    def __init__(self, variant: Variant, cubin: bytes) -> None:
        self.variant, self.module = variant, ctypes.c_void_p()
        driver("cuModuleLoadData", ctypes.byref(self.module), cubin)
        address, size, shared = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        driver(
            "cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self.module, b"jax_flash_shared_bytes"
        )
        driver("cuMemcpyDtoH_v2", ctypes.byref(shared), address, ctypes.c_size_t(4))
        self.shared, self.threads = shared.value, 128 * (variant.consumers + 1)
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def launcher(self, name: str, blocks: int, threads: int, shared: int, *arguments: Any) -> Callable[[], None]:
        function = ctypes.c_void_p()
        driver("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        if shared:
            driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (blocks, 1, 1, threads, 1, 1, shared)
        return keep(lambda: driver("cuLaunchKernel", function, *sizes, stream, pointers, None), arguments)

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: Dropout | None, *saved: torch.Tensor
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """`saved`: O, l, m and dO, of the backward only. Returns the call and O, l, m or dQ, dK, dV."""
        (batch, length, heads, dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        values: dict[str, Any] = {"batch": batch, "q_heads": heads, "kv_heads": kv_heads}
        values |= {"q_len": length, "kv_len": kv_length, "scale": dim**-0.5} | (dropout._asdict() if dropout else {})
        like = functools.partial(torch.full_like, fill_value=math.nan)
        floats = functools.partial(torch.full, fill_value=math.nan, device="cuda")
        size, consumers = self.variant.size, self.variant.consumers
        if not self.variant.backward:
            o, l, m = like(q), floats((batch, heads, length)), floats((batch, heads, length))
            p = parameters(["l", "m", *Dropout._fields[:3]], **values, l=l, m=m)
            maps = [tensor_map(q, 64), tensor_map(k, size), tensor_map(v, size), tensor_map(o, 64)]
            blocks = min(self.multiprocessors, -(-length // (64 * consumers)) * batch * heads)
            launch = self.launcher("jax_flash_forward", blocks, self.threads, self.shared, p, *maps)
            return keep(launch, q, k, v, dropout, o, l, m), [o, l, m]

        o, l, m, d_o = saved
        gradients, columns, padded = [like(x) for x in (q, k, v)], 64 * consumers, -(-length // size) * size
        rows = {"minus_l": floats((batch, heads, padded)), "d": floats((batch, heads, padded))}
        rows["dq"] = floats((batch, heads, padded, dim))
        p = parameters(["l", "m", *rows, *Dropout._fields[:3]], **values, **rows, l=l, m=m)
        maps = [tensor_map(x, r) for x, r in ((q, size), (k, columns), (v, columns), (d_o, size))]
        maps += [tensor_map(x, 64) for x in gradients[1:]]
        blocks = min(self.multiprocessors, -(-kv_length // columns) * batch * kv_heads)
        o_pointer, do_pointer, dq_pointer = (ctypes.c_void_p(x.data_ptr()) for x in (o, d_o, gradients[0]))
        launches = [  # a thread of the small kernels takes 8 elements, then 16
            self.launcher("jax_flash_backward_prepare", rows["dq"].numel() // 2048, 256, 0, p, o_pointer, do_pointer),
            self.launcher("jax_flash_backward", blocks, self.threads, self.shared, p, *maps),
            self.launcher("jax_flash_backward_finish", rows["dq"].numel() // 4096, 256, 0, p, dq_pointer),
        ]
        return keep(lambda: [launch() for launch in launches], q, k, v, dropout, rows, saved, gradients), gradients


def keep(call: Callable[[], object], *_: object) -> Callable[[], None]:
    """`call`, holding on to what the kernels have the addresses of."""

    def held() -> None:
        call(), _

    return held


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def attention(
    inputs: list[torch.Tensor], causal: bool, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, l and m by the definition."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    m = s.amax(-1).detach()
    p = torch.exp(s - m[..., None])
    l = p.sum(-1)
    p = p / l[..., None]
    return ((p if factors is None else p * factors) @ v).transpose(1, 2), l, m


def check(kernels: Kernels, rate: float) -> float:
    """The largest relative error (Frobenius) of a result, at a shape that no tile divides, with grouped heads."""
    backward, dim, causal, *_ = kernels.variant
    batch, length, heads, kv_heads = 2, 700, 4, 2
    kv_length = length if causal else 500
    q, k, v = random(batch, length, heads, dim), *(random(batch, kv_length, kv_heads, dim) for _ in range(2))
    dropout = Dropout.create(batch, heads, rate) if kernels.variant.dropout else None
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected = list(attention(inputs, causal, dropout.factors(length, kv_length) if dropout else None))
    saved: list[torch.Tensor] = []
    if backward:
        d_o = random(*q.shape)
        saved = [expected[0].bfloat16().contiguous(), *(x.float() for x in expected[1:]), d_o]
        expected = list(torch.autograd.grad(expected[0], inputs, d_o.double()))
    call, results = kernels.prepare(q, k, v, dropout, *(x.detach() for x in saved))
    call()
    pairs = zip(results, expected, strict=True)
    error = max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)
    if not error < 0.01:  # NaN too
        raise AssertionError(f"{kernels.variant}: relative error {error}")
    return error


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, rate: float) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            a, b, c = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=causal, dropout_p=rate)

    return call


def compare(kernels: Kernels, length: int, rate: float) -> list[float]:
    """TFLOP/s, ours and cuDNN's."""
    backward, dim, causal, *_ = kernels.variant
    batch, heads = max(TOKENS // length, 1), WIDTH // dim
    q, k, v, o, d_o = (random(batch, length, heads, dim) for _ in range(5))
    saved: list[torch.Tensor] = []
    theirs: Callable[[], object] = cudnn(q, k, v, causal, rate)
    if backward:
        l, m = (torch.full((batch, heads, length), x, device="cuda") for x in (float(length), 0.0))
        saved = [o, l, m, d_o]
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        output = cudnn(inputs[0], inputs[1], inputs[2], causal, rate)()
        theirs = functools.partial(torch.autograd.grad, output, inputs, d_o.transpose(1, 2), retain_graph=True)
    ours, _ = kernels.prepare(q, k, v, Dropout.create(batch, heads, rate) if rate else None, *saved)
    times: list[list[float]] = [[], []]
    events = []
    for _round in range(WARMUP + ROUNDS):
        for call in (ours, theirs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(events[2 * WARMUP :]):
        times[i % 2].append(start.elapsed_time(end) / 1e3)
    forward, both = (measure.attention_flops(batch, heads, length, dim, causal, x) for x in (False, True))
    return [measure.rate(both - forward if backward else forward, x) / 1e3 for x in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])
    parser.add_argument("--head-dims", nargs="+", type=int, choices=[64, 128, 256], default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--dropout", type=float, default=0.0, metavar="RATE")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # which only makes the mask
    console = Console(width=110)

    passes = [name == "backward" for name in options.passes]
    cases = list(itertools.product(passes, options.head_dims, options.lengths, (False, True)))
    rows = [(*case, choose(case[0], case[1], case[3], options.dropout > 0, case[2])) for case in cases]
    chosen = {choose(b, d, causal, dropout, n) for b, d, n, causal in cases for dropout in (False, True)} - {None}
    variants = sorted(variant for variant in chosen if variant)
    with ProcessPoolExecutor(min(len(variants), os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        cubins = list(pool.map(compile_kernels, variants))
    torch.zeros(1, device="cuda")  # makes the context
    kernels = {variant: Kernels(variant, cubin) for variant, cubin in zip(variants, cubins, strict=True)}
    errors = [check(x, options.dropout or 0.1) for x in kernels.values()]
    console.print(f"{len(errors)} variants agree with float64: relative errors up to {max(errors):.1e}")

    table = Table(title=f"TFLOP/s on {torch.cuda.get_device_name()}, bfloat16, dropout {options.dropout}")
    for heading in ("pass", "d", "N", "", "tile", "ours", "cuDNN", "/cuDNN"):
        table.add_column(heading, justify="right")
    for backward, dim, length, causal, variant in rows:
        if variant:
            ours, theirs = compare(kernels[variant], length, options.dropout)
            tile = (variant.size, 64 * variant.consumers) if backward else (64 * variant.consumers, variant.size)
            cells = ["backward" if backward else "forward", str(dim), str(length), "causal" if causal else "full"]
            cells += [f"{tile[0]} x {tile[1]}", f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
            table.add_row(*cells, end_section=causal and length == options.lengths[-1])
    console.print(table)
    versions = measure.environment(["torch", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "jax"])["versions"]
    console.print("cuDNN:", torch.backends.cudnn.version(), "packages:", versions)


if __name__ == "__main__":
    main()

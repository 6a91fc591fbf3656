"""`python -m jax_flash` shows versions and backends, explains which implementation a problem uses, compiles kernels
ahead of time, and counts the memory accesses of the paper's algorithms.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import pkgutil
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jaxlib

import jax_flash
from jax_flash import _native, paged
from jax_flash.block_sparse import Shape
from jax_flash.io_model import report
from jax_flash.operands import BROADCAST, CAPTURED, DCAPTURED, DIFFERENTIATED, DTYPES
from jax_flash.plan import of_tangent
from jax_flash.problem import MOVING

NO_GPU = "no NVIDIA GPU here"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_flash", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="{info,choose,warmup,io}")
    info = commands.add_parser("info", help="print versions and backends (the default command)")
    info.set_defaults(run=run_info)
    choose = commands.add_parser("choose", help="print which implementation a problem uses, and why")
    add_problem_flags(choose)
    choose.add_argument("--source", action="store_true", help="also print score programs as CUDA C++")
    choose.add_argument(
        "--compiled", action="store_true", help="compile the CUDA kernels, and print the tiles that calls take"
    )
    choose.add_argument(
        "--platform", choices=("cpu", "cuda", "rocm", "tpu"), help="platform (default: JAX's default platform)"
    )
    add_tangent_flag(choose, "also print the kernels of the tangent (jax.jvp)")
    choose.set_defaults(run=run_choose)
    warmup = commands.add_parser(
        "warmup", help="compile CUDA kernels into the cache, to make the first call of a problem fast"
    )
    add_problem_flags(warmup)
    differentiable = (*(name for name in DIFFERENTIATED.values() if name not in CAPTURED), "scale")
    warmup.add_argument(
        "--backward",
        nargs="*",
        choices=differentiable,
        metavar="OPERAND",
        help=f"also compile the backward with gradients for some of {', '.join(differentiable)} (default: the first 3)",
    )
    add_tangent_flag(warmup, "also compile the tangent (jax.jvp)")
    warmup.add_argument(
        "--dlogsumexp", action="store_true", help="compile the derivatives for calls that differentiate the logsumexp"
    )
    warmup.add_argument(
        "--arch", nargs="+", metavar="ARCH", help="GPU architectures, such as sm_80 sm_90a (default: this machine's)"
    )
    warmup.add_argument(
        "--problems",
        type=pathlib.Path,
        metavar="FILE",
        help="file with one problem per line, written as these flags and added to those given here; # starts a comment",
    )
    warmup.set_defaults(run=functools.partial(run_warmup, warmup))
    io = commands.add_parser("io", help="print the HBM accesses of the paper's algorithms as a table, or plot them")
    report.add_flags(io)
    io.set_defaults(run=report.run)
    parser.set_defaults(run=run_info)
    args = parser.parse_args(argv)
    return args.run(args)


def importable(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be imported: {error}") from None


def add_tangent_flag(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the flag that names the operands with a tangent."""
    names = ", ".join(MOVING)
    parser.add_argument(
        "--tangent",
        nargs="*",
        choices=MOVING,
        metavar="OPERAND",
        help=f"{purpose} if some of {names} have a tangent (default: the first 3)",
    )


def tangents_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the operands that `--tangent` names."""
    return () if args.tangent is None else tuple(args.tangent) or MOVING[:3]


def add_problem_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe one attention problem, for `problem_of`."""
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        metavar=("B", "T", "N", "D"),
        default=(1, 1024, 8, 64),
        help="shape of the query: batch, length, heads, head dim (default: 1 1024 8 64)",
    )
    parser.add_argument("--kv-len", type=int, metavar="S", help="length of key and value (default: T)")
    parser.add_argument("--kv-heads", type=int, metavar="K", help="number of key/value heads (default: N)")
    parser.add_argument(
        "--value-dim", type=int, metavar="E", help="head dim of the value (default: D; with --latent 512)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the arrays (default: float32)")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--packed", action="store_true", help="pack the B sequences in one array (varlen_attention)")
    keys.add_argument("--page", type=int, metavar="KEYS", help="page size of a paged cache (paged_attention)")
    parser.add_argument(
        "--latent",
        action="store_true",
        help="latent attention: one key of D entries for all heads, which starts with the value (mla_attention)",
    )
    parser.add_argument("--causal", action="store_true", help="add a causal mask")
    parser.add_argument(
        "--window", type=int, nargs="+", metavar=("LEFT", "RIGHT"), help="add a local window (default of RIGHT: LEFT)"
    )
    parser.add_argument("--soft-cap", type=float, metavar="CAP", help="cap the logits softly at CAP")
    parser.add_argument("--dropout", type=float, metavar="RATE", default=0.0, help="dropout rate (default: 0)")
    parser.add_argument("--bias", action="store_true", help="add a bias [B, N, T, S]")
    parser.add_argument("--bias-dtype", choices=DTYPES, help="dtype of the bias (default: the dtype of the arrays)")
    parser.add_argument("--mask", action="store_true", help="add a boolean mask [B, N, T, S]")
    parser.add_argument("--sinks", action="store_true", help="add attention sinks, one logit per head")
    parser.add_argument(
        "--block-mask", type=int, nargs=2, metavar=("Q_BLOCK", "KV_BLOCK"), help="add a block mask with this block size"
    )
    parser.add_argument(
        "--blocks", type=int, metavar="COUNT", help="most blocks in a row or column of the block mask (default: all)"
    )
    parser.add_argument("--segments", action="store_true", help="add segment ids (packed sequences)")
    parser.add_argument("--lengths", action="store_true", help="add lengths of the query and key/value sequences")
    parser.add_argument("--query-offset", action="store_true", help="add an offset of the first query (decoding)")
    parser.add_argument("--full-precision", action="store_true", help="compute float32 products in full precision")
    parser.add_argument(
        "--deterministic", action="store_true", help="compute gradients with the same bits in every run"
    )
    for name in ("score_mod", "mask_mod"):
        flag, help = f"--{name.replace('_', '-')}", "importable function, as package.module:name"
        parser.add_argument(flag, type=importable, metavar="FUNCTION", help=help)


def problem_of(args: argparse.Namespace) -> jax_flash.Problem:
    """Return the problem that the flags describe. Raise the error that the call would raise."""
    B, T, N, D = args.shape
    S = T if args.kv_len is None else args.kv_len
    K = N if args.kv_heads is None else args.kv_heads
    E = D if args.value_dim is None else args.value_dim
    numbers = (B, T, N, D, S, K, E, args.blocks or 0, *(args.block_mask or ()))
    if min(numbers) < 0:
        raise ValueError(f"sizes must not be negative, not {min(numbers)}")
    if max(numbers) >= 2**63:
        raise ValueError(f"sizes must be less than 2^63, not {max(numbers)}")
    if args.blocks is not None and args.block_mask is None:
        raise ValueError("--blocks needs a block mask: add --block-mask Q_BLOCK KV_BLOCK")
    if args.bias_dtype and not args.bias:
        raise ValueError("--bias-dtype needs a bias: add --bias")
    if args.latent and (args.packed or args.kv_heads is not None):
        raise ValueError("--latent has one key for all heads: leave out --packed and --kv-heads")
    window = args.window * 2 if args.window and len(args.window) == 1 else args.window
    lengths = jax.ShapeDtypeStruct((B,), "int32") if args.lengths else None
    options = {
        "bias": jax.ShapeDtypeStruct((B, N, T, S), args.bias_dtype or args.dtype) if args.bias else None,
        "mask": jax.ShapeDtypeStruct((B, N, T, S), "bool") if args.mask else None,
        "is_causal": args.causal,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
        "local_window_size": window,
        "sinks": jax.ShapeDtypeStruct((N,), "float32") if args.sinks else None,
        "dropout_rate": args.dropout or None,
        "query_segment_ids": jax.ShapeDtypeStruct((B, T), "int32") if args.segments else None,
        "key_value_segment_ids": jax.ShapeDtypeStruct((B, S), "int32") if args.segments else None,
        "logits_soft_cap": args.soft_cap,
        "precision": "highest" if args.full_precision else "default",
        "query_offset": jax.ShapeDtypeStruct((B,), "int32") if args.query_offset else None,
        "block_mask": described_block_mask(Shape(T, S, *args.block_mask), args.blocks) if args.block_mask else None,
        "deterministic": args.deterministic,
        "score_mod": args.score_mod,
        "mask_mod": args.mask_mod,
    }
    given = {name: x for name, x in options.items() if x is not None and x is not False}

    def arrays(dtype: str, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    if args.packed:
        packed = arrays(args.dtype, (B * T, N, D), (B * S, K, D), (B * S, K, E))
        return jax_flash.Problem.of_varlen(*packed, *arrays("int32", (B + 1,), (B + 1,)), **given)
    if args.latent:
        given |= {} if args.value_dim is None else {"value_dim": E}
    if args.page is not None:
        page = paged.checked_page(args.page)
        M = -(-S // page)
        table, ends = arrays("int32", (B, M), (B,))
        if args.latent:
            query, latents = arrays(args.dtype, (B, T, N, D), (B * M, page, D))
            return jax_flash.Problem.of_paged_mla(query, latents, table, ends, **given)
        query, keys, values = arrays(args.dtype, (B, T, N, D), (B * M, page, K, D), (B * M, page, K, E))
        return jax_flash.Problem.of_paged(query, keys, values, table, ends, **given)
    if args.latent:
        query, latent = arrays(args.dtype, (B, T, N, D), (B, S, D))
        return jax_flash.Problem.of_mla(query, latent, **given)
    return jax_flash.Problem.of(*arrays(args.dtype, (B, T, N, D), (B, S, K, D), (B, S, K, E)), **given)


def described_block_mask(shape: Shape, most: int | None) -> jax_flash.BlockMask:
    """Return a block mask that has shapes but no arrays, with at most `most` blocks per row and column (None: all)."""
    shape.check()
    rows, columns = shape.grid
    most = max(rows, columns) if most is None else most
    sizes = (rows, columns), (rows, 2 + min(most, columns)), (columns, 2 + min(most, rows))
    blocks, row_lists, column_lists = (jax.ShapeDtypeStruct((1, 1, *size), "int32") for size in sizes)
    return jax_flash.BlockMask.tree_unflatten(shape, (blocks, None, row_lists, column_lists))


def run_info(args: argparse.Namespace) -> int:
    print(f"jax_flash {jax_flash.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"JAX's platform: {this_platform()} ({len(jax.devices())} × {jax.devices()[0].device_kind})")
    print("Backends:")
    print(f"  cpu   {cpu_info()}")
    print(f"  cuda  {cuda_info()}")
    print("To see which implementation a problem uses: python -m jax_flash choose --help")
    return 0


def cpu_info() -> str:
    try:
        return f"fused kernels, instruction set {_native.cpu_isa()}"
    except ValueError as error:
        return f"no fused kernels: {error}"


def cuda_info() -> str:
    try:
        archs = cuda_archs()
        if not archs:
            return NO_GPU
        path, major, minor = _native.cuda_nvrtc()
    except RuntimeError as error:
        return f"no fused kernels: {error}"
    compiled = f"compiled by NVRTC {major}.{minor} ({path})"
    return (
        f"fused kernels for {', '.join(archs)}, {compiled}, kept in {_native.cuda_cache_directory() or 'no directory'}"
    )


def cuda_archs() -> list[str]:
    """Return the architectures of this machine's GPUs, or an empty list if it has none.

    Raises:
      RuntimeError: if the machine has GPUs, but the driver does not work or all of them are too old.
    """
    try:
        devices = _native.cuda_devices()
    except RuntimeError:
        if has_nvidia_gpu():
            raise
        devices = []
    archs, refusals = set(), []
    for major, minor, _ in devices:
        try:
            archs.add(_native.cuda_arch(major, minor))
        except ValueError as error:
            refusals.append(str(error))
    if refusals and not archs:
        raise RuntimeError("; ".join(refusals))
    return sorted(archs)


def has_nvidia_gpu() -> bool:
    """Whether a PCI device of this machine is an NVIDIA GPU, with or without a driver."""
    for device in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        vendor, kind = (device.joinpath(name).read_text().strip() for name in ("vendor", "class"))
        if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA; a display controller
            return True
    return False


def run_choose(args: argparse.Namespace) -> int:
    chosen_platform = args.platform or this_platform()
    try:
        problem = problem_of(args)
        choice = jax_flash.choose_implementation(problem, chosen_platform)
    except (ValueError, TypeError) as error:
        print(f"no implementation: {error}", file=sys.stderr)
        return 1
    print(f"{choice.implementation}: {choice.reason}")
    if (chosen_platform, choice.implementation) == ("cuda", "flash"):
        for backward in (False, True) if problem.differentiable else (False,):
            explanation = jax_flash.explain(problem, backward, compiled=args.compiled)
            print(explanation)
            if args.source:
                print(explanation.source)
        if tangents := tangents_of(args):
            try:
                print(jax_flash.explain(problem, compiled=args.compiled, tangents=tangents))
            except ValueError as error:
                print(error)
    return 0


def run_warmup(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        directory = _native.cuda_cache_directory()
        if not directory:
            raise RuntimeError(
                "there is no cache directory, because JAX_FLASH_CACHE_DIR is empty or HOME is not set: "
                "set JAX_FLASH_CACHE_DIR to a directory"
            )
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # or an OSError: a program would go on without a cache
            pass
        if args.problems is None:
            warm(args)
        else:
            for line in args.problems.read_text().splitlines():
                if flags := shlex.split(line, comments=True):
                    print(*flags)
                    one = parser.parse_args(flags, argparse.Namespace(**vars(args) | {"problems": None}))
                    if one.problems is not None:
                        raise ValueError("--problems must not be in a list of problems: remove it")
                    warm(one)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"kept in {directory}")
    return 0


def warm(args: argparse.Namespace) -> None:
    """Compile the kernels of one problem into the cache."""
    problem = problem_of(args)
    gradients = () if args.backward is None else args.backward or ("query", "key", "value")
    grads = {grad for grad, operand in DIFFERENTIATED.items() if operand in gradients or grad in DCAPTURED}
    if "scale" in gradients:
        problem = dataclasses.replace(problem, unrounded=True)
        grads.add("dq")  # the scale's gradient is made of it
    for name in BROADCAST:
        if name in gradients and not getattr(args, name):
            raise ValueError(f"--backward {name} needs this operand: add --{name}")
    tangents = tangents_of(args)
    if args.dlogsumexp and not gradients and not tangents:
        raise ValueError("--dlogsumexp needs a derivative: add --backward or --tangent")
    archs = args.arch or cuda_archs()
    if not archs:
        raise ValueError(f"{NO_GPU}: name the architectures to compile for, such as --arch sm_80 sm_90a")
    passes = {"forward": problem}
    if gradients:
        passes["backward"] = problem.differentiated(grads, dlogsumexp=args.dlogsumexp)
    if tangents:
        if problem.result_dtype("o") != problem.accumulation_dtype:  # forward mode takes O before it is rounded
            passes["forward with unrounded O"] = problem.without_rounding
        passes["tangent"] = dataclasses.replace(of_tangent(problem, tangents), l_tangent=args.dlogsumexp)
    for arch in archs:
        for name, one in passes.items():
            text, backward = one.encode(), name == "backward"
            start = time.perf_counter()
            if not _native.cuda_cache(text, backward, arch):
                raise OSError(
                    f"could not write a kernel to {_native.cuda_cache_directory()}: check its permissions, the space "
                    "left, and that no folder has the kernel's name"
                )
            seconds = time.perf_counter() - start
            plan = _native.cuda_plan(text, backward, arch, compiled=True)
            files = dict.fromkeys(
                f"{file} ({fields['rows']} x {fields['cols']})" if fields["rows"] else file for file, _, fields in plan
            )
            print(f"{arch} {name}: {', '.join(files)} in {seconds:.2f} s")


def this_platform() -> str:
    """Return the name of the default platform: "cpu", "cuda", "rocm", …"""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.extend.backend.get_backend().platform_version.lower() else "cuda"


if __name__ == "__main__":
    sys.exit(main())

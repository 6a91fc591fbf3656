"""Sums of a Gaussian kernel: `jax_flash.kernel_sum` compared with KeOps and XLA, which stores the kernel matrix.

    python benchmarks/kernel_sums.py                       # on a GPU a few minutes, most of them compiling
    python benchmarks/kernel_sums.py --points 10000 --dims 64 --gradients 64

N points x and N points y of a normal distribution in D dimensions, with length scale √D, and one weight for each y. All
arrays are float32. The gradient pass computes the sum and the gradients of x, y and the weights. KeOps (`pip install
pykeops`, and PyTorch on a GPU) is left out if it is not installed. XLA is left out if its matrix does not fit. All are
timed in turn in one process. The error is the largest of 64 sums against float64, divided by the largest sum.
"""

import argparse
import functools
import importlib.util
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_flash import kernel_sum, kernels

SUM, GRADIENT = "sum", "gradient"
OURS, TF32, XLA, KEOPS = "jax_flash", "jax_flash, TF32", "XLA", "KeOps"
CHECKED = 64  # sums compared with float64
SAMPLES = 5
Arrays = list[Any]


def points(count: int, dim: int) -> tuple[Arrays, float]:
    """x, y, weights and the cotangents of the sums; and the length scale."""
    rng = np.random.default_rng(0)
    shapes = (count, dim), (count, dim), (count, 1), (count, 1)
    return [rng.standard_normal(shape, np.float32) for shape in shapes], math.sqrt(dim)


def with_pass(function: Callable[..., jax.Array], pass_: str) -> Callable[..., Any]:
    if pass_ == SUM:
        return lambda x, y, weights, _: function(x, y, weights)

    def gradient(x, y, weights, cotangent):
        out, pull = jax.vjp(function, x, y, weights)
        return out, *pull(cotangent)

    return gradient


def jax_calls(count: int, dim: int, pass_: str, gpu: bool) -> Iterator[tuple[str, jax.stages.Lowered, Arrays]]:
    """The name, the program and the arguments of each. To lower ours starts its compilation."""
    arrays, length_scale = points(count, dim)
    arrays = jax.device_put(arrays)
    kernel = kernels.gaussian(length_scale)

    def materialised(x, y, weights):
        product = jnp.dot(x, y.T, precision="highest")
        d2 = jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * product
        return jnp.dot(jnp.exp(d2 / (-2 * length_scale**2)), weights, precision="highest")

    functions: dict[str, Callable[..., jax.Array]] = {
        OURS: functools.partial(kernel_sum, log_kernel=kernel),
        **({TF32: functools.partial(kernel_sum, log_kernel=kernel, precision="default")} if gpu else {}),
        XLA: materialised,
    }
    for name, function in functions.items():
        yield name, jax.jit(with_pass(function, pass_)).lower(*arrays), arrays


def compiled(name: str, lowered: jax.stages.Lowered, arrays: Arrays) -> measure.Call | None:
    """The call, or None if its memory does not suffice."""
    try:
        call = functools.partial(lowered.compile(), *arrays)
        jax.block_until_ready(call())
        return call
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        print(f"{name} runs out of memory")
        return None


def keops_call(count: int, dim: int, pass_: str, gpu: bool) -> measure.Call | None:
    """The same sums by KeOps; None for a gradient on a CPU, where its NumPy interface has none."""
    (x, y, weights, cotangent), length_scale = points(count, dim)
    formula = "Exp(-g * SqDist(x, y)) * b", ["g = Pm(1)", f"x = Vi({dim})", f"y = Vj({dim})", "b = Vj(1)"]
    factor = np.array([0.5 / length_scale**2], np.float32)
    if not gpu:
        from pykeops.numpy import Genred as NumpyGenred

        call = NumpyGenred(*formula, reduction_op="Sum", axis=1)
        return (lambda: call(factor, x, y, weights, backend="CPU")) if pass_ == SUM else None

    import torch
    from pykeops.torch import Genred

    sums = functools.partial(Genred(*formula, reduction_op="Sum", axis=1), backend="GPU")
    on_gpu = [torch.tensor(array, device="cuda") for array in (factor, x, y, weights, cotangent)]
    if pass_ == SUM:
        return lambda: sums(*on_gpu[:4])
    moving = [array.requires_grad_() for array in on_gpu[1:4]]

    def gradient() -> Any:
        out = sums(on_gpu[0], *moving)
        return out, *torch.autograd.grad(out, moving, on_gpu[4])

    return gradient


def working_keops_call(*case: Any) -> measure.Call | None:
    """The call, or None if KeOps does not compile it."""
    try:
        call = keops_call(*case)
        if call is not None:
            call()
        return call
    except Exception as error:  # of its compiler, of many kinds
        print(f"KeOps does not do {case}: {(str(error).splitlines() or [repr(error)])[0][:160]}")
        return None


def error(result: Any, count: int, dim: int) -> float:
    """The largest error of some sums, relative to the largest of them."""
    (x, y, weights, _), length_scale = points(count, dim)
    out = result[0] if isinstance(result, tuple) else result
    sums = np.asarray(out[:CHECKED].detach().cpu() if hasattr(out, "detach") else out[:CHECKED], np.float64)
    x, y, weights = (array.astype(np.float64) for array in (x[:CHECKED], y, weights))
    d2 = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    expected = np.exp(-d2 / (2 * length_scale**2)) @ weights
    return float(abs(sums - expected).max() / abs(expected).max())


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="+", type=int, default=[3, 16, 64, 128], help="D")
    parser.add_argument(
        "--points", nargs="+", type=int, default=[10_000, 100_000] if gpu else [2_000, 10_000], help="N"
    )
    parser.add_argument("--gradients", nargs="*", type=int, default=[64], help="the D of which gradients are measured")
    parser.add_argument("--no-keops", action="store_true", help="leave KeOps out: it compiles for a minute")
    parser.add_argument("--seconds", type=float, default=4.0, help="on a CPU, spent on a row of the table")
    name = "kernel_sums_gpu.json" if gpu else "kernel_sums_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()

    has_keops = not args.no_keops and importlib.util.find_spec("pykeops") is not None
    interleave: Callable[..., dict[str, list[float]]] = functools.partial(measure.interleave, seconds=args.seconds)
    if gpu:
        interleave = functools.partial(measure.interleave_enqueued, samples=SAMPLES)
    packages = ["jax-flash", "jax", "jaxlib", "pykeops", *(("nvidia-cuda-nvrtc", "torch") if gpu else ())]
    environment = measure.environment(packages)
    cases = [
        (count, dim, pass_)
        for pass_, dims in ((SUM, args.dims), (GRADIENT, args.gradients))
        for dim in dims
        for count in args.points
    ]
    lowered = {case: list(jax_calls(*case, gpu)) for case in cases}  # the kernels of all compile at the same time
    rows: list[dict[str, Any]] = []
    ways = [OURS, *([TF32] if gpu else []), *([KEOPS] if has_keops else []), XLA]
    table = Table("N", "D", "pass", *(f"{way}, ms" for way in ways), *(f"{way}, error" for way in ways))
    for case in cases:
        count, dim, pass_ = case
        found = [(name, compiled(name, program, arrays)) for name, program, arrays in lowered.pop(case)]
        if has_keops:
            found.append((KEOPS, working_keops_call(*case, gpu)))
        calls = {name: call for name, call in found if call is not None}
        seconds = interleave(calls)
        errors = {name: error(call(), count, dim) for name, call in calls.items()}
        rows.append({"N": count, "D": dim, "pass": pass_, "seconds": seconds, "error": errors})
        times = (f"{1e3 * statistics.median(seconds[way]):.4g}" if way in seconds else "–" for way in ways)
        table.add_row(
            str(count), str(dim), pass_, *times, *(f"{errors[way]:.1e}" if way in errors else "–" for way in ways)
        )
        measure.save(args.json, {"environment": environment, "rows": rows})
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

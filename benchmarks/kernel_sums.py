"""Sums of a Gaussian kernel: `jax_flash.kernel_sum` compared with KeOps and XLA, which stores the kernel matrix.

    python benchmarks/kernel_sums.py                       # on a GPU a few minutes, most of them compiling
    python benchmarks/kernel_sums.py --points 10000 --dims 64 --gradients 64

N points x and N points y of a normal distribution in D dimensions, with length scale √D, and one weight for each y. All
arrays are float32. The gradient pass computes the sum and the gradients of x, y and the weights. KeOps (`pip install
pykeops`, and PyTorch on a GPU) is left out if it is not installed or does not compile. On a CPU it has no gradients.
XLA is left out if its matrix does not fit. All calls are timed in turn. KeOps has a process of its own (keops.py). The
error is the largest of 64 sums against float64, divided by the largest sum.
"""

import argparse
import functools
import importlib.util
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keops
import measure
from keops import GRADIENT, SUM, Arrays
from rich.console import Console
from rich.table import Table

from jax_flash import kernel_sum, kernels

OURS, TF32, XLA, KEOPS = "jax_flash", "jax_flash, TF32", "XLA", "KeOps"
SAMPLES = 5


def with_pass(function: Callable[..., jax.Array], pass_: str) -> Callable[..., Any]:
    if pass_ == SUM:
        return lambda x, y, weights, _: (function(x, y, weights),)

    def gradient(x, y, weights, cotangent):
        out, pull = jax.vjp(function, x, y, weights)
        return out, *pull(cotangent)

    return gradient


def jax_calls(count: int, dim: int, pass_: str, gpu: bool) -> Iterator[tuple[str, jax.stages.Lowered, Arrays]]:
    """The name, the program and the arguments of each. To lower ours starts its compilation."""
    arrays, length_scale = keops.points(count, dim)
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


def compiled(name: str, lowered: jax.stages.Lowered, arrays: Arrays) -> Callable[[], Any] | None:
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


def take_turns(samplers: dict[str, Callable[[int], float | None]]) -> dict[str, list[float]]:
    """Seconds per call, from samples of each in turn. A call whose process ends is left out."""
    first = {name: [sampler(1), sampler(1)] for name, sampler in samplers.items()}
    repeats = {name: measure.calls_per_sample(two[1]) for name, two in first.items() if two[1] is not None}
    seconds: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(SAMPLES):
        for name, calls in repeats.items():
            if (sample := samplers[name](calls)) is not None:
                seconds[name].append(sample)
    return {name: times for name, times in seconds.items() if len(times) == SAMPLES}


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="+", type=int, default=[3, 16, 64, 128], help="D")
    parser.add_argument(
        "--points", nargs="+", type=int, default=[10_000, 100_000] if gpu else [2_000, 10_000], help="N"
    )
    parser.add_argument("--gradients", nargs="*", type=int, default=[64], help="the D of which gradients are measured")
    parser.add_argument("--no-keops", action="store_true", help="leave KeOps out: it compiles for a minute")
    name = "kernel_sums_gpu.json" if gpu else "kernel_sums_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()

    process = None if args.no_keops or importlib.util.find_spec("pykeops") is None else keops.Process()
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
    ways = [OURS, *([TF32] if gpu else []), *([KEOPS] if process else []), XLA]
    table = Table("N", "D", "pass", *(f"{way}, ms" for way in ways), *(f"{way}, error" for way in ways))
    for case in cases:
        count, dim, pass_ = case
        found = {name: compiled(name, program, arrays) for name, program, arrays in lowered.pop(case)}
        calls = {name: call for name, call in found.items() if call is not None}
        samplers: dict[str, Callable[[int], float | None]] = {
            name: functools.partial(measure.sample, call) for name, call in calls.items()
        }
        errors = {name: keops.error(call()[0], count, dim) for name, call in calls.items()}
        if process and (gpu or pass_ == SUM) and (found_error := process.ask("prepare", *case, gpu)) is not None:
            errors[KEOPS] = found_error
            samplers[KEOPS] = functools.partial(process.ask, "time")
        seconds = take_turns(samplers)
        rows.append({"N": count, "D": dim, "pass": pass_, "seconds": seconds, "error": errors})
        times = (f"{1e3 * statistics.median(seconds[way]):.4g}" if way in seconds else "–" for way in ways)
        shown = (f"{errors[way]:.1e}" if way in errors else "–" for way in ways)
        table.add_row(str(count), str(dim), pass_, *times, *shown)
        measure.save(args.json, {"environment": environment, "rows": rows})
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

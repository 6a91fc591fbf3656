"""Attention on the CPU: jax_flash, jitted `jax.nn.dot_product_attention` and, if installed, PyTorch.

    python benchmarks/cpu.py                         # the results in the README: about ten minutes on two cores
    python benchmarks/cpu.py --quick                 # a minute
    python benchmarks/cpu.py --dims 64 --lengths 2048 4096 --output /tmp/a.json
    python benchmarks/cpu.py --features --seconds 20 # the cost of a mask, a bias and a soft cap: five minutes

The problems are in float32 (for jax_flash also bfloat16), with batch 1 and 8 heads. All implementations of a row, and a
plain matrix product, are timed in turn in one process, with the same number of threads. Rates are in GFLOP/s at the
median time. FLOPs are counted as in the FlashAttention papers (half if causal).

--features measures calls with a mask, a bias or a soft cap relative to the plain call. (A causal mask given as an array
is relative to `is_causal`.) Forward and backward are separate, in float32 and bfloat16. In "dbias", the backward also
computes the gradient of the bias. It is still relative to the plain backward. "with its
tangent" is the forward and its tangent (jax.jvp).
"""

import argparse
import ctypes
import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

HAS_TORCH = importlib.util.find_spec("torch") is not None
HEADS = 8
MATMUL_SIZE = 1024
MATMUL_FLOPS = 2 * MATMUL_SIZE**3
COLUMNS = {"jax_flash": "ours", "jax_flash_bf16": "bf16", "jax_nn": "jax.nn", "torch": "torch", "matmul": "matmul"}
FEATURE_LENGTH = 2048
LONG = {"length": 65536, "heads": 1, "dim": 64}  # the problem for peak memory
Attention = Callable[..., jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--seconds", type=float, default=1.0, help="time per row; at least three rounds are measured")
    parser.add_argument("--features", action="store_true", help=f"masks, biases, soft caps; N={FEATURE_LENGTH}")
    parser.add_argument("--quick", action="store_true", help="head dim 64, lengths 512 and 2048, no memory measurement")
    parser.add_argument("--no-memory", action="store_true", help=f"do not measure the memory of N={LONG['length']}")
    parser.add_argument("--output", type=pathlib.Path, help="the JSON file; the plot is saved next to it")
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)  # the child process
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.measure_memory:
        print(json.dumps(peak_memory()))
        return
    if args.quick:
        args.dims, args.lengths, args.no_memory = [64], [512, 2048], True
    if args.features:
        measure_features(args.dims, args.seconds, args.output or measure.RESULTS / "cpu_features.json")
        return
    output = args.output or measure.RESULTS / ("cpu_quick.json" if args.quick else "cpu.json")
    if HAS_TORCH:
        import torch

        torch.set_num_threads(os.cpu_count() or 1)

    environment = measure.environment(["jax-flash", "jax", "jaxlib", "numpy", "torch"])
    problems = [
        (dim, causal, backward, length)
        for dim in args.dims
        for causal in (False, True)
        for backward in (False, True)
        for length in args.lengths
    ]
    products = matmul_calls()
    rates = {name: measure.rate(MATMUL_FLOPS, times) for name, times in measure.interleave(products, 1).items()}
    matmul = products[max(rates, key=lambda name: rates[name])]
    rows = [measure_row(*problem, matmul, args.seconds) for problem in track(problems, "Measuring attention")]
    results = {
        "environment": environment,
        "heads": HEADS,
        "matmul_gflops": rates,
        "rows": rows,
        "memory": None if args.no_memory else memory_in_child(),
    }
    measure.save(output, results)
    show(results)
    plot(results, output.with_suffix(".png"))
    print(f"Written: {output} and {output.with_suffix('.png').name}")


def matmul_calls() -> dict[str, Callable[[], object]]:
    """Return plain float32 matrix products. The fastest one's rate is an upper bound for attention."""
    a = np.random.default_rng(0).standard_normal((MATMUL_SIZE, MATMUL_SIZE), dtype=np.float32)
    x = jnp.asarray(a)
    product = jax.jit(jnp.matmul)
    # NumPy is not measured: OpenBLAS's threads spin for tens of milliseconds, which would disturb the next call.
    calls: dict[str, Callable[[], object]] = {"jax": lambda: product(x, x)}
    if HAS_TORCH:
        import torch

        t = torch.from_numpy(a)
        calls["torch"] = lambda: t @ t
    return calls


def measure_row(
    dim: int, causal: bool, backward: bool, length: int, matmul: Callable[[], object], seconds: float
) -> dict[str, object]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, length, HEADS, dim), dtype=np.float32) for _ in range(4)]

    def ours(q, k, v):
        return jax_flash.dot_product_attention(q, k, v, is_causal=causal, implementation="flash")

    def xla(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    calls = {
        "jax_flash": jax_call(ours, arrays, backward),
        "jax_flash_bf16": jax_call(ours, arrays, backward, jnp.bfloat16),
        "jax_nn": jax_call(xla, arrays, backward),
    }
    if HAS_TORCH:
        calls["torch"] = torch_call(arrays, causal, backward)
    times = measure.interleave({**calls, "matmul": matmul}, seconds)
    flops = measure.attention_flops(1, HEADS, length, dim, causal, backward)
    return {
        "dim": dim,
        "length": length,
        "causal": causal,
        "pass": "forward+backward" if backward else "forward",
        "gflops": {name: measure.rate(flops if name in calls else MATMUL_FLOPS, times[name]) for name in times},
        "seconds": times,
    }


def jax_call(attention: Attention, arrays: list[np.ndarray], backward: bool, dtype=jnp.float32) -> Callable:
    q, k, v, do = (jnp.asarray(x, dtype) for x in arrays)

    def forward_backward(q, k, v, do):
        o, vjp = jax.vjp(attention, q, k, v)
        return o, *vjp(do)

    if backward:
        compiled = jax.jit(forward_backward).lower(q, k, v, do).compile()
        return lambda: compiled(q, k, v, do)
    compiled = jax.jit(attention).lower(q, k, v).compile()
    return lambda: compiled(q, k, v)


def torch_call(arrays: list[np.ndarray], causal: bool, backward: bool) -> Callable:
    """PyTorch's CPU flash kernel, in the layout it prefers: [B, N, T, D]."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = (torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in arrays)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return (o, *torch.autograd.grad(o, inputs, do)) if backward else o

    return call


def features() -> dict[str, dict[str, Any]]:
    """Return arguments by the names of calls. Shapes are [batch, heads, query, key]."""
    n = FEATURE_LENGTH
    rng = np.random.default_rng(1)
    causal = np.tri(n, dtype=bool)[None, None]
    bias = jnp.asarray(rng.standard_normal((1, HEADS, n, n), dtype=np.float32))
    return {
        "plain": {},
        "is_causal": {"is_causal": True},
        "causal mask [1, 1, T, S]": {"mask": jnp.asarray(causal)},
        "causal mask [1, N, T, S]": {"mask": jnp.asarray(causal.repeat(HEADS, 1))},
        "random mask [1, 1, T, S]": {"mask": jnp.asarray(rng.random((1, 1, n, n)) < 0.5)},
        "random mask [1, 1, 1, S]": {"mask": jnp.asarray(rng.random((1, 1, 1, n)) < 0.5)},
        "f32 bias [1, 1, T, S]": {"bias": bias[:, :1]},
        "f32 bias [1, N, T, S]": {"bias": bias},
        "bf16 bias [1, 1, T, S]": {"bias": bias[:, :1].astype(jnp.bfloat16)},
        "bf16 bias [1, N, T, S]": {"bias": bias.astype(jnp.bfloat16)},
        "soft cap": {"logits_soft_cap": 30.0},
        "sinks": {"sinks": jnp.asarray(rng.standard_normal(HEADS, dtype=np.float32))},
    }


def measure_features(dims: list[int], seconds: float, output: pathlib.Path) -> None:
    rows: list[dict[str, Any]] = []
    for dim, dtype in track([(d, t) for d in dims for t in ("float32", "bfloat16")], "Measuring features"):
        shape = (1, FEATURE_LENGTH, HEADS, dim)
        arrays = [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)]
        calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
        for name, options in features().items():
            sinks = tuple(options.keys() & {"sinks"})
            calls["forward"][name], calls["backward"][name] = feature_calls(arrays, options, differentiated=sinks)
            if "bias" in options:
                _, calls["backward"]["dbias, " + name] = feature_calls(arrays, options, differentiated=("bias",))
        calls["forward"]["with its tangent"] = tangent_call(arrays)
        for pass_, by_name in calls.items():
            times = measure.interleave(by_name, seconds, rounds=7)
            for name, samples in times.items():
                baseline = times["is_causal" if name.startswith("causal") else "plain"]
                ratio = statistics.median(x / y for x, y in zip(samples, baseline, strict=True))
                rows.append(
                    {"dim": dim, "dtype": dtype, "pass": pass_, "feature": name, "ratio": ratio, "seconds": samples}
                )
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "numpy"])
    measure.save(output, {"environment": environment, "heads": HEADS, "length": FEATURE_LENGTH, "rows": rows})
    show_features(rows)
    print(f"Written: {output}")


def tangent_call(arrays: list[jax.Array]) -> Callable[[], object]:
    """The forward and its tangent, along tangents of q, k and v."""
    q, k, v, _ = arrays
    attend = functools.partial(jax_flash.dot_product_attention, implementation="flash")
    call = jax.jit(lambda at, along: jax.jvp(attend, at, along))
    return lambda: call((q, k, v), (v, q, k))


def show_features(rows: list[dict[str, Any]]) -> None:
    columns = dict.fromkeys((row["dim"], row["dtype"], row["pass"]) for row in rows)
    table = Table(title=f"Times relative to the plain call (causal: to is_causal), N={FEATURE_LENGTH}, {HEADS} heads")
    table.add_column("d\ndtype\npass", no_wrap=True)
    for dim, dtype, pass_ in columns:
        table.add_column(f"{dim}\n{dtype}\n{pass_}", justify="right")
    for name in dict.fromkeys(row["feature"] for row in rows):
        ratios = {(row["dim"], row["dtype"], row["pass"]): row["ratio"] for row in rows if row["feature"] == name}
        table.add_row(name, *(f"{ratios[column]:.2f}" if column in ratios else "" for column in columns))
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def feature_calls(
    arrays: list[jax.Array], options: dict[str, Any], differentiated: tuple[str, ...] = ()
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the forward, and the backward with the gradients of q, k, v and the `differentiated` options."""
    q, k, v, do = arrays
    given = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in options.items() if name not in given}
    inputs = {"query": q, "key": k, "value": v} | {name: given.pop(name) for name in differentiated}

    def attend(given, inputs):
        return jax_flash.dot_product_attention(**inputs, **given, **static, implementation="flash")

    forward = jax.jit(attend)
    _, pull = jax.jit(lambda given, inputs: jax.vjp(functools.partial(attend, given), inputs))(given, inputs)
    backward = jax.jit(lambda pull, do: pull(do))
    return lambda: forward(given, inputs), lambda: backward(pull, do)


def memory_in_child() -> dict[str, float]:
    print(f"Measuring the peak memory of N={LONG['length']} in a separate process")
    command = [sys.executable, __file__, "--measure-memory"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def peak_memory() -> dict[str, float]:
    """Return the MiB that forward and backward of a long sequence need in addition to their inputs."""
    shape = (1, LONG["length"], LONG["heads"], LONG["dim"])
    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in range(4))

    def forward_backward(attention):
        def run(q, k, v, do):
            o, vjp = jax.vjp(attention, q, k, v)
            return o, *vjp(do)

        return jax.jit(run).lower(q, k, v, do).compile()

    ours = forward_backward(lambda *x: jax_flash.dot_product_attention(*x, implementation="flash"))
    standard = forward_backward(lambda *x: jax.nn.dot_product_attention(*x, implementation="xla"))  # only compiled
    ctypes.CDLL(None).malloc_trim(0)  # return the compiler's freed memory
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status_mib("VmRSS")
    results = jax.block_until_ready(ours(q, k, v, do))
    return {
        "inputs_mib": 4 * q.nbytes / 2**20,
        "outputs_mib": sum(x.nbytes for x in results) / 2**20,
        "peak_over_inputs_mib": status_mib("VmHWM") - before,
        "jax_nn_temporaries_mib": standard.memory_analysis().temp_size_in_bytes / 2**20,
    }


def status_mib(field: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return math.nan


def show(results: dict) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    environment = results["environment"]
    table = Table(title=f"GFLOP/s on {environment['processor']}, {environment['cores']} cores, float32, {HEADS} heads")
    for heading in ("d", "", "pass", "N", *COLUMNS.values(), *(f"/{name}" for name in list(COLUMNS.values())[1:])):
        table.add_column(heading, justify="right")
    for i, row in enumerate(results["rows"]):
        rates = [row["gflops"].get(name, math.nan) for name in COLUMNS]
        last = i + 1 == len(results["rows"]) or results["rows"][i + 1]["pass"] != row["pass"]
        table.add_row(
            str(row["dim"]),
            "causal" if row["causal"] else "full",
            "fwd+bwd" if row["pass"] == "forward+backward" else "fwd",
            str(row["length"]),
            *(f"{x:.0f}" for x in rates),
            *(f"{rates[0] / x:.2f}" for x in rates[1:]),
            end_section=last,
        )
    console.print(table)
    console.print("Matrix product, GFLOP/s:", {name: round(rate) for name, rate in results["matmul_gflops"].items()})
    if results["memory"] is not None:
        memory = {name: round(value) for name, value in results["memory"].items()}
        console.print(f"N={LONG['length']}, one head, d={LONG['dim']}, forward+backward:", memory)


def plot(results: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    dims = sorted({row["dim"] for row in rows})
    columns = [(causal, pass_) for causal in (False, True) for pass_ in ("forward", "forward+backward")]
    figure, axes = plt.subplots(
        len(dims), len(columns), figsize=(15, 3.5 * len(dims)), squeeze=False, sharey=True, layout="constrained"
    )
    for axis_row, dim in zip(axes, dims, strict=True):
        for axis, (causal, pass_) in zip(axis_row, columns, strict=True):
            chosen = [r for r in rows if (r["dim"], r["causal"], r["pass"]) == (dim, causal, pass_)]
            for name in rows[0]["gflops"]:
                line = ":" if name == "matmul" else "o-"
                axis.plot([r["length"] for r in chosen], [r["gflops"][name] for r in chosen], line, label=COLUMNS[name])
            axis.set_xscale("log", base=2)
            axis.set_title(f"d={dim}, {'causal' if causal else 'full'}, {pass_}", fontsize=10)
            axis.set_xlabel("sequence length")
        axis_row[0].set_ylabel("GFLOP/s")
    axes[0, 0].legend(fontsize=8)
    axes[0, 0].set_ylim(bottom=0)
    environment = results["environment"]
    figure.suptitle(f"Attention on {environment['processor']}, {environment['cores']} cores, float32, {HEADS} heads")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

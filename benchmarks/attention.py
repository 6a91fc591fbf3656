"""Attention on an NVIDIA GPU: jax_flash against cuDNN and XLA (`jax.nn.dot_product_attention`) and PyTorch's SDPA.

    python benchmarks/attention.py                        # every group of problems: about ten minutes
    python benchmarks/attention.py --groups dense         # the tables of docs/performance.md, one group after the other
    python benchmarks/attention.py --groups dense --head-dims 128 --lengths 4096 --passes forward

All implementations of a row are timed in turn in one process. A sample is as many calls as take some milliseconds,
enqueued one after the other, so that the time of a launch hides behind the call before; rates are at the median time,
in TFLOP/s, counted as in the FlashAttention papers: 2 (D + E) a visible entry of S (half of all if causal), 2.5 times
that for the backward. bfloat16, if a group does not say otherwise. Problems with a window or documents are timed beside
the same without them, in the column "dense", since a GPU's clock depends on what ran before.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
from measure import Call
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

HAS_TORCH = importlib.util.find_spec("torch") is not None
TOKENS, WIDTH = 16384, 2048  # batch x N, heads x head dim
MATRIX_LIMIT = 2**32  # elements of S, above which XLA's standard attention is left out
PASSES = ("forward", "backward", "both")
COLUMNS = ("jax_flash", "cudnn", "xla", "torch", "dense")  # dense: jax_flash without window and documents


@dataclasses.dataclass(frozen=True)
class Problem:
    """B batch, T and S lengths, N and K heads, D and E head dims."""

    B: int
    T: int
    S: int
    N: int
    K: int
    D: int
    E: int
    causal: bool = False
    window: int | None = None  # keys to the left
    documents: int = 1  # equally long, packed
    dropout: float = 0.0
    deterministic: bool = False
    dtype: str = "bfloat16"

    @classmethod
    def square(cls, length: int, dim: int, **options) -> "Problem":
        heads = WIDTH // dim
        return cls(max(TOKENS // length, 1), length, length, heads, heads, dim, dim, **options)

    def entries(self) -> float:
        """Of S that count, in all heads."""
        columns = float(self.S)
        if self.window is not None:
            columns = min(self.window, self.S)
        elif self.causal and self.T == self.S:
            columns /= 2
        return self.B * self.N * self.T * columns / self.documents

    def dense(self) -> "Problem":
        """Without window and documents."""
        return dataclasses.replace(self, window=None, documents=1)

    def flops(self, pass_: str) -> float:
        return 2 * (self.D + self.E) * self.entries() * {"forward": 1, "backward": 2.5, "both": 3.5}[pass_]

    def label(self) -> str:
        heads = f"{self.N}" if self.N == self.K else f"{self.N}/{self.K}"
        dims = f"{self.D}" if self.D == self.E else f"{self.D}/{self.E}"
        length = f"{self.T}" if self.T == self.S else f"{self.T}x{self.S}"
        extras = [
            "causal" * self.causal,
            f"window {self.window}" * (self.window is not None),
            f"{self.documents} documents" * (self.documents > 1),
            f"dropout {self.dropout}" * (self.dropout > 0),
            "deterministic" * self.deterministic,
            self.dtype * (self.dtype != "bfloat16"),
        ]
        return " ".join([f"d={dims} N={length} B={self.B} H={heads}", *filter(None, extras)])


def groups(dims: Sequence[int], lengths: Sequence[int]) -> dict[str, tuple[tuple[str, ...], list[Problem]]]:
    """The passes and problems of each group."""
    masks = (False, True)
    dense = [Problem.square(n, d, causal=causal) for d in dims for n in lengths for causal in masks]
    return {
        "dense": (PASSES, dense),
        "dropout": (
            PASSES[:2],
            [Problem.square(4096, d, causal=causal, dropout=0.1) for d in (64, 128) for causal in masks],
        ),
        "masks": (
            PASSES[:2],
            [
                problem
                for d in (64, 128)
                for problem in (
                    Problem.square(16384, d),
                    Problem.square(16384, d, causal=True),
                    Problem.square(16384, d, causal=True, window=1024),
                    Problem.square(16384, d, documents=16),
                )
            ],
        ),
        "heads": (
            PASSES[:2],
            [
                Problem(4, 4096, 4096, 32, kv, d, e, causal=True)
                for kv, d, e in (
                    (32, 128, 128),
                    (4, 128, 128),
                    (32, 80, 80),
                    (32, 96, 96),
                    (32, 192, 192),
                    (32, 192, 128),
                )
            ]
            + [Problem(1, 8192, 8192, 16, 1, 128, 128, causal=True)],
        ),
        "small": (
            PASSES,
            [Problem(32, 512, 512, WIDTH // d, WIDTH // d, d, d) for d in (64, 128)]
            + [Problem(1, 2048, 2048, 8, 8, d, d) for d in (64, 128)],
        ),
        "decode": (
            PASSES[:1],
            [
                Problem(b, t, s, 32, kv, 128, 128)
                for kv in (4, 8)
                for t in (1, 16)
                for b, s in ((1, 131072), (8, 16384))
            ],
        ),
        "deterministic": (
            PASSES[1:2],
            [Problem.square(4096, d, causal=True, deterministic=x) for d in (64, 128) for x in (False, True)],
        ),
        "float32": (PASSES[:2], [Problem.square(n, d, dtype="float32") for d in (64, 128) for n in (2048, 8192)]),
    }


def jax_calls(problem: Problem, implementation: str) -> dict[str, Call]:
    """The three passes of `jax_flash`, or of jax.nn's "cudnn" or "xla"."""
    keys = jax.random.split(jax.random.key(0), 4)
    p = problem
    shapes = ((p.B, p.T, p.N, p.D), (p.B, p.S, p.K, p.D), (p.B, p.S, p.K, p.E), (p.B, p.T, p.N, p.E))
    q, k, v, do = (jax.random.normal(key, shape, p.dtype) for key, shape in zip(keys, shapes, strict=True))
    options: dict[str, Any] = {"is_causal": p.causal}
    function: Callable[..., jax.Array]
    if p.window is not None:
        options["local_window_size"] = (p.window - 1, 0)
    if implementation == "jax_flash":
        function, options["implementation"] = jax_flash.dot_product_attention, "flash"
        if p.deterministic:
            options["deterministic"] = True
        if p.documents > 1:
            ids = jnp.repeat(jnp.arange(p.documents), p.T // p.documents)[None].repeat(p.B, 0)
            options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
        if p.dropout:
            options |= {"dropout_rate": p.dropout, "dropout_key": jax.random.key(1)}
    else:
        function, options["implementation"] = jax.nn.dot_product_attention, implementation

    def attend(q, k, v):
        return function(q, k, v, **options)

    def both(q, k, v, do):
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    forward = jax.jit(attend).lower(q, k, v).compile()
    calls: dict[str, Call] = {"forward": lambda: forward(q, k, v)}
    if p.T == p.S:
        _, pull = jax.jit(functools.partial(jax.vjp, attend))(q, k, v)
        backward = jax.jit(lambda pull, do: pull(do)).lower(pull, do).compile()
        together = jax.jit(both).lower(q, k, v, do).compile()
        calls |= {"backward": lambda: backward(pull, do), "both": lambda: together(q, k, v, do)}
    return calls


def torch_calls(problem: Problem, backend: str) -> dict[str, Call]:
    """The three passes of PyTorch's SDPA with one of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = problem
    dtype = getattr(torch, p.dtype)

    def normal(length: int, heads: int, dim: int, requires_grad: bool = True):
        x = torch.randn(p.B, length, heads, dim, device="cuda", dtype=dtype)
        return x.transpose(1, 2).requires_grad_(requires_grad)

    inputs = [normal(p.T, p.N, p.D), normal(p.S, p.K, p.D), normal(p.S, p.K, p.E)]
    do = normal(p.T, p.N, p.E, False)

    def attend(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=p.causal, dropout_p=p.dropout, enable_gqa=p.N != p.K
            )

    detached = [x.detach() for x in inputs]
    calls: dict[str, Call] = {"forward": lambda: attend(*detached)}
    if p.T == p.S:
        o = attend(*inputs)
        calls["backward"] = lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)
        calls["both"] = lambda: torch.autograd.grad(attend(*inputs), inputs, do)
    return calls


def implementations(problem: Problem) -> tuple[dict[str, dict[str, Call]], dict[str, str]]:
    """The calls of all that can do the problem, and why the others cannot."""
    p, dense = problem, problem.dense()
    unusual = p.dropout > 0 or p.documents > 1 or p.deterministic
    matrix = p.B * p.N * p.T * p.S
    candidates: dict[str, Callable[[], dict[str, Call]]] = {"jax_flash": lambda: jax_calls(p, "jax_flash")}
    if not unusual:
        candidates["cudnn"] = lambda: jax_calls(p, "cudnn")
    elif p.dropout and HAS_TORCH:  # jax.nn hands no dropout on
        candidates["cudnn"] = lambda: torch_calls(p, "CUDNN_ATTENTION")
    if not unusual and matrix <= MATRIX_LIMIT:
        candidates["xla"] = lambda: jax_calls(p, "xla")
    if HAS_TORCH and p == dense and not p.deterministic:
        candidates["torch"] = lambda: torch_calls(p, "FLASH_ATTENTION")
    if p != dense:
        candidates["dense"] = lambda: jax_calls(dense, "jax_flash")
    calls, missing = {}, {}
    for name, build in candidates.items():
        try:
            calls[name] = build()
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if name == "jax_flash":
                raise
            missing[name] = str(error).splitlines()[0][:200]
    return calls, missing


def measure_problem(group: str, problem: Problem, passes: Sequence[str]) -> list[dict[str, Any]]:
    calls, missing = implementations(problem)
    rows = []
    for pass_ in passes:
        chosen = {name: by_pass[pass_] for name, by_pass in calls.items() if pass_ in by_pass}
        for name in chosen.keys() - {"jax_flash"}:  # the matrix may be too large
            try:
                measure.finish(chosen[name]())
            except RuntimeError as error:
                missing[name] = str(error).splitlines()[0][:200]
                del chosen[name]
        times = measure.interleave_enqueued(chosen)
        flops = {name: (problem.dense() if name == "dense" else problem).flops(pass_) for name in times}
        rows.append(
            {
                "group": group,
                "label": problem.label(),
                **dataclasses.asdict(problem),
                "pass": pass_,
                "tflops": {name: measure.rate(flops[name], x) / 1e3 for name, x in times.items()},
                "milliseconds": {name: 1e3 * statistics.median(x) for name, x in times.items()},
                "missing": dict(missing),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(groups((), ()))
    parser.add_argument("--groups", nargs="+", choices=names, default=names)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], help="of the group dense")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384], help="of the group dense")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument(
        "--output", type=pathlib.Path, default=measure.RESULTS / "attention.json", help="a plot goes next to it"
    )
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("no NVIDIA GPU here, or jax is installed without CUDA; benchmarks/cpu.py measures the CPU")

    chosen = {name: x for name, x in groups(args.head_dims, args.lengths).items() if name in args.groups}
    problems = [(name, problem, passes) for name, (passes, group) in chosen.items() for problem in group]
    packages = ["jax-flash", "jax", "jaxlib", "torch", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]
    results: dict[str, Any] = {"environment": measure.environment(packages), "rows": []}
    for name, problem, passes in track(problems, "Measuring attention"):
        results["rows"] += measure_problem(name, problem, [x for x in passes if x in args.passes])
        measure.save(args.output, results)
    show(results)
    plot(results, args.output.with_suffix(".png"))
    print(f"Written: {args.output} and {args.output.with_suffix('.png').name}")


def columns_of(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in COLUMNS if any(name in row["tflops"] for row in rows)]


def show(results: dict[str, Any]) -> None:
    console = Console(width=150)
    for group in dict.fromkeys(row["group"] for row in results["rows"]):
        table = Table(title=f"{group}: TFLOP/s on {results['environment']['devices'][0]}")
        rows = [row for row in results["rows"] if row["group"] == group]
        columns = columns_of(rows)
        for heading in ("problem", "pass", "ms", *columns, *(f"/{name}" for name in columns[1:])):
            table.add_column(heading, justify="left" if heading == "problem" else "right")
        for row in rows:
            rates = [row["tflops"].get(name, math.nan) for name in columns]
            cells = [f"{x:.0f}" for x in rates] + [f"{rates[0] / x:.2f}" for x in rates[1:]]
            milliseconds = f"{row['milliseconds']['jax_flash']:.3f}"
            table.add_row(row["label"], row["pass"], milliseconds, *(x.replace("nan", "") for x in cells))
        console.print(table)
        for pass_ in PASSES:
            ratios = [
                row["tflops"]["jax_flash"] / row["tflops"]["cudnn"]
                for row in rows
                if row["pass"] == pass_ and "cudnn" in row["tflops"]
            ]
            if ratios:
                console.print(f"{pass_}: {statistics.geometric_mean(ratios):.3f} of cuDNN (geometric mean)")


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    figure, axes = plt.subplots(
        1, 1 + (len(rows) > 40), figsize=(16, 4 + 0.12 * len(rows)), squeeze=False, layout="constrained"
    )
    half = math.ceil(len(rows) / axes.size)
    for axis, part in zip(axes[0], (rows[:half], rows[half:]), strict=False):
        for i, name in enumerate(columns_of(rows)):
            places = [y + 0.16 * i for y in range(len(part))]
            axis.barh(places, [row["tflops"].get(name, 0) for row in part], 0.16, label=name)
        axis.set_yticks(range(len(part)), [f"{row['label']} {row['pass']}" for row in part], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("TFLOP/s")
    axes[0, 0].legend()
    figure.suptitle(f"Attention on one {results['environment']['devices'][0]}")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()

"""Attention on an NVIDIA GPU: jax_flash, cuDNN and XLA (both by `jax.nn.dot_product_attention`) and PyTorch's SDPA.

Includes FlashAttention-3 if dew-flash-attn is installed, and FlashAttention-4 if flash-attn-4 and PyTorch are. Forward
mode (the group "tangent") includes fa4-jax, and jvp_flash_attention for PyTorch, if they are installed.

    python benchmarks/attention.py                        # all groups of problems: a quarter of an hour
    python benchmarks/attention.py --groups dense         # a table of docs/performance.md (see tables.py)
    python benchmarks/attention.py --groups dense --head-dims 128 --lengths 4096 --passes forward
    python benchmarks/attention.py --groups arrays bias dbias soft_cap --against dense

All implementations of a row are timed in turn in one process. A sample consists of enough calls to take 10 ms. They are
enqueued one after the other, so the launch of one call overlaps with the call before.

Rates are in TFLOP/s at the median time. FLOPs are counted as in the FlashAttention papers: 2 (D + E) per visible entry
of S (half of all entries if causal), 2.5 times that in the backward and for a tangent alone, and 3 times for the
forward with a tangent. With a random mask, all entries count. The dtype is bfloat16 unless a group specifies another.
In forward mode, an implementation whose results differ from the results of jax_flash is left out.

Problems with a window, documents, arrays or a soft cap are timed in turn with the same problem without them (column
"dense"). Separate runs are not comparable, because the clock of a GPU depends on what ran before. A causal mask given
as an array is compared with `is_causal`. Arrays are named by the dims that they have in full: a mask b1ts is the same
for all heads. The column "goal" has the target for a problem: TFLOP/s, milliseconds, or the rate relative to another
column.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
from measure import Call
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

HAS_TORCH, HAS_FA3, HAS_FA4, HAS_JVP_FLASH, HAS_FA4_JAX = (
    importlib.util.find_spec(x) is not None
    for x in ("torch", "dew_flash_attn", "flash_attn", "jvp_flash_attention", "fa4_jax")
)
TRACING = threading.Lock()
TOKENS, WIDTH = 16384, 2048  # batch x N, heads x head dim
MATRIX_LIMIT = 2**32  # elements of S; XLA's standard attention is not measured above
PASSES = ("forward", "backward", "both")
FORWARD_MODE = ("jvp", "tangent")  # forward and tangent along query, key and value, or the tangent alone
# dense: jax_flash on `Problem.dense`; plain: jax_flash in plain JAX, `implementation="xla"`.
COLUMNS = ("jax_flash", "cudnn", "fa3", "fa4", "xla", "torch", "dense", "plain", "jvp_flash", "fa4_jax")


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
    window: int | None = None  # number of keys that a query attends to, including its own
    documents: int = 1  # number of packed documents, which are equally long
    padding: int = 0  # tokens at the end of each sequence that sequence lengths exclude
    dropout: float = 0.0
    deterministic: bool = False
    dtype: str = "bfloat16"
    mask: str = ""  # dims that a boolean array has in full ("b1ts"): the causal mask if causal, else a random half
    bias: str = ""  # the same for a bias, of normally distributed numbers
    bias_dtype: str = "bfloat16"
    dbias: bool = False  # whether the backward computes the gradient of the bias
    soft_cap: float | None = None
    sinks: bool = False  # the backward includes their gradient
    goals: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)  # target by pass, as text

    @classmethod
    def square(cls, length: int, dim: int, **options) -> "Problem":
        heads = WIDTH // dim
        return cls(max(TOKENS // length, 1), length, length, heads, heads, dim, dim, **options)

    def entries(self) -> float:
        """Return the number of entries of S that count, in all heads."""
        columns = length = (self.S - self.padding) / self.documents
        if self.window is not None:
            columns = min(self.window, length)
            if self.T == self.S:
                columns -= columns**2 / (2 * length)  # the first rows of each document have fewer keys
        elif self.causal and self.T == self.S:
            columns /= 2
        return self.B * self.N * (self.T - self.padding) * columns

    def dense(self) -> "Problem":
        """Return the problem without window, documents, arrays, soft cap and sinks."""
        return dataclasses.replace(
            self, window=None, documents=1, padding=0, mask="", bias="", dbias=False, soft_cap=None, sinks=False
        )

    def flops(self, pass_: str) -> float:
        forwards = {"forward": 1, "backward": 2.5, "both": 3.5, "jvp": 3, "tangent": 2.5}
        return 2 * (self.D + self.E) * self.entries() * forwards[pass_]

    def label(self) -> str:
        heads = f"{self.N}" if self.N == self.K else f"{self.N}/{self.K}"
        dims = f"{self.D}" if self.D == self.E else f"{self.D}/{self.E}"
        length = f"{self.T}" if self.T == self.S else f"{self.T}x{self.S}"
        extras = [
            "causal" * self.causal,
            f"mask {self.mask}" * bool(self.mask),
            f"bias {self.bias} {self.bias_dtype}" * bool(self.bias),
            "dbias" * self.dbias,
            f"cap {self.soft_cap:g}" if self.soft_cap is not None else "",
            "sinks" * self.sinks,
            f"window {self.window}" * (self.window is not None),
            f"{self.documents} documents" * (self.documents > 1),
            f"{self.padding} padding" * (self.padding > 0),
            f"dropout {self.dropout}" * (self.dropout > 0),
            "deterministic" * self.deterministic,
            self.dtype * (self.dtype != "bfloat16"),
        ]
        return " ".join([f"d={dims} N={length} B={self.B} H={heads}", *filter(None, extras)])


def goals(*figures: str) -> dict[str, str]:
    """Return goals by pass. The last one also applies to the remaining passes."""
    return {pass_: figures[min(i, len(figures) - 1)] for i, pass_ in enumerate(PASSES)}


def biases(dbias: bool, goals_of: dict[int, dict[str, str]]) -> list[Problem]:
    return [
        Problem.square(4096, d, bias=bias, bias_dtype=dtype, dbias=dbias, goals=goals_of[d])
        for d in goals_of
        for bias in ("11ts", "b1ts", "1nts", "bnts")
        for dtype in ("bfloat16", "float32")
    ]


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
        "documents": (  # boundaries inside tiles, and combined with other masks
            PASSES[:2],
            [
                problem
                for d in (64, 128)
                for problem in (
                    Problem.square(15600, d, causal=True, documents=12),
                    Problem.square(15600, d, causal=True, documents=48),
                    Problem.square(15600, d, documents=48),
                    Problem.square(16384, d, causal=True, documents=16, window=1024),
                    Problem.square(16384, d, causal=True, documents=16, dropout=0.1),
                )
            ],
        ),
        "lengths": (
            PASSES[:2],
            [
                Problem.square(n, d, causal=causal, padding=n // 8 + 5)
                for d in (64, 128, 256)
                for n in (512, 1024, 4096)
                for causal in masks
            ],
        ),
        "windows": (  # gpt-oss
            PASSES[:2],
            [
                Problem(1, 16384, 16384, 64, 8, 64, 64, causal=True, window=w, sinks=sinks, goals=goals("/cudnn 1.2"))
                for w in (128, 1024)
                for sinks in (False, True)
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
        "arrays": (
            PASSES[:2],
            [
                Problem.square(4096, d, causal=True, mask=mask, dropout=dropout, goals=goals(goal))
                for d in (64, 128)
                for dropout in (0.0, 0.1)
                for mask, goal in (("11ts", "/dense 0.8"), ("b1ts", "/dense 0.8"), ("bnts", "/dense 0.8 + a read"))
            ]
            + [Problem.square(4096, d, mask="b1ts", goals=goals("/dense 0.75")) for d in (64, 128)],
        ),
        "bias": (PASSES[:2], biases(False, {64: goals("300", "330"), 128: goals("500", "440")})),
        "dbias": (PASSES[1:], biases(True, {64: {"both": "190"}, 128: {"both": "315"}})),
        "soft_cap": (
            PASSES[:2],
            [
                Problem.square(4096, d, soft_cap=cap, goals=goals(*rates) if cap > 1 else {})
                for d, rates in ((64, ("275", "350")), (128, ("460", "430")))
                for cap in (1.0, 30.0, 50.0)  # scores exceed the first
            ],
        ),
        "models": (
            PASSES,
            [
                Problem(32, 512, 512, 12, 12, 64, 64, bias="1nts", goals={"forward": "/cudnn 1.1"}),  # T5
                Problem(  # AlphaFold
                    256, 256, 256, 8, 8, 32, 32, bias="1nts", dbias=True, mask="b11s", goals=goals("/cudnn 1, /xla 4")
                ),
                Problem(  # Gemma 2
                    2, 8192, 8192, 8, 4, 256, 256, causal=True, window=4096, soft_cap=50.0, goals={"backward": "3 ms"}
                ),
            ],
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
            [
                Problem.square(4096, d, causal=causal, deterministic=x)
                for d in (64, 128, 256)
                for causal in masks
                for x in (False, True)
            ],
        ),
        "tangent": (
            FORWARD_MODE,
            [
                Problem(1, n, n, WIDTH // d, WIDTH // d, d, d, causal=causal)
                for d in (64, 128)
                for n in (2048, 8192)
                for causal in masks
            ],
        ),
        "float32": (PASSES[:2], [Problem.square(n, d, dtype="float32") for d in (64, 128) for n in (2048, 8192)]),
    }


def operands(problem: Problem) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return the arrays of a call by name: the differentiated ones, and the others."""
    p = problem
    sizes = {"b": p.B, "n": p.N, "t": p.T, "s": p.S, "1": 1}
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((p.B, p.T, p.N, p.D), (p.B, p.S, p.K, p.D), (p.B, p.S, p.K, p.E))
    named = zip(("query", "key", "value"), keys[:3], shapes, strict=True)
    inputs = {name: jax.random.normal(key, shape, p.dtype) for name, key, shape in named}
    arrays: dict[str, Any] = {}
    if p.mask:
        shape = tuple(sizes[dim] for dim in p.mask)
        below = jnp.arange(p.S) <= jnp.arange(p.T)[:, None]
        arrays["mask"] = jnp.broadcast_to(below, shape) if p.causal else jax.random.bernoulli(keys[3], shape=shape)
    if p.bias:
        bias = jax.random.normal(keys[4], tuple(sizes[dim] for dim in p.bias), p.bias_dtype)
        (inputs if p.dbias else arrays)["bias"] = bias
    if p.sinks:
        inputs["sinks"] = jax.random.normal(keys[5], (p.N,))
    if p.documents > 1:
        ids = jnp.repeat(jnp.arange(p.documents), p.T // p.documents)[None].repeat(p.B, 0)
        arrays |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    if p.padding:
        arrays["query_seq_lengths"] = jnp.full(p.B, p.T - p.padding)
        arrays["key_value_seq_lengths"] = jnp.full(p.B, p.S - p.padding)
    if p.dropout:
        arrays["dropout_key"] = jax.random.key(1)
    return inputs, arrays


def options(problem: Problem) -> dict[str, Any]:
    """Return the call's other arguments that differ from their defaults."""
    p = problem
    chosen: dict[str, Any] = {"is_causal": p.causal and not p.mask}
    if p.window is not None:
        chosen["local_window_size"] = (p.window - 1, 0)
    if p.soft_cap is not None:
        chosen["logits_soft_cap"] = p.soft_cap
    if p.deterministic:
        chosen["deterministic"] = True
    if p.dropout:
        chosen["dropout_rate"] = p.dropout
    return chosen


def compiled(function: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    """Compile a function and return the call. In JAX 0.11, threads that trace one custom_vjp concurrently may fail."""
    with TRACING:
        lowered = jax.jit(function).lower(*given)
    return functools.partial(lowered.compile(), *given)


def jax_call(problem: Problem, implementation: str, pass_: str, more: Mapping[str, Any] | None = None) -> Call:
    """Return a pass of "jax_flash", "plain", "fa3", "fa4_jax", or jax.nn's "cudnn" or "xla".

    `more` has arrays that `Problem` lacks.
    """
    inputs, arrays = operands(problem)
    arrays |= more or {}
    function: Callable[..., jax.Array]
    if implementation in ("jax_flash", "plain"):
        ours = "flash" if implementation == "jax_flash" else "xla"
        function = functools.partial(jax_flash.dot_product_attention, implementation=ours)
    elif implementation == "fa3":
        import dew_flash_attn

        function = dew_flash_attn.flash_mha
    elif implementation == "fa4_jax":
        import fa4_jax

        def function(query, key, value, is_causal):
            return fa4_jax.flash_attn(query, key, value, causal=is_causal)
    else:
        function = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    function = functools.partial(function, **options(problem))

    def attend(arrays, inputs):
        return function(**inputs, **arrays)

    def pullback(arrays, inputs):
        return jax.vjp(functools.partial(attend, arrays), inputs)

    def both(arrays, do, inputs):
        o, pull = pullback(arrays, inputs)
        return o, pull(do)

    def along(arrays, inputs, moved):
        return jax.jvp(functools.partial(attend, arrays), (inputs,), (moved,))

    def linear(arrays, inputs):
        return jax.linearize(functools.partial(attend, arrays), inputs)

    run: Callable[..., object] = attend
    given: tuple[Any, ...] = (arrays, inputs)
    if pass_ in FORWARD_MODE:
        moved = jax.tree.map(jnp.cos, inputs)
        if pass_ == "jvp":
            run, given = along, (arrays, inputs, moved)
        else:
            run, given = lambda push, moved: push(moved), (compiled(linear, arrays, inputs)()[1], moved)
    elif pass_ != "forward":
        p = problem
        do = jax.random.normal(jax.random.key(2), (p.B, p.T, p.N, p.E), p.dtype)
        if pass_ == "backward":
            run, given = lambda pull, do: pull(do), (compiled(pullback, arrays, inputs)()[1], do)
        else:
            run, given = both, (arrays, do, inputs)
    return compiled(run, *given)


def torch_calls(problem: Problem, attend: Callable[..., Any]) -> dict[str, Call]:
    """Return the three passes of a PyTorch function of query, key and value, [B, T, N, D] each."""
    import torch

    p = problem
    dtype = getattr(torch, p.dtype)
    shapes = (p.T, p.N, p.D), (p.S, p.K, p.D), (p.S, p.K, p.E), (p.T, p.N, p.E)
    *inputs, do = (torch.randn(p.B, *shape, device="cuda", dtype=dtype) for shape in shapes)
    leaves = [x.detach().requires_grad_() for x in inputs]
    calls: dict[str, Call] = {"forward": lambda: attend(*inputs)}
    if p.T == p.S:
        o = attend(*leaves)
        calls["backward"] = lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
        calls["both"] = lambda: torch.autograd.grad(attend(*leaves), leaves, do)
    return calls


def sdpa_calls(problem: Problem, backend: str) -> dict[str, Call]:
    """Return the three passes of PyTorch's SDPA with one of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = problem

    def attend(*inputs):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in inputs), is_causal=p.causal, dropout_p=p.dropout, enable_gqa=p.N != p.K
            ).transpose(1, 2)

    return torch_calls(p, attend)


def fa4_calls(problem: Problem) -> dict[str, Call]:
    """Return the three passes of FlashAttention-4."""
    from flash_attn.cute import flash_attn_func

    def attend(*inputs):
        o = flash_attn_func(*inputs, causal=problem.causal)
        return o[0] if isinstance(o, tuple) else o  # some versions also return the logsumexp

    return torch_calls(problem, attend)


def jvp_flash_call(problem: Problem) -> Call:
    """Return the forward with a tangent of jvp_flash_attention. Its kernel computes both, in arrays [B, N, T, D]."""
    import torch
    from jvp_flash_attention.jvp_attention import JVPAttn

    inputs = [x.swapaxes(1, 2) for x in operands(problem)[0].values()]
    primals, tangents = (tuple(map(torch.from_dlpack, arrays)) for arrays in (inputs, map(jnp.cos, inputs)))
    attend = functools.partial(JVPAttn.fwd_dual, causal=problem.causal)
    return lambda: tuple(x.transpose(1, 2) for x in torch.func.jvp(attend, primals, tangents))


def check(results: object, expected: object) -> None:
    """Raise an error if arrays of JAX or PyTorch differ from the expected ones by more than rounding."""
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        x = jnp.asarray(x if isinstance(x, jax.Array) else jnp.from_dlpack(x.contiguous()), "float32")
        error = float(jnp.abs(x - y).max() / jnp.abs(y).max())
        if not error < 0.05:
            raise ValueError(f"a result differs from jax_flash by {error:.2g} of the largest entry")


def implementations(problem: Problem, pass_: str, against: Sequence[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the calls of all implementations that support the pass, and the reasons why the others do not."""
    p, dense = problem, problem.dense()
    without_sinks = dataclasses.replace(p, sinks=False)  # jax.nn has no sinks and is timed without them
    unusual = p.dropout > 0 or p.documents > 1 or p.deterministic or p.soft_cap is not None
    matrix = p.B * p.N * p.T * p.S
    candidates: dict[str, Callable[[], Call]] = {}
    if not unusual:
        candidates["cudnn"] = lambda: jax_call(without_sinks, "cudnn", pass_)
    elif p.dropout and p == dense and HAS_TORCH:  # jax.nn does not pass dropout to cuDNN
        candidates["cudnn"] = lambda: sdpa_calls(p, "CUDNN_ATTENTION")[pass_]
    if not unusual and matrix <= MATRIX_LIMIT:
        candidates["xla"] = lambda: jax_call(without_sinks, "xla", pass_)
    if HAS_TORCH and p == dense and not p.deterministic:
        candidates["torch"] = lambda: sdpa_calls(p, "FLASH_ATTENTION")[pass_]
    if not unusual and p == dense and p.T == p.S and p.dtype != "float32":
        if HAS_FA3:
            candidates["fa3"] = lambda: jax_call(p, "fa3", pass_)
        if HAS_FA4 and HAS_TORCH:
            candidates["fa4"] = lambda: fa4_calls(p)[pass_]
    if pass_ in FORWARD_MODE:  # the others have no forward mode
        candidates = {name: x for name, x in candidates.items() if name == "xla"}
        candidates |= {name: functools.partial(jax_call, p, name, pass_) for name in ("plain", "fa4_jax")}
        if pass_ == "jvp":
            candidates["jvp_flash"] = lambda: jvp_flash_call(p)
    if p != dense:
        candidates["dense"] = lambda: jax_call(dense, "jax_flash", pass_)
    calls, missing = {"jax_flash": jax_call(p, "jax_flash", pass_)}, {}
    for name in (x for x in against if x in candidates):
        try:
            call = candidates[name]()
            measure.finish(result := call())  # the matrix may not fit into memory
            if pass_ in FORWARD_MODE:
                check(result, calls["jax_flash"]())
            calls[name] = call
        except (ImportError, ValueError, NotImplementedError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0][:200]
    return calls, missing


def measure_pass(group: str, problem: Problem, pass_: str, against: Sequence[str]) -> dict[str, Any]:
    calls, missing = implementations(problem, pass_, against)
    times = measure.interleave_enqueued(calls)
    flops = {name: (problem.dense() if name == "dense" else problem).flops(pass_) for name in times}
    return {
        "group": group,
        "label": problem.label(),
        **dataclasses.asdict(problem),
        "pass": pass_,
        "tflops": {name: measure.rate(flops[name], x) / 1e3 for name, x in times.items()},
        "milliseconds": {name: 1e3 * statistics.median(x) for name, x in times.items()},
        "missing": missing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(groups((), ()))
    parser.add_argument("--groups", nargs="+", choices=names, default=names)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], help="for the group dense")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384], help="for the group dense")
    every_pass = (*PASSES, *FORWARD_MODE)
    parser.add_argument("--passes", nargs="+", choices=every_pass, default=every_pass)
    parser.add_argument("--against", nargs="*", choices=COLUMNS[1:], default=COLUMNS[1:])
    parser.add_argument(
        "--output", type=pathlib.Path, default=measure.RESULTS / "attention.json", help="the plot is saved next to it"
    )
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("no NVIDIA GPU here, or jax is installed without CUDA; benchmarks/cpu.py measures the CPU")

    chosen = {name: x for name, x in groups(args.head_dims, args.lengths).items() if name in args.groups}
    problems = [(name, problem, passes) for name, (passes, group) in chosen.items() for problem in group]
    packages = ["jax-flash", "jax", "jaxlib", "torch", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]
    packages += ["dew-flash-attn-cu13"] * HAS_FA3 + ["flash-attn-4"] * HAS_FA4
    packages += ["jvp_flash_attention", "triton"] * HAS_JVP_FLASH + ["fa4-jax", "nvidia-cutlass-dsl"] * HAS_FA4_JAX
    results: dict[str, Any] = {"environment": measure.environment(packages), "rows": []}
    for name, problem, passes in track(problems, "Measuring attention"):
        for pass_ in (x for x in passes if x in args.passes):
            results["rows"].append(measure_pass(name, problem, pass_, args.against))
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
        goals = any(row["pass"] in row["goals"] for row in rows)
        for heading in ("problem", "pass", "ms", *columns, *(f"/{name}" for name in columns[1:]), *["goal"] * goals):
            table.add_column(heading, justify="left" if heading == "problem" else "right")
        for row in rows:
            rates = [row["tflops"].get(name, math.nan) for name in columns]
            cells = [f"{x:.0f}" for x in rates] + [f"{rates[0] / x:.2f}" for x in rates[1:]]
            milliseconds = f"{row['milliseconds']['jax_flash']:.3f}"
            cells += [row["goals"].get(row["pass"], "")] * goals
            table.add_row(row["label"], row["pass"], milliseconds, *(x.replace("nan", "") for x in cells))
        console.print(table)
        for name, reason in dict.fromkeys(item for row in rows for item in row["missing"].items()):
            console.print(f"{name} is missing in some rows: {reason}", markup=False)
        for pass_ in (*PASSES, *FORWARD_MODE):
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
            positions = [y + 0.16 * i for y in range(len(part))]
            axis.barh(positions, [row["tflops"].get(name, 0) for row in part], 0.16, label=name)
        axis.set_yticks(range(len(part)), [f"{row['label']} {row['pass']}" for row in part], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("TFLOP/s")
    axes[0, 0].legend()
    figure.suptitle(f"Attention on one {results['environment']['devices'][0]}")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()

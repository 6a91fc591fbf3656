"""Cost of score programs, compared with the plain call, the same built-in feature, and XLA with the same function.

    python benchmarks/score_programs.py                       # on a CPU N=2048, float32: four minutes on two cores
    python benchmarks/score_programs.py --head-dims 64 128    # on a GPU N=4096, B=4, bfloat16: seven minutes

All calls of a row are timed in turn in one process:

* the program
* the plain call (`is_causal` for masks that are causal)
* the built-in feature, if it exists
* attention that materialises the matrix under XLA, with the same function mapped over it
* PyTorch's FlexAttention, on a GPU with PyTorch installed

The backward computes the gradients of q, k, v, and in "table's gradient" and "bias and its gradient" also of the
captured array. In other rows captured arrays are constants. Ratios are medians over rounds. Calls that do not fit into
memory are omitted.

On a GPU, also measures the time to find out which blocks a mask_mod leaves empty or full, at N=65536. The call is a
forward of one head. No query and key share a document, so no other work remains.
"""

import argparse
import functools
import importlib.util
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flex
import jax
import jax.numpy as jnp
import measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

Options = dict[str, Any]
Arrays = dict[str, jax.Array]


class Row(NamedTuple):
    """A program as a function of arrays, and the built-in feature that does the same."""

    program: Callable[[Arrays], Options]
    arrays: Callable[["Size"], Arrays] = lambda size: {}
    built_in: Callable[[Arrays], Options] | None = None
    differentiated: bool = False
    causal: bool = False  # whether the plain call is causal


class Size(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int
    dtype: str


def relative(arrays: Arrays) -> Options:
    table, last = arrays["table"], arrays["table"].shape[1] // 2
    return {"score_mod": lambda score, batch, head, query, key: score + table[head, query - key + last]}


def relative_at_an_offset(arrays: Arrays) -> Options:
    return relative(arrays) | {"query_offset": arrays["offset"]}


def alibi(arrays: Arrays) -> Options:
    slopes = arrays["slopes"]
    return {"score_mod": lambda score, batch, head, query, key: score + slopes[head] * (key - query)}


def capped(arrays: Arrays) -> Options:
    return {"score_mod": lambda score, batch, head, query, key: 30 * jnp.tanh(score / 30)}


def biased(arrays: Arrays) -> Options:
    bias = arrays["bias"]
    return {"score_mod": lambda score, batch, head, query, key: score + bias[0, head, query, key]}


def causal(arrays: Arrays) -> Options:
    return {"mask_mod": lambda batch, head, query, key: key <= query}


def prefix(arrays: Arrays) -> Options:
    return {"mask_mod": lambda batch, head, query, key: (key <= query) | (key < 128)}


def documents(arrays: Arrays) -> Options:
    ids = arrays["ids"]
    return {"mask_mod": lambda batch, head, query, key: ids[query] == ids[key]}


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(7), shape, dtype)


def table(size: Size) -> Arrays:
    return {"table": normal(size.heads, 2 * size.length - 1)}


def table_and_offset(size: Size) -> Arrays:
    return table(size) | {"offset": jnp.zeros(size.batch, jnp.int32)}


def bias(size: Size) -> Arrays:
    return {"bias": normal(1, size.heads, size.length, size.length, dtype=size.dtype)}


def eight_documents(size: Size) -> Arrays:
    return {"ids": jnp.arange(size.length, dtype=jnp.int32) // (size.length // 8)}


def by_segments(arrays: Arrays) -> Options:
    return dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), arrays["ids"])


ROWS = {
    "does nothing": Row(lambda arrays: {"score_mod": lambda score, batch, head, query, key: score}),
    "soft cap": Row(capped, built_in=lambda arrays: {"logits_soft_cap": 30.0}),
    "ALiBi": Row(alibi, lambda size: {"slopes": 2.0 ** -jnp.linspace(1, 8, size.heads)}),
    "relative table": Row(relative, table),
    "relative table, query offset": Row(relative_at_an_offset, table_and_offset),
    "table's gradient": Row(relative, table, differentiated=True),
    "bias [1, N, T, S]": Row(biased, bias, lambda arrays: {"bias": arrays["bias"]}),
    "bias and its gradient": Row(biased, bias, lambda arrays: {"bias": arrays["bias"]}, differentiated=True),
    "causal": Row(causal, built_in=lambda arrays: {"is_causal": True}, causal=True),
    "causal, and a prefix": Row(prefix, causal=True),
    "documents": Row(documents, eight_documents, by_segments),
}


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64])
    parser.add_argument("--length", type=int, default=4096 if on_gpu else 2048)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=5.0, help="time per row and pass, on a CPU")
    parser.add_argument("--no-flex", action="store_true", help="without PyTorch's FlexAttention")
    parser.add_argument("--output", type=pathlib.Path, help="the JSON file")
    args = parser.parse_args()
    time = measure.interleave_enqueued if on_gpu else functools.partial(measure.interleave, seconds=args.seconds)
    use_flex = on_gpu and not args.no_flex and importlib.util.find_spec("torch") is not None
    rows = []
    for name, dim in track([(name, dim) for dim in args.head_dims for name in args.rows], "Measuring programs"):
        heads = 2048 // dim if on_gpu else 8
        size = Size(4 if on_gpu else 1, heads, args.length, dim, "bfloat16" if on_gpu else "float32")
        rows += measured(name, size, time, use_flex)
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "numpy", "torch", "triton"])
    output = args.output or measure.RESULTS / f"score_programs_{'gpu' if on_gpu else 'cpu'}.json"
    results: dict[str, Any] = {"environment": environment, "rows": rows}
    if on_gpu:
        results["classification_seconds"] = time({"classification": classification(65536)})["classification"]
        print(f"Classifying blocks at N=65536: {1e3 * statistics.median(results['classification_seconds']):.2f} ms")
    measure.save(output, results)
    show(rows)
    print(f"Written: {output}")


def measured(name: str, size: Size, time: Callable[..., Any], use_flex: bool) -> list[dict[str, Any]]:
    """Return a row of results for each pass. Its memory is freed on return."""
    by_pass = calls_of(ROWS[name], size)
    for pass_, way, call in flex.calls(name, *size[:4]) if use_flex else ():
        by_pass[pass_][way] = call
    rows = []
    for pass_, calls in by_pass.items():
        times = time(calls)
        rates = {call: measure.rate(flops(size, pass_, ROWS[name]), samples) for call, samples in times.items()}
        rows.append({"program": name, "pass": pass_, "size": size._asdict(), "gflops": rates, "seconds": times})
    return rows


def flops(size: Size, pass_: str, row: Row) -> float:
    both = measure.attention_flops(size.batch, size.heads, size.length, size.dim, row.causal, True)
    forward = measure.attention_flops(size.batch, size.heads, size.length, size.dim, row.causal, False)
    return forward if pass_ == "forward" else both - forward


def calls_of(row: Row, size: Size) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls by pass and implementation."""
    arrays = row.arrays(size)
    shape = (size.batch, size.length, size.heads, size.dim)
    inputs = [jax.random.normal(key, shape, size.dtype) for key in jax.random.split(jax.random.key(0), 4)]
    ways: dict[str, Callable[..., jax.Array]] = {
        "program": lambda q, k, v, arrays: fused(q, k, v, row.program(arrays)),
        "plain": lambda q, k, v, arrays: fused(q, k, v, {"is_causal": row.causal}),
    }
    if row.built_in is not None:
        built_in = row.built_in
        ways["built-in"] = lambda q, k, v, arrays: fused(q, k, v, built_in(arrays))
    # XLA comes last, since it needs memory in addition to the residuals of the other implementations.
    ways["XLA"] = lambda q, k, v, arrays: materialised(q, k, v, row.program(arrays))
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, way in ways.items():
        differentiated = row.differentiated and name != "plain"
        try:
            forward, backward = both_passes(way, inputs, arrays, differentiated)
            for call in (forward, backward):
                measure.sample(call, measure.WARM_UP)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"Not enough memory for {name}.")
        else:
            calls["forward"][name], calls["backward"][name] = forward, backward
    return calls


def both_passes(
    way: Callable[..., jax.Array], inputs: list[jax.Array], arrays: Arrays, differentiated: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v, do = inputs
    forward = jax.jit(way)
    constants = {} if differentiated else arrays

    def of_inputs(constants, q, k, v, arrays):
        return way(q, k, v, {**constants, **arrays})

    @jax.jit
    def residuals(constants, *inputs):
        return jax.vjp(functools.partial(of_inputs, constants), *inputs)[1]

    pull = residuals(constants, q, k, v, arrays if differentiated else {})
    backward = jax.jit(lambda pull, do: pull(do))
    return lambda: forward(q, k, v, arrays), lambda: backward(pull, do)


def fused(q: jax.Array, k: jax.Array, v: jax.Array, options: Options) -> jax.Array:
    each = {name: jnp.broadcast_to(x, q.shape[:2]) for name, x in options.items() if name.endswith("_segment_ids")}
    options = options | each
    return jax_flash.dot_product_attention(q, k, v, implementation="flash", **options)


def classification(length: int) -> Callable[[], object]:
    """Return a call that evaluates the mask_mod in every block, and has no visible entry."""
    documents = jnp.sort(jax.random.randint(jax.random.key(0), (length,), 0, 32))
    others = documents + 32
    x = jnp.ones((1, length, 1, 64), jnp.bfloat16)

    @jax.jit
    def forward(x, documents, others):
        def mask_mod(batch, head, query, key):
            return documents[query] == others[key]

        return jax_flash.dot_product_attention(x, x, x, mask_mod=mask_mod, implementation="flash")

    return lambda: forward(x, documents, others)


def materialised(q: jax.Array, k: jax.Array, v: jax.Array, options: Options) -> jax.Array:
    """Compute attention with the matrix in memory, without a fused kernel."""
    s = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    indices = tuple(jnp.arange(size, dtype=jnp.int32) for size in s.shape)
    scores = (s,) if "score_mod" in options else ()
    function = options.get("score_mod") or options["mask_mod"]
    for axis in (3, 2, 1, 0):
        function = jax.vmap(function, (*(0 for _ in scores), *(0 if i == axis else None for i in range(4))))
    changed = function(*scores, *indices)
    p = jax.nn.softmax(changed if scores else jnp.where(changed, s, -jnp.inf))
    return jnp.einsum("bnts,bsnd->btnd", p.astype(v.dtype), v)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="GFLOP/s of a program; its time over that of plain and built-in calls; XLA and Flex over it")
    for heading in ("program", "d", "pass", "GFLOP/s", "/ plain", "/ built-in", "XLA /", "Flex /"):
        table.add_column(heading, justify="right")
    for row in rows:
        seconds = row["seconds"]

        def ratio(a: str, b: str, seconds: dict[str, list[float]] = seconds) -> str:
            if a not in seconds or b not in seconds:
                return ""
            return f"{statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True)):.2f}"

        backends = {name: statistics.median(seconds[name]) for name in seconds if name.startswith("Flex")}
        faster = min(backends, key=lambda name: backends[name], default="")
        pairs = (("program", "plain"), ("program", "built-in"), ("XLA", "program"), (faster, "program"))
        ratios = [ratio(a, b) for a, b in pairs]
        rate = f"{row['gflops']['program']:.0f}"
        table.add_row(row["program"], str(row["size"]["dim"]), row["pass"], rate, *ratios)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()

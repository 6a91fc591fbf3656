"""Packed sequences: `varlen_attention`, compared with `dot_product_attention` with segment ids.

    python benchmarks/packed.py                # a minute on a GPU; fewer tokens on a CPU
    python benchmarks/packed.py --head-dims 128

Causal self-attention with 16 heads. The sequences are equally long, or their lengths are uniform between 16 and 4096.
TFLOP/s count 4 d FLOPs per visible entry in the forward, and 2.5 times that in the backward. Both functions are timed
in turn in one process.
"""

import argparse
import functools
import itertools
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

HEADS = 16
PASSES = ("forward", "backward")
SHORTEST, LONGEST = 16, 4096


def sample_lengths(kind: str, tokens: int) -> np.ndarray:
    """Return lengths of sequences with this many tokens in total."""
    if kind == "equal":
        return np.full(tokens // (LONGEST // 2), LONGEST // 2)
    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, tokens // SHORTEST)
    ends = np.cumsum(lengths).clip(max=tokens)
    clipped = np.diff(ends, prepend=0)
    return clipped[clipped > 0]


def calls(kind: str, tokens: int, dim: int, dtype: str, pass_: str) -> dict[str, measure.Call]:
    """Return the compiled calls by name. Both have the same arrays."""
    lengths = sample_lengths(kind, tokens)
    cu_seqlens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (tokens, HEADS, dim), dtype) for key in keys)

    def by_lengths(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax_flash.varlen_attention(q, k, v, cu_seqlens, is_causal=True)

    def by_ids(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax_flash.dot_product_attention(
            q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids
        )

    found: dict[str, measure.Call] = {}
    for name, attention in (("cumulative lengths", by_lengths), ("segment ids", by_ids)):
        if pass_ == "forward":
            found[name] = functools.partial(jax.jit(attention), q, k, v)
        else:
            pull = jax.vjp(attention, q, k, v)[1]
            found[name] = functools.partial(jax.jit(lambda pull, do: pull(do)), pull, do)
    return found


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--tokens", type=int, default=65536 if gpu else 8192)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for a row of the table, on a CPU")
    name = "packed_gpu.json" if gpu else "packed_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    dtype = "bfloat16" if gpu else "float32"
    rows: list[dict[str, Any]] = []
    table = Table("d", "sequences", "pass", "cumulative lengths", "segment ids", "ratio of speeds", title="TFLOP/s")
    cases = list(itertools.product(args.head_dims, ("equal", "drawn"), PASSES))
    for dim, kind, pass_ in track(cases, "Measuring packed sequences"):
        samples = interleave(calls(kind, args.tokens, dim, dtype, pass_))
        seconds = {name: statistics.median(times) for name, times in samples.items()}
        lengths = sample_lengths(kind, args.tokens)
        visible = int((lengths * (lengths + 1) // 2).sum())
        flops = 4 * dim * HEADS * visible * (1 if pass_ == "forward" else 2.5)
        ours, theirs = seconds["cumulative lengths"], seconds["segment ids"]
        row = {"dim": dim, "sequences": kind, "pass": pass_, "milliseconds": {n: 1e3 * s for n, s in seconds.items()}}
        rows.append(row | {"tflops": {n: flops / s / 1e12 for n, s in seconds.items()}, "ratio": theirs / ours})
        speeds = (f"{flops / s / 1e12:.3g}" for s in (ours, theirs))
        table.add_row(str(dim), kind, pass_, *speeds, f"{theirs / ours:.2f}")
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "nvidia-cuda-nvrtc"])
    measure.save(args.json, {"environment": environment, "tokens": args.tokens, "dtype": dtype, "rows": rows})
    Console().print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

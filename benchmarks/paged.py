"""Decoding of sequences in pages: `paged_attention` beside `dot_product_attention` on keys and values in a row.

    python benchmarks/paged.py                # on a GPU a minute; on a CPU fewer and shorter sequences
    python benchmarks/paged.py --sequences 64 --kv-heads 8

One query a sequence, 32 heads of 128. The sequences are equally long, or their lengths are drawn evenly from 100 to the
longest; there are fewer sequences the longer they are. In a row they have room for the longest, and `cudnn` is
`jax.nn.dot_product_attention` on the same arrays. The pages of a sequence are anywhere among all. Speed counts the keys
and values of the lengths, once. All are timed in turn, in one process.
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

HEADS, DIM, SHORTEST = 32, 128, 100
PAGES = (16, 64, 256)
IN_A_ROW, CUDNN = "in a row", "cudnn"


def lengths(kind: str, sequences: int, longest: int) -> np.ndarray:
    if kind == "equal":
        return np.full(sequences, longest, np.int32)
    return np.random.default_rng(0).integers(SHORTEST, longest + 1, sequences).astype(np.int32)


def calls(of_each: np.ndarray, longest: int, kv_heads: int, dtype: str, gpu: bool) -> dict[str, measure.Call]:
    """Each compiled, on the same keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (len(of_each), 1, HEADS, DIM), dtype)
    k, v = (jax.random.normal(key, (len(of_each), longest, kv_heads, DIM), dtype) for key in keys[1:])
    seen = jnp.asarray(of_each)
    row = jax.jit(functools.partial(jax_flash.dot_product_attention, implementation="flash"))
    made: dict[str, measure.Call] = {IN_A_ROW: functools.partial(row, q, k, v, key_value_seq_lengths=seen)}
    if gpu:
        rival = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
        one = jnp.ones_like(seen)
        made[CUDNN] = functools.partial(rival, q, k, v, query_seq_lengths=one, key_value_seq_lengths=seen)
    for page in PAGES:
        places = np.random.default_rng(1).permutation(len(of_each) * (longest // page)).astype(np.int32)
        in_pages = [
            jnp.zeros((len(places), page, kv_heads, DIM), dtype).at[places].set(x.reshape(-1, page, kv_heads, DIM))
            for x in (k, v)
        ]
        table = jnp.asarray(places.reshape(len(of_each), -1))
        attention = jax.jit(jax_flash.paged_attention)
        made[f"pages of {page}"] = functools.partial(attention, q, *in_pages, table, seen)
    return made


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256, 1024] if gpu else [8])
    parser.add_argument("--kv-heads", nargs="+", type=int, default=[8, 1])
    parser.add_argument("--keys", type=int, default=2**19 if gpu else 2**13, help="of all sequences, at their longest")
    parser.add_argument("--seconds", type=float, default=8.0, help="on a CPU, spent on a row of the table")
    name = "paged_gpu.json" if gpu else "paged_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()
    if bad := [x for x in args.sequences if args.keys % (x * max(PAGES)) or args.keys // x < SHORTEST]:
        parser.error(f"the longest of {bad[0]} sequences must have pages of {max(PAGES)}: {args.keys} keys in all")
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    dtype = "bfloat16" if gpu else "float32"
    rows: list[dict[str, Any]] = []
    ways = [IN_A_ROW, *(f"pages of {page}" for page in PAGES), *([CUDNN] if gpu else [])]
    table = Table("sequences", "longest", "lengths", "key/value heads", *ways, title="GB/s")
    cases = list(itertools.product(args.sequences, ("equal", "drawn"), args.kv_heads))
    for sequences, kind, kv_heads in track(cases, "Measuring sequences in pages"):
        longest = args.keys // sequences
        of_each = lengths(kind, sequences, longest)
        samples = interleave(calls(of_each, longest, kv_heads, dtype, gpu))
        seconds = {name: statistics.median(times) for name, times in samples.items()}
        read = 2 * int(of_each.sum()) * kv_heads * DIM * jnp.dtype(dtype).itemsize
        row = {"sequences": sequences, "longest": longest, "lengths": kind, "kv_heads": kv_heads}
        speeds = {name: read / s / 1e9 for name, s in seconds.items()}
        rows.append(row | {"microseconds": {name: 1e6 * s for name, s in seconds.items()}, "gb_per_s": speeds})
        shown = (f"{speeds[way]:.4g} ({speeds[way] / speeds[IN_A_ROW]:.2f})" for way in ways[1:])
        table.add_row(str(sequences), str(longest), kind, str(kv_heads), f"{speeds[IN_A_ROW]:.4g}", *shown)
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13"])
    measure.save(args.json, {"environment": environment, "keys": args.keys, "dtype": dtype, "rows": rows})
    Console().print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

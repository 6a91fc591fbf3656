"""Decoding with `paged_attention`, compared with `dot_product_attention` on contiguous keys and values.

    python benchmarks/paged.py                # a minute on a GPU; fewer and shorter sequences on a CPU
    python benchmarks/paged.py --sequences 64 --kv-heads 8

Each sequence has one query, and there are 32 heads of 128. The sequences are equally long, or their lengths are uniform
between 100 and the longest. The number of keys of all sequences is fixed, so there are fewer sequences if they are
longer. Contiguous keys and values ("in a row") have room for the longest sequence. `cudnn` is
`jax.nn.dot_product_attention` on the same arrays. The pages of a sequence are at random positions in the pool.
GB/s count each valid key and value once. All implementations are timed in turn in one process.
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
CONTIGUOUS, CUDNN = "in a row", "cudnn"


def sample_lengths(kind: str, sequences: int, longest: int) -> np.ndarray:
    if kind == "equal":
        return np.full(sequences, longest, np.int32)
    return np.random.default_rng(0).integers(SHORTEST, longest + 1, sequences).astype(np.int32)


def calls(lengths: np.ndarray, longest: int, kv_heads: int, dtype: str, gpu: bool) -> dict[str, measure.Call]:
    """Return the compiled calls by name. All have the same keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (len(lengths), 1, HEADS, DIM), dtype)
    k, v = (jax.random.normal(key, (len(lengths), longest, kv_heads, DIM), dtype) for key in keys[1:])
    kv_lengths = jnp.asarray(lengths)
    contiguous = jax.jit(functools.partial(jax_flash.dot_product_attention, implementation="flash"))
    found: dict[str, measure.Call] = {
        CONTIGUOUS: functools.partial(contiguous, q, k, v, key_value_seq_lengths=kv_lengths)
    }
    if gpu:
        cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
        q_lengths = jnp.ones_like(kv_lengths)
        found[CUDNN] = functools.partial(cudnn, q, k, v, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths)
    for page in PAGES:
        numbers = np.random.default_rng(1).permutation(len(lengths) * (longest // page)).astype(np.int32)
        pages = [
            jnp.zeros((len(numbers), page, kv_heads, DIM), dtype).at[numbers].set(x.reshape(-1, page, kv_heads, DIM))
            for x in (k, v)
        ]
        table = jnp.asarray(numbers.reshape(len(lengths), -1))
        attention = jax.jit(jax_flash.paged_attention)
        found[f"pages of {page}"] = functools.partial(attention, q, *pages, table, kv_lengths)
    return found


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256, 1024] if gpu else [8])
    parser.add_argument("--kv-heads", nargs="+", type=int, default=[8, 1])
    parser.add_argument("--keys", type=int, default=2**19 if gpu else 2**13, help="of all sequences at full length")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for a row of the table, on a CPU")
    name = "paged_gpu.json" if gpu else "paged_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()
    if bad := [x for x in args.sequences if args.keys % (x * max(PAGES)) or args.keys // x < SHORTEST]:
        parser.error(f"{args.keys} keys in {bad[0]} sequences: a sequence must consist of whole pages of {max(PAGES)}")
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    dtype = "bfloat16" if gpu else "float32"
    rows: list[dict[str, Any]] = []
    names = [CONTIGUOUS, *(f"pages of {page}" for page in PAGES), *([CUDNN] if gpu else [])]
    table = Table("sequences", "longest", "lengths", "key/value heads", *names, title="GB/s")
    cases = list(itertools.product(args.sequences, ("equal", "drawn"), args.kv_heads))
    for sequences, kind, kv_heads in track(cases, "Measuring paged attention"):
        longest = args.keys // sequences
        sampled = sample_lengths(kind, sequences, longest)
        samples = interleave(calls(sampled, longest, kv_heads, dtype, gpu))
        seconds = {name: statistics.median(times) for name, times in samples.items()}
        read = 2 * int(sampled.sum()) * kv_heads * DIM * jnp.dtype(dtype).itemsize
        row = {"sequences": sequences, "longest": longest, "lengths": kind, "kv_heads": kv_heads}
        speeds = {name: read / s / 1e9 for name, s in seconds.items()}
        rows.append(row | {"microseconds": {name: 1e6 * s for name, s in seconds.items()}, "gb_per_s": speeds})
        shown = (f"{speeds[name]:.4g} ({speeds[name] / speeds[CONTIGUOUS]:.2f})" for name in names[1:])
        table.add_row(str(sequences), str(longest), kind, str(kv_heads), f"{speeds[CONTIGUOUS]:.4g}", *shown)
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13"])
    measure.save(args.json, {"environment": environment, "keys": args.keys, "dtype": dtype, "rows": rows})
    Console().print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

"""Decoding with latent attention (`mla_attention`, dims 576/512), compared with standard attention in plain JAX.

    python benchmarks/mla.py                                        # minutes on a GPU; smaller cases on a CPU
    python benchmarks/mla.py --batch 32 --keys 65536 --heads 16 64 --queries 1

The queries are the last tokens of each sequence. `contiguous` is `mla_attention`, and `pages` is `paged_mla_attention`
with pages in random order. `plain` keeps the scores in memory, in two products; it is left out if the scores need more
than 8 GiB. `read` reads the latents once and does nothing else: an upper bound for few heads. FLOPs count all keys, and
bytes count each latent once. All calls of a case are timed in turn in one process.
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

DIM, VALUE_DIM, SCALE = 576, 512, 192**-0.5
MOST_SCORES = 2**33  # bytes of the float32 scores of `plain`
NAMES = ("contiguous", "pages", "plain", "read")


@jax.jit
def plain(query: jax.Array, latent: jax.Array) -> jax.Array:
    scores = SCALE * jnp.einsum("btnd,bsd->bnts", query, latent, preferred_element_type=jnp.float32)
    last = latent.shape[1] - query.shape[1] + jnp.arange(query.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(jnp.arange(latent.shape[1]) <= last, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsd->btnd", weights.astype(latent.dtype), latent[..., :VALUE_DIM])


def calls(
    batch: int, keys: int, heads: int, queries: int, page: int, dtype: str, implementation: Any
) -> dict[str, measure.Call]:
    """Return the compiled calls by name."""
    query = jax.random.normal(jax.random.key(0), (batch, queries, heads, DIM), dtype)
    latent = jax.random.normal(jax.random.key(1), (batch, keys, DIM), dtype)
    numbers = np.random.default_rng(0).permutation(batch * keys // page).astype(np.int32)
    pages = jnp.zeros((len(numbers), page, DIM), dtype).at[numbers].set(latent.reshape(-1, page, DIM))
    table, lengths = jnp.asarray(numbers.reshape(batch, -1)), jnp.full(batch, keys, jnp.int32)
    options = {"value_dim": VALUE_DIM, "scale": SCALE, "implementation": implementation}
    contiguous = jax.jit(
        functools.partial(jax_flash.mla_attention, is_causal=True, query_offset=keys - queries, **options)
    )
    paged = jax.jit(functools.partial(jax_flash.paged_mla_attention, **options))
    read = jax.jit(lambda x: x.max())
    found: dict[str, measure.Call] = {
        "contiguous": functools.partial(contiguous, query, latent),
        "pages": functools.partial(paged, query, pages, table, lengths),
        "read": functools.partial(read, latent),
    }
    if 4 * batch * heads * queries * keys <= MOST_SCORES:
        found["plain"] = functools.partial(plain, query, latent)
    return found


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 128] if gpu else [2])
    parser.add_argument("--keys", nargs="+", type=int, default=[4096, 65536] if gpu else [1024, 4096])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 64, 128] if gpu else [16, 128])
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 2, 4] if gpu else [1, 4])
    parser.add_argument("--page", type=int, default=64, help="keys in a page")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--implementation", choices=["flash", "xla"], help="of jax_flash; default: the fastest")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for a case, on a CPU")
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS / f"mla_{'gpu' if gpu else 'cpu'}.json")
    args = parser.parse_args()
    if bad := [keys for keys in args.keys if keys % args.page]:
        parser.error(f"--keys {bad[0]} must be a multiple of --page {args.page}")
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    rows: list[dict[str, Any]] = []
    shown = Table("B", "keys", "heads", "queries", *NAMES, title="µs (TFLOP/s; TB/s)")
    cases = list(itertools.product(args.batch, args.keys, args.heads, args.queries))
    for batch, keys, heads, queries in track(cases, "Measuring latent attention"):
        samples = interleave(calls(batch, keys, heads, queries, args.page, args.dtype, args.implementation))
        seconds = {name: statistics.median(times) for name, times in samples.items()}
        flops = 2 * batch * queries * heads * keys * (DIM + VALUE_DIM)
        read = batch * keys * DIM * jnp.dtype(args.dtype).itemsize
        rates = {
            "microseconds": {name: 1e6 * s for name, s in seconds.items()},
            "tflops": {name: flops / s / 1e12 for name, s in seconds.items() if name != "read"},
            "tb_per_s": {name: read / s / 1e12 for name, s in seconds.items()},
        }
        rows.append({"batch": batch, "keys": keys, "heads": heads, "queries": queries} | rates | {"seconds": samples})
        cells = (
            f"{1e6 * seconds[name]:.4g} ({rates['tflops'].get(name, 0):.3g}; {rates['tb_per_s'][name]:.3g})"
            if name in seconds
            else "–"
            for name in NAMES
        )
        shown.add_row(*map(str, (batch, keys, heads, queries)), *cells)
    environment = measure.environment(["jax-flash", "jax", "jaxlib", *(["nvidia-cuda-nvrtc"] if gpu else [])])
    measure.save(args.output, {"environment": environment, "dtype": args.dtype, "page": args.page, "rows": rows})
    Console().print(shown)


if __name__ == "__main__":
    main()

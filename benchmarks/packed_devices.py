"""Packed documents on several devices: under jit, in the zigzag layout and in a balanced layout, against the ideal.

    python benchmarks/packed_devices.py                        # 65,536 and 262,144 tokens on all GPUs
    python benchmarks/packed_devices.py --lengths 4096 --heads 8 --kv-heads 4 --head-dim 32 --rounds 2    # on CPUs

In the ideal, each device computes an equal share of the heads of the whole sequence, and nothing is sent. All devices
compute at the same time. The table shows the ideal time divided by the time of each way.

* `jit`: sharded arrays, which the library divides by heads or as a ring
* `zigzag`: `sequence_axis` with the zigzag layout
* `balance`: `sequence_axis` with the layout of `jax_flash.balance`

The cases are one document, documents of 256 to 8192 tokens, and one document of half the tokens with short ones of 512.
All documents start at multiples of 128 tokens.
All ways of a case are timed in turn in one process. The reordering of the arrays is not timed.
"""

import argparse
import functools
import pathlib
import statistics
from typing import Any

import attention
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash
from jax_flash import Layout

ALIGNMENT = 128  # documents start at multiples of it
WAYS, PASSES = ("jit", "zigzag", "balance"), ("forward", "forward and backward")


def documents(case: str, tokens: int) -> np.ndarray:
    """Return the cumulative lengths of the documents of a case."""
    if case == "one document":
        return np.array([0, tokens])
    if case == "one long, many short":
        return np.array([0, *range(tokens // 2, tokens + 1, min(512, tokens // 2))])
    rng = np.random.default_rng(0)
    most = min(8192, tokens // 2)
    lengths = np.exp(rng.uniform(np.log(most / 32), np.log(most), 64 * tokens // most)).astype(int)
    begins = np.cumsum(-(-lengths // ALIGNMENT) * ALIGNMENT)
    return np.array([0, *begins[begins < tokens], tokens])


CASES = ("one document", "256 to 8192", "one long, many short")


def normal(seed: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    sample = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(sample, out_shardings=sharding)(jax.random.key(seed))


def calls(args: argparse.Namespace, case: str, tokens: int, pass_: str) -> dict[str, measure.Call]:
    """Return the calls by their names: the ways, and "ideal"."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("d",), (AxisType.Auto,))
    cu_seqlens = documents(case, tokens)
    ids = np.repeat(np.arange(len(cu_seqlens) - 1, dtype=np.int32), np.diff(cu_seqlens))[None]
    layout = jax_flash.balance(cu_seqlens, count)
    rows, heads = (NamedSharding(mesh, spec) for spec in (P(None, "d"), P(None, None, "d")))
    shapes = [(1, tokens, n, args.head_dim) for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)]

    def attend(q: Any, k: Any, v: Any, ids: Any, **options: Any) -> jax.Array:
        masks = {} if case == "one document" else {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return jax_flash.dot_product_attention(q, k, v, is_causal=True, **masks, **options)

    def in_layout(q: Any, k: Any, v: Any, ids: Any, chunks: Layout | None) -> jax.Array:
        return attend(q, k, v, ids, sequence_axis="d", sequence_layout="zigzag" if chunks is None else chunks)

    def sharded(function: Any, spec: P) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=(spec, spec, spec, P(*spec[:2]), P()), out_specs=spec)

    def over_heads(q: Any, k: Any, v: Any, ids: Any, _: None) -> jax.Array:
        return attend(q, k, v, ids)

    functions = {
        "ideal": (sharded(over_heads, P(None, None, "d")), None, heads, ids),
        "jit": (lambda q, k, v, ids, _: attend(q, k, v, ids), None, rows, ids),
        "zigzag": (sharded(in_layout, P(None, "d")), None, rows, np.asarray(jax_flash.zigzag(ids, count, 1))),
        "balance": (sharded(in_layout, P(None, "d")), layout, rows, layout.permute(ids, 1)),
    }
    found = {}
    for name in ("ideal", *args.ways):
        function, chunks, place, own_ids = functions[name]
        own_ids = jax.device_put(own_ids, rows if place is rows else NamedSharding(mesh, P()))
        q, k, v, do = (normal(seed, shape, place) for seed, shape in enumerate(shapes))
        if pass_ == "forward":
            found[name] = attention.compiled(function, q, k, v, own_ids, chunks)
        else:

            def both(q, k, v, do, ids, chunks, function=function):
                return jax.vjp(lambda q, k, v: function(q, k, v, ids, chunks), q, k, v)[1](do)

            found[name] = attention.compiled(both, q, k, v, do, own_ids, chunks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144], help="tokens of the sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS / "packed_devices.json")
    args = parser.parse_args()
    if args.kv_heads % jax.device_count():
        parser.error(f"--kv-heads {args.kv_heads} must be a multiple of the {jax.device_count()} devices")
    if jax.default_backend() == "gpu":
        interleave = functools.partial(measure.interleave_enqueued, samples=args.rounds)
    else:
        interleave = functools.partial(measure.interleave, seconds=0, rounds=args.rounds)
    environment = measure.environment(["jax-flash", "jax", "jaxlib"])
    rows: list[dict[str, Any]] = []
    table = Table("tokens", "case", "pass", "ideal, ms", *args.ways)
    cases = [(n, case, p) for n in args.lengths for case in CASES for p in args.passes]
    for tokens, case, pass_ in track(cases, "Measuring"):
        times = interleave(calls(args, case, tokens, pass_))
        rows += [
            {"length": tokens, "case": case, "pass": pass_, "call": name, "seconds": seconds}
            for name, seconds in times.items()
        ]
        measure.save(args.output, {"environment": environment, "rows": rows})
        median = {name: statistics.median(seconds) for name, seconds in times.items()}
        shares = (f"{median['ideal'] / median[way]:.2f}" for way in args.ways)
        table.add_row(str(tokens), case, pass_, f"{median['ideal'] * 1e3:.2f}", *shares)
    Console().print(table)
    Console().print(f"Written: {args.output}")


if __name__ == "__main__":
    main()

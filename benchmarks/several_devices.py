"""Causal attention to a sequence sharded over devices, in several ways, compared with one sequence per device.

    python benchmarks/several_devices.py --lengths 65536 262144    # on 1, 2, 4, 8, … of the available devices
    python benchmarks/several_devices.py --alone 8 --lengths 262144 1048576    # one device does the work of each of 8

The ways:

* `ring` and `zigzag`: `sequence_axis` with the contiguous and the zigzag layout
* `heads`: an all-to-all over heads, and another one back
* `gathered`: all keys and values are gathered on every device
* `apart`: nothing is sharded, each device has its own sequence

Calls of a length are timed in turn in one process. On GPUs, several calls are enqueued one after the other, so the host
work of one call overlaps with the call before.

The table shows milliseconds, TFLOP/s per device, tokens/s of all devices, and the efficiency. The efficiency is
relative to the same number of devices with one sequence each, because devices differ in speed and wait for the slowest.
Use the same lengths on more devices for strong scaling, and lengths proportional to the devices for weak scaling.

`--alone` omits all communication. It times the work of each device, one after the other, and compares it with an equal
share of the whole call.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import attention
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash
from jax_flash import arguments, custom_calls, sequence
from jax_flash.call import Call
from jax_flash.operands import Operands
from jax_flash.problem import Problem

PASSES = ("forward", "backward")
attend = functools.partial(jax_flash.dot_product_attention, is_causal=True)


# --- the ways, as functions of a device's shards ----------------------------------------------------------------------


def ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend(q, k, v, sequence_axis="seq")


def zigzag(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend(q, k, v, sequence_axis="seq", sequence_layout="zigzag")


def heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    o = attend(*(lax.all_to_all(x, "seq", 2, 1, tiled=True) for x in (q, k, v)))
    return lax.all_to_all(o, "seq", 1, 2, tiled=True)


def gathered(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
    return attend(q, k, v, query_offset=lax.axis_index("seq") * q.shape[1])


WAYS = {way.__name__: way for way in (ring, zigzag, heads, gathered)}
APART = "apart"


def calls(args: argparse.Namespace, length: int, pass_: str) -> dict[str, measure.Call]:
    """Return the calls by "devices way"."""
    found = {}
    powers = [2**i for i in range(8) if 2**i < jax.device_count()]
    for count in [*powers, jax.device_count()]:
        mesh = jax.make_mesh((count,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:count])
        for name in args.ways:
            if name == APART or (count > 1 and (name != "heads" or args.kv_heads % count == 0)):
                found[f"{count} {name}"] = call(args, length, pass_, name, mesh)
    return found


def call(args: argparse.Namespace, length: int, pass_: str, way: str, mesh: Mesh) -> measure.Call:
    batch, spec = (mesh.size, P("seq")) if way == APART else (1, P(None, "seq"))
    function = jax.shard_map(WAYS.get(way, attend), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    *qkv, do = inputs(args, length, batch, NamedSharding(mesh, spec))
    if pass_ == "forward":
        return attention.compiled(function, *qkv)
    pull = attention.compiled(lambda *qkv: jax.vjp(function, *qkv)[1], *qkv)()
    return attention.compiled(lambda pull, do: pull(do), pull, do)


def inputs(args: argparse.Namespace, length: int, batch: int = 1, sharding: Any = None) -> list[jax.Array]:
    """Return Q, K, V and dO."""
    kinds = [(0, args.heads), (1, args.kv_heads), (2, args.kv_heads), (3, args.heads)]
    return [normal(seed, (batch, length, heads, args.head_dim), sharding) for seed, heads in kinds]


def normal(seed: int, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    sample = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(sample, out_shardings=sharding)(jax.random.key(seed))


# --- the work of one device at a time ---------------------------------------------------------------------------------


def alone(args: argparse.Namespace, length: int, pass_: str) -> dict[str, measure.Call]:
    """Return the calls by rank, and the call for the whole sequence, "whole"."""
    q, k, v, do = inputs(args, length)
    problem, operands = arguments.problem_and_operands(q, k, v, None, None, Call(is_causal=True))
    requested = problem.differentiated({"dq", "dk", "dv"}) if pass_ == "backward" else problem

    def kernel(problem: Problem, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        if pass_ == "forward":
            return custom_calls.forward(problem, False, Operands.of(arrays))
        forward_results = [arrays.pop(name) for name in ("o", "l", "m", "do")]
        return custom_calls.backward(problem, False, Operands.of(arrays), *forward_results)

    arrays = operands.arrays()
    if pass_ == "backward":
        o, l, m = jax.jit(functools.partial(custom_calls.forward, problem, False))(operands)
        arrays |= {"o": o, "l": l, "m": m, "do": do}

    def work(rank: jax.Array, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        class Here(sequence.Division):
            """The division as seen by this rank. Nothing is sent: the arrays stay as they are."""

            def device(self) -> jax.Array:
                return rank

            def sent(self, arrays: Any, shift: int) -> Any:
                return arrays

        pass_over = sequence.forward if pass_ == "forward" else sequence.backward
        return pass_over(kernel, requested, Here(("seq",), args.alone, "zigzag"), arrays)

    shards = {name: shard(name, x, args.alone) for name, x in arrays.items()}
    any_rank = jax.jit(work).lower(jnp.int32(0), shards).compile()
    ranks = {str(rank): functools.partial(any_rank, jnp.int32(rank), shards) for rank in range(args.alone)}
    return ranks | {"whole": attention.compiled(functools.partial(kernel, requested), arrays)}


def shard(name: str, x: jax.Array, devices: int) -> jax.Array:
    """Return a device's number of rows or keys. (Which ones does not affect the time.)"""
    axis = {"l": 2, "m": 2, "scale": None}.get(name, 1)
    return x if axis is None else lax.slice_in_dim(x, 0, x.shape[axis] // devices, axis=axis)


# --- the tables -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, ways: Sequence[str] = tuple(WAYS)) -> None:
    """Add the options that select the calls."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, (APART, *WAYS))
    parser.add_argument("--alone", type=int, metavar="DEVICES", help="one device does the work of each of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    output = args.output or measure.RESULTS / ("ranks.json" if args.alone else "several_devices.json")
    if jax.default_backend() == "gpu":
        interleave = functools.partial(measure.interleave_enqueued, samples=args.rounds)
    else:
        interleave = functools.partial(measure.interleave, seconds=0, rounds=args.rounds)
    environment = measure.environment(["jax-flash", "jax", "jaxlib"])
    rows: list[dict[str, Any]] = []
    for length, pass_ in track([(n, p) for n in args.lengths for p in args.passes], "Measuring"):
        built = (alone if args.alone else calls)(args, length, pass_)
        times = interleave(built)
        forward = measure.attention_flops(1, args.heads, length, args.head_dim, causal=True, backward=False)
        flops = forward * (2.5 if pass_ == "backward" else 1)
        rows += [
            {"length": length, "pass": pass_, "call": name, "seconds": seconds, "flops": flops}
            for name, seconds in times.items()
        ]
        measure.save(output, {"environment": environment, "rows": rows})
    Console().print(table_of_ranks(rows, args.alone) if args.alone else table_of_ways(rows))
    Console().print(f"Written: {output}")


def table_of_ways(rows: list[dict[str, Any]]) -> Table:
    table = Table("N", "pass", "devices", "way", "ms", "TFLOP/s per device", "tokens/s", "efficiency")
    median = {(row["length"], row["pass"], row["call"]): statistics.median(row["seconds"]) for row in rows}
    for row in rows:
        length, pass_, call = row["length"], row["pass"], row["call"]
        count, way = call.split()
        sequences = int(count) if way == APART else 1
        rate = sequences / median[length, pass_, call]  # sequences a second
        unsharded = int(count) / median.get((length, pass_, f"{count} {APART}"), float("nan"))
        table.add_row(
            *map(str, (length, pass_, count, way)),
            f"{1e3 * median[length, pass_, call]:.2f}",
            f"{row['flops'] * rate / int(count) / 1e12:.0f}",
            f"{length * rate:.3g}",
            f"{rate / unsharded:.3f}",
        )
    return table


def table_of_ranks(rows: list[dict[str, Any]], devices: int) -> Table:
    table = Table("N", "pass", "whole, ms", f"ranks of {devices}, ms", "whole / devices / slowest")
    for length, pass_ in dict.fromkeys((row["length"], row["pass"]) for row in rows):
        seconds = {
            row["call"]: statistics.median(row["seconds"])
            for row in rows
            if (length, pass_) == (row["length"], row["pass"])
        }
        whole = seconds.pop("whole")
        ranks = np.array(list(seconds.values()))
        table.add_row(
            str(length),
            pass_,
            f"{1e3 * whole:.1f}",
            " ".join(f"{1e3 * x:.1f}" for x in ranks),
            f"{whole / devices / ranks.max():.3f}",
        )
    return table


if __name__ == "__main__":
    main()

"""How much of a ring's exchange overlaps with kernels: a profile of the calls of `several_devices.py` on several GPUs.

    python benchmarks/exchange.py --lengths 65536 262144

Prints milliseconds of one call, on the GPU with the longest kernel time, since the other GPUs wait for it:

* attention kernels
* other kernels and copies, with the names of the longest
* NCCL's kernels
* the part of NCCL's time that overlaps with nothing else
* the time in which nothing runs
"""

import argparse
import collections
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import measure
import numpy as np
import several_devices
from jax.profiler import ProfileData
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

NAMED = 3  # how many other kernels are listed by name


class Event(NamedTuple):
    name: str
    start: float  # nanoseconds
    end: float


def events_of_gpus(directory: pathlib.Path) -> dict[str, list[Event]]:
    """Return the events of each GPU's streams, from the profile in a directory."""
    (path,) = directory.rglob("*.xplane.pb")
    found = {}
    for plane in ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:GPU"):
            streams = (line for line in plane.lines if line.name.startswith("Stream"))  # other lines are summaries
            events = (event for line in streams for event in line.events)
            found[plane.name] = [Event(x.name, x.start_ns, x.start_ns + x.duration_ns) for x in events]
    return found


def covered(events: Iterable[Event]) -> float:
    """Return the nanoseconds in which at least one event runs."""
    total, end = 0.0, -np.inf
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return total


def is_attention(event: Event) -> bool:
    return event.name.startswith("jax_flash")


def is_exchange(event: Event) -> bool:
    return "nccl" in event.name.lower()


def summary(events: list[Event]) -> dict[str, Any]:
    """Return milliseconds of one GPU, and the names of the longest other kernels."""
    attention = [event for event in events if is_attention(event)]
    exchange = [event for event in events if is_exchange(event)]
    others = [event for event in events if not is_attention(event) and not is_exchange(event)]
    times: dict[str, float] = collections.defaultdict(float)
    for event in others:
        times[event.name] += event.end - event.start
    longest = sorted(times, key=lambda name: -times[name])[:NAMED]
    span = max(event.end for event in events) - min(event.start for event in events)
    milliseconds = {
        "attention": covered(attention),
        "others": covered(others),
        "exchange": covered(exchange),
        "exchange alone": covered(events) - covered(attention + others),
        "nothing": span - covered(events),
        "all": span,
    }
    return {name: x / 1e6 for name, x in milliseconds.items()} | {
        "longest of the others": {name: times[name] / 1e6 for name in longest}
    }


def profiled(call: measure.Call) -> dict[str, Any]:
    """Profile one call. Return the times of the GPU with the longest kernel time, since the others wait for it."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(call())
        gpus = events_of_gpus(pathlib.Path(directory))
    return max(
        (summary(events) for events in gpus.values() if events), key=lambda gpu: gpu["attention"] + gpu["others"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several_devices.add_arguments(parser)
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS / "exchange.json")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        parser.error("this benchmark needs at least two GPUs")
    mesh = jax.make_mesh((jax.device_count(),), ("seq",), (AxisType.Auto,))
    rows = [
        {"length": length, "pass": pass_, "way": name} | profiled(several_devices.call(args, length, pass_, name, mesh))
        for length in args.lengths
        for pass_ in args.passes
        for name in args.ways
    ]
    measure.save(args.output, {"environment": measure.environment(["jax-flash", "jax", "jaxlib"]), "rows": rows})
    numbers = ("attention", "others", "exchange", "exchange alone", "nothing", "all")
    table = Table("N", "pass", "way", *(f"{name}, ms" for name in numbers), "longest of the others, ms")
    for row in rows:
        longest = "; ".join(f"{name[:40]} {x:.2f}" for name, x in row["longest of the others"].items())
        table.add_row(str(row["length"]), row["pass"], row["way"], *(f"{row[x]:.2f}" for x in numbers), longest)
    Console().print(table)
    Console().print(f"Written: {args.output}")


if __name__ == "__main__":
    main()

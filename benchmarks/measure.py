"""What every benchmark here shares: counting operations, timing calls side by side, naming the machine."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def attention_flops(batch: int, heads: int, length: int, dim: int, causal: bool, backward: bool) -> float:
    """As the FlashAttention papers count: the two products of the forward, 2.5 times that for the backward."""
    forward = 4 * batch * heads * length**2 * dim / (2 if causal else 1)
    return forward * (3.5 if backward else 1)


def interleave(calls: dict[str, Callable[[], object]], seconds: float, rounds: int = 3) -> dict[str, list[float]]:
    """Seconds per call: one of each in turn, so that what disturbs the machine disturbs all of them.

    The order is another one in every round, since a call may also disturb the one after it. Goes on for `seconds`, and
    for `rounds` rounds at least. The first call of each is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    order = random.Random(0)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or min(map(len, times.values())) < rounds:
        for name, call in order.sample(list(calls.items()), len(calls)):
            time.sleep(0.005)  # until another runtime's threads have stopped spinning
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return times


def rate(flops: float, times: list[float]) -> float:
    """GFLOP/s at the median time."""
    return flops / statistics.median(times) / 1e9


def environment(packages: list[str]) -> dict[str, object]:
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _output(["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]),
        "processor": processor(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    for line in _output(["lscpu"]).splitlines():
        if line.startswith("Model name:"):
            return line.partition(":")[2].strip()
    return platform.machine()


def save(path: pathlib.Path, results: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

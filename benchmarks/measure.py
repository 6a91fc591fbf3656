"""Shared by all benchmarks: counting operations, timing calls in turn, describing the machine."""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some of a GPU's memory

RESULTS = pathlib.Path(__file__).parent / "results"
SAMPLE_SECONDS, SAMPLES, WARM_UP = 0.01, 11, 2  # for `interleave_enqueued`
LONG_SECONDS = 0.5  # calls at least this long need only two calls to warm up
Call = Callable[[], object]


def attention_flops(batch: int, heads: int, length: int, dim: int, causal: bool, backward: bool) -> float:
    """Count as the FlashAttention papers do: two products in the forward, and 2.5 times that in the backward."""
    forward = 4 * batch * heads * length**2 * dim / (2 if causal else 1)
    return forward * (3.5 if backward else 1)


def interleave(calls: dict[str, Call], seconds: float, rounds: int = 3) -> dict[str, list[float]]:
    """Return seconds per call. The calls take turns, so a disturbance of the machine affects all of them.

    The order is random in every round, since a call may also disturb the next one. Runs for at least `seconds` and at
    least `rounds` rounds. The first run of each call is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    order = random.Random(0)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or min(map(len, times.values())) < rounds:
        for name, call in order.sample(list(calls.items()), len(calls)):
            time.sleep(0.005)  # until the threads of other runtimes stop spinning
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return times


def interleave_enqueued(calls: dict[str, Call], samples: int = SAMPLES) -> dict[str, list[float]]:
    """Return seconds per call on a GPU. The calls take turns. A sample consists of enough runs for 10 ms, at most 200.

    The runs of a sample are enqueued one after the other, so the launch of one overlaps with the run before.
    """
    repeats = {}
    for name, call in calls.items():
        sample(call, 1)
        if (seconds := sample(call, 1)) < LONG_SECONDS:
            sample(call, WARM_UP)
            seconds = sample(call, WARM_UP)
        repeats[name] = calls_per_sample(seconds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            times[name].append(sample(call, repeats[name]))
    return times


def calls_per_sample(seconds: float) -> int:
    """Return how many calls of this duration make a sample."""
    return max(1, min(200, math.ceil(SAMPLE_SECONDS / seconds)))


def sample(call: Call, repeats: int) -> float:
    """Return seconds per call, for `repeats` calls enqueued one after the other."""
    begin = time.perf_counter()
    for _ in range(repeats):
        result = call()
    finish(result)
    return (time.perf_counter() - begin) / repeats


def finish(result: object) -> None:
    """Wait until the GPU has computed a result."""
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(result)):
        jax.block_until_ready(result)
    else:
        import torch

        torch.cuda.synchronize()


def rate(flops: float, times: list[float]) -> float:
    """GFLOP/s at the median time."""
    return flops / statistics.median(times) / 1e9


def environment(packages: list[str]) -> dict[str, Any]:
    """Describe the run. The commit comes from JAX_FLASH_COMMIT or git, and is omitted if neither gives one."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    commit = os.environ.get("JAX_FLASH_COMMIT") or _output(
        ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]]),
        **({"commit": commit} if commit else {}),
        **({"xla_flags": flags} if (flags := os.environ.get("XLA_FLAGS")) else {}),
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


def save(path: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Write a file of results atomically, so an interrupted run leaves the previous file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".part")
    fields = ",\n".join(f"{json.dumps(name)}: {_lines(x)}" for name, x in plain(results).items())
    written.write_text(f"{{\n{fields}\n}}\n")
    written.replace(path)


def _lines(x: Any) -> str:
    """Return x as JSON: a list of rows has one line for each row."""
    if isinstance(x, list) and x and isinstance(x[0], dict):
        return "[\n{}\n]".format(",\n".join(map(json.dumps, x)))
    return json.dumps(x)


def plain(results: object) -> Any:
    """Return results as they are read from a file.

    Floats have seven significant digits. NaN and infinity become None, because JSON has neither.
    """
    return json.loads(
        json.dumps(results), parse_float=lambda x: float(f"{float(x):.7g}"), parse_constant=lambda _: None
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""The problem of `gpt2_problem` under the hardware's counters: bytes of HBM and instructions, forward + backward.

Nsight Compute (`ncu`) runs `counted.py` for each case and counts every kernel of one call. It empties the caches
before each kernel, so what a kernel reads of the one before it counts as read from HBM. The time of a kernel is at the
clock that the GPU happens to have, without others in turn: `gpt2_problem` has the times to compare.
"""

import csv
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
from rich.progress import track

from . import gpt2_problem

METRICS = {
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
ROOT = pathlib.Path(__file__).parents[2]
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # kernels one by one, so that each is counted


def run(quick: bool) -> dict[str, Any]:
    if jax.default_backend() != "gpu":
        return {"rows": [], "missing": {"all": "no NVIDIA GPU"}}
    if shutil.which("ncu") is None:
        return {"rows": [], "missing": {"all": "no ncu"}}
    rows, missing = [], {}
    for case in track(gpt2_problem.cases(), "Counting"):
        try:
            kernels = counted(case, quick)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            missing[" ".join(map(str, case))] = str(error)[-500:]
            continue
        rows.append(
            case._asdict() | {name: sum(kernel[name] for kernel in kernels) for name in METRICS} | {"kernels": kernels}
        )
    return {"rows": rows, "missing": missing}


def counted(case: gpt2_problem.Case, quick: bool) -> list[dict[str, Any]]:
    """The kernels of a call, in their order, with their metrics."""
    number = gpt2_problem.cases().index(case)
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "ncu.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
        command += ["--clock-control", "none", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        command += [sys.executable, "-m", "benchmarks.paper.counted", str(number), *["--quick"] * quick]
        environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
        text = log.read_text() if log.exists() else ""
    kernels = parsed(text)
    if done.returncode or not kernels:
        raise RuntimeError(f"ncu: {text} {done.stderr}")
    return kernels


def parsed(text: str) -> list[dict[str, Any]]:
    """Of ncu's CSV: after its messages a line of names, one of units, and one for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [
        {"name": row["Kernel Name"][:80]} | {name: float(row[of].replace(",", "")) for name, of in METRICS.items()}
        for row in csv.DictReader(lines)
        if row["ID"]  # a line of units has none
    ]

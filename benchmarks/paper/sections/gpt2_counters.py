"""The problem of `gpt2_problem` under the hardware's counters: bytes of HBM and instructions, forward + backward.

Nsight Compute (`ncu`) runs `profiled.py` for each case and counts every kernel of one call. It empties the caches
before each kernel, so what a kernel reads of the one before it counts as read from HBM. The time of a kernel is at the
clock that the GPU happens to have, without others in turn: `gpt2_problem` has the times to compare.
"""

import csv
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import jax

from ..results import Results, Row, named
from . import gpt2_problem

METRICS = {
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
TIMEOUT = 150  # seconds, of a run
FORBIDDEN = "ERR_NVGPUCTRPERM"  # what ncu says if the driver lets the counters be read by others alone
ROOT = pathlib.Path(__file__).parents[3]
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # kernels one by one, so that each is counted


def run(results: Results, quick: bool) -> None:
    results.begin(shape=list(gpt2_problem.shape(quick)))
    if jax.default_backend() != "gpu" or shutil.which("ncu") is None:
        results.fields["missing"] = {"all": "it takes an NVIDIA GPU and ncu"}
        return
    missing: dict[str, str] = {}
    results.fields["missing"] = missing

    def rows_of(**key: Any) -> list[Row]:
        case = gpt2_problem.Case(**key)
        try:
            kernels = counted(case, quick)
        except subprocess.TimeoutExpired as error:
            missing[named(key)] = f"{pathlib.Path(error.cmd[0]).name} did not end within {TIMEOUT} s"
            return []
        except (RuntimeError, ValueError, KeyError) as error:
            missing[named(key)] = " ".join(f"{type(error).__name__}: {error}".split())[-500:]
            if FORBIDDEN in str(error):
                raise SystemExit(f"ncu may not read the counters of this GPU: {missing}") from error
            return []
        return [{name: sum(kernel[name] for kernel in kernels) for name in METRICS} | {"kernels": kernels}]

    results.measure([case._asdict() for case in gpt2_problem.cases()], rows_of)


def counted(case: gpt2_problem.Case, quick: bool) -> list[dict[str, Any]]:
    """The kernels of a call, in their order, with their metrics."""
    number = gpt2_problem.cases().index(case)
    program = [sys.executable, "-m", "benchmarks.paper.profiled", str(number), *["--quick"] * quick]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # what was killed may still write there
        log = pathlib.Path(directory, "ncu.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
        command += ["--clock-control", "none", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}",
            "JAX_COMPILATION_CACHE_DIR": directory,
        }
        finished(program, environment)  # compiles without ncu, under which XLA's choice among kernels takes minutes
        said = finished(command + program, environment)
        text = log.read_text() if log.exists() else ""
    kernels = parsed(text)
    if not kernels:
        raise RuntimeError(f"ncu has counted no kernel: {text} {said}")
    return kernels


def finished(command: list[str], environment: dict[str, str]) -> str:
    """What it says. It has a session of its own, so that at the end of its time what it has started ends with it."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            said, _ = child.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        raise RuntimeError(f"{pathlib.Path(command[0]).name} has ended with {child.returncode}: {said}")
    return said


def parsed(text: str) -> list[dict[str, Any]]:
    """Of ncu's CSV: after its messages a line of names, one of units, and one for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [
        {"name": row["Kernel Name"][:80]} | {name: count(row[of]) for name, of in METRICS.items()}
        for row in csv.DictReader(lines)
        if row["ID"]  # a line of units has none
    ]


def count(text: str) -> float:
    number = float(text.replace(",", ""))
    if not math.isfinite(number):
        raise ValueError(f"a counter is {text}")
    return number

"""The problem of `gpt2_problem` under the hardware's counters: bytes of HBM and instructions, forward + backward.

Nsight Compute (`ncu`) runs `profiled.py` for each case and counts every kernel of one call. It empties the caches
before each kernel, so data that a kernel reads from the previous one counts as read from HBM. Kernel times here depend
on the current clock of the GPU and are not measured in turn. `gpt2_problem` has times to compare.
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

from ..results import Results, Row, key_text
from . import gpt2_problem

METRICS = {
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
TIMEOUT = 150  # seconds per run
FORBIDDEN = "ERR_NVGPUCTRPERM"  # ncu's error if the driver restricts access to the counters
ROOT = pathlib.Path(__file__).parents[3]
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # launch kernels one by one, so ncu counts each of them


def run(results: Results, quick: bool) -> None:
    results.begin(shape=list(gpt2_problem.shape(quick)))
    if jax.default_backend() != "gpu" or shutil.which("ncu") is None:
        results.fields["missing"] = {"all": "needs an NVIDIA GPU and ncu"}
        return
    missing: dict[str, str] = {}
    results.fields["missing"] = missing

    def rows_of(**key: Any) -> list[Row]:
        case = gpt2_problem.Case(**key)
        try:
            kernels = count_kernels(case, quick)
        except subprocess.TimeoutExpired as error:
            missing[key_text(key)] = f"{pathlib.Path(error.cmd[0]).name} did not finish within {TIMEOUT} s"
            return []
        except (RuntimeError, ValueError, KeyError) as error:
            missing[key_text(key)] = " ".join(f"{type(error).__name__}: {error}".split())[-500:]
            if FORBIDDEN in str(error):
                raise SystemExit(f"ncu may not read the counters of this GPU: {missing}") from error
            return []
        return [{name: sum(kernel[name] for kernel in kernels) for name in METRICS} | {"kernels": kernels}]

    results.measure([case._asdict() for case in gpt2_problem.cases()], rows_of)


def count_kernels(case: gpt2_problem.Case, quick: bool) -> list[dict[str, Any]]:
    """Return the kernels of a call in order, with their metrics."""
    number = gpt2_problem.cases().index(case)
    program = [sys.executable, "-m", "benchmarks.paper.profiled", str(number), *["--quick"] * quick]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # a killed child may still write there
        log = pathlib.Path(directory, "ncu.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
        command += ["--clock-control", "none", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}",
            "JAX_COMPILATION_CACHE_DIR": directory,
        }
        run_to_end(program, environment)  # compile first, since under ncu XLA's autotuning takes minutes
        output = run_to_end(command + program, environment)
        text = log.read_text() if log.exists() else ""
    kernels = parse(text)
    if not kernels:
        raise RuntimeError(f"ncu counted no kernels: {text} {output}")
    return kernels


def run_to_end(command: list[str], environment: dict[str, str]) -> str:
    """Run a command and return its output. On a timeout, kill all processes of its session."""
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
            output, _ = child.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        raise RuntimeError(f"{pathlib.Path(command[0]).name} ended with {child.returncode}: {output}")
    return output


def parse(text: str) -> list[dict[str, Any]]:
    """Parse ncu's CSV: after its messages come a line of names, a line of units, and a line for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [
        {"name": row["Kernel Name"][:80]} | {name: count(row[metric]) for name, metric in METRICS.items()}
        for row in csv.DictReader(lines)
        if row["ID"]  # the line of units has none
    ]


def count(text: str) -> float:
    number = float(text.replace(",", ""))
    if not math.isfinite(number):
        raise ValueError(f"a counter is {text}")
    return number

"""Run the CUDA kernels under NVIDIA's compute-sanitizer.

It checks addresses (memcheck), races in shared memory (racecheck) and the use of barriers (synccheck). JAX calls every
feature, forward and backward, at lengths of a few tiles.

    python tools/sanitize.py                              # every tool, both families of kernels: about 12 minutes
    python tools/sanitize.py --tools racecheck --families sm90 --seconds 300
    python tools/sanitize.py --calls                      # only the calls, also on an emulated GPU

docs/design/measuring.md describes which errors the tools find in Hopper's kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

if _EMULATED := os.environ.get("JAX_FLASH_EMULATE"):
    import emulator

    emulator.install(_EMULATED)

import jax
import numpy as np
from cuda import pathfinder

import jax_flash
from jax_flash import BlockMask

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "helpers"))

from block_masks import GARBAGE, sparse, with_unchecked_arrays
from cases import DIFFERENTIATED, FEATURES, Case, with_gradients
from programs import captured, run, score_and_mask

OPTIONS = ["--kernel-name", "kernel_substring=jax_flash_"]  # do not check XLA's kernels
OPTIONS += ["--error-exitcode", "1", "--print-limit", "20", "--show-backtrace", "device"]
TOOLS = {
    # Padding between arrays detects a tile that reaches beyond its array.
    "memcheck": ["--padding", str(2**18), "--report-api-errors", "no", "--check-tensor-ops", "yes"],
    "synccheck": [],
    "racecheck": [],
}
SETTINGS = {"racecheck": {"JAX_FLASH_NVRTC_OPTIONS": "-DJAX_FLASH_RACECHECK"}}  # cuda_src/kernels/ptx/types.cuh
FAMILIES = {"sm90": {}, "sm80": {"JAX_FLASH_CUDA_KERNELS": "sm80"}}
DIMS = (64, 128, 256, 72)


# --- calls ---


@dataclasses.dataclass(frozen=True)
class Call:
    case: Case
    dtype: str = "bfloat16"
    precision: str = "default"
    garbage: bool = False
    programs: bool = False

    def __str__(self) -> str:
        """Return one line, without the picture of the block mask."""
        mask = self.case.block_mask
        blocks = f"-blocks={mask.shape.q_block}x{mask.shape.kv_block}" if mask is not None else ""
        case = dataclasses.replace(self.case, block_mask=None)
        return f"{self.dtype} {self.precision} {case}{blocks}{'-garbage' * self.garbage}{'-programs' * self.programs}"


def enlarged(case: Case, dim: int) -> Case:
    """Return a case with several tiles, the last of them incomplete."""
    T, S = (size if size == 1 else 6 * size for size in (case.T, case.S))
    return dataclasses.replace(case, T=T, S=S, D=dim, E=dim if case.E == case.D else -(-case.E // 8) * 8)


def calls_with_dim(dim: int) -> Iterator[Call]:
    """Yield calls that `FEATURES` do not cover."""
    size = {"T": 222, "S": 270, "D": dim, "E": dim}
    yield Call(Case(**size | {"T": 140, "S": 140}, B=4, N=40, K=20, causal=True))  # more tiles than multiprocessors
    yield Call(Case(causal=True, segments=True, dropout=0.1, deterministic=True, **size))
    yield Call(Case(deterministic=True, **size | {"S": 1100}))  # ordered additions to dQ
    yield Call(Case(causal=True, lengths=True, sinks=2.0, deterministic=True, **size))
    yield Call(Case(**size | {"T": 1, "S": 1100}, causal=True, offset=True, lengths=True))  # split-KV
    yield Call(Case(bias="1nts", soft_cap=1.5, dropout=0.1, **size), programs=True)
    yield Call(Case(causal=True, segments=True, lengths=True, offset=True, **size), programs=True)
    for garbage in (False, True):
        yield Call(sparse(128, 128, batch=2, heads=4, dropout=0.1, **size), garbage=garbage)
        yield Call(sparse(128, 128, heads=4, K=4, **size), garbage=garbage)
        yield Call(sparse(256, 128, causal=True, **size | {"T": 400}), garbage=garbage)
        yield Call(sparse(48, 16, heads=4, bias="1nts", deterministic=True, **size), garbage=garbage)


def calls() -> list[Call]:
    """Return all calls in a random order. The first ones then cover a bit of everything."""
    found = [Call(enlarged(case, DIMS[i % 4])) for i, case in enumerate(FEATURES)]
    # With a key head for each query head, Hopper's backward may be a single kernel.
    ungrouped = [dataclasses.replace(case, K=case.N) for case in FEATURES[::3]]
    found += [Call(enlarged(case, DIMS[i % 4]), "float16") for i, case in enumerate(ungrouped)]
    found += [call for dim in (64, 128, 256) for call in calls_with_dim(dim)]
    found.append(Call(Case(T=222, S=270, D=192, E=128, causal=True)))
    for i, case in enumerate(FEATURES[::3]):
        found.append(Call(enlarged(case, DIMS[i % 4]), "float32", ("default", "highest")[i // 4 % 2]))
    found += [dataclasses.replace(call, dtype="float32") for call in calls_with_dim(64)]
    random.Random(0).shuffle(found)
    return found


def with_garbage(mask: BlockMask) -> BlockMask:
    """Replace half of its numbers by garbage, which no constructor allows but arrays may hold at run time."""
    rng = np.random.default_rng(0)

    def corrupted(x: np.ndarray) -> np.ndarray:
        return np.where(rng.random(x.shape) < 0.5, rng.choice([0, 1, 3, 100, *GARBAGE], x.shape), x).astype(np.int32)

    return with_unchecked_arrays(
        mask, **{name: corrupted(getattr(mask, name)) for name in ("blocks", "row_lists", "column_lists")}
    )


def execute(call: Call) -> None:
    """Run a forward and a backward as separate programs, so that they read and write only arrays of JAX.

    Then run a tangent, except of score programs.
    """
    arrays, cotangents = call.case.arrays(call.dtype), call.case.cotangents(call.dtype)
    if call.programs:
        make = functools.partial(score_and_mask, call.case)
        run(call.case, make, arrays | captured(make()), cotangents, "flash")
        return
    if call.garbage:
        arrays["block_mask"] = with_garbage(arrays["block_mask"])

    @jax.jit
    def attention(arrays):
        o, statistics = jax_flash.attention_with_statistics(**arrays, **call.case.options, implementation="flash")
        return o, statistics.logsumexp

    with jax.default_matmul_precision(call.precision):
        jax.block_until_ready(with_gradients(attention, arrays, cotangents, call.case.logsumexp))
        moving = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
        others = {name: x for name, x in arrays.items() if name not in moving}
        tangent = jax.jit(lambda x: jax.jvp(lambda x: attention(others | x), (x,), (x,)))
        jax.block_until_ready(tangent(moving))


def run_calls(seconds: float, jobs: int) -> int:
    """Run calls until the time is over. Return their number."""
    todo, end = calls(), time.monotonic() + seconds

    def run_in_time(call: Call) -> bool:
        if time.monotonic() > end:
            return False
        print(call, flush=True)
        execute(call)
        return True

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        done = sum(pool.map(run_in_time, todo))
    print(f"{done} of {len(todo)} calls on {jax.devices()[0].device_kind}")
    return done


# --- compute-sanitizer ---


def succeeds(name: str, command: list[str], environment: dict[str, str], expected: str) -> bool:
    """Return whether a command succeeds and prints the expected text. Otherwise show its output."""
    start = time.monotonic()
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    succeeded = result.returncode == 0 and expected in result.stdout
    lines = result.stdout.splitlines()
    if succeeded:
        lines = [line for line in lines if "SUMMARY" in line or " calls on " in line]
    print(f"\n{name}: {time.monotonic() - start:.0f} s", *lines, sep="\n", flush=True)
    return succeeded


def sanitize(tools: list[str], families: list[str], seconds: float) -> int:
    """Run the tools, and return the number of failed runs. A run fails if it has errors, no calls or no report.

    A run without a tool comes first and fills the caches of both compilers.
    """
    sanitizer = pathfinder.find_nvidia_binary_utility("compute-sanitizer")
    if sanitizer is None:
        sys.exit("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")
    print(subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout)
    this = [sys.executable, __file__, "--calls"]
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "JAX_PLATFORMS": "cuda",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # a separate allocation for every array
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer=",  # no CUDA graphs
        }
        prepared = None
        for family, tool in itertools.product(families, tools):
            environment = os.environ | settings | FAMILIES[family] | SETTINGS.get(tool, {})
            if environment != prepared:
                without_tool = [*this, "--jobs", str(os.cpu_count())]
                failed += not succeeds(f"{family}, no tool", without_tool, environment, " calls on ")
            prepared = environment
            under_tool = [sanitizer, "--tool", tool, *OPTIONS, *TOOLS[tool], *this, "--seconds", str(seconds)]
            failed += not succeeds(f"{family}, {tool}", under_tool, environment, "SUMMARY")
    return failed


def main() -> None:
    summary, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="kernels for Hopper")
    parser.add_argument("--seconds", type=float, help="time after which no call starts; default: 300 for each tool")
    parser.add_argument("--calls", action="store_true", help="run the calls in this process, without a tool")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent calls, with --calls")
    args = parser.parse_args()
    if args.calls:
        sys.exit(run_calls(args.seconds or float("inf"), args.jobs) == 0)
    else:
        sys.exit(sanitize(args.tools, args.families, args.seconds or 300) > 0)


if __name__ == "__main__":
    main()

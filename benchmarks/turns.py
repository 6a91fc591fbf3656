"""Compare builds of jax_flash by running them in turn on one device.

    pip uninstall jax-flash                         # an editable install would take precedence
    pip install --no-deps --target /tmp/before .    # at one commit
    pip install --no-deps --target /tmp/after .     # at another
    export PYTHONPATH=/tmp/before
    python benchmarks/turns.py /tmp/before /tmp/after --groups dense --head-dims 64 --lengths 4096 --passes backward
    python benchmarks/turns.py /tmp/before /tmp/after --patterns window document --head-dims 64 128 --lengths 16384

Each build runs in its own process. Each round takes a sample of some milliseconds from every build, in a random order.
So a disturbance of the device, above all its temperature, affects all builds equally. The table shows medians in
microseconds, and the speed relative to the first build: the median over the rounds. Pass one build twice to measure the
noise.
"""

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attention
import block_sparse
import jax
import measure
from rich.console import Console
from rich.table import Table

import jax_flash

ROUNDS = 13
SPARSE_PASSES = (block_sparse.FORWARD, block_sparse.BACKWARD, block_sparse.BOTH)  # in the order of attention.PASSES
Builder = Callable[[str], measure.Call]  # takes the pass


class Build:
    """A process that runs the jax_flash installed in a directory."""

    def __init__(self, directory: str):
        if not os.path.isdir(os.path.join(directory, "jax_flash")):
            sys.exit(f"no jax_flash is installed in {directory}: pip install --no-deps --target {directory} .")
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            env=os.environ | {"PYTHONPATH": os.path.abspath(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def request(self, *message: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def answer(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process for {self.directory} ended; see its output above")
        return json.loads(line)


def problems(args: argparse.Namespace) -> Iterator[tuple[str, tuple[str, ...], Builder]]:
    """Yield labels, passes and the functions that build the calls."""
    for name, (passes, group) in attention.groups(args.head_dims, args.lengths).items():
        for problem in group if name in args.groups else ():
            yield problem.label(), passes, functools.partial(attention.jax_call, problem, "jax_flash")
    for n, d, pattern in itertools.product(args.lengths, args.head_dims, args.patterns):
        yield f"d={d} N={n} {pattern}", attention.PASSES, functools.partial(sparse_call, pattern, n, d)


def sparse_call(pattern: str, n: int, d: int, pass_: str) -> measure.Call:
    """Build a call as in block_sparse.py, with 16 heads."""
    shape = (max(block_sparse.TOKENS // n, 1), n, 16, d)
    arrays = [jax.random.normal(key, shape, "bfloat16") for key in jax.random.split(jax.random.key(0), 4)]
    sparse_pass = SPARSE_PASSES[attention.PASSES.index(pass_)]
    call, _ = block_sparse.jax_call(sparse_pass, block_sparse.PATTERNS[pattern](n), arrays)
    return call


def serve(builders: list[Builder]) -> None:
    """Answer requests on stdout, in seconds per call: ["prepare", number, pass], then any number of ["time", calls]."""
    if not os.path.realpath(jax_flash.__file__).startswith(os.path.realpath(os.environ["PYTHONPATH"]) + os.sep):
        sys.exit(f"an editable install takes precedence: {jax_flash.__file__} was imported; pip uninstall jax-flash")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so all other output goes to stderr
    call: measure.Call = lambda: None  # noqa: E731
    for line in sys.stdin:
        match json.loads(line):
            case ["prepare", number, pass_]:
                call = builders[number](pass_)
                measure.sample(call, measure.WARM_UP)
                seconds = measure.sample(call, measure.WARM_UP)
            case ["time", calls]:
                seconds = measure.sample(call, calls)
        print(json.dumps(seconds), file=answers, flush=True)


def take_turns(builds: list[Build], number: int, pass_: str) -> list[list[float]]:
    """Return seconds per call, for each build and each round."""
    for build in builds:
        build.request("prepare", number, pass_)
    calls = measure.calls_per_sample(min([build.answer() for build in builds]))
    times: list[list[float]] = [[] for _ in builds]
    for _ in range(ROUNDS):
        for i in random.sample(range(len(builds)), len(builds)):
            builds[i].request("time", calls)
            times[i].append(builds[i].answer())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", help="directories with an installed jax_flash; the first is the baseline")
    parser.add_argument("--groups", nargs="+", choices=list(attention.groups((), ())), default=[])
    parser.add_argument("--patterns", nargs="+", choices=list(block_sparse.PATTERNS), default=[], help="block masks")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], help="of dense and patterns")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384], help="of dense and patterns")
    parser.add_argument("--passes", nargs="+", choices=attention.PASSES, default=attention.PASSES)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = list(problems(args))
    if not chosen:
        parser.error("nothing to measure: give --groups or --patterns")
    if args.serve:
        serve([builder for _, _, builder in chosen])
        return

    builds = [Build(directory) for directory in args.builds]
    table = Table("problem", "pass", *args.builds, *(f"{directory}, speed-up" for directory in args.builds[1:]))
    try:
        for number, (label, passes, _) in enumerate(chosen):
            for pass_ in (x for x in passes if x in args.passes):
                base, *others = times = take_turns(builds, number, pass_)
                ratios = (statistics.median(a / b for a, b in zip(base, x, strict=True)) for x in others)
                cells = [f"{1e6 * statistics.median(x):.1f}" for x in times] + [f"{x:.3f}" for x in ratios]
                table.add_row(label, pass_, *cells)
    finally:  # after Ctrl-C, show the results so far
        Console().print(table)


if __name__ == "__main__":
    main()

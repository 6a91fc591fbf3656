"""Measure the claims of the FlashAttention paper, together with the baselines of the paper.

    python -m benchmarks.paper                      # all sections: most of a day on an H200
    python -m benchmarks.paper gpt2_problem --quick # one section with small problems: minutes, even on a CPU

A section writes benchmarks/results/paper_SECTION.json (with --quick: build/paper_quick/paper_SECTION.json) after every
row. docs/paper.md shows tables (`python benchmarks/tables.py`) and figures (`python -m benchmarks.paper.figures`) of
these files. The same command resumes from such a file if GPU, versions and problem are the same.

The exit status is 0 if everything is measured, and 1 if a section failed or nothing could be measured. It is 3 if the
time limit was reached. The same command then measures the rest.
"""

import argparse
import importlib
import inspect
import os
import pathlib
import subprocess
import sys

import measure

from .results import OutOfTime, Results

SECTIONS = (  # modules of `sections`, in the paper's order
    "gpt2_problem",
    "gpt2_counters",
    "gpt2_operators",
    "figure2",
    "figure3",
    "checkpointing",
    "memory",
    "gpt2_small",
    "gpt2_medium",
    "gpt2_curves",
    "gpt2_context",
    "bert",
    "lra_speed",
    "lra_accuracy",
    "pathfinder",
    "pathfinder_discs",
    "sparse_mlp",
)
PARENTS = ("gpt2_counters", "memory")  # sections with child processes that need the GPU's memory
PACKAGES = ["jax-flash", "jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]
QUICK = measure.RESULTS.parents[1] / "build" / "paper_quick"
OUT_OF_TIME = 3  # exit status


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small problems, few repetitions")
    parser.add_argument("--fresh", action="store_true", help="do not resume from a file; --quick never does")
    parser.add_argument("--output", type=pathlib.Path, help="directory of the JSON files")
    parser.add_argument(
        "--minutes", type=float, default=5, help="time limit of a section, from when its process starts"
    )
    parser.add_argument("--side", type=int, choices=(32, 64, 128, 256), default=32, help="pathfinder: size of images")
    kinds = ("flash", "block-sparse")
    parser.add_argument("--attention", choices=kinds, help="pathfinder: by default block-sparse for side 256 only")
    parser.add_argument("--labels-alone", action="store_true", help="pathfinder: train without targets for pixels")
    checkpoint = pathlib.Path("pathfinder_checkpoint")
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, default=checkpoint, help="pathfinder: directory to resume from"
    )
    args = parser.parse_args(argv)
    names = args.sections or SECTIONS
    if len(names) == 1:
        sys.exit(section(names[0], args, parser))
    # Each section runs in its own process, with all of the GPU's memory and the whole time limit.
    options = options_of(args, parser, list(vars(args)))
    command = [sys.executable, "-m", "benchmarks.paper", *options]
    statuses = [subprocess.run([*command, name]).returncode for name in names]
    sys.exit(next((x for x in statuses if x not in (0, OUT_OF_TIME)), max(statuses)))


def section(name: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure one section. Return the exit status."""
    if name in PARENTS:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    run = importlib.import_module(f".sections.{name}", __package__).run
    parameters = inspect.signature(run).parameters
    accepted = {option: value for option, value in vars(args).items() if option in parameters}
    options = options_of(args, parser, [*accepted, "minutes"])
    environment = measure.environment(PACKAGES)
    environment["command"] = " ".join(["python -m benchmarks.paper", name, *options])
    path = (args.output or (QUICK if args.quick else measure.RESULTS)) / f"paper_{name}.json"
    results = Results(path, environment, args.minutes, args.fresh or args.quick)
    try:
        run(results, **accepted)
    except OutOfTime as left:
        print(f"{name}: the limit of {args.minutes:g} minutes is reached. Left: {left}. The same command resumes.")
        return OUT_OF_TIME
    if not results.rows:
        print(f"{name}: nothing could be measured. {results.fields.get('missing', '')}")
        return 1
    return 0


def options_of(args: argparse.Namespace, parser: argparse.ArgumentParser, names: list[str]) -> list[str]:
    """Return the named options as a command line, without those that have their default."""
    given = {name: getattr(args, name) for name in names if name != "sections"}
    changed = {name: value for name, value in given.items() if value != parser.get_default(name)}
    return [
        x
        for name, value in changed.items()
        for x in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]


if __name__ == "__main__":
    main()

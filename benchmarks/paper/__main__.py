"""The claims of the FlashAttention paper, measured beside what it measured them against.

    python -m benchmarks.paper                      # every section: most of a day of an H200
    python -m benchmarks.paper gpt2_problem --quick # one of them, small: minutes, on a CPU too

A section writes benchmarks/results/paper_SECTION.json, from which docs/paper.md has its tables
(`python benchmarks/tables.py`) and figures (`python -m benchmarks.paper.figures`).
"""

import argparse
import importlib
import pathlib

import measure

SECTIONS = (  # a module of this package each, in the paper's order
    "gpt2_problem",
    "gpt2_counters",
    "gpt2_operators",
    "figure2",
    "figure3",
    "checkpointing",
    "memory",
)
PACKAGES = ["jax-flash", "jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small problems, few repetitions")
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS, help="directory of the JSON files")
    args = parser.parse_args(argv)
    for name in args.sections or SECTIONS:
        section = importlib.import_module(f".{name}", __package__)
        command = " ".join(["python -m benchmarks.paper", name, *["--quick"] * args.quick])
        environment = measure.environment(PACKAGES) | {"command": command}
        measure.save(args.output / f"paper_{name}.json", {"environment": environment, **section.run(args.quick)})


if __name__ == "__main__":
    main()

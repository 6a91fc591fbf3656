"""The claims of the FlashAttention paper, measured beside what it measured them against.

    python -m benchmarks.paper                      # every section: most of a day of an H200
    python -m benchmarks.paper gpt2_problem --quick # one of them, small: minutes, on a CPU too

A section writes benchmarks/results/paper_SECTION.json, from which docs/paper.md has its tables
(`python benchmarks/tables.py`) and figures (`python -m benchmarks.paper.figures`).
"""

import argparse
import importlib
import inspect
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
    "gpt2_small",
    "gpt2_medium",
    "gpt2_curves",
    "gpt2_context",
    "bert",
    "lra_speed",
    "lra_accuracy",
    "pathfinder",
)
PACKAGES = ["jax-flash", "jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small problems, few repetitions")
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS, help="directory of the JSON files")
    parser.add_argument("--minutes", type=float, default=8, help="gpt2_context, lra_accuracy, pathfinder: of training")
    parser.add_argument("--side", type=int, choices=(32, 64, 128, 256), default=32, help="pathfinder: of the images")
    checkpoint = pathlib.Path("pathfinder_checkpoint")
    parser.add_argument("--checkpoint", type=pathlib.Path, default=checkpoint, help="pathfinder: what it goes on from")
    args = parser.parse_args(argv)
    for name in args.sections or SECTIONS:
        section = importlib.import_module(f".{name}", __package__)
        parameters = inspect.signature(section.run).parameters
        taken = {option: value for option, value in vars(args).items() if option in parameters}
        given = [f"--{option} {value}" for option, value in taken.items() if value != parser.get_default(option)]
        command = " ".join(["python -m benchmarks.paper", name, *given]).replace("--quick True", "--quick")
        environment = measure.environment(PACKAGES) | {"command": command}
        measure.save(args.output / f"paper_{name}.json", {"environment": environment, **section.run(**taken)})


if __name__ == "__main__":
    main()

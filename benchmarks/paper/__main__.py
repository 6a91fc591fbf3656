"""The claims of the FlashAttention paper, measured beside what it measured them against.

    python -m benchmarks.paper                      # every section: most of a day of an H200
    python -m benchmarks.paper gpt2_problem --quick # one of them, small: minutes, on a CPU too

A section writes benchmarks/results/paper_SECTION.json, from which docs/paper.md has its tables and figures
(`python benchmarks/tables.py`).
"""

import argparse
import importlib
import inspect
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the other benchmarks, which are run as files

import measure

SECTIONS: tuple[str, ...] = (  # a module of this package each, in the paper's order
    "gpt2_small",
    "gpt2_medium",
    "gpt2_curves",
    "gpt2_context",
    "bert",
    "lra_speed",
    "lra_accuracy",
    "pathfinder",
)


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
        taken = inspect.signature(section.run).parameters
        results = section.run(**{option: value for option, value in vars(args).items() if option in taken})
        measure.save(args.output / f"paper_{name}.json", {"environment": measure.environment([]), **results})


if __name__ == "__main__":
    main()

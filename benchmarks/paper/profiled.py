"""Run one case of `gpt2_problem` for a profiler that starts with `cudaProfilerStart`; see `gpt2_counters`.

ncu --profile-from-start off python -m benchmarks.paper.profiled NUMBER
"""

import argparse
import ctypes

import jax
import measure
from cuda.pathfinder import load_nvidia_dynamic_lib

from . import passes
from .sections import gpt2_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="index of the case")
    parser.add_argument("--quick", action="store_true", help="the small problem")
    args = parser.parse_args()
    call = gpt2_problem.cases()[args.number].program(passes.BOTH, args.quick).call
    measure.finish(call())
    path = load_nvidia_dynamic_lib("cudart").abs_path
    if path is None:
        raise SystemExit("no CUDA runtime was found")
    runtime = ctypes.CDLL(path)
    if runtime.cudaProfilerStart():
        raise SystemExit("cudaProfilerStart failed")
    jax.block_until_ready(call())
    runtime.cudaProfilerStop()


if __name__ == "__main__":
    main()

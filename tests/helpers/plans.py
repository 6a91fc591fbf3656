"""What the CUDA backend plans for a problem: kernels, tiles, scratch."""

import dataclasses

from jax_flash import _native
from jax_flash.problem import Extent, Problem

BASE = Problem(2, 512, 512, 8, 4, 64, 64, "bfloat16")
GRADIENTS = {"dq": True, "dk": True, "dv": True}
THREE_MASKS = {"causal": True, "q_lengths": True, "query_offset": True}  # no backward is one kernel beside so many
EVERY = Extent(True, True, True, True)
BIASED = {"bias_dtype": "float32", "bias": EVERY}


def problem(**changes) -> Problem:
    return dataclasses.replace(BASE, **changes)


def kernels(arch="sm_90a", backward=False, **changes) -> list[tuple[str, str]]:
    """(file, kernel) of the launches."""
    return [launch[:2] for launch in _native.cuda_plan(problem(**changes).encode(), backward, arch)]


def fields(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> dict[str, int]:
    """What the last launch is compiled for."""
    return _native.cuda_plan(problem(**changes).encode(), backward, arch, multiprocessors)[-1][2]


def scratch(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> int:
    """Bytes."""
    return _native.cuda_explain(problem(**changes).encode(), backward, arch, multiprocessors)[1]


def everywhere(backward=False, **changes) -> int:
    """Bytes of scratch that do for any GPU."""
    return _native.cuda_scratch_bytes(problem(**changes).encode(), backward, True)

"""The CUDA backend's plan for a problem: kernels, tiles and scratch."""

import dataclasses

from jax_flash import _native
from jax_flash.description import Extent
from jax_flash.masks import Mask
from jax_flash.problem import Problem
from jax_flash.scores import Score

BASE = Problem(2, 512, 512, 8, 4, 64, 64, "bfloat16")
GRADIENTS = {"requested": ("dq", "dk", "dv")}
THREE_MASKS = {
    "is_causal": True,
    "query_seq_lengths": True,
    "query_offset": True,
}  # with three masks, the backward needs separate prepare and finish kernels
FULL_EXTENT = Extent(True, True, True, True)
BIASED = {"bias_dtype": "float32", "bias": FULL_EXTENT}


def changed(problem: Problem, **changes) -> Problem:
    """Return the problem with these fields replaced. They may be fields of its mask or its score."""
    parts = {}
    for name, kind in (("mask", Mask), ("score", Score)):
        own = {field.name: changes.pop(field.name) for field in dataclasses.fields(kind) if field.name in changes}
        parts[name] = dataclasses.replace(getattr(problem, name), **own)
    return dataclasses.replace(problem, **parts, **changes)


def problem(**changes) -> Problem:
    return changed(BASE, **changes)


def kernels(arch="sm_90a", backward=False, **changes) -> list[tuple[str, str]]:
    """Return (file, kernel) for each launch."""
    return [launch[:2] for launch in _native.cuda_plan(problem(**changes).encode(), backward, arch)]


def fields(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> dict[str, int]:
    """Return the compile-time constants of the last launch."""
    return _native.cuda_plan(problem(**changes).encode(), backward, arch, multiprocessors)[-1][2]


def scratch(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> int:
    """Return the bytes of scratch."""
    return _native.cuda_explain(problem(**changes).encode(), backward, arch, multiprocessors)[1]


def portable_scratch(backward=False, **changes) -> int:
    """Return the bytes of scratch that suffice on any GPU."""
    return _native.cuda_scratch_bytes(problem(**changes).encode(), backward, True)

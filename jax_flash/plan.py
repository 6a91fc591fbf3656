"""Which CUDA kernels a problem takes, and why: what `cuda_src/plan` decides, for people."""

from __future__ import annotations

import re
from typing import NamedTuple

from jax_flash import _native, checks, custom_calls
from jax_flash.problem import Problem

FAMILIES = {80: "ampere", 90: "hopper"}  # of contract.h


class Kernel(NamedTuple):
    """A launch. Its sizes are those of the file that the kernel is in, 0 where it has no tiles."""

    name: str  #: of the kernel
    family: str  #: "ampere", for every GPU from compute capability 8.0 on, or "hopper", for 9.0 alone
    rows: int  #: queries of a tile of the score matrix
    cols: int  #: keys
    groups: int  #: warps, or in Hopper's own kernels warpgroups beside the one that loads
    stages: int  #: tiles in flight


class Explanation(NamedTuple):
    """How a pass is done on a GPU. `print` shows it."""

    backward: bool  #: whether the pass is the backward
    arch: str  #: of the GPU
    multiprocessors: int  #: of the GPU
    kernels: tuple[Kernel, ...]  #: one after the other
    scratch_bytes: int  #: of memory beside the results
    reasons: tuple[str, ...]  #: why it is not otherwise
    programs: dict[str, str]  #: instructions of score_mod, mask_mod and score_grad (docs/score-programs.md)
    source: str  #: the programs as CUDA C++

    def __str__(self) -> str:
        name = "backward" if self.backward else "forward"
        scratch = f"{self.scratch_bytes / 1e6:.3g} MB of scratch memory"
        lines = [f"{name} on {self.arch} with {self.multiprocessors} multiprocessors, {scratch}"]
        for kernel in self.kernels:
            unit = "warpgroups" if kernel.family == "hopper" else "warps"
            tiles = f", tiles {kernel.rows} x {kernel.cols}, {kernel.groups} {unit}, {kernel.stages} stages"
            lines.append(f"  {kernel.name}: {kernel.family}{tiles if kernel.rows else ''}")
        lines += [f"  {name}: {text.replace(';', '; ')}" for name, text in self.programs.items()]
        return "\n".join([*lines, *(f"  because {reason}" for reason in self.reasons)])


def explain(problem: Problem, backward: bool = False, arch: str | None = None) -> Explanation:
    """Which CUDA kernels do a pass of `problem` (see `Problem.of`), with which tiles, and what kept it from others.

    The backward is that of query, key and value, and of what score_mod captures, if the problem asks for no gradients.
    `arch` is "sm_80", "sm_90a", …, a GPU with as many multiprocessors as those most often have; by default it is the
    first GPU of this process, or "sm_90a" if there is none. No kernel is compiled.

    Raises TypeError for an argument of a wrong kind, and ValueError if there are no CUDA kernels for the problem or for
    the GPU.
    """
    problem = checks.problem(problem)
    backward = checks.flag("backward", backward)
    if backward and not problem.differentiable:
        raise ValueError("keys in pages are for inference: there is no backward")
    if problem.symbolic:
        raise ValueError(custom_calls.refusal(problem, "cuda"))
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"arch must be a str, not {checks.described(arch)}")
    if arch is not None and not re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", arch):
        raise ValueError(f'arch must be "sm_80", "sm_90a", …, not {checks.described(arch)}')
    if backward and not problem.gradients:
        problem = problem.differentiated(problem.differentiable - {"dbias"})
    chosen, multiprocessors = (arch, 0) if arch is not None else _first_gpu()
    call = problem.encode(), backward, chosen, multiprocessors
    kernels = tuple(
        Kernel(name, FAMILIES[fields["family"]], *(fields[size] for size in Kernel._fields[2:]))
        for _, name, fields in _native.cuda_plan(*call)
    )
    counted, scratch_bytes, reasons = _native.cuda_explain(*call)
    programs = {name: getattr(problem, name) for name in ("score_mod", "mask_mod", "score_grad")}
    texts = {name: x.text for name, x in programs.items() if x is not None}
    source = _native.cuda_programs(call[0]) if texts else ""
    return Explanation(backward, chosen, counted, kernels, scratch_bytes, tuple(reasons), texts, source)


def _first_gpu() -> tuple[str, int]:
    """Its architecture and multiprocessors; 0 of these: as usual."""
    try:
        major, minor, multiprocessors = _native.cuda_devices()[0]
    except (RuntimeError, IndexError):  # no driver, or no GPU
        return "sm_90a", 0
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}", multiprocessors

"""`explain`: a readable report of the CUDA kernels that `cuda_src/plan` chooses for a problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.typing import ArrayLike

from jax_flash import _native, checks, custom_calls, sequence
from jax_flash.problem import Problem, checked_problem

FAMILIES = {80: "ampere", 90: "hopper"}  # of contract.h


class Kernel(NamedTuple):
    """One kernel launch. The tile sizes are 0 if the kernel has no tiles."""

    name: str  #: name of the kernel
    family: str  #: "hopper" for compute capability 9.0, or "ampere" for every GPU from 8.0 on
    rows: int  #: queries in a tile of the score matrix
    cols: int  #: keys in a tile of the score matrix
    groups: int  #: warps per CTA; in Hopper kernels the consumer warpgroups
    stages: int  #: stages of the pipeline that loads tiles


class Explanation(NamedTuple):
    """The kernels of one pass on a GPU, with the reasons for them. Print it to read it."""

    backward: bool  #: whether the pass is the backward
    arch: str  #: architecture of the GPU, such as "sm_90a"
    multiprocessors: int  #: number of multiprocessors of the GPU
    kernels: tuple[Kernel, ...]  #: the launches in order
    scratch_bytes: int  #: scratch memory in bytes, in addition to the results
    reasons: tuple[str, ...]  #: why other kernels or tiles were not chosen
    programs: dict[str, str]  #: instructions of the score and mask programs (docs/score-programs.md)
    source: str  #: the programs as CUDA C++
    division: str = ""  #: how a call under `jit` divides a sequence over several devices, and why
    tangent: bool = False  #: whether the pass is the tangent of forward mode

    def __str__(self) -> str:
        name = "tangent" if self.tangent else "backward" if self.backward else "forward"
        scratch = f"{self.scratch_bytes / 1e6:.3g} MB of scratch memory"
        lines = [f"{name} on {self.arch} with {self.multiprocessors} multiprocessors, {scratch}"]
        for kernel in self.kernels:
            unit = "warpgroups" if kernel.family == "hopper" else "warps"
            tiles = f", tiles {kernel.rows} x {kernel.cols}, {kernel.groups} {unit}, {kernel.stages} stages"
            lines.append(f"  {kernel.name}: {kernel.family}{tiles if kernel.rows else ''}")
        lines += [f"  {name}: {text.replace(';', '; ')}" for name, text in self.programs.items()]
        lines += [f"  because {reason}" for reason in self.reasons]
        return "\n".join([*lines, f"  {self.division}"] if self.division else lines)


def explain(
    problem: Problem,
    backward: bool = False,
    arch: str | None = None,
    compiled: bool = False,
    devices: int = 1,
    tangents: Sequence[str] = (),
    cu_seqlens: ArrayLike | None = None,
) -> Explanation:
    """Report the CUDA kernels and tiles of one pass of a problem, and why they were chosen.

    A call tries the tiles of the report first. If they need too many registers, the call takes other tiles. Pass
    `compiled=True` to see the tiles that the call takes.

    Args:
      problem: the problem, see `Problem.of`.
      backward: whether to report the backward pass. It computes the gradients that the problem requests, or by default
        those for query, key, value and the float arrays that score_mod captures.
      arch: architecture of the GPU, such as "sm_80" or "sm_90a", with its usual number of multiprocessors. Default: the
        first GPU of this process, or "sm_90a" if this process has no GPU.
      compiled: whether to compile the kernels into the cache, and report the tiles that a call takes. Without it, no
        kernel is compiled.
      devices: number of devices over which a call under `jit` shards the sequence. With more than one, the report tells
        how the call is divided. The kernels in the report are those of the whole call on one device.
      cu_seqlens: cumulative lengths of packed documents, as in `varlen_attention`. With several devices, the report
        compares layouts for these documents: the entries of the slowest device of each visit, divided by the mean of
        all devices, and the megabytes of keys and values that a device sends in a forward.
      tangents: the arguments that have a tangent: some of "query", "key", "value", "bias", "sinks" and "scale". With
        them, the report is on the tangent pass of forward mode (`jax.jvp`).

    Returns:
      An `Explanation`. Print it to read it.

    Raises:
      TypeError: if an argument has a wrong type.
      ValueError: if there are no CUDA kernels for the problem or the GPU. The message gives the reason, for example why
        a tangent is computed in plain JAX.
      RuntimeError: if `compiled` is set, and NVRTC is missing or too old.
    """
    problem = checked_problem(problem)
    backward = checks.flag("backward", backward)
    compiled = checks.flag("compiled", compiled)
    devices = checks.integer("devices", devices, least=1)
    if backward and not problem.differentiable:
        raise ValueError("paged attention is for inference and has no backward kernels: leave out backward=True")
    if problem.symbolic:
        raise ValueError(custom_calls.refusal(problem, "cuda"))
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"arch must be a str, not {checks.described(arch)}")
    if arch is not None and not re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", arch):
        raise ValueError(f'arch must be "sm_80", "sm_90a", …, not {checks.described(arch)}')
    if cu_seqlens is not None and devices == 1:
        raise ValueError("cu_seqlens needs devices: pass the number of devices that share the documents")
    if tangents and backward:
        raise ValueError("tangents are of the forward: leave out backward=True")
    if tangents:
        problem = of_tangent(problem, tangents)
    if backward and not problem.gradients:
        problem = problem.differentiated(problem.differentiable - {"dbias"})
    chosen, multiprocessors = (arch, 0) if arch is not None else _first_gpu()
    call = problem.encode(), backward, chosen, multiprocessors, compiled
    kernels = tuple(
        Kernel(name, FAMILIES[fields["family"]], *(fields[size] for size in Kernel._fields[2:]))
        for _, name, fields in _native.cuda_plan(*call)
    )
    counted, scratch_bytes, reasons = _native.cuda_explain(*call)
    score, mask_mod = problem.score, problem.mask.mask_mod
    programs = {"score_mod": score.score_mod, "mask_mod": mask_mod, "score_grad": score.score_grad}
    programs["score_tangent"] = score.score_tangent
    texts = {name: x.text for name, x in programs.items() if x is not None}
    source = _native.cuda_programs(call[0]) if texts else ""
    division = sequence.explained(problem, devices, cu_seqlens) if devices > 1 else ""
    return Explanation(
        backward, chosen, counted, kernels, scratch_bytes, tuple(reasons), texts, source, division, bool(tangents)
    )


def of_tangent(problem: Problem, tangents: Sequence[str]) -> Problem:
    """Return the problem of the tangent pass along tangents of these arguments.

    Raises:
      TypeError, ValueError: as in `explain`.
    """
    moving = problem.with_tangents(tangents)
    if "scale" in tangents:
        problem = problem.without_rounding
    if reason := custom_calls.refusal(problem, "cuda", moving):
        raise ValueError(f"the tangent is computed in plain JAX, which is slower: {reason}")
    return problem.along(moving)


def _first_gpu() -> tuple[str, int]:
    """Return the architecture and the number of multiprocessors. 0 means the usual number."""
    try:
        major, minor, multiprocessors = _native.cuda_devices()[0]
    except (RuntimeError, IndexError):  # no driver, or no GPU
        return "sm_90a", 0
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}", multiprocessors

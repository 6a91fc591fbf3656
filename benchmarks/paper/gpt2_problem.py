"""The paper's first table: attention of GPT-2 medium, N = 1024, 16 heads of d = 64, batch 64.

Milliseconds, and FLOPs and bytes as the algorithms' formulas and as XLA count them; `gpt2_counters` has the bytes that
the hardware counts. Each of padding mask and dropout is there and not, so that one sees what it costs.
"""

import itertools
from typing import Any, NamedTuple

import measure
from rich.progress import track

from jax_flash import io_model

from . import attentions, passes

IMPLEMENTATIONS = {"standard": attentions.standard, "cudnn": attentions.cudnn, "jax_flash": attentions.flash}
KEY_BLOCK = 256  # of the counting model: about what fits into the fast memory of a multiprocessor


def shape(quick: bool) -> tuple[int, int, int, int]:
    return (2, 128, 2, 64) if quick else (64, 1024, 16, 64)


class Case(NamedTuple):
    implementation: str
    mask: bool  # of padding
    dropout: bool

    def program(self, pass_: str, quick: bool) -> passes.Program:
        given = passes.operands(shape(quick), self.mask, self.dropout)
        return passes.program(IMPLEMENTATIONS[self.implementation], pass_, given)


def cases() -> list[Case]:
    """All; without dropout for cuDNN, which `jax.nn` does not hand it on to."""
    found = [Case(*case) for case in itertools.product(IMPLEMENTATIONS, (False, True), (False, True))]
    return [case for case in found if case.implementation != "cudnn" or not case.dropout]


def run(quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for pass_ in (passes.FORWARD, passes.BOTH):
        programs: dict[Case, passes.Program] = {}
        for case in track(cases(), f"Compiling {pass_}"):
            try:
                program = case.program(pass_, quick)
                measure.finish(program.call())
                programs[case] = program
            except (ValueError, NotImplementedError, RuntimeError) as error:
                missing[case.implementation] = passes.reason(error)
        times = passes.milliseconds({case: program.call for case, program in programs.items()})
        for case, program in programs.items():
            row = case._asdict() | {"pass": pass_, "milliseconds": times[case], "memory": program.bytes}
            if case.implementation == "standard":  # of the others XLA sees custom calls
                row |= {"xla_flops": program.cost.get("flops"), "xla_bytes": program.cost.get("bytes accessed")}
            rows.append(row)
    batch, length, heads, dim = shape(quick)
    return {
        "rows": rows,
        "missing": missing,
        "model": {name: model(name, batch * heads, length, dim) for name in MODELS},
        "shape": [batch, length, heads, dim],
    }


MODELS: dict[str, tuple[io_model.Algorithm, io_model.Algorithm]] = {  # forward and backward
    "standard": ("algorithm_0", "algorithm_3"),
    "flash": ("algorithm_2", "algorithm_4"),
    "jax_flash": ("kernel_forward", "kernel_backward"),
}


def model(name: str, matrices: int, length: int, dim: int) -> dict[str, float]:
    """FLOPs of the products and bytes of forward and backward, as `jax_flash.io_model` counts them, in 16 bits."""
    sram = 4 * dim * KEY_BLOCK
    flops = sum(io_model.flops(algorithm, length, dim, sram) for algorithm in MODELS[name])
    accesses = sum(io_model.hbm_accesses(algorithm, length, dim, sram) for algorithm in MODELS[name])
    return {"flops": matrices * flops, "bytes": io_model.in_bytes(matrices * accesses, "bfloat16")}

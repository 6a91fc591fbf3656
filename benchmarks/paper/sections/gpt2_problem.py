"""The paper's first table: attention of GPT-2 medium, N = 1024, 16 heads of d = 64, batch 64.

Measures milliseconds. FLOPs and bytes are from the algorithms' formulas, and as counted by XLA. `gpt2_counters` has the
bytes counted by the hardware. Padding mask and dropout are each measured on and off, to show their cost.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_flash import io_model

from .. import attentions, passes
from ..results import Results, Row

RBG = "standard_rbg"  # standard attention with a mask from XLA's random generator
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "standard": attentions.standard,
    RBG: attentions.standard,
    "xla": attentions.xla,
    "cudnn": attentions.cudnn,
    "jax_flash": attentions.flash,
}
JAX_NN = ("xla", "cudnn")  # have no dropout
KEY_BLOCK = 256  # for the I/O model: approximately what fits into the fast memory of an SM


def shape(quick: bool) -> tuple[int, int, int, int]:
    return (1, 128, 2, 16) if quick else (64, 1024, 16, 64)


class Case(NamedTuple):
    implementation: str
    mask: bool  # padding mask
    dropout: bool

    def program(self, pass_: str, quick: bool) -> passes.Program:
        generator = "rbg" if self.implementation == RBG else passes.THREEFRY
        given = passes.operands(shape(quick), self.mask, self.dropout, generator)
        return passes.program(IMPLEMENTATIONS[self.implementation], pass_, given)


def cases() -> list[Case]:
    """Return the cases. The ones in the paper's claims come first: with mask and dropout."""
    features = itertools.product((True, False), (True, False), IMPLEMENTATIONS)
    found = [Case(name, mask, dropout) for mask, dropout, name in features]
    return [case for case in found if case.implementation not in (JAX_NN if case.dropout else (RBG,))]


def run(results: Results, quick: bool) -> None:
    batch, length, heads, dim = shape(quick)
    results.begin(
        shape=[batch, length, heads, dim],
        model={name: model(name, batch * heads, length, dim) for name in MODELS},
    )

    def rows_of(**key: Any) -> list[Row]:
        makers = {case: functools.partial(case.program, key["pass"], quick) for case in cases()}
        return [row(case, found) for case, found in passes.measured(makers).items()]

    results.measure([{"pass": pass_} for pass_ in (passes.FORWARD, passes.BOTH)], rows_of)


def row(case: Case, found: passes.Measured) -> Row:
    fields: Row = case._asdict() | {"milliseconds": found.milliseconds, "failure": found.failure}
    if found.program is not None:
        fields["memory"] = found.program.bytes
        if case.implementation in ("standard", RBG, "xla"):  # the others are custom calls, which XLA cannot count
            cost = found.program.cost
            fields |= {"xla_flops": cost.get("flops"), "xla_bytes": cost.get("bytes accessed")}
    return fields


MODELS: dict[str, tuple[io_model.Algorithm, io_model.Algorithm]] = {  # forward and backward
    "standard": ("algorithm_0", "algorithm_3"),
    "flash": ("algorithm_2", "algorithm_4"),
    "jax_flash": ("kernel_forward", "kernel_backward"),
}


def model(name: str, matrices: int, length: int, dim: int) -> dict[str, float]:
    """Return FLOPs of the products and bytes of forward and backward from `jax_flash.io_model`, for 16-bit arrays."""
    sram = 4 * dim * KEY_BLOCK
    flops = sum(io_model.flops(algorithm, length, dim, sram) for algorithm in MODELS[name])
    accesses = sum(io_model.hbm_accesses(algorithm, length, dim, sram) for algorithm in MODELS[name])
    return {"flops": matrices * flops, "bytes": io_model.in_bytes(matrices * accesses, "bfloat16")}

"""The paper's first table: attention of GPT-2 medium, N = 1024, 16 heads of d = 64, batch 64.

Milliseconds, and FLOPs and bytes as the algorithms' formulas and as XLA count them; `gpt2_counters` has the bytes that
the hardware counts. Each of padding mask and dropout is there and not, so that one sees what it costs.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_flash import io_model

from .. import attentions, passes
from ..results import Results, Row

RBG = "standard_rbg"  # draws its mask with XLA's own generator
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "standard": attentions.standard,
    RBG: attentions.standard,
    "xla": attentions.xla,
    "cudnn": attentions.cudnn,
    "jax_flash": attentions.flash,
}
OF_JAX_NN = ("xla", "cudnn")  # which have no dropout there
KEY_BLOCK = 256  # of the counting model: about what fits into the fast memory of a multiprocessor


def shape(quick: bool) -> tuple[int, int, int, int]:
    return (2, 128, 2, 64) if quick else (64, 1024, 16, 64)


class Case(NamedTuple):
    implementation: str
    mask: bool  # of padding
    dropout: bool

    def program(self, pass_: str, quick: bool) -> passes.Program:
        generator = "rbg" if self.implementation == RBG else passes.THREEFRY
        given = passes.operands(shape(quick), self.mask, self.dropout, generator)
        return passes.program(IMPLEMENTATIONS[self.implementation], pass_, given)


def cases() -> list[Case]:
    """First those of the paper's claims: with mask and dropout."""
    features = itertools.product((True, False), (True, False), IMPLEMENTATIONS)
    found = [Case(name, mask, dropout) for mask, dropout, name in features]
    return [case for case in found if case.implementation not in (OF_JAX_NN if case.dropout else (RBG,))]


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
    made: Row = case._asdict() | {"milliseconds": found.milliseconds, "failure": found.failure}
    if found.program is not None:
        made["memory"] = found.program.bytes
        if case.implementation in ("standard", RBG, "xla"):  # of the others XLA sees custom calls
            cost = found.program.cost
            made |= {"xla_flops": cost.get("flops"), "xla_bytes": cost.get("bytes accessed")}
    return made


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

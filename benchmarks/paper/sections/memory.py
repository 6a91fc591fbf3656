"""Theorem 1: what attention needs beside its arguments and results grows with N, as planned and as allocated.

Forward + backward of one sequence with 16 heads of d = 64, bfloat16, padding and dropout. Planned are XLA's temporaries
of the compiled program. Allocated is the peak of the allocator during a call, less the operands that were there before
and less the results. Each method has a process of its own, in which sequences become longer, since the allocator has
one peak in a process: that of the longest sequence so far. A CPU has no such count.
"""

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from typing import Any

import jax
import measure

from .. import attentions, passes
from ..results import Results, Row

HEADS, DIM = 16, 64
METHODS: dict[str, Callable[..., jax.Array]] = {
    "standard": attentions.standard,
    "chunked": attentions.chunked,
    "jax_flash": attentions.flash,
}


def run(results: Results, quick: bool) -> None:
    lengths = [128] if quick else [2**i for i in range(10, 19)]

    def rows_of(method: str) -> list[Row]:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            return pool.submit(until_failure, method, lengths).result()

    results.begin(shape=[1, HEADS, DIM], lengths=lengths)
    results.measure([{"method": name} for name in METHODS], rows_of)


def until_failure(method: str, lengths: list[int]) -> list[Row]:
    """Of ever longer sequences, until one does not fit."""
    rows: list[Row] = []
    for length in lengths:
        rows.append({"length": length, **measured(method, length)})
        if rows[-1]["failure"] is not None:
            break
    return rows


def measured(name: str, length: int) -> dict[str, Any]:
    """What is planned and allocated, in a function of its own, so that its arrays are gone before the next are made."""
    planned = None
    try:
        program = passes.program(METHODS[name], passes.BOTH, passes.operands((1, length, HEADS, DIM), True, True))
        planned = program.temporaries
        return {"planned": planned, "allocated": allocated(program.call), "failure": None}
    except passes.FAILURES as error:
        return {"planned": planned, "allocated": None, "failure": passes.failure(error)}


def allocated(call: measure.Call) -> int | None:
    """Bytes at the peak of a call beside what was there before and what it returns."""
    device = jax.local_devices()[0]
    before = device.memory_stats()
    if before is None:
        return None
    results = jax.block_until_ready(call())
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        return None  # the peak is of something before, which says nothing of the call
    return peak - before["bytes_in_use"] - sum(x.nbytes for x in jax.tree.leaves(results))

"""Theorem 1: the additional memory of attention grows linearly with N, as planned and as allocated.

Forward + backward of one sequence with 16 heads of d = 64, bfloat16, padding and dropout. Planned memory is XLA's
temporaries of the compiled program. Allocated memory is the allocator's peak during a call, minus the existing operands
and the results. The allocator only has one peak per process, for the longest sequence so far. So each method runs in
its own process, with increasing lengths. A CPU has no such count.
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
    """Measure increasing lengths until one does not fit."""
    rows: list[Row] = []
    for length in lengths:
        rows.append({"length": length, **measured(method, length)})
        if rows[-1]["failure"] is not None:
            break
    return rows


def measured(name: str, length: int) -> dict[str, Any]:
    """Return planned and allocated bytes. This is a separate function, so its arrays are freed on return."""
    planned = None
    try:
        program = passes.program(METHODS[name], passes.BOTH, passes.operands((1, length, HEADS, DIM), True, True))
        planned = program.temporaries
        return {"planned": planned, "allocated": allocated(program.call), "failure": None}
    except passes.FAILURES as error:
        return {"planned": planned, "allocated": None, "failure": passes.failure(error)}


def allocated(call: measure.Call) -> int | None:
    """Return the bytes at the peak of a call, in addition to existing arrays and its results."""
    device = jax.local_devices()[0]
    before = device.memory_stats()
    if before is None:
        return None
    results = jax.block_until_ready(call())
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        return None  # an earlier peak was higher
    return peak - before["bytes_in_use"] - sum(x.nbytes for x in jax.tree.leaves(results))

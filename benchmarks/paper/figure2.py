"""The paper's figure 2, middle and right: the size of the key block, and block-sparsity. (Left: `gpt2_problem`.)

Blocks: the tiles of this library's CUDA kernels are chosen when they are compiled, so the run time is that of the same
algorithm in plain JAX (`jax_flash.blockwise`, forward), whose tiles are squares of that size, and the bytes are those
that `jax_flash.io_model` counts for Algorithm 1. Sparsity: the CUDA kernels, as `block_sparse.py` measures them.
"""

import functools
from typing import Any
from unittest import mock

import block_sparse
import jax
import measure
from rich.progress import track

import jax_flash
from jax_flash import blockwise, io_model

from . import gpt2_problem, passes

BLOCKS = (64, 128, 256, 512)
PARTS = (2, 4, 8, 16, 32)  # one block in so many is kept


def run(quick: bool) -> dict[str, Any]:
    shape = (1, 512, 2, 64) if quick else (4, 4096, 16, 64)
    masks = {f"1/{part}": block_sparse.random_blocks(shape[1], part) for part in (PARTS[:2] if quick else PARTS)}
    interleave = functools.partial(measure.interleave, seconds=0.1) if quick else measure.interleave_enqueued
    return {
        "rows": block_rows(gpt2_problem.shape(quick)),
        "sparsity": block_sparse.measure_masks(shape, "bfloat16", masks, False, interleave),
    }


def block_rows(shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    batch, length, heads, dim = shape
    sizes = [size for size in BLOCKS if size <= length]
    calls = {str(size): blockwise_call(shape, size) for size in track(sizes, "Compiling blocks")}
    for call in calls.values():
        measure.finish(call())
    times = passes.milliseconds(calls)

    def bytes_of(size: int) -> float:
        accesses = io_model.hbm_accesses("algorithm_1", length, dim, 4 * dim * size)
        return io_model.in_bytes(batch * heads * accesses, "bfloat16")

    return [{"block": size, "milliseconds": times[str(size)], "bytes": bytes_of(size)} for size in sizes]


def blockwise_call(shape: tuple[int, int, int, int], size: int) -> measure.Call:
    """The forward in plain JAX, whose module has its block size as a constant, compiled with another."""
    attend = functools.partial(jax_flash.dot_product_attention, implementation="xla")
    with mock.patch.object(blockwise, "BLOCK", size):
        jax.clear_caches()  # which have what was traced with the size before
        return passes.program(
            lambda q, k, v, lengths, key: attend(q, k, v), passes.FORWARD, passes.operands(shape, False, False)
        ).call

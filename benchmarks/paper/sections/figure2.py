"""The paper's figure 2, middle and right: the size of the key block, and block-sparsity. (Left: `gpt2_problem`.)

Blocks: this library's CUDA kernels choose their tiles when they are compiled. So the run time is measured with the same
algorithm in plain JAX (`jax_flash.blockwise`, forward) with square tiles of that size. The bytes are counted by
`jax_flash.io_model` for Algorithm 1. Sparsity: the CUDA kernels, measured as in `block_sparse.py`.
"""

import functools
from unittest import mock

import block_sparse
import jax
import measure

import jax_flash
from jax_flash import blockwise, io_model

from .. import passes
from ..results import Results, Row
from . import gpt2_problem

BLOCKS = (64, 128, 256, 512)
PARTS = (2, 4, 8, 16, 32)  # denominators: one block in this many is kept


def run(results: Results, quick: bool) -> None:
    """Measure the rows of two parts, all block sizes and all masks. Each part is timed in turn."""
    shape = (1, 512, 2, 64) if quick else (4, 4096, 16, 64)

    def rows_of(part: str) -> list[Row]:
        if part == "blocks":
            return block_rows(gpt2_problem.shape(quick))
        masks = {f"1/{part}": block_sparse.random_blocks(shape[1], part) for part in (PARTS[:2] if quick else PARTS)}
        interleave = functools.partial(measure.interleave, seconds=0.1) if quick else measure.interleave_enqueued
        return block_sparse.measure_masks(shape, "bfloat16", masks, False, interleave)

    results.begin(shape=list(gpt2_problem.shape(quick)), sparse_shape=list(shape))
    results.measure([{"part": "blocks"}, {"part": "sparsity"}], rows_of)


def block_rows(shape: tuple[int, int, int, int]) -> list[Row]:
    batch, length, heads, dim = shape
    found = passes.measured({size: functools.partial(compiled_with, shape, size) for size in BLOCKS if size <= length})

    def bytes_of(size: int) -> float:
        accesses = io_model.hbm_accesses("algorithm_1", length, dim, 4 * dim * size)
        return io_model.in_bytes(batch * heads * accesses, "bfloat16")

    return [
        {"block": size, "milliseconds": x.milliseconds, "failure": x.failure, "bytes": bytes_of(size)}
        for size, x in found.items()
    ]


def compiled_with(shape: tuple[int, int, int, int], size: int) -> passes.Program:
    """Compile the forward in plain JAX with another block size, which is a constant of its module."""
    attend = functools.partial(jax_flash.dot_product_attention, implementation="xla")
    with mock.patch.object(blockwise, "BLOCK", size):
        jax.clear_caches()  # otherwise a trace with the previous size is reused
        return passes.program(
            lambda q, k, v, lengths, key: attend(q, k, v), passes.FORWARD, passes.operands(shape, False, False)
        )

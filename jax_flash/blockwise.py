"""FlashAttention in plain JAX, tile by tile: `implementation="xla"`, and the derivatives of the fused calls.

These are Algorithms 2 and 4 of arXiv 2205.14135, with the outer loop over query blocks as in FlashAttention-2. O is
divided by ℓ at the end. The code runs on every platform, and JAX can differentiate it in any mode and order. The bodies
of the loops are rematerialised, so memory is O(N) in reverse mode as well. Arguments, results and conventions are those
of `reference.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import denominator, padding, reference, tile
from jax_flash.operands import DIFFERENTIATED, DIMS, OUTSIDE_SCORES, Operands
from jax_flash.problem import Problem
from jax_flash.varying import varying_alike

BLOCK = 256  # rows and columns of a tile, at most


def forward(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute O, ℓ and m with Algorithm 2. Arguments and results are as in `reference.forward`."""
    problem, operands = tile.with_contiguous_keys(problem, varying_alike(operands, operands))
    operands = tile.in_accumulation_dtype(problem, padding.without_padded_keys(operands))
    dtype = problem.accumulation_dtype
    batch, heads = problem.batch, problem.q_heads
    row_block, column_block = _block(problem.q_len), _block(problem.kv_len)

    @jax.checkpoint
    def block_row(row_arrays: dict[str, jax.Array], row_start: jax.Array) -> dict[str, jax.Array]:
        row_tile = operands.replaced(row_arrays)
        rows = _positions(row_start, row_block)
        column_blocks = _blocks(row_tile, _axes(operands, "S"), problem.kv_len)
        if problem.may_empty_rows:

            def add_block(any_visible: jax.Array, xs: tuple[dict[str, jax.Array], jax.Array]) -> tuple[jax.Array, None]:
                column_arrays, column_start = xs
                block, columns = row_tile.replaced(column_arrays), _positions(column_start, column_block)
                return any_visible | tile.may_attend(problem, block, rows, columns).any(-1), None

            none_visible = varying_alike(jnp.zeros((batch, heads, row_block), bool), operands)
            any_visible, _ = jax.lax.scan(add_block, none_visible, column_blocks)
            row_tile = row_tile._replace(query=padding.zero_rows(any_visible, row_tile.query))

        @jax.checkpoint
        def update(statistics, column_arrays: dict[str, jax.Array], column_start: jax.Array):
            block = row_tile.replaced(column_arrays)
            columns = _positions(column_start, column_block)

            def attend(o, l, m):
                s = tile.scores(problem, block, rows, columns).s
                m_new = jax.lax.stop_gradient(jnp.maximum(m, s.max(axis=-1)))
                rescale = tile.exp_minus(m, m_new)
                p = tile.exp_minus(s, m_new[..., None])
                l = rescale * l + p.sum(axis=-1)
                z = tile.kept(problem, block, rows, columns)
                pv = tile.weighted_values(problem, p if z is None else z * p, block.value)
                return rescale.mT[..., None] * o + pv, l, m_new

            visible = problem.mask.may_show(problem.lengths, block, rows, columns)
            if visible is None:
                return attend(*statistics)
            return jax.lax.cond(visible, attend, lambda *unchanged: unchanged, *statistics)

        start = (
            jnp.zeros((batch, row_block, heads, problem.v_dim), dtype),
            jnp.zeros((batch, heads, row_block), dtype),
            jnp.full((batch, heads, row_block), -jnp.inf, dtype),
        )
        (o, l, m), _ = jax.lax.scan(
            lambda statistics, xs: (update(statistics, *xs), None), varying_alike(start, operands), column_blocks
        )
        o = denominator.normalized(operands, o.swapaxes(1, 2), l, m).swapaxes(1, 2)
        live = padding.live_rows(problem, m)
        o = padding.zero_rows(live, o).astype(problem.result_dtype("o"))
        return {"o": o, "l": padding.zero_statistics(live, l), "m": m}

    row_blocks = _blocks(operands, _axes(operands, "T"), problem.q_len)
    results = _sum_or_join(block_row, row_blocks, {"o": 1, "l": 2, "m": 2}, problem.q_len)
    return results["o"], results["l"], results["m"]


def backward(
    problem: Problem,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Compute the requested gradients with Algorithm 4. Arguments and results are as in `reference.backward`."""
    given = (operands, o, l, m, do, dlogsumexp)
    operands, o, l, m, do, dlogsumexp = varying_alike(given, given)
    prepared = reference.prepare(problem, operands, o, l, m, do, dlogsumexp)
    row_block, column_block = _block(problem.q_len), _block(problem.kv_len)
    row_axes, column_axes = _axes(operands, "T"), _axes(operands, "S")

    def gradient_axes(axes: dict[str, int]) -> dict[str, int]:
        return {grad: axes[name] for grad, name in DIFFERENTIATED.items() if name in axes}

    @jax.checkpoint
    def block_row(row_arrays: dict[str, jax.Array], row_start: jax.Array) -> dict[str, jax.Array]:
        results = {name: row_arrays.pop(name) for name in ("l", "m", "do", "d")}
        row_tile = prepared.operands.replaced(row_arrays)
        rows = _positions(row_start, row_block)

        @jax.checkpoint
        def block(column_arrays: dict[str, jax.Array], column_start: jax.Array) -> dict[str, jax.Array]:
            block = row_tile.replaced(column_arrays)
            columns = _positions(column_start, column_block)

            def attend() -> dict[str, jax.Array]:
                return tile.gradients(problem, block, rows, columns, **results)

            def nothing() -> dict[str, jax.Array]:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(attend))
                return varying_alike(zeros, operands)

            visible = problem.mask.may_show(problem.lengths, block, rows, columns)
            return attend() if visible is None else jax.lax.cond(visible, attend, nothing)

        column_blocks = _blocks(row_tile, column_axes, problem.kv_len)
        return _sum_or_join(block, column_blocks, gradient_axes(column_axes), problem.kv_len)

    row_arrays, starts = _blocks(prepared.operands, row_axes, problem.q_len)
    for name, axis in (("l", 2), ("m", 2), ("do", 1), ("d", 2)):
        x = prepared.do if name == "do" else getattr(prepared.rows, name)
        row_arrays[name] = _split(x, axis, row_block)
    sums = _sum_or_join(block_row, (row_arrays, starts), gradient_axes(row_axes), problem.q_len)
    return reference.finish(problem, operands, m, sums | prepared.rows.gradients)


def tangent(
    problem: Problem, operands: Operands, moving: dict[str, jax.Array], o: jax.Array, l: jax.Array, m: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangents of O and ℓ.

    With Ṡ the tangent of the scores, and μ_i = Σ_j P_ij Ṡ_ij (a sink included), the tangent of O is
    (Z∘P∘Ṡ) V + (Z∘P) V̇ - μ∘O. It is linear in `moving`. m is a constant, so the tangent of the logsumexp is the tangent
    of ℓ divided by ℓ.

    Each tile takes five products. If the scores have a tangent, a sixth computes O again: a large μ multiplies the
    errors of P, which cancel only if O has the same errors.

    Args:
      operands: as in `reference.forward`.
      moving: the tangents of operands, by name. Other operands are constants and cost nothing.
      o, l, m: results of `forward`.
    """
    given = (operands, moving, o, l, m)
    operands, moving, o, l, m = varying_alike(given, given)
    live = padding.live_rows(problem, m)

    def prepared(operands: Operands) -> Operands:
        operands = tile.in_accumulation_dtype(problem, padding.without_padded_keys(operands))
        return operands._replace(query=padding.zero_rows(live, operands.query))

    along, operands = prepared(operands.replaced(moving)), prepared(operands)
    row_block, column_block = _block(problem.q_len), _block(problem.kv_len)
    row_axes, column_axes = _axes(operands, "T"), _axes(operands, "S")

    scores_move = not set(OUTSIDE_SCORES).issuperset(moving)

    def of_moving(along: Operands, axes: dict[str, int], block: int) -> dict[str, jax.Array]:
        return {name: _split(getattr(along, name), axis, block) for name, axis in axes.items() if name in moving}

    @jax.checkpoint
    def block_row(row_arrays, row_start: jax.Array, row_moving: dict[str, jax.Array], results: dict[str, jax.Array]):
        row_along = along.replaced(row_moving)
        row_moved = {name: x for name, x in row_along.arrays().items() if name in moving}
        row_tile, rows, m = operands.replaced(row_arrays), _positions(row_start, row_block), results["m"]

        @jax.checkpoint
        def update(sums: tile.Tangents, column_arrays, column_start: jax.Array, column_moving) -> tile.Tangents:
            block, columns = row_tile.replaced(column_arrays), _positions(column_start, column_block)
            block_along = row_along.replaced(column_moving).arrays()
            here = {name: block_along[name] for name in moving}

            def attend(sums: tile.Tangents) -> tile.Tangents:
                return tile.tangents(problem, block, here, rows, columns, m, sums)

            visible = problem.mask.may_show(problem.lengths, block, rows, columns)
            return attend(sums) if visible is None else jax.lax.cond(visible, attend, lambda sums: sums, sums)

        a = jnp.zeros((problem.batch, row_block, problem.q_heads, problem.v_dim), m.dtype)
        none = jnp.zeros_like(m)
        start = tile.Tangents(a, none, none, none, a if scores_move else None)
        column_blocks = (
            *_blocks(row_tile, column_axes, problem.kv_len),
            of_moving(row_along, column_axes, column_block),
        )
        sums, _ = jax.lax.scan(
            lambda sums, xs: (update(sums, *xs), None), varying_alike(start, operands), column_blocks
        )
        return dict(zip("ol", reference.finish_tangents(problem, operands, row_moved, sums, **results), strict=True))

    results = {name: _split(x, axis, row_block) for name, x, axis in (("o", o, 1), ("l", l, 2), ("m", m, 2))}
    row_blocks = (*_blocks(operands, row_axes, problem.q_len), of_moving(along, row_axes, row_block), results)
    tangents = _sum_or_join(block_row, row_blocks, {"o": 1, "l": 2}, problem.q_len)
    return tangents["o"], tangents["l"]


def _axes(operands: Operands, dim: str) -> dict[str, int]:
    """Return the operands that are divided into blocks of rows ("T") or columns ("S"), with the axis to divide."""
    axes = {name: 1 + DIMS[name].index(dim) for name in operands.arrays() if dim in DIMS[name]}
    return {name: axis for name, axis in axes.items() if getattr(operands, name).shape[axis] != 1}


def _block(size: int) -> int:
    """Return the block size for a length.

    All blocks are about equal. If there are several, their size is a multiple of 16, for the dropout mask. A symbolic
    length has blocks of `BLOCK`.
    """
    if not isinstance(size, int):
        return BLOCK
    if size <= BLOCK:
        return max(size, 1)
    blocks = -(-size // BLOCK)
    return -(-size // (blocks * tile.STEP)) * tile.STEP


def _blocks(operands: Operands, axes: dict[str, int], size: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the inputs of a scan over blocks of rows or columns: the operands in `axes`, split, and the positions of
    the first row or column of each block."""
    block = _block(size)
    arrays = {name: _split(getattr(operands, name), axis, block) for name, axis in axes.items()}
    return arrays, jnp.arange(-(-size // block), dtype=jnp.int32) * block


def _split(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Split an axis into blocks, and move the axis of blocks to the front. The last block is padded with zeros."""
    blocks = -(-x.shape[axis] // block)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, blocks * block - x.shape[axis])
    x = jnp.pad(x, padding).reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(blocks: jax.Array, axis: int, size: int) -> jax.Array:
    """Invert `_split`."""
    x = jnp.moveaxis(blocks, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, size, axis=axis)


def _sum_or_join(
    body: Callable[..., dict[str, jax.Array]], xs: tuple[Any, ...], axes: dict[str, int], size: int
) -> dict[str, jax.Array]:
    """Loop over the leading axis of `xs`. Concatenate the results in `axes` along their axis, and sum the others.

    The sums are outside of the rematerialised bodies, so their derivatives need no copy of the running sum.
    """
    results = jax.eval_shape(functools.partial(jax.lax.map, lambda x: body(*x)), xs)  # map, for the same varying axes
    start = {name: jnp.zeros(x.shape[1:], x.dtype) for name, x in results.items() if name not in axes}

    def step(sums, x):
        results = body(*x)
        sums = {name: x + results[name] for name, x in sums.items()}
        return sums, {name: x for name, x in results.items() if name in axes}

    sums, stacks = jax.lax.scan(step, varying_alike(start, xs), xs)
    return sums | {name: _join(x, axes[name], size) for name, x in stacks.items()}


def _positions(start: jax.Array, size: int) -> jax.Array:
    return start + jnp.arange(size, dtype=jnp.int32)

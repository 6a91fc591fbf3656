"""One tile of the attention matrix: its mask, S, P, and its contributions to gradients and tangents.

For `reference.py`, the whole matrix is one tile. `blockwise.py` loops over tiles. Formulas: docs/contract.md.

A tile has R rows and C columns. Its `Operands` contain only these rows and columns of each array. `rows` and `columns`
are their positions. Positions beyond the lengths are padding, which is masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import dropout
from jax_flash.operands import CAPTURED, DCAPTURED, DIFFERENTIATED, OUTSIDE_SCORES, Operands
from jax_flash.problem import Problem
from jax_flash.programs import entries, replay

STEP = dropout.TILE  # a tile's first row and column are multiples of it; so are the sizes of a block mask's blocks


def with_contiguous_keys(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return the problem and the operands with contiguous keys and values, if they are in pages."""
    if operands.key_pages is None or operands.value_pages is None or operands.page_table is None:
        return problem, operands
    table = operands.page_table.clip(0, problem.pages - 1)

    def gathered(pages: jax.Array) -> jax.Array:
        return pages[table].reshape(table.shape[0], problem.kv_len, *pages.shape[2:])

    keys = {"key": gathered(operands.key_pages), "value": gathered(operands.value_pages)}
    arrays = {
        name: x for name, x in operands.arrays().items() if name not in ("key_pages", "value_pages", "page_table")
    }
    return dataclasses.replace(problem, page=0, pages=0), Operands.of(arrays | keys)


def in_accumulation_dtype(problem: Problem, operands: Operands) -> Operands:
    """Return the operands with all differentiable arrays in the accumulation dtype.

    Call this before a loop over tiles. JAX sums the gradient of an array in the dtype of the array, so with a 16-bit
    array the contribution of each tile would be rounded. Programs still read numbers with the precision of the captured
    arrays' dtypes (`programs/replay.py`).
    """
    dtype = problem.accumulation_dtype
    floats = {*DIFFERENTIATED.values()} - {*CAPTURED}
    arrays = {name: x.astype(dtype) for name, x in operands.arrays().items() if name in floats}
    captured = {name: replay.widened(x, dtype) for name, x in operands.arrays().items() if name in CAPTURED}
    return operands.replaced(arrays | captured)


def may_attend(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return which entries are visible: bool [B|1, N|1, R, C].

    Args:
      problem: the whole problem.
      tile: its operands at these rows and columns.
      rows, columns: int32 [R] and [C], the positions in the call's own arrays.
    """
    return problem.mask.visible(problem.lengths, problem.captured, tile, rows, columns)


class Scores(NamedTuple):
    s: jax.Array  # [B, N, R, C], masked with -inf
    capped: jax.Array  # [B, N, R, C], after the soft cap
    biased: jax.Array  # [B, N, R, C], after the bias, before score_mod
    visible: jax.Array  # bool [B|1, N|1, R, C]; with a score_mod, entries with a bias of -inf are masked as well


def scores(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> Scores:
    """Compute S of a tile in the accumulation dtype: scale, cap, bias, score_mod, mask."""
    s = tile.scale * _rows_by_columns(problem, tile.query, tile.key)
    score = problem.score
    if score.logits_soft_cap:
        s = score.logits_soft_cap * jnp.tanh(s / score.logits_soft_cap)
    capped = s
    bias = None if tile.bias is None else tile.bias.astype(s.dtype)
    if bias is not None:
        s = s + bias
    biased, visible = s, may_attend(problem, tile, rows, columns)
    if score.score_mod is not None:
        if bias is not None:  # a bias of -inf masks the entry, whatever score_mod returns
            visible &= bias != -jnp.inf
        s = entries.evaluate(score.score_mod, problem.captured, tile, rows, columns, s, visible)
    return Scores(jnp.where(visible, s, -jnp.inf), capped, biased, visible)


def exp_minus(x: jax.Array, m: jax.Array) -> jax.Array:
    """Return exp(x - m) for x <= m. If m = -inf, because no entry is visible yet, return 0 with finite derivatives.

    XLA may fuse scale·qk - m and round it once, although m is the maximum of the rounded scale·qk. For large scores,
    the result may then differ a lot from x - m. The minimum below, which is 0 up to rounding, prevents this fusion.
    """
    m = jnp.where(m == -jnp.inf, 0, m)
    return jnp.exp(x + jax.lax.stop_gradient(jnp.minimum(m - x, 0)) - m)


def divide(x: jax.Array, l: jax.Array) -> jax.Array:
    """Return x / l, and x where l = 0. Such a row sees no key, so its x is 0 as well."""
    return x / jnp.where(l == 0, 1, l)


def kept(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """Return Z of a tile, [B, N, R, C]: keep_scale for kept entries, 0 for dropped entries. Without dropout: None.

    The first row and the first column must be multiples of `STEP`.
    """
    if not problem.drop_threshold:
        return None
    assert tile.seed is not None and tile.batch_id is not None and tile.head_id is not None
    start = [x[0] if x.size else 0 for x in (rows, columns)]
    if tile.row_tiles is not None and tile.key_tiles is not None:
        tiles = [table[at[::STEP] // STEP] for table, at in ((tile.row_tiles, rows), (tile.key_tiles, columns))]
        keep = dropout.keep_mask_of_tiles(problem.drop_threshold, tile.seed, tile.batch_id, tile.head_id, *tiles)
        keep = keep[:, :, : rows.shape[0], : columns.shape[0]]
        return keep.astype(problem.accumulation_dtype) * dropout.keep_scale(problem.drop_threshold)
    if tile.origin is not None:
        start = [x + first for x, first in zip(start, tile.origin, strict=True)]
    shape = (rows.shape[0], columns.shape[0])
    keep = dropout.keep_mask(problem.drop_threshold, tile.seed, tile.batch_id, tile.head_id, shape, *start)
    return keep.astype(problem.accumulation_dtype) * dropout.keep_scale(problem.drop_threshold)


def weighted_values(problem: Problem, p: jax.Array, value: jax.Array) -> jax.Array:
    """Compute P V of a tile: [B, N, R, C] and [B, C, K, E] -> [B, R, N, E] in the accumulation dtype."""
    product = _einsum(problem, "bkgrc,bcke->brkge", _group(problem, p, 1), value)
    return product.reshape(*product.shape[:2], problem.q_heads, product.shape[-1])


class Tangents(NamedTuple):
    """Sums over columns that the tangents of a row consist of, with P not divided by l yet."""

    a: jax.Array  # [B, R, N, E]: Σ Z P (Ṡ - r) V + Σ Z P V̇
    mu: jax.Array  # [B, N, R]: Σ P (Ṡ - r)
    reference: jax.Array  # [B, N, R]: r, a number near Ṡ
    weight: jax.Array  # [B, N, R]: Σ P, and 0 if the scores do not move
    o: jax.Array | None  # [B, R, N, E]: Σ Z P V, and None if the scores do not move


def tangents(
    problem: Problem,
    tile: Operands,
    moving: Mapping[str, jax.Array],
    rows: jax.Array,
    columns: jax.Array,
    m: jax.Array,
    sums: Tangents,
) -> Tangents:
    """Add a tile to the sums that the tangents of O and the logsumexp consist of.

    O does not change if a number is added to all Ṡ of a row. So a reference is subtracted. Without it, a large but
    nearly constant Ṡ would leave the difference of large numbers. The reference is the mean of Ṡ over 64 or more
    columns of the first tile in which P is not 0. A mean over all of 256 columns takes as long as half of a product.

    Args:
      tile, rows, columns: as in `may_attend`.
      moving: tangents of operands at these rows and columns, by name.
      m: [B, N, R], the maximum of the scores.
      sums: the sums over the tiles before.
    """

    def scored(moved: Mapping[str, jax.Array]) -> jax.Array:
        return scores(problem, tile.replaced(moved), rows, columns).s

    z = kept(problem, tile, rows, columns)
    along = {name: x for name, x in moving.items() if name not in OUTSIDE_SCORES}
    at = {name: x for name, x in tile.arrays().items() if name in along}
    a, mu, reference, weight, o = sums
    s, ds = jax.jvp(scored, (at,), (along,)) if along else (scored({}), None)
    p = exp_minus(s, m[..., None])
    zp = p if z is None else z * p
    if ds is not None and o is not None:
        step = max(len(columns) // 64, 1)
        some_p, some_ds = (jax.lax.stop_gradient(x[..., ::step]) for x in (p, ds))
        mean = divide((some_p * some_ds).sum(-1), some_p.sum(-1))
        reference = jnp.where(weight == 0, mean, reference)
        dp = p * (ds - reference[..., None])
        mu += dp.sum(-1)
        weight += p.sum(-1)
        a += weighted_values(problem, dp if z is None else z * dp, tile.value)
        o += weighted_values(problem, zp, tile.value)
    if "value" in moving:
        a += weighted_values(problem, zp, moving["value"])
    return Tangents(a, mu, reference, weight, o)


def gradients(
    problem: Problem,
    tile: Operands,
    rows: jax.Array,
    columns: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    d: jax.Array,
) -> dict[str, jax.Array]:
    """Compute the gradients of a tile: Algorithm 4, lines 11 to 22. (Algorithm 3, if the tile is the whole matrix.)

    Args:
      l, m: [B, N, R], the statistics of the forward.
      do: [B, R, N, E], the cotangent of O.
      d: [B, N, R], D of docs/contract.md.

    Returns:
      The requested gradients by name, in the accumulation dtype: dq [B, R, N, D], dk [B, C, K, D], dv [B, C, K, E].
      dbias and the gradients of captured arrays have the shapes of these arrays, summed over broadcast dims.
    """
    s, capped, biased, visible = scores(problem, tile, rows, columns)
    p = divide(exp_minus(s, m[..., None]), l[..., None])
    z = kept(problem, tile, rows, columns)

    gradients = {}
    if "dv" in problem.requested:
        zp = p if z is None else z * p
        gradients["dv"] = _einsum(problem, "bkgrc,brkge->bcke", _group(problem, zp, 1), _group(problem, do, 2))
    if problem.gradients in ((), ("dv",)):
        return gradients

    dp = _rows_by_columns(problem, do, tile.value)
    ds = p * ((dp if z is None else z * dp) - d[..., None])
    if problem.may_empty_rows:  # P is 0, but the product of its derivative and a cotangent of padding may be NaN
        ds = jnp.where(visible & (m != -jnp.inf)[..., None], ds, 0)
    if problem.score.score_mod is not None:
        ds, dcaptured = _through_program(problem, tile, biased, visible, ds, rows, columns)
        gradients |= dcaptured
    if "dbias" in problem.requested:
        assert tile.bias is not None
        summed = tuple(axis for axis in range(4) if tile.bias.shape[axis] != ds.shape[axis])
        gradients["dbias"] = ds.sum(summed, keepdims=True)

    cap = problem.score.logits_soft_cap
    dx = tile.scale * (ds * (1 - (capped / cap) ** 2) if cap else ds)
    if "dq" in problem.requested:
        dq = _einsum(problem, "bkgrc,bckd->brkgd", _group(problem, dx, 1), tile.key)
        gradients["dq"] = dq.reshape(tile.query.shape)
    if "dk" in problem.requested:
        gradients["dk"] = _einsum(problem, "bkgrc,brkgd->bckd", _group(problem, dx, 1), _group(problem, tile.query, 2))
    return gradients


def _through_program(
    problem: Problem,
    tile: Operands,
    s: jax.Array,
    visible: jax.Array,
    ds: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Differentiate score_mod. Return the cotangent of its scores, and the requested gradients of captured arrays."""
    requested = [i for i, x in enumerate(problem.captured) if x.gradient]

    def scores(s: jax.Array, differentiated: list[jax.Array]) -> jax.Array:
        captured = list(tile.captured)
        for i, x in zip(requested, differentiated, strict=True):
            captured[i] = x
        assert problem.score.score_mod is not None
        with_captured = tile._replace(captured=tuple(captured))
        return entries.evaluate(problem.score.score_mod, problem.captured, with_captured, rows, columns, s, visible)

    _, vjp = jax.vjp(scores, s, [tile.captured[i] for i in requested])
    ds, dcaptured = vjp(jnp.where(visible, ds, 0))  # dS is 0 elsewhere, but its derivative may be infinite
    return ds, {DCAPTURED[i]: x.astype(ds.dtype) for i, x in zip(requested, dcaptured, strict=True)}


def _rows_by_columns(problem: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply the rows of each query head by the keys of its head: [B, R, N, D] and [B, C, K, D] -> [B, N, R, C]."""
    product = _einsum(problem, "brkgd,bckd->bkgrc", _group(problem, a, 2), b)
    return product.reshape(product.shape[0], problem.q_heads, *product.shape[3:])


def _group(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    """Split the axis of the N query heads into [K, N / K]. The last axis has the heads that share a key/value head."""
    groups = (problem.kv_heads, problem.q_heads // problem.kv_heads)
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])


def _einsum(problem: Problem, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = problem.accumulation_dtype
    precision = jax.lax.Precision.HIGHEST if problem.full_precision else None
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=precision)

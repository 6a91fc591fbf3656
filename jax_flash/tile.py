"""One tile of the attention matrix: which entries may attend, S, P, and the tile's part of the gradients.

`reference.py` takes the whole matrix as one tile, `blockwise.py` goes tile by tile. Formulas: docs/architecture.md.

A tile is R rows by C columns. Its `Operands` hold just those rows and columns of every array; positions come from
`rows` and `columns`, which may go past the ends (padding): nothing is attended to there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import dropout
from jax_flash.operands import CAPTURED, DCAPTURED, DIFFERENTIATED, Operands
from jax_flash.problem import Problem
from jax_flash.programs import entries, replay

STEP = dropout.TILE  # a tile's first row and column are multiples of it; so are the sizes of a block mask's blocks


def with_contiguous_keys(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The same with the keys and values of each batch entry one after the other, if they are in pages."""
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
    """Return the operands with the arrays that scores and sums are made of in the accumulation dtype.

    This is done once, before they are divided into tiles. JAX sums the gradient of an array in the dtype of the array,
    so the tiles' parts of a 16-bit array's gradient would be rounded one by one. Programs still get the numbers of the
    captured arrays' own dtypes (`programs/replay.py`).
    """
    dtype = problem.accumulation_dtype
    floats = {*DIFFERENTIATED.values()} - {*CAPTURED}
    arrays = {name: x.astype(dtype) for name, x in operands.arrays().items() if name in floats}
    captured = {name: replay.widened(x, dtype) for name, x in operands.arrays().items() if name in CAPTURED}
    return operands.replaced(arrays | captured)


def may_attend(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Which entries may attend: bool [B|1, N|1, R, C].

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
    seen: jax.Array  # bool [B|1, N|1, R, C]: which may attend, and with a score_mod have no bias of -inf


def scores(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> Scores:
    """S of a tile in the accumulation dtype: scaled, capped, biased, as score_mod has it, masked."""
    s = tile.scale * _rows_by_columns(problem, tile.query, tile.key)
    score = problem.score
    if score.logits_soft_cap:
        s = score.logits_soft_cap * jnp.tanh(s / score.logits_soft_cap)
    capped = s
    bias = None if tile.bias is None else tile.bias.astype(s.dtype)
    if bias is not None:
        s = s + bias
    biased, seen = s, may_attend(problem, tile, rows, columns)
    if score.score_mod is not None:
        if bias is not None:  # a bias of -inf masks, whatever score_mod makes of it
            seen &= bias != -jnp.inf
        s = entries.evaluate(score.score_mod, problem.captured, tile, rows, columns, s, seen)
    return Scores(jnp.where(seen, s, -jnp.inf), capped, biased, seen)


def exp_minus(x: jax.Array, m: jax.Array) -> jax.Array:
    """exp(x - m) for x <= m, and 0 where m = -inf (a row with nothing to attend to yet), with finite derivatives there.

    XLA may round scale·qk - m once, where m is the maximum of scale·qk rounded: of large scores the difference can be
    far from that of m and x. A minimum in between, which changes x by rounding at most, keeps it from that.
    """
    m = jnp.where(m == -jnp.inf, 0, m)
    return jnp.exp(x + jax.lax.stop_gradient(jnp.minimum(m - x, 0)) - m)


def divide(x: jax.Array, l: jax.Array) -> jax.Array:
    """x / l, and x where l = 0 (then x is 0 too: a row with nothing to attend to)."""
    return x / jnp.where(l == 0, 1, l)


class WithSink(NamedTuple):
    """The statistics of rows, [B, N, R], with the sink as one score more: P = exp(s - m) / l."""

    l: jax.Array
    m: jax.Array
    alpha: jax.Array  # exp(m without the sink - m)
    sink: jax.Array  # exp(z - m)


def with_sinks(sinks: jax.Array, l: jax.Array, m: jax.Array) -> WithSink:
    """Of ℓ and m without it. They stay what they are, and the sink is 0, where there is nothing to attend to.

    The new m is a constant to derivatives, as that of the scores is.
    """
    z = jnp.where(m == -jnp.inf, m, sinks[..., 0])
    with_sink = jax.lax.stop_gradient(jnp.maximum(m, z))
    alpha, sink = exp_minus(m, with_sink), exp_minus(z, with_sink)
    return WithSink(alpha * l + sink, with_sink, alpha, sink)


def kept(problem: Problem, tile: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """Z of a tile, [B, N, R, C]: keep_scale where an entry is kept, 0 where dropped; None without dropout.

    The first row and the first column must be multiples of `STEP`.
    """
    if not problem.drop_threshold:
        return None
    assert tile.seed is not None and tile.batch_id is not None and tile.head_id is not None
    start = [x[0] if x.size else 0 for x in (rows, columns)]
    if tile.origin is not None:
        start = [x + first for x, first in zip(start, tile.origin, strict=True)]
    shape = (rows.shape[0], columns.shape[0])
    keep = dropout.keep_mask(problem.drop_threshold, tile.seed, tile.batch_id, tile.head_id, shape, *start)
    return keep.astype(problem.accumulation_dtype) * dropout.keep_scale(problem.drop_threshold)


def weighted_values(problem: Problem, p: jax.Array, value: jax.Array) -> jax.Array:
    """P V of a tile: [B, N, R, C] and [B, C, K, E] -> [B, R, N, E] in the accumulation dtype."""
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
    along = {name: x for name, x in moving.items() if name not in ("value", "sinks")}
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
    """The gradients of a tile: Algorithm 4, lines 11 to 22 (Algorithm 3 where the tile is the whole matrix).

    Args:
      l, m: [B, N, R], the statistics of the forward.
      do: [B, R, N, E], the cotangent of O.
      d: [B, N, R], D of docs/architecture.md.

    Returns:
      Those asked for, by name, in the accumulation dtype: dq [B, R, N, D], dk [B, C, K, D], dv [B, C, K, E]; dbias and
      those of captured arrays as these are, summed over what shares them.
    """
    s, capped, biased, seen = scores(problem, tile, rows, columns)
    p = divide(exp_minus(s, m[..., None]), l[..., None])
    z = kept(problem, tile, rows, columns)

    gradients = {}
    if problem.dv:
        zp = p if z is None else z * p
        gradients["dv"] = _einsum(problem, "bkgrc,brkge->bcke", _group(problem, zp, 1), _group(problem, do, 2))
    if problem.gradients in ((), ("dv",)):
        return gradients

    dp = _rows_by_columns(problem, do, tile.value)
    ds = p * ((dp if z is None else z * dp) - d[..., None])
    if problem.may_empty_rows:  # P is 0, but not its derivative times a cotangent of padding
        ds = jnp.where(seen & (m != -jnp.inf)[..., None], ds, 0)
    if problem.score.score_mod is not None:
        ds, dcaptured = _through_program(problem, tile, biased, seen, ds, rows, columns)
        gradients |= dcaptured
    if problem.dbias:
        assert tile.bias is not None
        summed = tuple(axis for axis in range(4) if tile.bias.shape[axis] != ds.shape[axis])
        gradients["dbias"] = ds.sum(summed, keepdims=True)

    cap = problem.score.logits_soft_cap
    dx = tile.scale * (ds * (1 - (capped / cap) ** 2) if cap else ds)
    if problem.dq:
        dq = _einsum(problem, "bkgrc,bckd->brkgd", _group(problem, dx, 1), tile.key)
        gradients["dq"] = dq.reshape(tile.query.shape)
    if problem.dk:
        gradients["dk"] = _einsum(problem, "bkgrc,brkgd->bckd", _group(problem, dx, 1), _group(problem, tile.query, 2))
    return gradients


def _through_program(
    problem: Problem,
    tile: Operands,
    s: jax.Array,
    seen: jax.Array,
    ds: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The cotangent of what score_mod gets, and the gradients of captured arrays that are asked for, from dS."""
    asked = [i for i, x in enumerate(problem.captured) if x.gradient]

    def scores(s: jax.Array, asked_for: list[jax.Array]) -> jax.Array:
        captured = list(tile.captured)
        for i, x in zip(asked, asked_for, strict=True):
            captured[i] = x
        assert problem.score.score_mod is not None
        with_captured = tile._replace(captured=tuple(captured))
        return entries.evaluate(problem.score.score_mod, problem.captured, with_captured, rows, columns, s, seen)

    _, vjp = jax.vjp(scores, s, [tile.captured[i] for i in asked])
    ds, dcaptured = vjp(jnp.where(seen, ds, 0))  # it is 0 elsewhere, but its own derivative may be infinite
    return ds, {DCAPTURED[i]: x.astype(ds.dtype) for i, x in zip(asked, dcaptured, strict=True)}


def _rows_by_columns(problem: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """Each query head's rows times its key/value head's columns: [B, R, N, D] and [B, C, K, D] -> [B, N, R, C]."""
    product = _einsum(problem, "brkgd,bckd->bkgrc", _group(problem, a, 2), b)
    return product.reshape(product.shape[0], problem.q_heads, *product.shape[3:])


def _group(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    """Splits the axis of the N query heads in [K, N / K]: heads that share a key/value head."""
    groups = (problem.kv_heads, problem.q_heads // problem.kv_heads)
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])


def _einsum(problem: Problem, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = problem.accumulation_dtype
    precision = jax.lax.Precision.HIGHEST if problem.full_precision else None
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=precision)

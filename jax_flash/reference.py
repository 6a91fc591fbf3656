"""Standard attention with the matrix in memory: the oracle of every test, and `implementation="reference"`.

Algorithms 0 and 3 of arXiv 2205.14135 (appendix B), with masking and dropout as in B.3 and B.4. All computations use
the accumulation dtype. docs/contract.md has the exact formulas, including fully masked rows. JAX can differentiate
both functions in any mode and order. m has no gradient, and m + log ℓ has its gradient through ℓ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import denominator, padding, tile
from jax_flash.operands import DIFFERENTIATED, Operands
from jax_flash.problem import Problem


def forward(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute O, ℓ and m with Algorithm 0.

    Returns:
      o: [B, T, N, E] in the problem's dtype.
      l, m: [B, N, T] in the accumulation dtype.
    """
    problem, operands = tile.with_contiguous_keys(problem, operands)
    rows, columns = _positions(problem)
    operands = tile.in_accumulation_dtype(problem, padding.without_padded_keys(operands))
    if problem.may_empty_rows:
        any_visible = tile.may_attend(problem, operands, rows, columns).any(-1)
        operands = operands._replace(query=padding.zero_rows(any_visible, operands.query))
    s = tile.scores(problem, operands, rows, columns).s
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    p = tile.exp_minus(s, m[..., None])
    l = p.sum(axis=-1)
    p = denominator.normalized(operands, p, l, m)
    z = tile.kept(problem, operands, rows, columns)
    o = tile.weighted_values(problem, p if z is None else z * p, operands.value)
    live = padding.live_rows(problem, m)
    return padding.zero_rows(live, o).astype(problem.result_dtype("o")), padding.zero_statistics(live, l), m


def backward(
    problem: Problem,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Compute the requested gradients, in the order of `problem.gradients`, with Algorithm 3.

    Args:
      o, l, m: results of `forward`.
      do: [B, T, N, E], the cotangent of O.
      dlogsumexp: [B, N, T], the cotangent of m + log ℓ, or None for zero.

    Returns:
      The shapes of the operands, in the dtypes of `Problem.result_dtype`.
    """
    given = prepare(problem, operands, o, l, m, do, dlogsumexp)
    rows = given.rows
    gradients = tile.gradients(problem, given.operands, *_positions(problem), rows.l, rows.m, given.do, rows.d)
    return finish(problem, operands, m, gradients | rows.gradients)


class Prepared(NamedTuple):
    operands: Operands  # with zeros for padding
    do: jax.Array
    rows: denominator.Backward


def prepare(
    problem: Problem,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None,
) -> Prepared:
    """Prepare the inputs of the gradients in the accumulation dtype: D_i = dO_i · O_i - dlogsumexp_i (equation 4)."""
    dtype = problem.accumulation_dtype
    live = padding.live_rows(problem, m)
    operands = tile.in_accumulation_dtype(problem, padding.without_padded_keys(operands))
    operands = operands._replace(query=padding.zero_rows(live, operands.query))
    do = padding.zero_rows(live, do.astype(dtype))
    if dlogsumexp is not None:
        dlogsumexp = padding.zero_statistics(live, dlogsumexp)
    d = jnp.sum(do.astype(dtype) * o.astype(dtype), axis=-1).transpose(0, 2, 1)
    return Prepared(operands, do, denominator.backward(problem, operands, l, m, d, dlogsumexp))


def finish(
    problem: Problem, operands: Operands, m: jax.Array, gradients: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """Return the requested gradients in order, in the dtypes of the custom call's results, with zeros for padding.

    So cotangents of the gradients of padding do not reach second derivatives.
    """

    def finished(name: str) -> jax.Array:
        match name:
            case "dq":
                x = padding.zero_rows(padding.live_rows(problem, m), gradients[name])
            case "dk" | "dv":
                x = padding.zero_keys(operands.key_value_seq_lengths, gradients[name])
            case _:
                x = gradients[name]
        return x.astype(problem.result_dtype(name))

    return tuple(finished(name) for name in DIFFERENTIATED if name in gradients)


def finish_tangents(
    problem: Problem,
    operands: Operands,
    moving: Mapping[str, jax.Array],
    sums: tile.Tangents,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the tangents of O and ℓ from the sums over all columns: Ȯ = A - μ∘O."""
    weight = l if sums.o is None else sums.weight  # so P has the same rounding errors in all sums
    dlogsumexp = tile.divide(sums.mu, weight) + sums.reference
    share, mu = denominator.tangents(operands, moving, sums, weight, m)  # share: the factor from exp(s - m) to P

    def by_row(x: jax.Array) -> jax.Array:
        return x.mT[..., None]

    o = o.astype(l.dtype) if sums.o is None else by_row(share) * sums.o
    live = padding.live_rows(problem, m)
    do = padding.zero_rows(live, by_row(share) * sums.a - by_row(mu) * o)
    return do.astype(problem.result_dtype("o")), padding.zero_statistics(live, l * dlogsumexp)


def _positions(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(problem.q_len, dtype=jnp.int32), jnp.arange(problem.kv_len, dtype=jnp.int32)

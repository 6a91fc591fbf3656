"""Standard attention with the matrix in memory: the oracle of every test, and `implementation="reference"`.

Algorithms 0 and 3 of arXiv 2205.14135 (appendix B), with masking and dropout as in B.3 and B.4. All computations use
the accumulation dtype. docs/architecture.md has the exact formulas, including fully masked rows. JAX can differentiate
both functions in any mode and order. m has no gradient, and m + log ℓ has its gradient through ℓ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import padding, tile
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
    p = normalized(operands.sinks, p, l, m)
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
    gradients = tile.gradients(problem, given.operands, *_positions(problem), given.l, given.m, given.do, given.d)
    return finish(problem, operands, m, gradients | given.gradients)


def normalized(sinks: jax.Array | None, x: jax.Array, l: jax.Array, m: jax.Array) -> jax.Array:
    """Divide rows of P or O, [B, N, R, ...], relative to the maxima m, by the denominators of their softmax."""
    if sinks is None:
        return tile.divide(x, l[..., None])
    sums = tile.with_sinks(sinks, l, m)
    return tile.divide(sums.alpha[..., None] * x, sums.l[..., None])


class Prepared(NamedTuple):
    operands: Operands  # with zeros for padding
    do: jax.Array
    l: jax.Array  # [B, N, T]; P = exp(s - m) / l, with or without a sink
    m: jax.Array
    d: jax.Array  # [B, N, T], D of docs/architecture.md
    gradients: dict[str, jax.Array]  # dsinks, if it is requested


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
    if operands.sinks is None:
        return Prepared(operands, do, l, m, d if dlogsumexp is None else d - dlogsumexp, {})
    sums = tile.with_sinks(operands.sinks, l, m)
    gradients = {}
    if problem.dsinks:
        gradients["dsinks"] = summed_over_rows(-tile.divide(sums.sink, sums.l) * d, operands.sinks)
    if dlogsumexp is not None:
        # The logsumexp does not include the sink, so its derivative is P times the ratio of the denominators with and
        # without the sink. If this ratio overflows, all P are 0.
        least = 2.0**-900 if dtype == "float64" else 2.0**-115
        d -= dlogsumexp * tile.divide(sums.l, l * jnp.maximum(sums.alpha, least))
    return Prepared(operands, do, sums.l, sums.m, d, gradients)


def summed_over_rows(x: jax.Array, sinks: jax.Array) -> jax.Array:
    """Sum the contributions of the rows, [B, N, T], to the gradient of the sinks."""
    axes = (0, 2) if sinks.shape[0] == 1 else (2,)
    return x.sum(axes).reshape(sinks.shape)


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
    sinks: jax.Array | None,
    dsinks: jax.Array | None,
    sums: tile.Tangents,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the tangents of O and ℓ from the sums over all columns: Ȯ = A - μ∘O.

    Like the logsumexp, the sums do not include a sink. A sink adds a term to μ, and decreases P.
    """
    weight = l if sums.o is None else sums.weight  # so P has the same rounding errors in all sums
    mu = tile.divide(sums.mu, weight)
    dlogsumexp = mu + sums.reference
    share = tile.divide(jnp.ones_like(l), weight)  # the factor from exp(s - m) to P
    if sinks is not None:
        with_sink = tile.with_sinks(sinks, weight, m)
        share = tile.divide(with_sink.alpha, with_sink.l)
        moved = -sums.reference if dsinks is None else dsinks[..., 0] - sums.reference
        mu = share * sums.mu + tile.divide(with_sink.sink, with_sink.l) * moved

    def by_row(x: jax.Array) -> jax.Array:
        return x.mT[..., None]

    o = o.astype(l.dtype) if sums.o is None else by_row(share) * sums.o
    live = padding.live_rows(problem, m)
    do = padding.zero_rows(live, by_row(share) * sums.a - by_row(mu) * o)
    return do.astype(problem.result_dtype("o")), padding.zero_statistics(live, l * dlogsumexp)


def _positions(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(problem.q_len, dtype=jnp.int32), jnp.arange(problem.kv_len, dtype=jnp.int32)

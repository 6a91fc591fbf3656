"""The denominator of a row's softmax: ℓ, and one more term if the row has a sink.

A sink z is a logit without a value. ℓ and m, and so the logsumexp, do not include it: it joins when O is divided, and
when the backward computes P. Formulas: docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import tile
from jax_flash.operands import Operands
from jax_flash.problem import Problem


class _WithSink(NamedTuple):
    """The statistics of rows, [B, N, R], with the sink as an additional score: P = exp(s - m) / l."""

    l: jax.Array
    m: jax.Array
    alpha: jax.Array  # exp(m without the sink - m)
    sink: jax.Array  # exp(z - m)


def _with_sink(sinks: jax.Array, l: jax.Array, m: jax.Array) -> _WithSink:
    """Add the sinks to the statistics ℓ and m of the scores.

    If a row sees no key, its statistics stay the same, and its sink counts as 0. The new m is a constant in
    derivatives, like the m of the scores.
    """
    z = jnp.where(m == -jnp.inf, m, sinks[..., 0])
    largest = jax.lax.stop_gradient(jnp.maximum(m, z))
    alpha, sink = tile.exp_minus(m, largest), tile.exp_minus(z, largest)
    return _WithSink(alpha * l + sink, largest, alpha, sink)


def normalized(operands: Operands, x: jax.Array, l: jax.Array, m: jax.Array) -> jax.Array:
    """Divide rows of P or O, [B, N, R, ...], relative to the maxima m, by the denominators of their softmax."""
    if operands.sinks is None:
        return tile.divide(x, l[..., None])
    sums = _with_sink(operands.sinks, l, m)
    return tile.divide(sums.alpha[..., None] * x, sums.l[..., None])


class Backward(NamedTuple):
    """The statistics of rows in the backward, [B, N, R]."""

    l: jax.Array  # P = exp(s - m) / l
    m: jax.Array
    d: jax.Array  # D of docs/contract.md
    gradients: dict[str, jax.Array]  # dsinks, if it is requested


def backward(
    problem: Problem, operands: Operands, l: jax.Array, m: jax.Array, d: jax.Array, dlogsumexp: jax.Array | None
) -> Backward:
    """Return the statistics of rows in the backward.

    Args:
      l, m: results of the forward.
      d: dO · O.
      dlogsumexp: the cotangent of m + log ℓ, or None for zero.
    """
    if operands.sinks is None:
        return Backward(l, m, d if dlogsumexp is None else d - dlogsumexp, {})
    sums = _with_sink(operands.sinks, l, m)
    gradients = {}
    if "dsinks" in problem.requested:
        gradients["dsinks"] = summed_over_rows(-tile.divide(sums.sink, sums.l) * d, operands.sinks)
    if dlogsumexp is not None:
        # The logsumexp does not include the sink, so its derivative is P times the ratio of the denominators with and
        # without the sink. If this ratio overflows, all P are 0.
        least = 2.0**-900 if l.dtype == "float64" else 2.0**-115
        d -= dlogsumexp * tile.divide(sums.l, l * jnp.maximum(sums.alpha, least))
    return Backward(sums.l, sums.m, d, gradients)


def summed_over_rows(x: jax.Array, operand: jax.Array) -> jax.Array:
    """Sum the contributions of the rows, [B, N, T], to the gradient of an operand [B|1, N, 1, 1]."""
    axes = (0, 2) if operand.shape[0] == 1 else (2,)
    return x.sum(axes).reshape(operand.shape)


def tangents(
    operands: Operands, moving: Mapping[str, jax.Array], sums: tile.Tangents, weight: jax.Array, m: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the factor from exp(s - m) to P, and μ, of each row.

    Like the logsumexp, the sums do not include a sink. A sink adds a term to μ, and decreases P.

    Args:
      moving: the tangents of operands, by name.
      weight: Σ P, with the rounding errors of the other sums.
    """
    if operands.sinks is None:
        return tile.divide(jnp.ones_like(weight), weight), tile.divide(sums.mu, weight)
    joined = _with_sink(operands.sinks, weight, m)
    share = tile.divide(joined.alpha, joined.l)
    moved = moving["sinks"][..., 0] - sums.reference if "sinks" in moving else -sums.reference
    return share, share * sums.mu + tile.divide(joined.sink, joined.l) * moved

"""Standard attention with the matrix in memory: the oracle of every test, and `implementation="reference"`.

Algorithms 0 and 3 of arXiv 2205.14135 (appendix B), with masking and dropout as in B.3 and B.4, in the accumulation
dtype throughout. Exact formulas, also for rows with nothing to attend to: docs/architecture.md. Both functions can be
differentiated by JAX, in any mode and order; m carries no gradient, so that m + log ℓ has the right one through ℓ.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash import tile
from jax_flash.problem import DIFFERENTIATED, Operands, Problem


def forward(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """O, ℓ and m: Algorithm 0.

    Returns:
      o: [B, T, N, E] in the problem's dtype.
      l, m: [B, N, T] in the accumulation dtype.
    """
    rows, columns = _positions(problem)
    s = tile.scores(problem, operands, rows, columns).s
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    p = tile.exp_minus(s, m[..., None])
    l = p.sum(axis=-1)
    p = tile.divide(p, l[..., None])
    z = tile.kept(problem, operands, rows, columns)
    o = tile.weighted_values(problem, p if z is None else z * p, operands.value)
    return o.astype(operands.query.dtype), l, m


def backward(
    problem: Problem,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """The gradients that the problem asks for, in the order of its `gradients`: Algorithm 3.

    Args:
      o, l, m: what `forward` returned.
      do: [B, T, N, E], the cotangent of O.
      dlogsumexp: [B, N, T], the cotangent of m + log ℓ, or None for zero.

    Returns:
      dq, dk, dv: shape and dtype of the operand; the others: shape of the operand, accumulation dtype.
    """
    d = row_products(problem, o, do, dlogsumexp)
    gradients = tile.gradients(problem, operands, *_positions(problem), l, m, do, d)
    return finish(operands, gradients)


def row_products(problem: Problem, o: jax.Array, do: jax.Array, dlogsumexp: jax.Array | None) -> jax.Array:
    """D_i = dO_i · O_i - dlogsumexp_i (equation 4): [B, N, T] in the accumulation dtype."""
    dtype = problem.accumulation_dtype
    d = jnp.sum(do.astype(dtype) * o.astype(dtype), axis=-1).transpose(0, 2, 1)
    return d if dlogsumexp is None else d - dlogsumexp


def finish(operands: Operands, gradients: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The gradients asked for, in their order, those of query, key and value in the dtype of the operand."""
    dtypes = {"dq": operands.query.dtype, "dk": operands.key.dtype, "dv": operands.value.dtype}
    names = [name for name in DIFFERENTIATED if name in gradients]
    return tuple(gradients[name].astype(dtypes.get(name, gradients[name].dtype)) for name in names)


def _positions(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(problem.q_len, dtype=jnp.int32), jnp.arange(problem.kv_len, dtype=jnp.int32)

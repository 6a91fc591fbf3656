"""Padding in plain JAX: tokens that must not affect any result, forward or backward.

Padding is the keys beyond `key_value_seq_lengths`, and the rows that have nothing to attend to. Both may hold NaN or
inf, and 0 times NaN is NaN. So selections replace padding by zeros before each product. A selection stops cotangents as
well as values: derivatives of any order are safe.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.operands import Operands
from jax_flash.problem import Problem


def live_rows(problem: Problem, m: jax.Array) -> jax.Array | None:
    """Return which rows have something to attend to, bool [B, N, R]; None: all of them."""
    return m != -jnp.inf if problem.may_empty_rows else None


def zero_rows(live: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x, [B, R, N, D], with zeros for the rows that are not live: bool [B, N, R]; None: all rows are live."""
    return x if live is None else jnp.where(live.mT[..., None], x, 0)


def zero_statistics(live: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x, [B, N, R], with zeros for the rows that are not live."""
    return x if live is None else jnp.where(live, x, 0)


def zero_keys(lengths: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x, [B, S, K, D], with zeros beyond the lengths: int32 [B]; None: all keys are there."""
    if lengths is None:
        return x
    there = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(there[..., None, None], x, 0)


def without_padded_keys(operands: Operands) -> Operands:
    """Return the operands with zeros for keys and values beyond their lengths."""
    key, value = (zero_keys(operands.key_value_seq_lengths, x) for x in (operands.key, operands.value))
    return operands._replace(key=key, value=value)

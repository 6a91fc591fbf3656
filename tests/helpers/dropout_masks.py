"""The dropout mask: as specified, and as observed in the results of the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import standard

import jax_flash
from jax_flash import dropout


def attend(query, key, value, rate, dropout_key, implementation="flash", **options):
    return jax_flash.dot_product_attention(
        query, key, value, dropout_rate=rate, dropout_key=dropout_key, implementation=implementation, **options
    )


def specified(rate, key, B, N, T, S):
    """Return the specified mask, by NumPy, which needs no compilation. `test_dropout.py` compares it with JAX."""
    seed = np.asarray(dropout.seed_from_key(key, B))
    return standard.random_bits(seed, np.arange(B), np.arange(N), T, S) >= dropout.threshold(rate)


def from_forward(attention, B, N, T, S, dtype="float32"):
    """Return the mask of the forward: with equal scores and unit vectors as values, O = Z / S."""
    query, key = jnp.zeros((B, T, N, 8), dtype), jnp.zeros((B, S, N, 8), dtype)
    units = jnp.eye(S, -(-S // 8) * 8, dtype=dtype)
    o = [attention(query, key, jnp.broadcast_to(v[:, None], (B, S, N, v.shape[-1]))) for v in _columns(units)]
    return np.concatenate(o, -1).transpose(0, 2, 1, 3)[..., :S] > 0


def from_backward(attention, B, N, T, S, dtype="float32"):
    """Return the mask of the backward: with unit vectors as cotangents, dV = Zᵀ / S."""
    query, key = jnp.zeros((B, T, N, 8), dtype), jnp.zeros((B, S, N, 8), dtype)
    dv = []
    for do in _columns(jnp.eye(T, -(-T // 8) * 8, dtype=dtype)):
        value = jnp.zeros((B, S, N, do.shape[-1]), dtype)
        _, pull = jax.vjp(lambda value: attention(query, key, value), value)
        dv += pull(jnp.broadcast_to(do[:, None], (B, T, N, do.shape[-1])))
    return np.concatenate(dv, -1).transpose(0, 2, 3, 1)[:, :, :T] > 0


def _columns(x):
    return [x[:, i : i + 256] for i in range(0, x.shape[1], 256)]

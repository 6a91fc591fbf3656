"""Conversion of the row maximum m to words and back. jax_debug_infs does not check words.

m of a fully masked row is -inf. Under jax_debug_infs JAX raises an error for every jitted function that returns an
infinity, and the residuals of a derivative are such results. So m leaves a jitted function as words. XLA removes the
conversion where a program uses m itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def of(x: jax.Array) -> jax.Array:
    """Return the bits of a float32 or float64 array as uint32. A float64 array gets a last dim of 2."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def to(dtype: Any, words: jax.Array) -> jax.Array:
    """Return the array of this dtype that has these bits: the inverse of `of`."""
    with jax.debug_infs(False):
        return lax.bitcast_convert_type(words, dtype)

"""Checks of arguments. Each returns the argument in a normal form, or raises an error that names it."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash.operands import DTYPES


def flag(name: str, x: Any) -> bool:
    """Return True or False. Other values are errors, because the text "False" would count as true."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be True or False, not the traced {x.dtype}{list(x.shape)}: make the argument of your "
            "function static (static_argnames of jax.jit), or branch with jax.lax.cond"
        )
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {described(x)}")
    return bool(x)


def integer(name: str, x: Any, least: int = 0) -> int:
    """Return an int that is at least `least` and fits in 64 bits."""
    try:
        value = operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {described(x)}") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2^63, not {value}")
    return value


def number(name: str, x: Any) -> float:
    """Return a concrete number as a float. A number beyond the range of floats becomes infinite."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a concrete number, not the traced value {x}: pass a Python number, or make the argument "
            "of your function static (static_argnames of jax.jit)"
        )
    if not is_real(x):
        raise TypeError(f"{name} must be a real number, not {described(x)}")
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def is_real(x: Any) -> bool:
    """Return whether x is one real number: a Python number or an array of one. A bool is not a number."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return x.shape == () and any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def finite(name: str, x: Any, limit: float) -> float:
    x = number(name, x)
    if not abs(x) <= limit:
        raise ValueError(f"{name} must be finite and at most {limit:.3g} in absolute value, not {x}")
    return x


def array(name: str, x: ArrayLike, convert: Callable[[Any], Any] = jnp.asarray) -> Any:
    """Return the array `convert(x)`, or raise an error that names the argument."""
    try:
        if x is None or any(isinstance(leaf, (str, bytes)) for leaf in jax.tree.leaves(x)):  # JAX sees dtypes in text
            raise TypeError
        return convert(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array of numbers, not {described(x)}") from error


def numpy_array(name: str, x: ArrayLike) -> Any:
    """Return a NumPy array of numbers or bools. A traced array is returned unchanged."""
    if isinstance(x, jax.core.Tracer):
        return x
    converted: np.ndarray = array(name, x, np.asarray)
    if not (jnp.issubdtype(converted.dtype, np.number) or converted.dtype == np.bool_):
        raise TypeError(f"{name} must be an array of numbers, not an array of {converted.dtype}")
    return converted


def floats(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {converted.dtype}, but must have {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return converted


def biases(name: str, x: ArrayLike) -> jax.Array:
    """Return floats. Other libraries take the mask as the fourth positional argument, which is the bias here."""
    converted: jax.Array = array(name, x)
    if converted.dtype == jnp.bool_:
        raise TypeError(f"{name} must be a float array, not a boolean array: pass a mask by name, as mask=...")
    return floats(name, converted)


def booleans(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, not {converted.dtype}: pass an additive mask as bias=...")
    return converted


def matrices(name: str, x: ArrayLike) -> Any:
    """Return bools [B|1, N|1, …, …] from one matrix, one per head, or one per batch entry and head."""
    given = numpy_array(name, x)
    if given.dtype != np.bool_:
        raise TypeError(f"{name} must be boolean, not {given.dtype}")
    if not 2 <= given.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 dims, not shape {given.shape}")
    return given.reshape((1,) * (4 - given.ndim) + given.shape)


def broadcastable(
    name: str, x: ArrayLike | None, full: tuple[int, ...], kind: Callable[[str, ArrayLike], jax.Array]
) -> jax.Array | None:
    """Return [B|1, N|1, T|1, S|1], checked by `kind`."""
    if x is None:
        return None
    given = kind(name, x)
    shape = (1,) * (4 - given.ndim) + given.shape
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(f"{name} has shape {given.shape}, which is not broadcastable to [B, N, T, S] = {full}")
    return given.reshape(shape)


def integers(name: str, x: ArrayLike) -> np.ndarray | jax.Array:
    """Return a NumPy array unless x contains a JAX array, because JAX silently truncates 64-bit integers to 32 bits."""

    def convert(x: Any) -> np.ndarray | jax.Array:
        if not all(isinstance(leaf, (int, np.generic, np.ndarray)) for leaf in jax.tree.leaves(x)):
            return jnp.asarray(x)
        x = np.asarray(x)
        return np.asarray(np.clip(x, -(2**63), 2**63 - 1), np.int64) if x.dtype == object else x  # beyond 64 bits

    converted: np.ndarray | jax.Array = array(name, x, convert)
    if not jnp.issubdtype(converted.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {converted.dtype}")
    return converted


def heads_known(**shapes: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for symbolic numbers of heads and symbolic head dims (`jax.export.symbolic_shape`)."""
    if not all(isinstance(size, int) for shape in shapes.values() for size in shape[-2:]):
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise NotImplementedError(f"heads and head dims must be numbers, not symbolic, but the shapes are {named}")


def sizes_known(**shapes: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for shapes with symbolic sizes (`jax.export.symbolic_shape`)."""
    if not all(isinstance(size, int) for shape in shapes.values() for size in shape):
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise NotImplementedError(
            f"this function does not support symbolic shapes: {named}. Pass arrays of known shapes"
        )


def shaped(name: str, x: Any, shape: tuple[int, ...], unbatched: bool = False) -> Any:
    """Return `x` after a check of its shape. An unbatched argument may lack the batch dimension."""
    if unbatched and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {x.shape}")
    return x


def lengths(name: str, x: ArrayLike | None, batch: int) -> jax.Array | None:
    """Return int32 [B]. Lengths beyond 32 bits are clamped."""
    return None if x is None else saturated(shaped(name, integers(name, x), (batch,)))


def ids(name: str, x: ArrayLike | None, shape: tuple[int, ...], unbatched: bool = False) -> jax.Array | None:
    """Return int32 of this shape. Ids have 32 bits, signed or unsigned."""
    if x is None:
        return None
    given = shaped(name, integers(name, x), shape, unbatched)
    if jnp.iinfo(given.dtype).bits > 32 and given.size:
        if isinstance(given, jax.core.Tracer):
            raise TypeError(f"{name} are traced {given.dtype}, but ids have 32 bits: cast them to int32")
        low, high = int(given.min()), int(given.max())
        if not (-(2**31) <= low and high < 2**31 or low >= 0 and high < 2**32):
            raise ValueError(f"{name} must be 32-bit integers, but range from {low} to {high}: renumber them")
    return jnp.asarray(given).astype(jnp.int32)


def saturated(x: Any) -> jax.Array:
    own, limits = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.asarray(x.clip(max(own.min, limits.min), min(own.max, limits.max))).astype(jnp.int32)


def described(x: Any) -> str:
    """Return a short text for an error message. It is the name of the type for arrays and other objects."""
    return repr(x) if x is None or isinstance(x, (str, int, float)) and len(repr(x)) < 80 else type(x).__name__

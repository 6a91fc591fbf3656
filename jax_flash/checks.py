"""Kinds of arguments: a flag, a number, an array. Each is checked and brought into one form; errors name it."""

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

from jax_flash.problem import DTYPES, Problem


def flag(name: str, x: Any) -> bool:
    """True or False. Nothing else: "False" would be true."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be True or False, not the traced {x.dtype}{list(x.shape)}: make the argument that it comes "
            "from static (static_argnames of jax.jit), or choose by jax.lax.cond"
        )
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {described(x)}")
    return bool(x)


def integer(name: str, x: Any, least: int = 0) -> int:
    """An int from `least` on that has 64 bits."""
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
    """A number that is known when tracing; what is larger than any float is infinite."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} must be a concrete number, not a traced value: {x}")
    if not is_real(x):
        raise TypeError(f"{name} must be a real number, not {described(x)}")
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def is_real(x: Any) -> bool:
    """Whether it is one real number, of Python's or an array of one. A truth value is none."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return x.shape == () and any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def finite(name: str, x: Any, limit: float) -> float:
    x = number(name, x)
    if not abs(x) <= limit:
        raise ValueError(f"{name} must be finite and at most {limit:.3g}, not {x}")
    return x


def array(name: str, x: ArrayLike, convert: Callable[[Any], Any] = jnp.asarray) -> Any:
    """`convert(x)`, an array."""
    try:
        if x is None or any(isinstance(leaf, (str, bytes)) for leaf in jax.tree.leaves(x)):  # JAX sees dtypes in text
            raise TypeError
        return convert(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array of numbers, not {described(x)}") from error


def numpy_array(name: str, x: ArrayLike) -> Any:
    """On the host, of numbers or truth values; itself if it is traced."""
    if isinstance(x, jax.core.Tracer):
        return x
    converted: np.ndarray = array(name, x, np.asarray)
    if not (jnp.issubdtype(converted.dtype, np.number) or converted.dtype == np.bool_):
        raise TypeError(f"{name} must be an array of numbers, not of {converted.dtype}")
    return converted


def floats(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {converted.dtype}; supported are {', '.join(DTYPES)}")
    return converted


def biases(name: str, x: ArrayLike) -> jax.Array:
    """Floats. The bias is the fourth positional argument, where other libraries have the mask."""
    converted: jax.Array = array(name, x)
    if converted.dtype == jnp.bool_:
        raise TypeError(f"{name} must be floats, not a boolean array: pass a mask by name, as mask=")
    return floats(name, converted)


def booleans(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, not {converted.dtype}; an additive mask is a bias")
    return converted


def matrices(name: str, x: ArrayLike) -> Any:
    """bool [B|1, N|1, …, …]: a matrix, one for each head, or one for each batch entry and head; see `numpy_array`."""
    given = numpy_array(name, x)
    if given.dtype != np.bool_:
        raise TypeError(f"{name} must be boolean, not {given.dtype}")
    if not 2 <= given.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 dims, not shape {given.shape}")
    return given.reshape((1,) * (4 - given.ndim) + given.shape)


def broadcastable(
    name: str, x: ArrayLike | None, full: tuple[int, ...], kind: Callable[[str, ArrayLike], jax.Array]
) -> jax.Array | None:
    """As [B|1, N|1, T|1, S|1], of `floats` or `booleans`."""
    if x is None:
        return None
    given = kind(name, x)
    shape = (1,) * (4 - given.ndim) + given.shape
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(f"{name} has shape {given.shape}, which is not broadcastable to [B, N, T, S] = {full}")
    return given.reshape(shape)


def integers(name: str, x: ArrayLike) -> np.ndarray | jax.Array:
    """NumPy's if nothing in it is JAX's, which would cut 64 bits to 32 without a word."""

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
    """Refuses symbolic numbers of heads and symbolic head dims (`jax.export.symbolic_shape`)."""
    if not all(isinstance(size, int) for shape in shapes.values() for size in shape[-2:]):
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise NotImplementedError(f"heads and head dims must be numbers, not symbolic: {named}")


def sizes_known(**shapes: tuple[Any, ...]) -> None:
    """Refuses shapes that have symbols for sizes (`jax.export.symbolic_shape`)."""
    if not all(isinstance(size, int) for shape in shapes.values() for size in shape):
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise NotImplementedError(f"symbolic shapes: {named}; kernels need sizes")


def shaped(name: str, x: Any, shape: tuple[int, ...], unbatched: bool = False) -> Any:
    """`x`, which has this shape, or that of one batch entry."""
    if unbatched and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {x.shape}")
    return x


def lengths(name: str, x: ArrayLike | None, batch: int) -> jax.Array | None:
    """int32 [B]. Beyond 32 bits a length is as good as the largest."""
    return None if x is None else saturated(shaped(name, integers(name, x), (batch,)))


def ids(name: str, x: ArrayLike | None, shape: tuple[int, ...], unbatched: bool = False) -> jax.Array | None:
    """int32 of this shape. Ids have 32 bits, signed or not, by which they are told apart."""
    if x is None:
        return None
    given = shaped(name, integers(name, x), shape, unbatched)
    if jnp.iinfo(given.dtype).bits > 32 and given.size:
        if isinstance(given, jax.core.Tracer):
            raise TypeError(f"{name} are traced {given.dtype}, of which 32 bits are compared: cast them to int32")
        low, high = int(given.min()), int(given.max())
        if not (-(2**31) <= low and high < 2**31 or low >= 0 and high < 2**32):
            raise ValueError(f"{name} must be numbers of 32 bits, but there are {low} to {high}")
    return jnp.asarray(given).astype(jnp.int32)


def saturated(x: Any) -> jax.Array:
    own, limits = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.asarray(x.clip(max(own.min, limits.min), min(own.max, limits.max))).astype(jnp.int32)


def problem(x: Any) -> Problem:
    if not isinstance(x, Problem):
        raise TypeError(f"problem must be a jax_flash.Problem, not {described(x)}")
    return x


def described(x: Any) -> str:
    """Short, also of what is an array."""
    return repr(x) if x is None or isinstance(x, (str, int, float)) and len(repr(x)) < 80 else type(x).__name__

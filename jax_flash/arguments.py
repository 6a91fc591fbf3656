"""The arguments of the public functions: each is checked and brought into one form; errors name it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash.problem import DTYPES

Implementation = Literal["flash", "xla", "reference"]


def flag(name: str, x: Any) -> bool:
    """True or False. Nothing else: "False" would be true."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {_described(x)}")
    return bool(x)


def integer(name: str, x: Any, least: int = 0) -> int:
    """An int from `least` on that has 64 bits."""
    try:
        value = operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {_described(x)}") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2^63, not {value}")
    return value


def number(name: str, x: Any) -> float:
    """A number that is known when tracing; what is larger than any float is infinite."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} must be a concrete number, not a traced value: {x}")
    try:
        if isinstance(x, (str, bytes, bytearray, bool, np.bool_)) or np.ndim(x):
            raise TypeError
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {_described(x)}") from None


def finite(name: str, x: Any, limit: float) -> float:
    x = number(name, x)
    if not abs(x) <= limit:
        raise ValueError(f"{name} must be finite and at most {limit:.3g}, not {x}")
    return x


def soft_cap(cap: float | None, largest: float) -> float:
    """0 for none. Of a cap that is much larger score / cap could be 0, and one that is much smaller is 0 itself."""
    if cap is None:
        return 0.0
    least, most = 1e8 / largest, largest / 1e8
    cap = number("logits_soft_cap", cap)
    if not least <= cap <= most:
        raise ValueError(f"logits_soft_cap must be from {least:.3g} to {most:.3g}, not {cap}")
    return cap


def window(size: int | tuple[int, int] | None) -> tuple[int, int]:
    """(left, right), -1 for no bound."""
    if size is None:
        return -1, -1
    try:
        left, right = map(operator.index, size if isinstance(size, (tuple, list)) else (size, size))
    except (TypeError, ValueError):
        raise TypeError(f"local_window_size must be an int or a pair of ints, not {size!r}") from None
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size must not be negative: {size}")
    return left if left < 2**63 else -1, right if right < 2**63 else -1  # beyond 64 bits it is as good as none


def implementation(x: Implementation | None) -> Implementation | None:
    if isinstance(x, str) and x == "cudnn":
        raise ValueError(
            'implementation="cudnn" is jax.nn.dot_product_attention\'s; here "flash" is the fused kernel '
            "(and None takes it where it can)"
        )
    if x is not None and not (isinstance(x, str) and x in ("flash", "xla", "reference")):
        raise ValueError(f'implementation must be None, "flash", "xla" or "reference", not {_described(x)}')
    return x


# Values of jax_default_matmul_precision, which may name a dot algorithm too, that ask for more than TF32.
_FULL_PRECISIONS = (
    "highest",
    "float32",
    "F32_F32_F32",
    "F64_F64_F64",
    "TF32_TF32_F32_X3",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
)


def full_precision(precision: Any) -> bool:
    """Whether float32 products are to have all of float32's bits."""
    if precision is None:
        return jax.config.jax_default_matmul_precision in _FULL_PRECISIONS  # type: ignore[attr-defined, unused-ignore]
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        left, right = map(full_precision, precision)
        return left or right
    name = getattr(precision, "name", precision)
    if isinstance(name, str) and name in lax.DotAlgorithmPreset.__members__:
        return name in _FULL_PRECISIONS
    try:
        return lax.Precision(precision) == lax.Precision.HIGHEST
    except (TypeError, ValueError):
        raise ValueError(
            "precision must be a jax.lax.Precision or DotAlgorithmPreset, the name of one, or a pair of them, "
            f"not {precision!r}"
        ) from None


# --- arrays ---


def array(name: str, x: ArrayLike, convert: Callable[[Any], Any] = jnp.asarray) -> Any:
    """`convert(x)`, an array."""
    try:
        if x is None:
            raise TypeError
        return convert(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array of numbers, not {_described(x)}") from error


def floats(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {converted.dtype}; supported are {', '.join(DTYPES)}")
    return converted


def booleans(name: str, x: ArrayLike) -> jax.Array:
    converted: jax.Array = array(name, x)
    if converted.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, not {converted.dtype}; an additive mask is a bias")
    return converted


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


def shaped(name: str, x: Any, shape: tuple[int, ...], unbatched: bool = False) -> Any:
    """`x`, which has this shape, or that of one batch entry."""
    if unbatched and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {x.shape}")
    return x


def lengths(name: str, x: ArrayLike | None, batch: int) -> jax.Array | None:
    """int32 [B]. Beyond 32 bits a length is as good as the largest."""
    return None if x is None else _saturated(shaped(name, integers(name, x), (batch,)))


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


def offsets(x: int | ArrayLike | None, batch: int) -> jax.Array | None:
    """int32 [B]; None for none and for 0."""
    if x is None or isinstance(x, int) and x == 0:
        return None
    given = integers("query_offset", x)
    if isinstance(given, np.ndarray) and given.size and not (given.min() >= -(2**31) and given.max() < 2**31):
        raise ValueError(f"query_offset must be int32 numbers, but there are {given.min()} to {given.max()}")
    xp = np if isinstance(given, np.ndarray) else jnp
    return _saturated(shaped("query_offset", xp.broadcast_to(given, (batch,)) if given.ndim == 0 else given, (batch,)))


def _saturated(x: Any) -> jax.Array:
    own, limits = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.asarray(x.clip(max(own.min, limits.min), min(own.max, limits.max))).astype(jnp.int32)


def _described(x: Any) -> str:
    """Short, also of what is an array."""
    return repr(x) if x is None or isinstance(x, (str, int, float)) and len(repr(x)) < 80 else type(x).__name__

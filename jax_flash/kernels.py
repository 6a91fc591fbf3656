"""Positive kernels of the distance between two points, for `jax_flash.kernel_sum`.

All are functions of d = `|x - y| / length_scale`. A length scale is a number, or an array [D] with one for each
dimension. It may be traced, and so may alpha. Both get gradients. A kernel is a pytree of its parameters, so it can be
an argument of a jitted function, and `jax.grad` can differentiate with respect to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import checks

__all__ = ["DistanceKernel", "gaussian", "laplace", "matern32", "matern52", "rational_quadratic"]

LogKernel = Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceKernel:
    """A kernel of the scaled distance. Create it with one of the functions in this module.

    `log` is a function of d² and the parameters that returns the logarithm of the kernel. If it is not smooth at 0, the
    kernel is `sharp`, and `kernel_sum` replaces d² by 0 if rounding errors dominate it.
    """

    log: LogKernel = dataclasses.field(metadata={"static": True})
    length_scale: Any
    parameters: tuple[Any, ...] = ()
    sharp: bool = dataclasses.field(default=False, metadata={"static": True})


def gaussian(length_scale: ArrayLike) -> DistanceKernel:
    """Gaussian kernel exp(-d²/2), also known as RBF or squared exponential.

    Raises:
      TypeError: if length_scale is not a real number or an array of them.
      ValueError: if length_scale is not positive and finite, or has more than one dimension.
    """
    return DistanceKernel(_gaussian, _length_scale(length_scale))


def laplace(length_scale: ArrayLike) -> DistanceKernel:
    """Laplace kernel exp(-d), also known as exponential or Matérn 1/2. It raises the errors of `gaussian`.

    It is not smooth at d = 0. Points that are so close that rounding errors dominate d² count as equal: then the kernel
    is 1, and its gradient 0.
    """
    return DistanceKernel(_laplace, _length_scale(length_scale), sharp=True)


def matern32(length_scale: ArrayLike) -> DistanceKernel:
    """Matérn kernel of smoothness 3/2, (1 + √3 d) exp(-√3 d). It raises the errors of `gaussian`."""
    return DistanceKernel(_matern32, _length_scale(length_scale), sharp=True)


def matern52(length_scale: ArrayLike) -> DistanceKernel:
    """Matérn kernel of smoothness 5/2, (1 + √5 d + 5d²/3) exp(-√5 d). It raises the errors of `gaussian`."""
    return DistanceKernel(_matern52, _length_scale(length_scale), sharp=True)


def rational_quadratic(length_scale: ArrayLike, alpha: ArrayLike) -> DistanceKernel:
    """Rational quadratic kernel (1 + d² / 2α)^-α. It raises the errors of `gaussian`. alpha is a scalar."""
    return DistanceKernel(_rational_quadratic, _length_scale(length_scale), (_positive("alpha", alpha, 0),))


def _length_scale(x: ArrayLike) -> Any:
    return _positive("length_scale", x, 1)


def _positive(name: str, x: ArrayLike, dims: int) -> Any:
    """Return x after a check of its type, of its number of dims and, unless it is traced, of its values."""
    if isinstance(x, list | tuple):
        raise TypeError(f"{name} must be a number or an array, not a {type(x).__name__}: pass jnp.array({name})")
    given: Any = checks.numpy_array(name, x)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must be real, not {given.dtype}")
    if given.ndim > dims:
        expected = "a number, or an array [D]" if dims else "a number"
        raise ValueError(f"{name} must be {expected}, not an array of shape {given.shape}")
    if isinstance(given, np.ndarray) and not ((given > 0) & (given < np.inf)).all():
        raise ValueError(f"{name} must be positive and finite, not {x}")
    return x


# Rounding errors can make d² negative. The derivatives below pass through at 0, where d has none, and do not cancel.


def _root(x: jax.Array) -> jax.Array:
    """Return the root of x, or 0 with derivative 0 if x is not positive. NaN stays NaN."""
    no_root = x <= 0
    return jnp.where(no_root, 0, jnp.sqrt(jnp.where(no_root, 1, x)))


@jax.custom_jvp
def _gaussian(d2: jax.Array) -> jax.Array:
    return -0.5 * jnp.maximum(d2, 0)


@_gaussian.defjvp
def _gaussian_jvp(primals, tangents):
    return _gaussian(*primals), -0.5 * tangents[0]


def _laplace(d2: jax.Array) -> jax.Array:
    return -_root(d2)


@jax.custom_jvp
def _matern32(d2: jax.Array) -> jax.Array:
    a = _root(3 * d2)
    return jnp.log1p(a) - a


@_matern32.defjvp
def _matern32_jvp(primals, tangents):
    a = _root(3 * primals[0])
    return _matern32(*primals), -1.5 / (1 + a) * tangents[0]


@jax.custom_jvp
def _matern52(d2: jax.Array) -> jax.Array:
    a = _root(5 * d2)
    return jnp.log1p(a + a * a / 3) - a


@_matern52.defjvp
def _matern52_jvp(primals, tangents):
    a = _root(5 * primals[0])
    return _matern52(*primals), -5 / 6 * (1 + a) / (1 + a + a * a / 3) * tangents[0]


@jax.custom_jvp
def _rational_quadratic(d2: jax.Array, alpha: jax.Array) -> jax.Array:
    return -alpha * jnp.log1p(jnp.maximum(d2, 0) / (2 * alpha))


@_rational_quadratic.defjvp
def _rational_quadratic_jvp(primals, tangents):
    d2, alpha = primals
    u = jnp.maximum(d2, 0) / (2 * alpha)
    of_alpha = u / (1 + u) - jnp.log1p(u)
    return _rational_quadratic(*primals), -0.5 / (1 + u) * tangents[0] + of_alpha * tangents[1]

"""`kernel_sum`: sums of a positive kernel in linear memory (appendix D.2 of arXiv 2205.14135).

A kernel exp(f) is attention without normalisation. If f_ij are the scores, attention returns
O_i = Σ_j exp(f_ij) w_j / Σ_j exp(f_ij), and its statistics give the denominator. The product of both is the sum.

A kernel of the distance needs the scores -|x - y|² / 2 = x·y - |x|²/2 - |y|²/2. One product computes them if the points
have additional columns: (x, -|x|²/2, 1) · (y, 1, -|y|²/2). Then the norms get their gradients from the same products
as the points, and rounding errors of both cancel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_flash import checks, kernels
from jax_flash.arguments import full_precision
from jax_flash.attention import attention_with_statistics
from jax_flash.call import Implementation
from jax_flash.explicit import placed
from jax_flash.kernels import DistanceKernel

Function = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
MULTIPLE = 8  # head dims of the GPU kernels are multiples of it


def kernel_sum(
    x: ArrayLike,
    y: ArrayLike,
    weights: ArrayLike,
    log_kernel: DistanceKernel | Function,
    *,
    precision: lax.PrecisionLike = "highest",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Compute Σ_j k(x_i, y_j) w_j for a positive kernel k = exp(log_kernel) without storing the kernel matrix.

    It runs in the attention kernels, forward and backward. x, y, weights, the parameters of a kernel of
    `jax_flash.kernels`, and float arrays that a function captures have gradients. Leading dims broadcast.

    Args:
      x: array [..., M, D] of finite points; float32, float64, bfloat16 or float16. 16-bit inputs are computed in
        float32.
      y: array [..., N, D] of points in the same dtype.
      weights: array [..., N, E] in the same dtype, of any sign.
      log_kernel: a kernel of `jax_flash.kernels`, or a function (dot, x_norm2, y_norm2) that returns the logarithm of
        the kernel. The function takes x·y, `|x|²` and `|y|²`, scalars in float32 (float64 for float64 inputs), and uses
        `jnp`. The rules for a `score_mod` apply (docs/score-programs.md). Its result may be -inf, where the kernel is
        0. Sums of the kernel must not overflow: log_kernel must be well below 88 in float32.
      precision: precision of float32 products on a GPU, as in `dot_product_attention`. The default is full float32.
        "default" is TF32, which is faster. Points are then rounded to TF32 (11 significant bits) first, so distances
        are distances of the rounded points, and equal points stay equal.
      implementation: as in `dot_product_attention`.

    Returns:
      Array [..., M, E] in the dtype of the inputs.

    Raises:
      TypeError: if an argument has an unsupported dtype or type, or log_kernel does not return a scalar.
      ValueError: if shapes do not match or D is 0.
    """
    arrays = {name: checks.floats(name, x) for name, x in (("x", x), ("y", y), ("weights", weights))}
    _check(arrays, log_kernel)
    given = arrays["x"].dtype
    dtype = jnp.promote_types(given, jnp.float32)
    x, y, weights = (array.astype(dtype) for array in arrays.values())
    shape = (*jnp.broadcast_shapes(*(array.shape[:-2] for array in (x, y, weights))), x.shape[-2], weights.shape[-1])
    if not y.shape[-2] or 0 in shape:
        return jnp.zeros(shape, given)  # before the mean of no points
    if isinstance(log_kernel, DistanceKernel):
        kernel: DistanceKernel = jax.tree.map(lambda parameter: jnp.asarray(parameter, dtype), log_kernel)
        log_kernel, (x, y) = kernel, _scaled(x, y, kernel.length_scale)
    else:
        _check_function(log_kernel, dtype)
    if not full_precision(precision):
        x, y = _rounded(x), _rounded(y)
    sum_of = functools.partial(_sum, log_kernel, precision=precision, implementation=implementation)
    # All arrays get equally many dims, because JAX can be set to refuse others (jax_numpy_rank_promotion).
    x, y, weights = (jnp.expand_dims(array, tuple(range(len(shape) - array.ndim))) for array in (x, y, weights))
    return jnp.vectorize(sum_of, signature="(m,d),(n,d),(n,e)->(m,e)")(x, y, weights).astype(given)


def _sum(
    log_kernel: DistanceKernel | Function,
    x: jax.Array,
    y: jax.Array,
    weights: jax.Array,
    *,
    precision: lax.PrecisionLike,
    implementation: Implementation | None,
) -> jax.Array:
    """Return the sum for arrays [M, D], [N, D] and [N, E]."""
    outputs = weights.shape[1]
    if isinstance(log_kernel, DistanceKernel):
        score_mod = _score_mod(log_kernel, y)
        x, y = _with_norms(x, y)
    else:
        x_norm2, y_norm2 = _replicated(_norm2(x)), _replicated(_norm2(y))
        function = log_kernel

        def score_mod(score, batch, head, query, key):
            return function(score, x_norm2[query], y_norm2[key])

    query, key, value = (_padded(array)[:, None] for array in (x, y, weights))
    o, statistics = attention_with_statistics(
        query, key, value, scale=1.0, score_mod=score_mod, precision=precision, implementation=implementation
    )
    # In derivatives m is a constant, and l has the gradient of the sum at fixed m. Both m and O are finite: a row
    # without a visible entry has l = 0. Two factors exp(m / 2) overflow only if the sum does, or m is above 176.
    l, m = statistics.l.mT, statistics.m.mT
    half = jnp.exp(0.5 * jnp.where(l == 0, 0, m))
    return o[:, 0, :outputs] * l * half * half


def _scaled(x: jax.Array, y: jax.Array, length_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the points divided by the length scale, and centred, because norms of far points cancel in a distance."""
    centre = lax.stop_gradient(y.mean(-2, keepdims=True))  # distances do not depend on it

    def scaled(points: jax.Array) -> jax.Array:
        dims = max(points.ndim, y.ndim)
        arrays = (jnp.expand_dims(array, tuple(range(dims - array.ndim))) for array in (points, centre, length_scale))
        points, shift, scale = arrays
        return (points - shift) / scale

    return scaled(x), scaled(y)


def _rounded(x: jax.Array) -> jax.Array:
    """Return the points as TF32 on a GPU. Other platforms multiply in full precision. The gradient passes through."""
    tf32 = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
    return x + lax.stop_gradient(lax.platform_dependent(x, cuda=tf32, default=lambda x: x) - x)


def _with_norms(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the points with columns for norms: their dot product is -|x - y|² / 2.

    A norm has two columns. The first has 11 significant bits, which TF32 keeps, and the second has the rest.
    """

    def norms(points: jax.Array) -> jax.Array:
        norm = -0.5 * _norm2(points)
        high = lax.stop_gradient(lax.reduce_precision(norm, exponent_bits=8, mantissa_bits=10))
        return jnp.stack([high, norm - high], -1)

    def with_ones(points: jax.Array) -> jax.Array:  # vmap of a pad keeps the sharding of the points
        return jnp.pad(points, ((0, 0), (0, 2)), constant_values=1)

    return with_ones(jnp.concatenate([x, norms(x)], -1)), jnp.concatenate([with_ones(y), norms(y)], -1)


def _score_mod(kernel: DistanceKernel, y: jax.Array) -> Callable[..., jax.Array]:
    """Return the function from -d²/2 to the logarithm of the kernel."""
    # One value for each key. Gradients of one number would be added up at one address on a GPU.
    parameters = [_replicated(jnp.broadcast_to(parameter, y.shape[:1])) for parameter in kernel.parameters]
    # Roots of rounding errors are large. The passes of attention round differently, so the derivatives for equal points
    # would not cancel. The bound is twice the error of three TF32 products. Only its order matters. It needs no norm of
    # x, since |x| is about |y| where it matters.
    bound = 2.0**-19 if y.dtype == jnp.float32 else 2.0**-48
    noise = _replicated(bound * lax.stop_gradient(_norm2(y))) if kernel.sharp else None

    def score_mod(score, batch, head, query, key):
        d2 = -2 * score
        if noise is not None:  # the derivative passes through: at 0, it is the limit for equal points
            d2 += lax.stop_gradient(jnp.where(d2 <= noise[key], -d2, 0))
        return kernel.log(d2, *(parameter[key] for parameter in parameters))

    return score_mod


def _norm2(points: jax.Array) -> jax.Array:
    return jnp.sum(points * points, -1)


def _replicated(x: jax.Array) -> jax.Array:
    """Return x in full on each device, as an array that a function captures must be on a mesh with explicit axes."""
    return placed(lambda x: x, PartitionSpec(), x)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % MULTIPLE)))


def _check(arrays: dict[str, jax.Array], log_kernel: Any) -> None:
    """Raise an error if dtypes or shapes do not match."""
    x, y, weights = arrays.values()
    if not x.dtype == y.dtype == weights.dtype:
        raise TypeError(f"x, y and weights must have equal dtypes, not {x.dtype}, {y.dtype} and {weights.dtype}")
    for (name, array), dims in zip(arrays.items(), ("M, D", "N, D", "N, E"), strict=True):
        if array.ndim < 2:
            raise ValueError(f"{name} must have shape [..., {dims}], not {array.shape}")
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x [..., M, D] and y [..., N, D] must have equal D, but have shapes {x.shape} and {y.shape}")
    if x.shape[-1] == 0:
        raise ValueError(f"D must be at least 1, but x has shape {x.shape}")
    if y.shape[-2] != weights.shape[-2]:
        raise ValueError(
            f"y [..., N, D] and weights [..., N, E] must have equal N, but have shapes {y.shape} and {weights.shape}"
        )
    try:
        jnp.broadcast_shapes(*(array.shape[:-2] for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"leading dims must broadcast, but the shapes are {shapes}") from None
    if isinstance(log_kernel, DistanceKernel):
        shape = jnp.shape(log_kernel.length_scale)
        if shape not in ((), x.shape[-1:], (1,)):
            raise ValueError(f"length_scale must be a number or an array [D] with D = {x.shape[-1]}, not {shape}")
    elif any(log_kernel is getattr(kernels, name) for name in kernels.__all__):
        raise TypeError(f"log_kernel must be a kernel: call kernels.{log_kernel.__name__} with its parameters")
    elif not callable(log_kernel):
        raise TypeError(
            "log_kernel must be a kernel of jax_flash.kernels or a function (dot, x_norm2, y_norm2), "
            f"not {checks.described(log_kernel)}"
        )


def _check_function(log_kernel: Function, dtype: Any) -> None:
    """Raise an error that names log_kernel. Attention would name its score_mod."""
    try:
        inspect.signature(log_kernel).bind("dot", "x_norm2", "y_norm2")
    except TypeError:
        raise TypeError("log_kernel must take 3 arguments: dot, x_norm2, y_norm2") from None
    except ValueError:  # the callable has no signature
        pass
    scalar = jax.ShapeDtypeStruct((), dtype)
    result = jax.eval_shape(log_kernel, scalar, scalar, scalar)
    if getattr(result, "shape", None) != () or result.dtype != dtype:
        raise TypeError(f"log_kernel must return one scalar {jnp.dtype(dtype).name}, not {result}")

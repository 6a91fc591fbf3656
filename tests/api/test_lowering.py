"""Generated code of score programs and of their derivatives, interpreted by NumPy, equals the original functions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import run
from jax import lax

from jax_flash.programs import program
from jax_flash.programs.program import Captured, Sizes

SIZES = Sizes(batch=2, head=3, query=7, key=6)
RNG = np.random.default_rng(0)


def entries():
    """Return all entries, with scores that are integers, halves and other numbers of both signs."""
    b, h, q, k = (x.ravel().astype(np.int32) for x in np.meshgrid(*map(np.arange, SIZES), indexing="ij"))
    score = np.where(RNG.random(b.size) < 0.3, RNG.integers(-6, 7, b.size) / 2, 2 * RNG.normal(size=b.size))
    return {"score": score, "batch": b, "head": h, "query": q, "key": k, "cotangent": RNG.normal(size=b.size)}


ENTRIES = entries()
NAMES = ("score", *program.INDICES)


def floats(*shape):
    return RNG.normal(size=shape)


def integers(low, high, *shape, dtype=np.int32):
    return RNG.integers(low, high, shape).astype(dtype)


def int_range(*limits):
    return jnp.arange(*limits, dtype=jnp.int32)


# Functions of an entry, or pairs of a function of captured arrays and an entry, and the arrays.
ELEMENTWISE = {
    "arithmetic": lambda s, b, h, q, k: -(s + q) * (s - k) / (s * s + 1) + abs(s) - jnp.sign(s - 0.5),
    "exponentials": lambda s, b, h, q, k: (
        jnp.exp(s) + jnp.exp2(-s) + jnp.expm1(s) + jnp.log(s * s + 1) + jnp.log1p(s * s) + jnp.log2(s * s + 1)
    ),
    "trigonometry": lambda s, b, h, q, k: (
        jnp.sin(s) + jnp.cos(s) * jnp.tan(s / 8) + jnp.tanh(s) + jnp.arctan2(s, 1.0 + k)
    ),
    "special": lambda s, b, h, q, k: (
        lax.erf(s) + lax.erfc(s) + lax.logistic(s) + jnp.sqrt(s * s + 1) * lax.rsqrt(2.0 + k)
    ),
    "rounding": lambda s, b, h, q, k: (
        jnp.floor(s) + 10 * jnp.ceil(s) + 100 * lax.round(s, lax.RoundingMethod.AWAY_FROM_ZERO) + 1e3 * jnp.round(s)
    ),
    "remainder": lambda s, b, h, q, k: lax.rem(s, 1.5) + s % 0.7 + s // 1.25,
    "integer powers": lambda s, b, h, q, k: s**3 + s**7 + (s * s + 1) ** -2 + s**0 + (s + 9) ** -1,
    "powers": lambda s, b, h, q, k: (jnp.abs(s) + 0.5) ** 1.7 + (1.0 + k) ** (s / 4) + lax.pow(1.5 + jnp.cos(s), q),
    "squares": lambda s, b, h, q, k: lax.square(s) + jnp.square(s + 1),
    "minimum and maximum": lambda s, b, h, q, k: (
        jnp.maximum(s, 0.3) * jnp.minimum(s, 1.0 * q) + lax.clamp(-1.0, s, 1.2)
    ),
    "clip": lambda s, b, h, q, k: jnp.clip(s, -0.4, 2.0) + jnp.clip(q, 1, k),
    "comparisons": lambda s, b, h, q, k: (
        1.0 * (s > 0) + 2.0 * (s >= 1) + 4.0 * (s < k) + 8.0 * (s <= 0.5) + 16.0 * (s == 1.5) + 32.0 * (s != 0) * s
    ),
    "comparisons of integers": lambda s, b, h, q, k: (
        s * (q > k) + 2.0 * (q >= k) + 4.0 * (q < h) + 8.0 * (b <= k) + 16.0 * (q == k) + 32.0 * (q != h)
    ),
    "comparisons of bools": lambda s, b, h, q, k: (
        s * ((q > 2) == (k > 2)) + ((q > 2) < (k > 1)) + 2.0 * ((q > 2) != (b > 0))
    ),
    "bools": lambda s, b, h, q, k: jnp.where((q > 2) & ~(k < 2) | (h == 1) ^ (b == 0), s, -s),
    "minus infinity": lambda s, b, h, q, k: jnp.where(q >= k, s * 2, -jnp.inf),
    "finite": lambda s, b, h, q, k: jnp.where(jnp.isfinite(jnp.log(s)) & ~jnp.isnan(s) & ~jnp.isinf(s), s, 0.0),
    "not a number": lambda s, b, h, q, k: jnp.maximum(jnp.where(q > k, jnp.nan, s), 1.0),
    "select": lambda s, b, h, q, k: lax.select_n(h, s, 2 * s, s * s) + lax.select_n(q > k, s, 1.0 * k),
    "stop gradient": lambda s, b, h, q, k: s * lax.stop_gradient(s) + jnp.exp(lax.stop_gradient(s)),
    "integer division": lambda s, b, h, q, k: s + lax.div(q - 3, k - 2) + 10.0 * ((q - 3) // (k - 2)),
    "integer remainder": lambda s, b, h, q, k: s + lax.rem(q - 3, k - 2) + 10.0 * ((q - 3) % (k - 2)),
    "division by numbers": lambda s, b, h, q, k: (
        s
        + (q - 3) // 2
        + 10.0 * ((q - 3) % 2)
        + 100.0 * ((k - 3) // -2)
        + 1e3 * ((k - 3) % -2)
        + 1e4 * (q // 3 + k % 3)
    ),
    "divmod": lambda s, b, h, q, k: s + sum(jnp.divmod(q - k, 3)) + jnp.fmod(q - k, 3) + jnp.remainder(k - q, h + 1),
    "shifts": lambda s, b, h, q, k: s + ((q - 3) << k) + ((q - 300) >> k) + lax.shift_right_logical(q - 3, k + 20),
    "shifts by too much": lambda s, b, h, q, k: s + ((q - 3) << (k + 30)) + ((q - 3) >> (k + 30)),
    "shifts of unsigned": lambda s, b, h, q, k: (
        s + lax.shift_right_arithmetic(jnp.uint32(q) * jnp.uint32(0x55555555), jnp.uint32(7 * k))
    ),
    "unsigned": lambda s, b, h, q, k: (
        s + ((jnp.uint32(q) * jnp.uint32(2654435761)) >> jnp.uint32(20)) + jnp.uint32(k) // 3 + jnp.uint32(k) % 3
    ),
    "bits": lambda s, b, h, q, k: (
        s + ((q - 2) & k) + ((q - 2) | k) + ((q - 2) ^ k) + ~q + jnp.bitwise_invert(jnp.uint32(k))
    ),
    "counts": lambda s, b, h, q, k: (
        s + lax.population_count(q - 3) + lax.clz(k - 1) + lax.population_count(jnp.uint32(q))
    ),
    "signs of integers": lambda s, b, h, q, k: s + abs(q - k) + 10.0 * jnp.sign(q - k) - (-(q - k)),
    "wrapping": lambda s, b, h, q, k: s + (q + 1) * 2**30 * (k - 2) + (q - 3) * 0x7FFFFFFF,
    "casts": lambda s, b, h, q, k: (
        s.astype(jnp.int32)
        + (s * 1e10).astype(jnp.int32)
        + 1.0 * (jnp.abs(s) * 1e10).astype(jnp.uint32)
        + s.astype(bool)
    ),
    "casts of integers": lambda s, b, h, q, k: (
        s
        + q.astype(bool)
        + (q > k).astype(jnp.uint32)
        + (q - k).astype(jnp.uint32).astype(jnp.int32)
        + k.astype(s.dtype)
    ),
    "cast of NaN": lambda s, b, h, q, k: s + jnp.log(s).astype(jnp.int32),
    "smaller floats": lambda s, b, h, q, k: (
        s.astype(jnp.float32) * 3 + (s.astype(jnp.bfloat16) * 3).astype(s.dtype) + jnp.exp(s.astype(jnp.float16))
    ).astype(s.dtype),
    "a rounded constant": lambda s, b, h, q, k: (
        s + jnp.bfloat16(1) * jnp.float64(0.1).astype(jnp.bfloat16).astype(s.dtype)
    ),
    "reduce precision": lambda s, b, h, q, k: lax.reduce_precision(s, 8, 7) + lax.reduce_precision(s, 5, 10),
    "activations": lambda s, b, h, q, k: (
        jax.nn.relu(s) + jax.nn.silu(s) + jax.nn.gelu(s) + jax.nn.gelu(s, approximate=False) + jax.nn.softplus(s)
    ),
    "more activations": lambda s, b, h, q, k: (
        jax.nn.leaky_relu(s)
        + jax.nn.elu(s)
        + jax.nn.sigmoid(s)
        + jax.nn.log_sigmoid(s)
        + jax.nn.hard_tanh(s)
        + jax.nn.relu6(s)
        + jax.nn.selu(s)
        + jax.nn.soft_sign(s)
    ),
    "logaddexp": lambda s, b, h, q, k: jnp.logaddexp(s, 1.0 * k - 2),
    "calls": lambda s, b, h, q, k: jax.jit(lambda x: jax.jit(jnp.sin)(x) * x)(s) + jax.checkpoint(jnp.cos)(s),
    "only indices": lambda s, b, h, q, k: 1.0 * q - k,
    "a number": lambda s, b, h, q, k: 0.25,
    "the score": lambda s, b, h, q, k: s,
    "small arrays": lambda s, b, h, q, k: (
        jnp.stack([s, s * s, 1.0 * q])[h]
        + jnp.array([s, 2 * s]).sum()
        + jnp.linspace(0, 1, 4)[k % 4]
        + jnp.arange(7.0)[q]
    ),
    "reductions": lambda s, b, h, q, k: (
        (s * int_range(4)).sum() + (s + int_range(1, 4)).prod() + jnp.max(s - int_range(3)) + (s * int_range(3)).min()
    ),
    "reductions of bools": lambda s, b, h, q, k: (
        s * jnp.any(q == 2 * int_range(3))
        + jnp.all(k > int_range(3))
        + jnp.max(int_range(3) == q)
        + (q == int_range(4)).sum(dtype=jnp.int32)
    ),
    "reductions of bits": lambda s, b, h, q, k: (
        s
        + lax.reduce_or(q + int_range(3), (0,))
        + lax.reduce_and(k + int_range(3), (0,))
        + lax.reduce_xor(int_range(3) * q, (0,))
    ),
    "empty reductions": lambda s, b, h, q, k: (
        jnp.where(jnp.any(jnp.zeros(0, bool)), 5.0, s)
        + jnp.where(jnp.all(jnp.zeros(0, bool)), 7.0, s)
        + jnp.zeros(0).sum()
    ),
    "dot of bools": lambda s, b, h, q, k: s * jnp.dot(jnp.stack([q > 2, k > 2]), jnp.stack([k > 3, q > 3])),
    "outer": lambda s, b, h, q, k: (jnp.outer(s + int_range(2), int_range(3) - s) @ jnp.arange(3.0)).sum(),
    "batched dot": lambda s, b, h, q, k: jnp.einsum("aij,akj->ika", s * jnp.ones((2, 2, 3)), jnp.ones((2, 2, 3)) * q)[
        0, 1, 1
    ],
    "rearranged": lambda s, b, h, q, k: jnp.pad(
        (s + int_range(6)).reshape(2, 3).T, ((1, 2), (0, 1)), constant_values=9.0
    )[::-1].ravel()[q + k],
    "padded within": lambda s, b, h, q, k: lax.pad(s * jnp.arange(1.0, 5), 0.5, ((-1, 2, 2),))[k],
    "joined": lambda s, b, h, q, k: jnp.concatenate([s + int_range(2), jnp.zeros(0), 2 * s - int_range(5)])[q],
    "tiled": lambda s, b, h, q, k: (
        jnp.tile(jnp.stack([s, s * s, q - s]), 3)[q + h] + jnp.repeat(jnp.stack([s, 2 * s]), 4)[q]
    ),
    "unstacked": lambda s, b, h, q, k: functools.reduce(lambda x, y: x * 0.5 + y, [*jnp.stack([s, s * s, 1.0 * k])]),
    "split": lambda s, b, h, q, k: sum(i * x[0] for i, x in enumerate(jnp.split(s + int_range(6), 3))),
    "broadcast": lambda s, b, h, q, k: jnp.broadcast_to(jnp.stack([s, 2 * s])[:, None], (2, 5))[b, k],
    "dynamic slice": lambda s, b, h, q, k: lax.dynamic_slice(s + int_range(8), (q,), (3,)).sum(),
    "dynamic update": lambda s, b, h, q, k: (
        lax.dynamic_update_slice(jnp.arange(6.0), s * jnp.arange(1.0, 3), (k,)).sum()
        + (lax.dynamic_update_slice(s * jnp.arange(6.0), jnp.ones(2), (q - 1,))[k])
    ),
    "one hot": lambda s, b, h, q, k: (jax.nn.one_hot(h, 3) * jnp.stack([s, s * s, 0 * s])).sum(),
}

if hasattr(lax, "polynomial"):  # since jax 0.12
    ELEMENTWISE["polynomial"] = lambda s, b, h, q, k: (
        lax.polynomial(s, [1, s, q / 2])
        + lax.polynomial(jnp.full((2, 3), s), [0.5, jnp.ones((2, 1)), s * jnp.ones((1, 3))]).sum()
    )

TABLES = {
    "load": (lambda t: lambda s, b, h, q, k: s + t[h, q] * t[h, k], [floats(3, 7)]),
    "load of each kind": (
        lambda f, g, i, u, p: lambda s, b, h, q, k: s * f[q] + g[k] + i[q] + u[k] + jnp.where(p[q], s, 0.0),
        [
            floats(7).astype(np.float32),
            floats(6).astype(jnp.bfloat16),
            integers(-9, 9, 7, dtype=np.int8),
            integers(0, 99, 6, dtype=np.uint16),
            floats(7) > 0,
        ],
    ),
    "negative indices": (lambda t: lambda s, b, h, q, k: s * t[q - 7] + t[-1] + t[-k - 1], [floats(7)]),
    "out of bounds": (lambda t: lambda s, b, h, q, k: s * t[q + k] + t[q - 12], [floats(7)]),
    "clip": (lambda t: lambda s, b, h, q, k: s * t.at[q + k - 3].get(mode="clip"), [floats(5)]),
    "fill": (
        lambda t: (
            lambda s, b, h, q, k: s * t.at[q + k - 3, h].get(mode="fill", fill_value=0.5, wrap_negative_indices=False)
        ),
        [floats(5, 3)],
    ),
    "fill of integers": (
        lambda t, u: (
            lambda s, b, h, q, k: (
                s + t.at[q].get(mode="fill") / 1e9 + u.at[k].get(mode="fill") + t.at[q].get(mode="fill", fill_value=3)
            )
        ),
        [integers(0, 9, 5), integers(0, 9, 4, dtype=np.uint8)],
    ),
    "fill that the dtype changes": (
        lambda t, u, i: (
            lambda s, b, h, q, k: (
                s
                + t.at[q].get(mode="fill", fill_value=0.1).astype("float32")
                + u.at[k].get(mode="fill", fill_value=-1) / 99
                + i.at[q].get(mode="fill", fill_value=300) / 9
            )
        ),
        [floats(5).astype(jnp.bfloat16), integers(0, 9, 4, dtype=np.uint8), integers(0, 9, 5, dtype=np.int8)],
    ),
    "promise": (lambda t: lambda s, b, h, q, k: s + t.at[q, k].get(mode="promise_in_bounds"), [floats(7, 6)]),
    "unsigned indices": (
        lambda t, i: lambda s, b, h, q, k: s * t[i[k]],
        [floats(7), np.array([0, 2**32 - 1, 3, 6, 7, 2**31], np.uint32)],
    ),
    "small indices": (
        lambda t, i, j: (
            lambda s, b, h, q, k: s * t[i[q], 1] + t[j[k], 0] + t[3, j[k] + j[q]] + t[2, i[q] * j[k] - i[k]]
        ),
        [floats(200, 3), integers(-128, 128, 7, dtype=np.int8), integers(-(2**15), 2**15, 7, dtype=np.int16)],
    ),
    "sums of small integers": (
        lambda i, j, u: lambda s, b, h, q, k: s + (i[q] + i[k]) + (j[q] * j[k] - j[q]) / 99 + (u[q] - u[k]),
        [
            integers(-128, 128, 7, dtype=np.int8),
            integers(-999, 999, 7, dtype=np.int16),
            integers(0, 256, 7, dtype=np.uint8),
        ],
    ),
    "nested": (lambda t, i: lambda s, b, h, q, k: s + t[i[i[q] % 7], i[k] % 3], [floats(7, 3), integers(0, 7, 7)]),
    "rows": (lambda x, y: lambda s, b, h, q, k: s + jnp.dot(x[q], y[k]), [floats(7, 4), floats(6, 4)]),
    "rows of heads": (
        lambda x, y: lambda s, b, h, q, k: s + x[b, q] @ y[k, :, h] + (x[b, q] * y[k, :, h]).sum(),
        [floats(2, 7, 4), floats(6, 4, 3)],
    ),
    "views": (
        lambda t: (
            lambda s, b, h, q, k: (
                s * t.T[k, q]
                + t[::-1, 1::2][q, h]
                + t.reshape(6, 7)[k, q]
                + t[None, :, None][0, q, 0, k]
                + t.ravel()[6 * q + k]
            )
        ),
        [floats(7, 6)],
    ),
    "part of a row": (
        lambda t: lambda s, b, h, q, k: s + lax.dynamic_slice(t[q], (k,), (2,)) @ t[0, :2],
        [floats(7, 6)],
    ),
    "two rows": (
        lambda t: lambda s, b, h, q, k: s * t[jnp.array([q, k])].sum() + t[jnp.stack([h, b])[::-1], 1].prod(),
        [floats(7, 3)],
    ),
    "mapped load": (
        lambda t: lambda s, b, h, q, k: s * jax.vmap(lambda row, i: row[i])(t, int_range(3) + q % 2).sum(),
        [floats(3, 4)],
    ),
    "used and indexed": (
        lambda t, u: (
            lambda s, b, h, q, k: s * jnp.tanh(t[q]) + t.sum() * t[k] + (t * t)[q] + jnp.exp(u) * u + t[k] * t[k]
        ),
        [floats(7), floats()],
    ),
    "returned": (lambda t: lambda s, b, h, q, k: t[q, k], [floats(7, 6)]),
    "smaller dtype": (
        lambda t: lambda s, b, h, q, k: s * (t[q] * t[k]).astype(s.dtype),
        [floats(7).astype(jnp.bfloat16)],
    ),
    "precise dtype": (lambda t: lambda s, b, h, q, k: s * t[q], [floats(7).astype(jnp.float16)]),
    "captured in a call": (lambda t: lambda s, b, h, q, k: jax.jit(lambda s, k: s * t[k])(s, k), [floats(6)]),
    "in a function with custom_jvp": (
        lambda t, u: lambda s, b, h, q, k: _scaled(s, t[q]) + _scaled(u[k], s),
        [floats(7), floats(6)],
    ),
    "in a function with custom_vjp": (
        lambda t, u: lambda s, b, h, q, k: _halved(s, t[q]) + _halved(u[k], s),
        [floats(7), floats(6)],
    ),
    "piecewise": (
        lambda t: lambda s, b, h, q, k: jnp.where(q > k, s * t[q - k], jnp.where(q == k, 0.0, t[k - q])),
        [floats(7)],
    ),
    "power of a table": (
        lambda t: lambda s, b, h, q, k: s * jnp.abs(t[q]) ** k + lax.integer_pow(t[q], -2),
        [1 + floats(7) ** 2],
    ),
}


@jax.custom_jvp
def _scaled(x, y):
    return x * y


_scaled.defjvp(
    lambda primals, tangents: (_scaled(*primals), 3 * tangents[0] * primals[1] + 5 * tangents[1] * primals[0])
)


@jax.custom_vjp
def _halved(x, y):
    return x * y


_halved.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, cotangent: (cotangent * xy[1] / 2, cotangent * jnp.cos(xy[0])))

PROGRAMS = {name: (functools.partial(lambda f: f, f), []) for name, f in ELEMENTWISE.items()} | TABLES


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def by_jax(make, arrays, entries):
    """Return the values, the gradients of the score, and the float64 sums of the gradients of captured floats."""

    def gradients(cotangent, score, *indices):
        def value(score, floating):
            given = [floating.get(i, x) for i, x in enumerate(arrays)]
            return jnp.asarray(make(*given)(score, *indices), jnp.float64)

        result, pull = jax.vjp(value, score, {i: x for i, x in enumerate(arrays) if is_float(x)})
        return result, *pull(cotangent)

    result, dscore, floating = jax.vmap(gradients)(*(entries[name] for name in ("cotangent", *NAMES)))
    return result, dscore, jax.tree.map(lambda x: x.astype(jnp.float64).sum(0), floating)


@pytest.fixture(scope="module")
def expected():
    """Values and gradients of every program by JAX, from one compilation."""

    @jax.jit
    def every(arrays, entries):
        return {name: by_jax(make, arrays[name], entries) for name, (make, _) in PROGRAMS.items()}

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, every({name: arrays for name, (_, arrays) in PROGRAMS.items()}, ENTRIES))


def lowered(make, arrays, sizes=SIZES, name="score_mod"):
    """Return the traced program, the code of its derivative, the indices of its captured arrays, and these arrays."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in arrays]
        traced, found = program.trace(name, make(*arrays), "float64", sizes, 0)
        assert traced.refusal is None, traced.refusal
        captured = [Captured(x.dtype.name, False, x.shape, is_float(x)) for x in found]
        gradient = traced.gradient(captured, "float64", sizes) if name == "score_mod" else None
        order = [next(i for i, x in enumerate(arrays) if x is y) for y in found]
        return traced, gradient, order, [np.asarray(x) for x in found]


def close(x, y, dtype=np.float64):
    """Compare with a tolerance of `dtype`. Gradients are summed before they are rounded to an array's dtype."""
    largest, tolerance = np.abs(y).max(initial=1, where=np.isfinite(y)), max(1e-13, float(jnp.finfo(dtype).eps))
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("sizes", [SIZES, Sizes(2, 3, None, 6)], ids=["sizes", "an offset"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_code_equals_function(name, sizes, expected):
    """The range of the query indices is known or unknown."""
    make, arrays = PROGRAMS[name]
    value, dscore, dfloating = expected[name]
    traced, gradient, order, found = lowered(make, arrays, sizes)
    close(run(traced.text, ENTRIES, found)[0], value)
    result, accumulated = run(gradient.text, ENTRIES, found)
    close(result, dscore)
    for number, i in enumerate(order):
        if i in dfloating:
            close(accumulated.get(number, np.zeros(arrays[i].shape)), dfloating[i], arrays[i].dtype)


def test_masks():
    """A mask_mod has no score. Known ranges of indices decide some comparisons at compile time."""
    documents = integers(0, 3, 7)

    def mask_mod(documents):
        return lambda b, h, q, k: jnp.where(h == 0, q >= k, (documents[q] == documents[k]) & (q - k < 9)) | (b + h > 3)

    traced, *_ = lowered(mask_mod, [documents], name="mask_mod")
    b, h, q, k = (ENTRIES[name] for name in program.INDICES)
    same = documents[q] == documents[k]
    np.testing.assert_array_equal(run(traced.text, ENTRIES, [documents])[0], np.where(h == 0, q >= k, same))
    assert "9" not in re.findall(r"const.i,(\d+)", traced.text)


def test_dead_code_is_removed():
    """Only one entry of a table is loaded. Unused and constant values have no instructions."""

    def score_mod(s, b, h, q, k):
        unused = jnp.exp(jnp.tanh(table)).sum()
        return s + jnp.tanh(jnp.exp(table) * 2)[q, k] + jnp.where(q < 7, 0.0, unused) + 0 * k

    table = jnp.asarray(floats(7, 6), jnp.float32)
    traced, _ = program.trace("mask_mod", lambda *indices: score_mod(1.0, *indices) > 0, "float32", SIZES, 0)
    assert traced.text.count("load") == traced.text.count("tanh") == traced.text.count("exp") == 1
    assert traced.text.count("score") == traced.text.count("select") == 0


@pytest.mark.parametrize(
    ("score_mod", "divides"),
    [
        (lambda s, b, h, q, k: s / 30, False),
        (lambda s, b, h, q, k: 30 / s, True),
        (lambda s, b, h, q, k: s / 1e-40, True),  # the reciprocal is infinite
    ],
)
def test_division_by_a_constant_is_a_product(score_mod, divides):
    traced, _ = program.trace("score_mod", score_mod, "float32", SIZES, 0)
    assert ("div.f" in traced.text) == divides


# --- random functions -------------------------------------------------------------------------------------------------

# Operations and their types of operands and results. Products are bounded, and rounding of floats causes no jumps.
OPERATIONS = [
    (lambda x, y: x + y, "ff", "f"),
    (lambda x, y: x - 0.5 * y, "ff", "f"),
    (lambda x, y: jnp.tanh(x * y), "ff", "f"),
    (lambda x, y: x / (1 + y * y), "ff", "f"),
    (lambda x: jax.nn.silu(x), "f", "f"),
    (lambda x: jnp.sin(x) - jnp.exp(-x * x), "f", "f"),
    (jnp.minimum, "ff", "f"),
    (jnp.where, "bff", "f"),
    (lambda x, y: x * jnp.float64(1) + 0.125 * y, "fi", "f"),
    (lambda table, x, y: table[x, y], "tii", "f"),
    (lambda table, x, y: table.at[x, y].get(mode="fill", fill_value=0.25), "tii", "f"),
    (lambda table, x, y: jnp.dot(table[x], table[y]), "tii", "f"),
    (lambda table, x: lax.stop_gradient(table[x, 1]), "ti", "f"),
    (lambda x, y, i: jnp.stack([x, y, x])[i], "ffi", "f"),
    (lambda x, y: x + y, "ii", "i"),
    (lambda x, y: x - y, "ii", "i"),
    (lambda x, y: x * y, "ii", "i"),
    (lambda x, y: x // y, "ii", "i"),
    (lambda x, y: x % (jnp.abs(y) + 1), "ii", "i"),
    (lambda x: x % 3 - 1, "i", "i"),
    (lambda x: x // -2, "i", "i"),
    (lambda x, y: (x & y) ^ 5, "ii", "i"),
    (lambda x, y: jnp.clip(x, 0, y), "ii", "i"),
    (lambda x, y: (x << 2) | (y >> 1), "ii", "i"),
    (lambda x, y: lax.shift_right_logical(x, y), "ii", "i"),
    (lambda table, x: table[x], "ji", "i"),
    (jnp.where, "bii", "i"),
    (lambda x, y: x < y, "ii", "b"),
    (lambda x, y: x == y, "ii", "b"),
    (lambda x, y: x & ~y, "bb", "b"),
    (lambda x, y: x ^ y, "bb", "b"),
]
CAPTURED = [floats(4, 3), integers(-4, 9, 5)]


def random_function(instructions):
    def make(table, whole):
        def score_mod(s, b, h, q, k):
            values = {"f": [s], "i": [q, k, h, b], "b": [q >= k], "t": [table], "j": [whole]}
            for operation, *operands in instructions:
                function, taken, given = OPERATIONS[operation]
                found = [values[type][i % len(values[type])] for type, i in zip(taken, operands, strict=False)]
                values[given].append(function(*found))
            return jnp.asarray(sum(values["f"][-2:]) + jnp.where(values["b"][-1], 0.5, 0.25 * values["i"][-1]))

        return score_mod

    return make


try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:
    pass
else:
    OPERAND = st.integers(0, 7)
    INSTRUCTIONS = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), OPERAND, OPERAND, OPERAND), max_size=12)

    @given(INSTRUCTIONS)
    def test_random_functions(instructions):
        make = random_function(instructions)
        traced, gradient, order, found = lowered(make, CAPTURED)
        with jax.enable_x64(True):
            value, dscore, dfloating = by_jax(make, list(map(jnp.asarray, CAPTURED)), ENTRIES)
        close(run(traced.text, ENTRIES, found)[0], value)
        result, accumulated = run(gradient.text, ENTRIES, found)
        close(result, dscore)
        if 0 in order:
            close(accumulated.get(order.index(0), np.zeros(CAPTURED[0].shape)), dfloating[0])

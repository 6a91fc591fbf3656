"""Functions that are equivalent to built-in features use these.

A score_mod may be a soft cap or a bias. A mask_mod may be a causal mask or a window.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from programs import Mod, check

import jax_flash
from jax_flash import Problem

pytestmark = pytest.mark.usefixtures("device")

B, N, T, S = 2, 4, 19, 23
CASE = functools.partial(Case, B=B, T=T, S=S, N=N, K=2, D=8, E=8)


def array(*shape):
    return np.random.default_rng(3).normal(size=shape).astype("float32")


def described(score_mod=None, T=T, **options):
    shapes = (B, T, N, 8), (B, S, 2, 8), (B, S, 2, 8)
    return Problem.of(*(jax.ShapeDtypeStruct(x, "float32") for x in shapes), score_mod=score_mod, **options)


CAPS = {
    "a number": lambda s, *_: 3 * jnp.tanh(s / 3),
    "its reciprocal": lambda s, *_: jnp.tanh(s * (1 / 3)) * 3.0,
    "jitted function": jax.jit(lambda s, *_: jnp.float32(3) * jnp.tanh(s / jnp.float32(3))),
    "one": lambda s, *_: jnp.tanh(s),
}


@pytest.mark.parametrize("name", CAPS)
def test_soft_cap(name):
    problem = described(CAPS[name])
    assert problem.score.score_mod is None and problem.score.logits_soft_cap == (1.0 if name == "one" else 3.0)
    check(CASE(causal=True), lambda: (Mod("score_mod", lambda: CAPS[name], ()),), "flash")


# Shape, dtype, a function of the array and an entry, and the extent of the bias.
BIASES = {
    "each": ((B, N, T, S), "float32", lambda x, s, b, h, q, k: s + x[b, h, q, k], "bnts"),
    "batch dim of 1": ((1, N, T, S), "float32", lambda x, s, b, h, q, k: s + x[0, h, q, k], "1nts"),
    "two dims": ((T, S), "float32", lambda x, s, b, h, q, k: x[q, k] + s, "11ts"),
    "bfloat16, transposed": ((S, N, T), "bfloat16", lambda x, s, b, h, q, k: s + x[k, h, q], "1nts"),
    "larger": ((T + 5, B + 1, S + 1), "float32", lambda x, s, b, h, q, k: s + x[q, b, k], "b1ts"),
}


@pytest.mark.parametrize("name", BIASES)
def test_bias(name):
    shape, dtype, score_mod, extent = BIASES[name]

    def make(x):
        return lambda *entry: score_mod(x, *entry)

    x = jnp.asarray(array(*shape), dtype)
    problem = described(make(x))
    assert problem.score.score_mod is None and problem.captured == ()
    assert f"score.bias={extent}" in problem.encode() and problem.score.bias_dtype == dtype
    made = (Mod("score_mod", make, (np.asarray(x.astype("float32")),)),)
    for options in ({"causal": True, "soft_cap": 1.5}, {"dropout": 0.3, "segments": True, "deterministic": True}):
        check(CASE(**options), lambda: made, "flash")


PAIRS = jnp.asarray(array(T, S))
NOT_FEATURES = {
    "the score twice": lambda s, b, h, q, k: s + 3 * jnp.tanh(s / 3),
    "two numbers": lambda s, *_: 3 * jnp.tanh(s / 3.001),
    "a negative cap": lambda s, *_: -3 * jnp.tanh(s / -3),
    "a cap for each head": lambda s, b, h, *_: (h + 3) * jnp.tanh(s / (h + 3)),
    "a cap and more": lambda s, b, h, q, k: 3 * jnp.tanh(s / 3) + PAIRS[q, k],
    "a bias and more": lambda s, b, h, q, k: (s + PAIRS[q, k]) * 2,
    "shifted": lambda s, b, h, q, k: s + PAIRS[q, k - 1],
    "the same index twice": lambda s, b, h, q, k: s + PAIRS[q, q],
    "too small": lambda s, b, h, q, k: s + PAIRS[:, :-1][q, k],
    "keys only": lambda s, b, h, q, k: s + PAIRS[3, k],
    "integers": lambda s, b, h, q, k: s + (PAIRS > 0).astype(int)[q, k],
}


@pytest.mark.parametrize("name", NOT_FEATURES)
def test_other_functions_stay_programs(name):
    problem = described(NOT_FEATURES[name])
    assert problem.score.score_mod is not None and not problem.score.logits_soft_cap and problem.score.bias is None


def test_feature_used_twice():
    cap, bias = CAPS["a number"], lambda s, b, h, q, k: s + PAIRS[q, k]
    given = jax.ShapeDtypeStruct((1, 1, T, S), "float32")
    assert described(cap, bias=given).score.score_mod is not None
    assert described(bias, bias=given).score.score_mod is not None
    assert described(cap, logits_soft_cap=2.0).score.score_mod is not None
    assert described(bias, query_offset=1).score.score_mod is not None
    assert described(bias, logits_soft_cap=2.0).score.score_mod is None


def test_custom_derivatives():
    """A function with a custom derivative is not replaced by a feature."""
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvp(lambda primals, tangents: (jnp.tanh(*primals), 5 * tangents[0]))
    assert described(lambda s, *_: 3 * tanh(s / 3)).score.score_mod is not None


def test_one_query():
    def make(x):
        return lambda s, b, h, q, k: s + x[q, k]

    row = array(1, S)
    assert described(make(jnp.asarray(row)), T=1).score.score_mod is None
    check(CASE(T=1), lambda: (Mod("score_mod", make, (row,)),), "flash")


def test_transformations():
    """The captured array may be mapped over, and differentiated twice."""
    q, k, v = (jnp.asarray(array(3, B, n, 2, 8)) for n in (5, 6, 6))
    x = jnp.asarray(array(3, 2, 5, 6))

    def loss(x, q, k, v, implementation):
        def score_mod(s, b, h, q, k):
            return s + x[h, q, k]

        o = jax_flash.dot_product_attention(q, k, v, score_mod=score_mod, implementation=implementation)
        return (o**2).sum()

    def results(implementation):
        f = functools.partial(loss, implementation=implementation)
        gradient = jax.vmap(jax.grad(jax.checkpoint(f), (0, 1)))
        second = jax.grad(lambda x: (jax.grad(f)(x, q[0], k[0], v[0]) ** 2).sum())
        return jax.jit(gradient)(x, q, k, v), second(x[0])

    found, expected = results("flash"), results("xla")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)


# The function, and the number of visible keys to the left and to the right of a query; -1 means all.
WINDOWS = {
    "causal": (lambda b, h, q, k: k <= q, -1, 0),
    "causal, from the query": (lambda b, h, q, k: q >= k, -1, 0),
    "causal, by the distance": (lambda b, h, q, k: q - k >= 0, -1, 0),
    "causal, negated": (lambda b, h, q, k: ~(k > q), -1, 0),
    "anti-causal": (lambda b, h, q, k: jnp.logical_not(q > k), 0, -1),
    "less than": (lambda b, h, q, k: k < q + 1, -1, 0),
    "and the next ones": (lambda b, h, q, k: k - q < 4, -1, 3),
    "sliding": (lambda b, h, q, k: (k <= q) & (q - k < 7), 6, 0),
    "sliding, the last keys": (lambda b, h, q, k: (k > q - 7) & (q >= k), 6, 0),
    "both sides": (lambda b, h, q, k: jnp.abs(q - k) <= 5, 5, 5),
    "both sides, less than": (lambda b, h, q, k: abs(k - q) < 5, 4, 4),
    "negated distances": (lambda b, h, q, k: (-k >= -q - 2) & (k + 3 >= q), 3, 2),
    "narrower of two": (lambda b, h, q, k: (q - k <= 9) & ((k <= q + 4) & (q - k <= 3)), 3, 4),
    "jitted function": (jax.jit(lambda b, h, q, k: (k <= q) & (q - k <= np.int32(2))), 2, 0),
    "diagonal": (lambda b, h, q, k: (q - k <= 0) & (k <= q), 0, 0),
}


def extent(problem):
    return problem.mask.reach


@pytest.mark.parametrize("name", WINDOWS)
def test_window(name):
    mask_mod, left, right = WINDOWS[name]
    problem = described(mask_mod=mask_mod)
    assert problem.mask.mask_mod is None and problem.captured == ()
    assert extent(problem) == (left, right) and problem.mask.is_causal == (right == 0)
    made = (Mod("mask_mod", lambda: mask_mod, ()),)
    check(CASE(), lambda: made, "flash")
    check(CASE(T=S, S=T, offset=True, segments=True, dropout=0.3), lambda: made, "flash")


def test_window_with_other_windows():
    """The narrower bound applies on each side."""
    both, ahead = (lambda b, h, q, k: abs(q - k) <= 5), (lambda b, h, q, k: k <= q + 2)
    assert extent(described(mask_mod=both, is_causal=True)) == (5, 0)
    assert extent(described(mask_mod=both, local_window_size=(3, 9))) == (3, 5)
    assert extent(described(mask_mod=ahead, local_window_size=(3, 9))) == (3, 2)
    assert extent(described(mask_mod=ahead, is_causal=True)) == (-1, 0)
    assert extent(described(mask_mod=WINDOWS["causal"][0], local_window_size=(3, 9))) == (3, 0)
    wider = described(mask_mod=both, local_window_size=(3, 9), score_mod=NOT_FEATURES["keys only"], query_offset=2)
    assert extent(wider) == (3, 5) and wider.mask.mask_mod is None and wider.score.score_mod is not None
    case = CASE(causal=True)
    check(case, lambda: (Mod("mask_mod", lambda: both, ()),), "flash")


WIDTH = jnp.int32(5)
OTHER_MASKS = {
    "strictly before": lambda b, h, q, k: k < q,
    "far keys only": lambda b, h, q, k: q - k >= 5,
    "before the window": lambda b, h, q, k: (q - k <= 9) & (q - k >= 2),
    "disjunction": lambda b, h, q, k: (k <= q) | (k < 5),
    "captured width": lambda b, h, q, k: abs(q - k) <= WIDTH,
    "width per head": lambda b, h, q, k: q - k <= h,
    "dilated": lambda b, h, q, k: (k <= q) & (k % 2 == 0),
    "condition on keys": lambda b, h, q, k: k < 9,
    "condition on queries": lambda b, h, q, k: q < 9,
    "sum": lambda b, h, q, k: q + k < 20,
    "doubled query": lambda b, h, q, k: 2 * q >= k,
    "negated conjunction": lambda b, h, q, k: ~((k > q) & (q - k < 5)),
    "equality": lambda b, h, q, k: q == k,
    "sums that wrap": lambda b, h, q, k: q - k + np.int32(2**30 - 1) + np.int32(2**30 - 1) + np.int32(2**30 - 1) >= 0,
    "numbers that wrap": lambda b, h, q, k: q - k + np.int32(2**31 - 4) >= 0,
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_stay_programs(name):
    problem = described(mask_mod=OTHER_MASKS[name])
    assert problem.mask.mask_mod is not None and extent(problem) == (-1, -1)


@pytest.mark.parametrize("transform", ["jit", "vmap", "sharded"])
def test_windows_under_transformations(transform):
    q, k, v = (jnp.asarray(array(B, n, 2, 8)) for n in (T, S, S))

    def loss(q, k, v, **options):
        return (jax_flash.dot_product_attention(q, k, v, implementation="flash", **options) ** 2).sum()

    def gradients(**options):
        f = jax.grad(lambda *x: loss(*x, **options), (0, 1, 2))
        if transform == "jit":
            return jax.jit(f)(q, k, v)
        if transform == "vmap":
            return jax.vmap(f)(q, k, v)
        mesh = jax.make_mesh((B,), ("data",), devices=jax.devices()[:B]) if len(jax.devices()) >= B else None
        if mesh is None:
            pytest.skip("there are too few devices")
        place = jax.sharding.NamedSharding(mesh, jax.P("data"))
        return jax.jit(f)(*(jax.device_put(x, place) for x in (q, k, v)))

    found, expected = gradients(mask_mod=WINDOWS["sliding"][0]), gradients(is_causal=True, local_window_size=(6, 0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)

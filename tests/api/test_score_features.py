"""A score_mod that is a soft cap or a bias and nothing else is what the kernels have as a feature."""

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


def described(score_mod, T=T, **options):
    shapes = (B, T, N, 8), (B, S, 2, 8), (B, S, 2, 8)
    return Problem.of(*(jax.ShapeDtypeStruct(x, "float32") for x in shapes), score_mod=score_mod, **options)


CAPS = {
    "a number": lambda s, *_: 3 * jnp.tanh(s / 3),
    "its reciprocal": lambda s, *_: jnp.tanh(s * (1 / 3)) * 3.0,
    "of a function that is jitted": jax.jit(lambda s, *_: jnp.float32(3) * jnp.tanh(s / jnp.float32(3))),
    "one": lambda s, *_: jnp.tanh(s),
}


@pytest.mark.parametrize("name", CAPS)
def test_soft_cap(name):
    problem = described(CAPS[name])
    assert problem.score_mod is None and problem.soft_cap == (1.0 if name == "one" else 3.0)
    check(CASE(causal=True), lambda: (Mod("score_mod", lambda: CAPS[name], ()),), "flash")


# Shape, dtype, the function of the array too, and what of the bias there is.
BIASES = {
    "each": ((B, N, T, S), "float32", lambda x, s, b, h, q, k: s + x[b, h, q, k], "bnts"),
    "of a list of one": ((1, N, T, S), "float32", lambda x, s, b, h, q, k: s + x[0, h, q, k], "1nts"),
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
    assert problem.score_mod is None and problem.captured == ()
    assert f"bias={extent}" in problem.encode() and problem.bias_dtype == dtype
    made = (Mod("score_mod", make, (np.asarray(x.astype("float32")),)),)
    for options in ({"causal": True, "soft_cap": 1.5}, {"dropout": 0.3, "segments": True, "deterministic": True}):
        check(CASE(**options), lambda: made, "flash")


PAIRS = jnp.asarray(array(T, S))
LEFT_ALONE = {
    "the score twice": lambda s, b, h, q, k: s + 3 * jnp.tanh(s / 3),
    "two numbers": lambda s, *_: 3 * jnp.tanh(s / 3.001),
    "a negative cap": lambda s, *_: -3 * jnp.tanh(s / -3),
    "a cap for each head": lambda s, b, h, *_: (h + 3) * jnp.tanh(s / (h + 3)),
    "a cap and more": lambda s, b, h, q, k: 3 * jnp.tanh(s / 3) + PAIRS[q, k],
    "a bias and more": lambda s, b, h, q, k: (s + PAIRS[q, k]) * 2,
    "shifted": lambda s, b, h, q, k: s + PAIRS[q, k - 1],
    "the same index twice": lambda s, b, h, q, k: s + PAIRS[q, q],
    "too small": lambda s, b, h, q, k: s + PAIRS[:, :-1][q, k],
    "for keys alone": lambda s, b, h, q, k: s + PAIRS[3, k],
    "integers": lambda s, b, h, q, k: s + (PAIRS > 0).astype(int)[q, k],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_functions_stay_programs(name):
    problem = described(LEFT_ALONE[name])
    assert problem.score_mod is not None and not problem.soft_cap and problem.bias is None


def test_where_the_feature_has_no_place():
    cap, bias = CAPS["a number"], lambda s, b, h, q, k: s + PAIRS[q, k]
    given = jax.ShapeDtypeStruct((1, 1, T, S), "float32")
    assert described(cap, bias=given).score_mod is not None
    assert described(bias, bias=given).score_mod is not None
    assert described(cap, logits_soft_cap=2.0).score_mod is not None
    assert described(bias, query_offset=1).score_mod is not None
    assert described(bias, logits_soft_cap=2.0).score_mod is None


def test_derivatives_of_its_own():
    """A function with a rule is not what it computes."""
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvp(lambda primals, tangents: (jnp.tanh(*primals), 5 * tangents[0]))
    assert described(lambda s, *_: 3 * tanh(s / 3)).score_mod is not None


def test_one_query():
    def make(x):
        return lambda s, b, h, q, k: s + x[q, k]

    row = array(1, S)
    assert described(make(jnp.asarray(row)), T=1).score_mod is None
    check(CASE(T=1), lambda: (Mod("score_mod", make, (row,)),), "flash")


def test_transformations():
    """The array that is captured may be mapped over, and differentiated twice."""
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

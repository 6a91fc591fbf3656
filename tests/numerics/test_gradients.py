"""First and higher derivatives in float64, compared with finite differences and with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from accuracy import by_numpy, errors
from cases import Case, differentiable, run
from jax.test_util import check_grads

import jax_flash
from jax_flash import blockwise, dropout

pytestmark = pytest.mark.usefixtures("x64")

SMALL = functools.partial(Case, B=2, T=5, S=6, N=2, K=2, D=3, E=2)

# For any two of these features, a case has both, and other cases have only one: masks, bias, shared keys, windows, soft
# cap, dropout, segment ids.
PAIRS = [
    SMALL(),
    SMALL(N=4, causal=True, bias="bnts", mask="b1ts", sinks=1.0),
    SMALL(K=1, window=(2, 1), soft_cap=1.5, bias="1n1s", sinks=1.0, segments=True),
    SMALL(N=4, window=(1, 2), mask="bnts", dropout=0.3, lengths=True),
    SMALL(causal=True, window=(2, 0), soft_cap=2.0, dropout=0.2, mask="11ts"),
    SMALL(K=1, causal=True, dropout=0.4, segments=True, bias="b1t1"),
    SMALL(soft_cap=1.0, bias="1111", sinks=2.0, dropout=0.3, mask="1n11", offset=True),
    SMALL(N=4, causal=True, soft_cap=1.2, segments=True, mask="b11s", offset=True),
    SMALL(window=(3, 3), bias="bnt1", segments=True, mask="1nts", dropout=0.25, lengths=True),
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_fused(case):
    attention, inputs = differentiable(case, "flash")
    check_grads(attention, inputs, order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4, eps=1e-4)


@pytest.mark.parametrize("case", PAIRS[1::3], ids=str)
def test_blockwise(case, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 4 if not case.dropout else dropout.TILE)
    attention, inputs = differentiable(case, "xla")
    check_grads(attention, inputs, order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4, eps=1e-4)


@pytest.mark.parametrize("case", [PAIRS[2], PAIRS[4]], ids=str)
def test_reference(case):
    attention, inputs = differentiable(case, "reference")
    check_grads(attention, inputs, order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4, eps=1e-4)


def scalar(case, implementation):
    """Return a scalar function of attention, and its inputs."""
    attention, inputs = differentiable(case, implementation)
    do, dlogsumexp = case.cotangents("float64")

    def product(*inputs):
        o, logsumexp = attention(*inputs)
        return jnp.vdot(o, do) + jnp.vdot(logsumexp, dlogsumexp)

    return product, inputs


HIGHER = [PAIRS[1], PAIRS[6]]


def assert_same_as_reference(derivative, case):
    results = []
    for implementation in ("flash", "reference"):
        f, inputs = scalar(case, implementation)
        results.append(jax.jit(derivative(f))(*inputs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10), *results)


@pytest.mark.parametrize("case", HIGHER, ids=str)
def test_hessian(case):
    assert_same_as_reference(lambda f: jax.hessian(f, argnums=(0, 1, 2)), case)


@pytest.mark.parametrize("case", HIGHER, ids=str)
def test_gradient_of_gradient(case):
    """The gradient of a gradient penalty."""

    def penalised(f):
        def penalty(*inputs):
            return sum((g**2).sum() for g in jax.grad(f, tuple(range(len(inputs))))(*inputs))

        return lambda *inputs: jax.grad(penalty, tuple(range(len(inputs))))(*inputs)

    assert_same_as_reference(penalised, case)


def test_third_order():
    def third(f):
        def summed_gradient(g):
            return lambda *inputs: jax.grad(lambda *x: g(*x).sum())(*inputs)

        return summed_gradient(summed_gradient(summed_gradient(f)))

    assert_same_as_reference(third, SMALL(causal=True, bias="1111", soft_cap=1.0))


def test_reverse_over_reverse():
    def product(f):
        def hessian_times_cosine(query, *rest):
            _, pull = jax.vjp(lambda query: jax.grad(f)(query, *rest), query)
            return pull(jnp.cos(query))

        return hessian_times_cosine

    assert_same_as_reference(product, PAIRS[1])


@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_empty_rows(implementation):
    """Outputs and gradients of empty rows are zero, never NaN, up to second order."""
    query, key, value, bias = (jnp.asarray(x) for x in SMALL(bias="bnts").arrays("float64").values())
    bias = bias.at[0, 0, 2].set(-jnp.inf)

    def loss(query, key, value):
        mask = jnp.ones((2, 2, 5, 6), bool).at[1, :, 3].set(False)
        o, logsumexp = jax_flash.dot_product_attention(
            query, key, value, bias, mask, return_residual=True, implementation=implementation
        )
        empty_rows = (o[1, 3], o[0, 2, 0])
        return (o**2).sum() + jnp.where(jnp.isfinite(logsumexp), logsumexp, 0).sum(), (empty_rows, logsumexp)

    (_, (rows, logsumexp)), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(query, key, value)
    assert not any(row.any() for row in rows)
    assert jnp.isneginf(logsumexp[1, 3]).all() and jnp.isneginf(logsumexp[0, 2, 0])
    assert jnp.isfinite(logsumexp).sum() == 2 * 2 * 5 - 3
    assert not gradients[0][1, 3].any() and not gradients[0][0, 2, 0].any()
    assert all(jnp.isfinite(g).all() for g in gradients)
    second = jax.grad(lambda q: (jax.grad(lambda q: loss(q, key, value)[0])(q) ** 2).sum())(query)
    assert jnp.isfinite(second).all() and not second[1, 3].any()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_16_bit_gradients_of_plain_jax_are_rounded_once(implementation):
    """Sums over 2048 rows and keys have at most twice the error of float32, plus half a unit in the last place."""
    case = Case(B=1, T=2048, S=2048, N=2, K=1, bias="1n1s", sinks=2.0, logsumexp=False)
    arrays, cotangents = case.arrays("bfloat16"), case.cotangents("bfloat16")
    exact = by_numpy(case, arrays, cotangents)
    in_float32 = errors(standard.attention(case, arrays, cotangents, np.float32), exact)
    results = run(case, arrays, cotangents, implementation)
    for name, x in exact.items():
        rounding = float(jnp.finfo(results[name].dtype).eps) / 2 * np.abs(x)
        assert (np.abs(results[name].astype(x.dtype) - x) <= rounding + 2 * in_float32[name]).all(), name

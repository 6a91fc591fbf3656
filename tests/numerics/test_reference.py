"""Compares the reference and the blockwise implementation with NumPy in extended precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from cases import FEATURES, Case, problem, run

from jax_flash import blockwise, reference
from jax_flash.operands import DIFFERENTIATED

pytestmark = pytest.mark.usefixtures("x64")

ULP = np.finfo(np.float64).eps


def assert_exact(results, exact):
    """Check equality up to the rounding of sums over a few dozen terms."""
    assert results.keys() == exact.keys()
    for name, expected in exact.items():
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(results[name][~finite], expected[~finite].astype(float), err_msg=name)
        scale = np.abs(expected[finite]).max(initial=0)
        np.testing.assert_allclose(results[name][finite], expected[finite], rtol=0, atol=32 * ULP * scale, err_msg=name)


def explicit(module, problem, operands, cotangents):
    """Return o, logsumexp and gradients from `forward` and `backward` of `reference` or `blockwise`."""
    o, l, m = module.forward(problem, operands)
    logsumexp = jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))
    names = [DIFFERENTIATED[name] for name in problem.gradients]
    gradients = module.backward(problem, operands, o, l, m, *cotangents)
    results = {"o": o, "logsumexp": logsumexp} | dict(zip(names, gradients, strict=True))
    return results | ({"sinks": results["sinks"].ravel()} if "sinks" in names else {})


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_reference_is_exact(case):
    """Check Algorithm 0 through the public function, with JAX's differentiation, and then Algorithm 3."""
    arrays, cotangents = case.arrays("float64"), case.cotangents("float64")
    exact = standard.attention(case, arrays, cotangents, np.longdouble)
    assert_exact(run(case, arrays, cotangents, "reference"), exact)
    problem_, operands = problem(case, arrays)
    assert_exact(jax.jit(functools.partial(explicit, reference, problem_))(operands, cotangents), exact)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_blockwise_is_exact(case, monkeypatch):
    """Use tiles so small that there are several, some of them incomplete."""
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    arrays, cotangents = case.arrays("float64"), case.cotangents("float64")
    exact = standard.attention(case, arrays, cotangents, np.longdouble)
    problem_, operands = problem(case, arrays)
    assert_exact(jax.jit(functools.partial(explicit, blockwise, problem_))(operands, cotangents), exact)


@pytest.mark.parametrize("case", [Case(), Case(causal=True, bias="1n1s", dropout=0.3, soft_cap=1.5)], ids=str)
def test_derivative_of_blockwise_forward(case, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    arrays, cotangents = case.arrays("float64", seed=3), case.cotangents("float64", seed=3)
    assert_exact(run(case, arrays, cotangents, "xla"), standard.attention(case, arrays, cotangents, np.longdouble))


@pytest.mark.parametrize("order", [1, 2])
def test_memory_of_blockwise_is_linear(order):
    """Temporaries per position do not grow with the length, in the forward pass and in reverse mode."""

    def loss(function):
        return lambda *arrays: sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(function(*arrays)))

    def temporaries(length):
        case = Case(B=1, T=length, S=length, N=1, K=1, causal=True, dropout=0.1)
        problem_, operands = problem(case, case.arrays())

        def forward(query, key, value):
            return blockwise.forward(problem_, operands._replace(query=query, key=key, value=value))

        def backward(query, key, value):
            o, l, m = forward(query, key, value)
            return blockwise.backward(problem_, operands._replace(query=query, key=key, value=value), o, l, m, o, l)

        function = jax.grad(loss(forward if order == 1 else backward), (0, 1, 2))
        compiled = jax.jit(function).lower(*operands[:3]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 2 * temporaries(4096)


@pytest.mark.parametrize("length", [2, 0])
def test_padding_has_no_effect(length):
    """Tokens beyond the lengths change neither the results nor the gradients."""
    case = Case(B=1, T=20, S=24, lengths=True)
    arrays, cotangents = case.arrays("float64"), case.cotangents("float64")
    arrays |= {"query_seq_lengths": np.array([length], np.int32), "key_value_seq_lengths": np.array([5], np.int32)}
    changed = {name: x.copy() for name, x in arrays.items()}
    changed["query"][:, length:] = 1e3
    changed["key"][:, 5:] = -1e3
    changed["value"][:, 5:] = 1e3
    for implementation in ("reference", "xla"):
        results, same = (run(case, x, cotangents, implementation) for x in (arrays, changed))
        for name, x in results.items():
            np.testing.assert_array_equal(same[name], x, err_msg=name)

"""Static types of the public functions. mypy checks this file, and pytest checks that the types are true."""

from typing import assert_type

import jax
import jax.numpy as jnp
import pytest

import jax_flash

X = jnp.ones((1, 16, 2, 8))
ENDS = jnp.array([0, 16])


def test_without_the_residual():
    o = assert_type(jax_flash.dot_product_attention(X, X, X), jax.Array)
    causal = assert_type(
        jax_flash.dot_product_attention(X, X, X, None, None, is_causal=True, return_residual=False), jax.Array
    )
    assert isinstance(o, jax.Array) and isinstance(causal, jax.Array)


def test_with_the_residual():
    pair = assert_type(
        jax_flash.dot_product_attention(X, X, X, scale=0.5, local_window_size=(3, 0), return_residual=True),
        tuple[jax.Array, jax.Array],
    )
    assert [x.shape for x in pair] == [(1, 16, 2, 8), (1, 16, 2)]


@pytest.mark.parametrize("residual", [False, True])
def test_with_an_unknown_flag(residual: bool):
    result = jax_flash.dot_product_attention(X, X, X, return_residual=residual)
    assert_type(result, jax.Array | tuple[jax.Array, jax.Array])
    assert isinstance(result, tuple) == residual


def test_statistics():
    o, statistics = jax_flash.attention_with_statistics(X, X, X, is_causal=True)
    assert_type(o, jax.Array)
    assert isinstance(assert_type(statistics, jax_flash.Statistics), jax_flash.Statistics)


def test_packed_sequences():
    o = assert_type(jax_flash.varlen_attention(X[0], X[0], X[0], ENDS, is_causal=True), jax.Array)
    pair = assert_type(
        jax_flash.varlen_attention(X[0], X[0], X[0], ENDS, return_residual=True), tuple[jax.Array, jax.Array]
    )
    assert [x.shape for x in (o, *pair)] == [(16, 2, 8), (16, 2, 8), (16, 2)]


def test_pages():
    pages, table = jnp.ones((1, 16, 2, 8)), jnp.zeros((1, 1), int)
    o = assert_type(jax_flash.paged_attention(X, pages, pages, table, ENDS[1:]), jax.Array)
    pair = assert_type(
        jax_flash.paged_attention(X, pages, pages, table, ENDS[1:], return_residual=True), tuple[jax.Array, jax.Array]
    )
    assert [x.shape for x in (o, *pair)] == [(1, 16, 2, 8), (1, 16, 2, 8), (1, 16, 2)]


def test_wrong_arguments():
    """mypy reports an ignored error that it does not find."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        jax_flash.dot_product_attention(X, X, X, causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is_causal must be True or False"):
        jax_flash.dot_product_attention(X, X, X, is_causal="yes")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        jax_flash.attention_with_statistics(X, X, X, causal=True)  # type: ignore[call-arg]


def test_tab_completion_shows_public_names():
    """Submodules that a user has imported are public, too."""
    names = set(dir(jax_flash))
    assert set(jax_flash.__all__) <= names
    assert names - set(jax_flash.__all__) <= {"__version__", "equinox", "io_model", "keras", "linen", "nnx"}
    assert all(hasattr(jax_flash, name) for name in names)


def test_problem():
    assert isinstance(assert_type(jax_flash.Problem.of(X, X, X), jax_flash.Problem), jax_flash.Problem)

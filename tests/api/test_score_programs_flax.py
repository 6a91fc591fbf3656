"""Parameters of Flax modules in score programs are trained like any others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx

import jax_flash
import jax_flash.linen
import jax_flash.nnx

pytestmark = pytest.mark.usefixtures("device")

LENGTH, FEATURES, HEADS = 6, 16, 2
X = np.random.default_rng(0).normal(size=(3, LENGTH, FEATURES)).astype(np.float32)
DISTANCES = np.arange(LENGTH)[:, None] - np.arange(LENGTH) + LENGTH - 1


def programs(table, width):
    """A bias for each head and distance, and a window."""
    return {
        "score_mod": lambda s, b, h, q, k: s + table[h, q - k + LENGTH - 1],
        "mask_mod": lambda b, h, q, k: jnp.abs(q - k) < width,
    }


def by_arrays(table, width):
    """Return an equivalent `attention_fn` with a bias and a mask."""

    def attention_fn(query, key, value, **_):
        mask = np.abs(DISTANCES - LENGTH + 1) < width
        return jax_flash.dot_product_attention(query, key, value, table[:, DISTANCES], mask)

    return attention_fn


def assert_close(x, y):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), x, y)


@pytest.mark.parametrize("wrap", [lambda kind: kind, nn.remat], ids=["plain", "remat"])
@pytest.mark.parametrize("way", ["module", "function"])
def test_linen(way, wrap):
    class Layer(nn.Module):
        way: str

        @nn.compact
        def __call__(self, x):
            table = self.param("table", nn.initializers.normal(1.0), (HEADS, 2 * LENGTH - 1))
            if self.way == "module":
                return jax_flash.linen.MultiHeadAttention(HEADS, name="attention")(x, **programs(table, 4))

            def attention_fn(*args, **kwargs):
                return jax_flash.linen.dot_product_attention(*args, **kwargs, **programs(table, 4))

            attention_fn = by_arrays(table, 4) if self.way == "arrays" else attention_fn
            return nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, name="attention")(x)

    def gradient(module):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sin(module.apply(*args)).sum(), (0, 1)))(variables, X)

    variables = Layer("arrays").init(jax.random.key(0), X)
    results, expected = gradient(wrap(Layer)(way)), gradient(Layer("arrays"))
    assert np.abs(expected[1][0]["params"]["table"]).max() > 1e-3
    assert_close(results, expected)


@pytest.mark.parametrize("way", ["module", "function"])
def test_nnx(way):
    class Layer(nnx.Module):
        def __init__(self, way):
            rngs = nnx.Rngs(0)
            kind = jax_flash.nnx.MultiHeadAttention if way == "module" else nnx.MultiHeadAttention
            self.way, self.attention = way, kind(HEADS, FEATURES, rngs=rngs, decode=False)
            self.table = nnx.Param(jax.random.normal(rngs.params(), (HEADS, 2 * LENGTH - 1)))

        def __call__(self, x):
            table = self.table[...]
            if self.way == "module":
                return self.attention(x, **programs(table, 4))

            def attention_fn(*args, **kwargs):
                return jax_flash.nnx.dot_product_attention(*args, **kwargs, **programs(table, 4))

            self.attention.attention_fn = by_arrays(table, 4) if self.way == "arrays" else attention_fn
            return self.attention(x)

    def gradient(way):
        graph, parameters, rest = nnx.split(Layer(way), nnx.Param, ...)

        def loss(parameters, x):
            return jnp.sin(nnx.merge(graph, parameters, rest)(x)).sum()

        value, (gradients, dx) = jax.jit(jax.value_and_grad(loss, (0, 1)))(parameters, X)
        return value, nnx.to_pure_dict(gradients), dx

    results, expected = gradient(way), gradient("arrays")
    assert np.abs(expected[1]["table"]).max() > 1e-3
    assert_close(results, expected)

"""`jax_flash.patch_jax_nn`: unchanged layers that call `jax.nn.dot_product_attention` use the fused kernels."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax_flash

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 24)), jnp.float32)
IDS = np.arange(24).reshape(2, 12) % 7


def attend(implementation=None, **options):
    q = X.reshape(2, 12, 3, 8)
    return jax.nn.dot_product_attention(q, q, q, implementation=implementation, **options)


def nnx_layer():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(3, 24, decode=False, rngs=nnx.Rngs(0))
    return lambda: layer(X, mask=nnx.make_causal_mask(X[..., 0]))


def keras_layer():
    layer = pytest.importorskip("keras").layers.MultiHeadAttention(3, 8)
    layer.build(X.shape, X.shape)
    return lambda: layer(X, X, use_causal_mask=True)


def keras_hub_model():
    reason = "keras-hub is not installed: it requires TensorFlow"
    model = pytest.importorskip("keras_hub", reason=reason).models.LlamaBackbone(
        vocabulary_size=7,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=32,
    )
    return lambda: model({"token_ids": IDS, "padding_mask": np.ones_like(IDS)})


def equinox_layer():
    """Equinox computes attention itself, so the patch has no effect."""
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(3, 24, key=jax.random.key(0))
    return lambda: layer(X[0], X[0], X[0], mask=np.tri(12, dtype=bool))


def fused(function):
    """Count the forward kernels of the program."""
    jax.clear_caches()  # the layer may contain jitted functions
    return jax.jit(lambda: function()).lower().as_text().count("@jax_flash_forward")


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_every_implementation_becomes_fused(implementation):
    want = attend(is_causal=True, local_window_size=4)
    with jax_flash.patch_jax_nn():
        np.testing.assert_allclose(
            attend(implementation, is_causal=True, local_window_size=4), want, rtol=1e-5, atol=1e-5
        )
        assert fused(lambda: attend(implementation)) == 1


@pytest.mark.parametrize(
    "make, calls",
    [(nnx_layer, 1), (keras_layer, 1), (keras_hub_model, 1), (equinox_layer, 0)],
    ids=["nnx", "keras", "keras-hub", "equinox"],
)
def test_stock_layers(make, calls):
    function = make()
    assert fused(function) == 0
    want = function()
    with jax_flash.patch_jax_nn():
        assert fused(function) == calls
        np.testing.assert_allclose(function(), want, rtol=1e-4, atol=1e-5)


def test_patches_are_restored_in_order():
    stock = jax.nn.dot_product_attention
    first = jax_flash.patch_jax_nn()
    assert jax.nn.dot_product_attention is not stock
    second = jax_flash.patch_jax_nn()
    with pytest.raises(RuntimeError, match="restore the later patch first"):
        first.restore()
    second.restore()
    first.restore()
    first.restore()
    assert jax.nn.dot_product_attention is stock
    with pytest.raises(ZeroDivisionError), jax_flash.patch_jax_nn():
        raise ZeroDivisionError
    assert jax.nn.dot_product_attention is stock

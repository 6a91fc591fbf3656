"""`jax_flash.equinox` compared with Equinox's own module."""

import forwarded_options
import guide
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox")

import equinox as eqx

from jax_flash import attention
from jax_flash.equinox import MultiheadAttention

BATCH, T, S, FEATURES, HEADS = 3, 12, 15, 32, 4


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pair(**options):
    """Return the stock module and the fused one, with the same parameters."""
    return (
        kind(HEADS, FEATURES, **options, key=jax.random.key(1))
        for kind in (eqx.nn.MultiheadAttention, MultiheadAttention)
    )


def assert_equal_with_gradients(stock, fused, inputs, mask=None, tolerance=2e-5, **options):
    """Compare a batch under vmap. `options` are passed to the fused module instead of the mask."""

    @eqx.filter_jit
    def run(layer, inputs, mask, options):
        def loss(layer_and_inputs):
            layer, inputs = layer_and_inputs
            out = jax.vmap(lambda *x: layer(*x, mask, **options))(*inputs)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

        return eqx.filter_value_and_grad(loss, has_aux=True)((layer, inputs))

    (_, want), expected = run(stock, inputs, mask, {})
    (_, got), gradients = run(fused, inputs, None if options else mask, options)
    for g, w in zip(jax.tree.leaves((got, gradients)), jax.tree.leaves((want, expected)), strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


CAUSAL = np.tril(np.ones((T, T), bool))
SELF = (normal(0, BATCH, T, FEATURES),) * 3


@pytest.mark.parametrize("mask", [None, CAUSAL, np.stack([CAUSAL, ~CAUSAL | np.eye(T, dtype=bool)] * 2)])
def test_equals_stock_module(mask):
    assert_equal_with_gradients(*pair(use_query_bias=True, use_output_bias=True), SELF, mask)


def test_all_sizes_different():
    sizes = {"key_size": 24, "value_size": 40, "output_size": 20, "qk_size": 8, "vo_size": 16}
    inputs = normal(0, BATCH, T, FEATURES), normal(1, BATCH, S, 24), normal(2, BATCH, S, 40)
    assert_equal_with_gradients(*pair(**sizes), inputs, normal(3, T, S) > 0)


def test_options_in_place_of_masks():
    ids = np.repeat([0, 1, 2], T // 3)
    distance = np.arange(T)[:, None] - np.arange(T)
    assert_equal_with_gradients(*pair(), SELF, CAUSAL, is_causal=True)
    mask = (distance >= 0) & (distance <= 3) & (ids[:, None] == ids)
    options = {"local_window_size": (3, 0), "query_segment_ids": ids, "key_value_segment_ids": ids}
    assert_equal_with_gradients(*pair(), SELF, mask, **options)


def test_lengths_of_each_example():
    stock, fused = pair()
    lengths = jnp.array([3, 12, 7])
    got = jax.vmap(lambda x, n: fused(x, x, x, key_value_seq_lengths=n[None]))(SELF[0], lengths)
    want = jax.vmap(lambda x, n: stock(x, x, x, jnp.tile(jnp.arange(T) < n, (T, 1))))(SELF[0], lengths)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_rotary_embedding_as_process_heads():
    rotate = jax.vmap(eqx.nn.RotaryPositionalEmbedding(FEATURES // HEADS), in_axes=1, out_axes=1)
    stock, fused = (
        jax.vmap(lambda x, layer=layer: layer(x, x, x, process_heads=lambda q, k, v: (rotate(q), rotate(k), v)))(
            SELF[0]
        )
        for layer in pair()
    )
    np.testing.assert_allclose(fused, stock, rtol=2e-5, atol=2e-5)


def test_batch_is_one_call():
    _, fused = pair()
    text = jax.jit(jax.vmap(lambda x: fused(x, x, x))).lower(SELF[0]).as_text()
    assert text.count("@jax_flash_forward") == 1 and f"batch={BATCH}" in text


def test_dropout():
    """With identities as values and as output projection, the output is the matrix of weights after dropout."""
    length, rate = 64, 0.25
    _, layer = pair(dropout_p=rate, key_size=length, value_size=length, vo_size=length, output_size=HEADS * length)
    weights = [np.zeros_like(layer.query_proj.weight), np.tile(np.eye(length), (HEADS, 1)), np.eye(HEADS * length)]
    where = lambda layer: [layer.query_proj.weight, layer.value_proj.weight, layer.output_proj.weight]  # noqa: E731
    layer = eqx.tree_at(where, layer, weights)
    inputs = np.zeros((length, FEATURES), np.float32), *(np.eye(length, dtype=np.float32),) * 2

    keys = jax.random.split(jax.random.key(0), 2)
    first, second = np.asarray(jax.vmap(lambda key: layer(*inputs, key=key))(keys)) * length
    assert set(np.unique(first.round(4))) == {0, np.float32(1 / (1 - rate)).round(4)}
    assert abs((first == 0).mean() - rate) < 0.02 and ((first == 0) != (second == 0)).mean() > 0.2
    np.testing.assert_array_equal(layer(*inputs, key=keys[0]) * length, first)
    for quiet in layer(*inputs, inference=True), eqx.nn.inference_mode(layer)(*inputs):
        np.testing.assert_allclose(quiet * length, 1, rtol=1e-5)
    with pytest.raises(RuntimeError, match="dropout of 0.25 needs a `key`"):
        layer(*inputs)


def test_leaves_of_stock_module_fit(tmp_path):
    stock, _ = pair(use_value_bias=True)
    fused = MultiheadAttention(HEADS, FEATURES, use_value_bias=True, key=jax.random.key(2))
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", stock)
    for copied in (
        eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", fused),
        jax.tree.unflatten(jax.tree.structure(fused), jax.tree.leaves(stock)),
    ):
        assert_equal_with_gradients(stock, copied, SELF)


def test_mixed_dtypes_are_promoted():
    _, fused = pair()
    half = SELF[0][0].astype(jnp.bfloat16)
    layer = eqx.tree_at(lambda layer: layer.query_proj.weight, fused, fused.query_proj.weight.astype(jnp.bfloat16))
    assert layer(half, SELF[0][0], SELF[0][0]).dtype == np.float32


def test_errors():
    _, fused = pair()
    x = SELF[0][0]
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        fused(x, x, x, causal=True)
    for name in ("deterministic", "bias", "return_residual"):  # arguments of dot_product_attention or of Equinox
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            fused(x, x, x, **{name: True})
    with pytest.raises(ValueError, match="do not fit together"):
        fused(x, x, x[1:])


def test_each_option_reaches_the_call(monkeypatch):
    (_, fused), x = pair(), SELF[0][0]
    forwarded_options.check(monkeypatch, attention, "dot_product_attention", fused, x, x, x)


def test_guide():
    assert guide.run("Equinox")["y"].shape == (2, 128, 512)

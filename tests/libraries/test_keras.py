"""`jax_flash.keras` compared with Keras's own layer, on JAX."""

import inspect
import os

import guide
import jax
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported
pytest.importorskip("keras")

import keras

from jax_flash.keras import MultiHeadAttention

B, T, S, FEATURES, HEADS, DIM = 2, 12, 9, 24, 3, 8
PARAMETERS = inspect.signature(keras.layers.MultiHeadAttention).parameters


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = normal(0, B, T, FEATURES), normal(1, B, S, FEATURES)
MASK = normal(2, B, T, S) > -0.5


def pair(**options):
    """Return the stock layer and the fused one, with the same weights."""
    layers = [kind(HEADS, DIM, **options) for kind in (keras.layers.MultiHeadAttention, MultiHeadAttention)]
    for layer in layers:
        layer.build(X.shape, Y.shape)
    layers[1].set_weights([normal(i, *w.shape) / 4 for i, w in enumerate(layers[0].get_weights())])
    layers[0].set_weights(layers[1].get_weights())
    assert [w.path.split("/", 1)[1] for w in layers[0].weights] == [w.path.split("/", 1)[1] for w in layers[1].weights]
    return layers


def results(layer, inputs, **options):
    """Return the output, and the gradients of the weights and of the inputs."""

    def loss(weights, inputs):
        out, _ = layer.stateless_call(weights, [v.value for v in layer.non_trainable_variables], *inputs, **options)
        return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum(), out

    weights = [v.value for v in layer.trainable_variables]
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, inputs)
    return jax.tree.leaves((out, gradients))


def assert_close(got, want, tolerance=2e-5):
    """Compare relative to the largest of all results: the gradient of the key bias is 0 up to rounding."""
    largest = max(np.abs(w).max() for w in want)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(
    "inputs, options, call",
    [
        ((X, X), {}, {}),
        ((X, X), {"use_bias": False}, {"use_causal_mask": True}),
        ((X, Y), {"value_dim": 16, "output_shape": 10, "dropout": 0.5}, {"attention_mask": MASK}),
        ((X, Y), {}, {"attention_mask": MASK[0].astype(np.float32)}),
        ((X, Y), {}, {"attention_mask": normal(3, B, HEADS, T, S) > 0}),
        (
            (X, Y, normal(4, B, S, FEATURES)),
            {},
            {"use_causal_mask": True, "attention_mask": MASK | np.eye(T, S, dtype=bool)},
        ),
    ],
)
def test_equals_stock_layer(inputs, options, call):
    stock, fused = pair(**options)
    assert_close(results(fused, inputs, **call), results(stock, inputs, **call))


@pytest.mark.skipif("sliding_window" not in PARAMETERS, reason="Keras has it since 3.14")
@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window(causal):
    stock, fused = pair(sliding_window=3)
    assert_close(*(results(layer, (X, X), use_causal_mask=causal) for layer in (fused, stock)))


def test_padding_and_training(recwarn):
    """The masks come from the embedding. Padded tokens do not count in the loss."""
    tokens = np.random.default_rng(0).integers(1, 20, (8, T))
    tokens[1::2, -4:] = 0
    kept = tokens != 0

    def model(attention):
        inputs = keras.Input((T,), dtype="int32")
        x = keras.layers.Embedding(20, FEATURES, mask_zero=True)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(20)(attention(x, x, use_causal_mask=True)))
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def losses(model):
        return model.fit(tokens, tokens, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]

    stock, fused = model(keras.layers.MultiHeadAttention(HEADS, DIM)), model(MultiHeadAttention(HEADS, DIM))
    fused.set_weights(stock.get_weights())
    got, want = (model.predict(tokens, verbose=0) for model in (fused, stock))
    assert_close([got[kept]], [want[kept]])
    got, want = losses(fused), losses(stock)
    assert_close([got], [want])
    assert got[-1] < got[0]
    assert_close(fused.get_weights(), stock.get_weights())
    assert not [str(w.message) for w in recwarn if "mask" in str(w.message)]


def test_nested_layer_in_a_functional_model():
    """Keras evaluates a nested layer with a symbolic shape in which batch and length are the same symbol."""

    class Block(keras.layers.Layer):
        def __init__(self, kind):
            super().__init__()
            self.attention, self.norm = kind(HEADS, DIM), keras.layers.LayerNormalization()

        def call(self, x):
            return self.norm(x + self.attention(x, x, use_causal_mask=True))

    def model(kind):
        inputs = keras.Input((None, FEATURES))
        return keras.Model(inputs, Block(kind)(inputs))

    stock, fused = model(keras.layers.MultiHeadAttention), model(MultiHeadAttention)
    assert fused.output_shape == (None, None, FEATURES)
    fused.set_weights(stock.get_weights())
    for x in (X, Y):
        assert_close([fused.predict(x, verbose=0)], [stock.predict(x, verbose=0)])
    fused.compile("sgd", "mse")
    assert np.isfinite(fused.fit(X, X, verbose=0).history["loss"]).all()


def test_key_masks():
    valid = np.arange(S) < np.array([[S], [4]])
    stock, fused = pair()
    got = results(fused, (X, Y), value_mask=valid)
    assert_close(got, results(stock, (X, Y), attention_mask=valid[:, None]))
    assert_close(got, results(fused, (X, Y), key_mask=valid))


def test_masks_as_lists():
    """Masks may be lists of numbers, as in the stock layer."""
    lengths = {"query_mask": (T, 5), "value_mask": (S, 4), "key_mask": (3, S)}
    masks = {name: (np.arange(max(x)) < np.array(x)[:, None]).astype(int).tolist() for name, x in lengths.items()}
    masks["attention_mask"] = (MASK | (np.arange(S) == 0)).tolist()  # a key for every query
    stock, fused = pair()
    kept = np.array(masks["query_mask"], bool)
    got, want = (np.asarray(layer(X, Y, **masks))[kept] for layer in (fused, stock))
    assert_close([got], [want])


def test_dropout():
    _, fused = pair(dropout=0.5, seed=1)
    quiet = np.asarray(fused(X, X))
    np.testing.assert_array_equal(fused(X, X, training=False), quiet)
    draws = np.stack([fused(X, X, training=True) for _ in range(300)])
    assert (draws[0] != draws[1]).mean() > 0.9
    spread = draws.std(axis=0) / np.sqrt(len(draws))
    assert 0.7 < np.sqrt(((draws.mean(axis=0) - quiet) ** 2).mean() / (spread**2).mean()) < 1.3


def test_saved_models_load(tmp_path):
    """Load the weights of a model with stock layers, and a whole model with fused layers."""

    def model(kind):
        inputs = keras.Input((T, FEATURES))
        return keras.Model(inputs, kind(HEADS, DIM, dropout=0.5, name="attention")(inputs, inputs))

    stock, fused = model(keras.layers.MultiHeadAttention), model(MultiHeadAttention)
    stock.save_weights(tmp_path / "stock.weights.h5")
    fused.load_weights(tmp_path / "stock.weights.h5")
    want = stock.predict(X, verbose=0)
    assert_close([fused.predict(X, verbose=0)], [want])
    fused.save(tmp_path / "ours.keras")
    loaded = keras.saving.load_model(tmp_path / "ours.keras")
    assert isinstance(loaded.get_layer("attention"), MultiHeadAttention)
    assert_close([loaded.predict(X, verbose=0)], [want])


def test_mixed_precision():
    layer = MultiHeadAttention(HEADS, DIM, dtype="mixed_bfloat16")
    assert layer(X, X).dtype == "bfloat16" and layer.query_dense.kernel.dtype == "float32"


def test_refusals(monkeypatch):
    _, fused = pair()
    with pytest.raises(NotImplementedError, match="`return_attention_scores`"):
        fused(X, X, return_attention_scores=True)
    with pytest.raises(NotImplementedError, match=r"inputs of shape \[B, length, dim\], not \(2, 1, 12, 24\)"):
        MultiHeadAttention(HEADS, DIM)(X[:, None], X[:, None])
    if "use_gate" in PARAMETERS:  # since Keras 3.14
        with pytest.raises(NotImplementedError, match="`use_gate`"):
            MultiHeadAttention(HEADS, DIM, use_gate=True)
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=jax"):
        MultiHeadAttention(HEADS, DIM)


def test_guide():
    assert guide.run("Keras 3 on JAX")["y"].shape == (2, 128, 512)

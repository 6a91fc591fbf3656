"""The Haiku module of docs/libraries.md compared with Haiku's own."""

import guide
import jax
import numpy as np
import pytest

pytest.importorskip("haiku")

import haiku as hk

MultiHeadAttention = guide.run("Haiku")["MultiHeadAttention"]

B, T, S, HEADS = 2, 12, 9, 4
SIZES = {"key_size": 8, "value_size": 16, "model_size": 20}
CAUSAL = np.tril(np.ones((1, 1, T, T), bool))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = normal(0, B, T, 24), normal(1, B, S, 32)


@pytest.mark.parametrize(
    "inputs, mask, options",
    [
        ((X, X, X), None, {}),
        ((X, X, X), CAUSAL, {"is_causal": True}),
        ((X, Y, Y), normal(2, B, HEADS, T, S) > 0, {}),
        ((X[0], Y[0], Y[0]), normal(2, 1, T, S) > 0, {}),
    ],
)
def test_equals_stock_module(inputs, mask, options):
    def transformed(kind, **options):
        def forward(*inputs):
            layer = kind(
                HEADS, **SIZES, w_init=hk.initializers.VarianceScaling(2.0), b_init=hk.initializers.RandomNormal()
            )
            return layer(*inputs, **options)

        return hk.without_apply_rng(hk.transform(forward))

    stock = transformed(hk.MultiHeadAttention, mask=mask)
    fused = transformed(MultiHeadAttention, **(options or {"mask": mask}))
    params = stock.init(jax.random.key(0), *inputs)
    jax.tree.map(np.testing.assert_array_equal, fused.init(jax.random.key(0), *inputs), params)

    def results(module):
        def loss(params, inputs):
            out = module.apply(params, *inputs)
            return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs)

    got, want = jax.tree.leaves(results(fused)), jax.tree.leaves(results(stock))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-4)

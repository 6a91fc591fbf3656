"""A stack of layers like Gemma's: windowed layers with heads of 256, and global layers with heads of 512."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

import jax_flash.nnx

pytestmark = pytest.mark.usefixtures("device")

FEATURES, HEADS, LENGTH = 32, 2, 40
X = np.random.default_rng(0).normal(size=(2, LENGTH, FEATURES)).astype(np.float32)


class Stack(nnx.Module):
    def __init__(self, implementation=None):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            jax_flash.nnx.MultiHeadAttention(
                HEADS,
                FEATURES,
                HEADS * (256 if window else 512),
                num_kv_heads=1,
                normalize_qk=True,
                is_causal=True,
                local_window_size=window,
                implementation=implementation,
                decode=False,
                rngs=rngs,
            )
            for window in ((7, 0), (7, 0), None)
        )

    def __call__(self, x, **call):
        for layer in self.layers:
            x = x + layer(x, **call)
        return x


def test_training():
    """The loss and its gradients are those of materialised attention."""

    @nnx.jit
    def loss_and_gradients(stack):
        return nnx.value_and_grad(lambda stack: (stack(X) ** 2).mean())(stack)

    found, want = (loss_and_gradients(Stack(implementation)) for implementation in (None, "reference"))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), *map(nnx.to_pure_dict, (found[1], want[1])))


@pytest.mark.parametrize("paged", [False, True])
def test_decoding(paged):
    """A prompt, then token by token, gives the outputs of the whole sequence."""
    stack = Stack()
    want = nnx.jit(lambda stack: stack(X))(stack)
    for layer in stack.layers:
        layer.init_pages(6, 16) if paged else layer.init_cache(X.shape)
    table = jnp.array([[4, 0, 2], [1, 3, 5]])

    @nnx.jit
    def step(stack, x, end):
        cache = {"page_table": table, "lengths": jnp.full(2, end)} if paged else {"decode": True}
        return stack(x, **cache)

    for first, last in ((0, 36), *((i, i + 1) for i in range(36, LENGTH))):
        np.testing.assert_allclose(step(stack, X[:, first:last], last), want[:, first:last], atol=2e-5)

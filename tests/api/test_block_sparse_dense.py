"""`BlockSparseDense` for linen and nnx: parameters, results and gradients of a dense layer with zeros, checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

import jax_flash.linen  # noqa: E402
import jax_flash.nnx  # noqa: E402
from jax_flash import BlockMask, blocks_to_matrix, matrix_to_blocks, patterns  # noqa: E402

INPUTS, OUTPUTS = 64, 128
PATTERN = functools.partial(patterns.butterfly, global_blocks=1, q_block=16, kv_block=16)
MASK = PATTERN(INPUTS, OUTPUTS)


def inputs():
    return jax.random.normal(jax.random.key(0), (2, 10, INPUTS))


def linen_layer(**options):
    layer = jax_flash.linen.BlockSparseDense(OUTPUTS, options.pop("pattern", PATTERN), **options)
    return layer, layer.init(jax.random.key(1), inputs())["params"]


@pytest.mark.parametrize("pattern", [PATTERN, MASK], ids=["function", "mask"])
def test_a_linen_checkpoint_becomes_dense_and_back(pattern):
    layer, params = linen_layer(pattern=pattern)
    assert params["kernel"].shape == (int(MASK.kept * 4 * 8), 16, 16) and params["bias"].shape == (OUTPUTS,)
    params |= {"bias": jnp.arange(OUTPUTS, dtype=jnp.float32)}
    dense = params | {"kernel": blocks_to_matrix(params["kernel"], MASK)}
    function = nn.Dense(OUTPUTS).apply
    np.testing.assert_allclose(
        layer.apply({"params": params}, inputs()), function({"params": dense}, inputs()), atol=1e-5
    )
    np.testing.assert_array_equal(matrix_to_blocks(dense["kernel"], MASK), params["kernel"])


def test_gradients_of_linen():
    layer, params = linen_layer()
    dense = params | {"kernel": blocks_to_matrix(params["kernel"], MASK)}

    def gradients(module, params):
        return jax.jit(jax.grad(lambda params: (module.apply({"params": params}, inputs()) ** 2).mean()))(params)

    ours, theirs = gradients(layer, params), gradients(nn.Dense(OUTPUTS), dense)
    np.testing.assert_allclose(ours["kernel"], matrix_to_blocks(theirs["kernel"], MASK), atol=1e-6)
    np.testing.assert_allclose(ours["bias"], theirs["bias"], atol=1e-6)


def test_nnx_equals_linen_and_linear():
    layer = jax_flash.nnx.BlockSparseDense(INPUTS, OUTPUTS, PATTERN, rngs=nnx.Rngs(0))
    linear = nnx.Linear(INPUTS, OUTPUTS, rngs=nnx.Rngs(1))
    linear.kernel[...] = blocks_to_matrix(layer.kernel[...], MASK)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, inputs()), linear(inputs()), atol=1e-5)
    params = {"kernel": layer.kernel[...], "bias": layer.bias[...]}
    np.testing.assert_array_equal(linen_layer()[0].apply({"params": params}, inputs()), layer(inputs()))
    ours, theirs = (nnx.grad(lambda m: (m(inputs()) ** 2).mean())(m) for m in (layer, linear))
    np.testing.assert_allclose(ours["kernel"][...], matrix_to_blocks(theirs["kernel"][...], MASK), atol=1e-6)


def test_a_stack_of_nnx_layers():
    """nnx.vmap makes one layer for each key, and applies them."""
    create = nnx.vmap(lambda rngs: jax_flash.nnx.BlockSparseDense(INPUTS, OUTPUTS, PATTERN, rngs=rngs))
    layers = create(nnx.Rngs(0).split(3))
    ours = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, inputs())
    for i in range(3):
        params = {"kernel": layers.kernel[...][i], "bias": layers.bias[...][i]}
        np.testing.assert_allclose(ours[i], linen_layer()[0].apply({"params": params}, inputs()), atol=1e-5)


def test_options():
    layer, params = linen_layer(use_bias=False, dtype=jnp.bfloat16, kernel_init=nn.initializers.ones)
    assert list(params) == ["kernel"] and params["kernel"].dtype == jnp.float32 and (params["kernel"] == 1).all()
    assert layer.apply({"params": params}, inputs()).dtype == jnp.bfloat16
    layer = jax_flash.nnx.BlockSparseDense(
        INPUTS, OUTPUTS, MASK, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    assert layer.bias is None and layer.kernel.dtype == jnp.bfloat16 and layer(inputs()).dtype == jnp.float32


def test_without_rank_promotion():
    layer, params = linen_layer()
    with jax.numpy_rank_promotion("raise"):
        layer.apply({"params": params}, inputs()[None])


def test_initial_outputs_have_variance_one():
    """In each column of blocks, however many blocks it has."""
    layer, params = linen_layer(use_bias=False)
    x = jax.random.normal(jax.random.key(2), (4000, INPUTS))
    variance = jnp.var(layer.apply({"params": params}, x), 0).reshape(-1, 16).mean(1)
    np.testing.assert_allclose(variance, 1, atol=0.25)


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (patterns.butterfly(32, OUTPUTS, q_block=16, kv_block=16), ValueError, "64 x 128, not .32, 128."),
        (functools.partial(patterns.butterfly, q_block=48), ValueError, "64 x 128 does not consist of blocks of 48"),
        (np.ones((4, 8)), TypeError, "pattern must be a BlockMask, or a function"),
        (lambda inputs, outputs: np.ones((4, 8)), TypeError, "mask must be a jax_flash.BlockMask"),
    ],
)
def test_errors(pattern, error, message):
    with pytest.raises(error, match=message):
        linen_layer(pattern=pattern)
    with pytest.raises(error, match=message):
        jax_flash.nnx.BlockSparseDense(INPUTS, OUTPUTS, pattern, rngs=nnx.Rngs(0))


def test_errors_of_inputs():
    layer = jax_flash.nnx.BlockSparseDense(INPUTS, OUTPUTS, PATTERN, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"inputs must have shape \[..., 64\]"):
        layer(jnp.ones((2, 65)))
    with pytest.raises(ValueError, match=r"inputs must have shape \[..., in_features\], not \(\)"):
        jax_flash.linen.BlockSparseDense(OUTPUTS, PATTERN).init(jax.random.key(0), 1.0)


@pytest.mark.parametrize("sizes", [(64, 128), (64, 0), (0, 64)], ids=str)
def test_no_blocks(sizes):
    """Either the pattern keeps no block, or the weight is empty."""
    blocks = np.zeros((sizes[0] // 16, sizes[1] // 16), bool)
    mask = BlockMask.from_dense(blocks, *sizes, q_block=16, kv_block=16)
    layer = jax_flash.nnx.BlockSparseDense(*sizes, mask, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, sizes[0]))
    np.testing.assert_array_equal(layer(x), np.zeros((2, 3, sizes[1])))
    linen = jax_flash.linen.BlockSparseDense(sizes[1], mask)
    np.testing.assert_array_equal(linen.init_with_output(jax.random.key(0), x)[0], layer(x))
    of_layer, of_x = nnx.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)
    np.testing.assert_array_equal(of_layer.bias[...], np.full(sizes[1], 6))
    np.testing.assert_array_equal(of_x, np.zeros(x.shape))

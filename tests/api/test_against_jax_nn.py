"""A drop-in for `jax.nn.dot_product_attention`: equal arguments have equal meanings.

Values differ by rounding only. `test_accuracy.py` compares with exact results.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

pytestmark = pytest.mark.usefixtures("device")

B, T, S, N, K, D = 2, 13, 17, 4, 2, 8


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def arrays(T=T, S=S, N=N, K=K):
    return normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)


def assert_same(*args, rows=slice(None), **options):
    """Compare values and gradients of rows that see some key."""

    def results(attention):
        def function(query, key, value):
            return attention(query, key, value, *args[3:], **options)

        result, pull = jax.vjp(function, *args[:3])
        cotangent = jnp.zeros_like(result).at[..., rows, :, :].set(normal(3, *result[..., rows, :, :].shape))
        return result[..., rows, :, :], pull(cotangent)

    actual, expected = results(jax_flash.dot_product_attention), results(jax.nn.dot_product_attention)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), actual, expected)
    assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, expected)


def test_signature_begins_with_that_of_jax_nn():
    actual = inspect.signature(jax_flash.dot_product_attention).parameters
    expected = inspect.signature(jax.nn.dot_product_attention).parameters
    positional = [name for name, p in expected.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(actual)[: len(positional)] == positional
    for name, parameter in expected.items():
        assert actual[name].kind == parameter.kind
        assert actual[name].default == parameter.default


@pytest.mark.parametrize("K", [4, 2, 1])
def test_heads(K):
    assert_same(*arrays(K=K))


@pytest.mark.parametrize("rank", [3, 4])
def test_rank(rank):
    q, k, v = arrays() if rank == 4 else (x[0] for x in arrays())
    assert_same(q, k, v)
    assert_same(q, k, v, normal(5, 1, N, T, S), is_causal=True)


@pytest.mark.parametrize("scale", [None, 0.3, 1, 0.0, -0.5])
def test_scale(scale):
    assert_same(*arrays(), scale=scale)


@pytest.mark.parametrize(("T", "S"), [(13, 17), (17, 13), (9, 9), (1, 12), (12, 1)])
def test_causal(T, S):
    assert_same(*arrays(T, S), is_causal=True)


EXTENTS = [
    (B, N, T, S),
    (1, N, T, S),
    (B, 1, T, S),
    (1, 1, T, S),
    (B, N, 1, S),
    (1, 1, 1, S),
    (1, N, T, 1),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("shape", EXTENTS, ids=str)
def test_bias(shape):
    assert_same(*arrays(), normal(4, *shape))
    bias = normal(4, *shape)
    q, k, v = arrays()

    def gradient(attention):
        return jax.grad(lambda bias: (attention(q, k, v, bias) ** 2).sum())(bias)

    actual = gradient(jax_flash.dot_product_attention)
    np.testing.assert_allclose(actual, gradient(jax.nn.dot_product_attention), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", EXTENTS, ids=str)
def test_mask(shape):
    mask = jax.random.bernoulli(jax.random.key(4), 0.7, shape).at[..., 0].set(True)
    assert_same(*arrays(), None, mask)


@pytest.mark.parametrize("bias_rank", [3, 4])
def test_lower_ranks_of_bias_and_mask(bias_rank):
    """jax.nn takes 4 dims, and 3 for inputs of shape TNH. All of these are supported."""
    q, k, v = arrays() if bias_rank == 4 else (x[0] for x in arrays())
    bias = normal(4, *(1, N, T, S)[4 - bias_rank :])
    mask = jnp.tri(T, S, dtype=bool)[(None,) * (bias_rank - 2)]
    try:
        jax.nn.dot_product_attention(q, k, v, bias, mask)
    except (ValueError, TypeError) as error:
        pytest.skip(f"jax.nn does not take it: {error}")
    assert_same(q, k, v, bias, mask)


def test_lengths():
    q_lengths, kv_lengths = jnp.array([13, 5]), jnp.array([3, 17])
    assert_same(*arrays(), key_value_seq_lengths=kv_lengths)
    assert_same(*arrays(), key_value_seq_lengths=kv_lengths, query_seq_lengths=q_lengths, rows=slice(0, 5))
    assert_same(*arrays(), query_seq_lengths=q_lengths, is_causal=True, rows=slice(0, 5))


@pytest.mark.parametrize("window", [0, 3, 100, (2, 1), (0, 4), (5, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_window(window, is_causal):
    assert_same(*arrays(), local_window_size=window, is_causal=is_causal)


def test_all_together():
    mask = jax.random.bernoulli(jax.random.key(4), 0.8, (B, 1, T, S)) | jnp.eye(T, S, dtype=bool)
    assert_same(
        *arrays(),
        normal(4, 1, N, T, S),
        mask,
        scale=0.4,
        is_causal=True,
        local_window_size=(6, 2),
        query_seq_lengths=jnp.array([13, 9]),
        key_value_seq_lengths=jnp.array([15, 17]),
        rows=slice(0, 9),
    )


@pytest.mark.parametrize("rank", [3, 4])
def test_residual(rank):
    q, k, v = arrays() if rank == 4 else (x[0] for x in arrays())
    actual = jax_flash.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    q, k, v = (x.astype(dtype) for x in arrays())
    actual, expected = (
        f(q, k, v, is_causal=True) for f in (jax_flash.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), atol=4 * float(jnp.finfo(dtype).eps))


# --- documented differences ---


def test_empty_rows_are_zero():
    q, k, v = arrays()
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 4].set(False)
    actual = jax_flash.dot_product_attention(q, k, v, mask=mask)
    expected = jax.nn.dot_product_attention(q, k, v, mask=mask)
    assert not actual[:, 4].any() and expected[:, 4].all()
    np.testing.assert_allclose(expected[:, 4], jnp.repeat(v.mean(1), N // K, axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jnp.delete(actual, 4, 1), jnp.delete(expected, 4, 1), rtol=1e-4, atol=1e-5)


def test_residual_is_f32_and_differentiable():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    _, residual = jax_flash.dot_product_attention(q, k, v, return_residual=True)
    assert residual.dtype == jnp.float32

    def residuals(q):
        return jax_flash.dot_product_attention(q, k, v, return_residual=True)[1].sum()

    def expected(q):
        scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, N // K, D), k) * D**-0.5
        return jax.nn.logsumexp(scores, axis=-1).sum()

    q, k, v = arrays()
    np.testing.assert_allclose(jax.grad(residuals)(q), jax.grad(expected)(q), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [jax_flash.dot_product_attention, jax_flash.attention_with_statistics])
def test_signature_names_every_argument(function):
    parameters = inspect.signature(function).parameters
    residual = {"return_residual": False} if function is jax_flash.dot_product_attention else {}
    flags = dict.fromkeys(("is_causal", "broadcast_dropout", "deterministic"), False)
    masks = ("bias", "mask", "sinks", "scale", "local_window_size", "logits_soft_cap", "query_offset", "block_mask")
    others = ("score_mod", "mask_mod", "sequence_axis", "sequence_layout")
    ids = ("query_segment_ids", "key_value_segment_ids", "dropout_batch_ids", "dropout_head_ids")
    others += ("query_seq_lengths", "key_value_seq_lengths", "implementation", "precision", "dropout_key")
    none = dict.fromkeys((*masks, *ids, *others))
    wanted = dict.fromkeys(("query", "key", "value"), inspect.Parameter.empty) | residual | flags | none
    assert {name: p.default for name, p in parameters.items()} == wanted | {"dropout_rate": 0.0}
    annotations = {name: p.annotation for name, p in parameters.items()}
    assert annotations["block_mask"] == "BlockMask | None" and annotations["is_causal"] == "bool"
    assert inspect.Parameter.empty not in annotations.values()

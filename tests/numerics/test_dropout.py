"""The dropout mask: its specification, bitwise agreement of the kernels with it, and its statistics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from dropout_masks import attend, from_backward, from_forward, specified

import jax_flash
from jax_flash import dropout

on_each_device = pytest.mark.usefixtures("device")


# --- the specification ---


@pytest.mark.parametrize(
    ("counter", "key", "random"),
    [
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_known_answers(counter, key, random):
    """The answers for philox4x32-7 in Random123's kat_vectors."""
    expected = [int(word, 16) for word in random.split()]
    counter, key = np.array(counter, np.uint32), np.array(key, np.uint32)
    assert [int(x) for x in dropout.philox(tuple(counter), tuple(key))] == expected
    assert standard.philox(counter, key).tolist() == expected


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 33), (40, 7), (3, 130)])
def test_bits_of_every_entry(shape):
    """Compare the library's function, which works by tiles, with the tests' function of single entries."""
    seed = np.array([[1, 2], [3, 0xFFFFFFFF]], np.uint32)
    batch, heads = np.array([7, 0x80000000], np.uint32), np.array([0, 5, 123456789], np.uint32)
    bits = dropout.random_bits(jnp.asarray(seed), jnp.asarray(batch), jnp.asarray(heads), shape)
    assert bits.dtype == jnp.uint32
    expected = standard.random_bits(seed, batch, heads, *shape)
    np.testing.assert_array_equal(bits, expected)
    keep = dropout.keep_mask(20000, jnp.asarray(seed), jnp.asarray(batch), jnp.asarray(heads), shape)
    np.testing.assert_array_equal(keep, expected >= 20000)


def test_block_equals_part_of_mask():
    seed, ids = jnp.array([[8, 9]], jnp.uint32), jnp.zeros(1, jnp.uint32)
    full = dropout.random_bits(seed, ids, ids, (70, 90))
    block = jax.jit(lambda i, j: dropout.random_bits(seed, ids, ids, (22, 35), i, j))(48, 16)
    np.testing.assert_array_equal(block, full[:, :, 48:70, 16:51])


def test_typed_and_raw_keys_give_the_same_seed():
    seed = dropout.seed_from_key(jax.random.key(3), 4)
    assert seed.shape == (4, 2) and seed.dtype == jnp.uint32
    np.testing.assert_array_equal(seed, dropout.seed_from_key(jax.random.PRNGKey(3), 4))
    np.testing.assert_array_equal(seed, dropout.seed_from_key(np.asarray(jax.random.PRNGKey(3)), 4))
    assert (seed == seed[0]).all() and (seed[0] != dropout.seed_from_key(jax.random.key(4), 1)[0]).any()
    assert dropout.seed_from_key(jax.random.key(3, impl="rbg"), 4).shape == (4, 2)


def test_threshold_rounds_to_nearest():
    rates = (0, 1e-9, 0.1, 0.5, 255 / 256, 1 - 2**-17, 1.0)
    assert [dropout.threshold(rate) for rate in rates] == [0, 0, 3277, 16384, 32640, 32768, 32768]
    assert dropout.threshold(np.float32(0.25)) == dropout.threshold(jnp.float32(0.25)) == 8192


@pytest.mark.parametrize("rate", [255 / 256 + 2**-15, 0.999, 1 - 2**-15])
def test_rates_too_close_to_1_are_refused(rate):
    with pytest.raises(ValueError, match=r"at most 0\.99609375, or 1, not"):
        dropout.threshold(rate)


# --- the kernels ---

SHAPES = [
    (1, 1, 1, 1),
    (1, 2, 16, 16),
    (2, 3, 17, 33),
    (2, 1, 65, 130),
    (1, 2, 1, 300),
    (1, 1, 300, 5),
    (1, 1, 140, 260),
]


@on_each_device
@pytest.mark.parametrize("find", [from_forward, from_backward])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_mask_matches_specification(shape, find):
    B, N, T, S = shape
    key = jax.random.key(11)
    mask = find(lambda q, k, v: attend(q, k, v, 0.3, key), B, N, T, S)
    np.testing.assert_array_equal(mask, specified(0.3, key, B, N, T, S))


@on_each_device
@pytest.mark.parametrize("find", [from_forward, from_backward])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_kernel_mask_does_not_depend_on_dtype(dtype, find, device):
    if dtype == "float64" and device.platform == "gpu":
        pytest.skip("no float64 kernels for GPUs")
    key = jax.random.key(5)
    with jax.enable_x64(dtype == "float64"):
        mask = find(lambda q, k, v: attend(q, k, v, 0.5, key), 2, 2, 70, 100, dtype)
        np.testing.assert_array_equal(mask, specified(0.5, key, 2, 2, 70, 100))


@on_each_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [2**-15, 0.002, 127 / 32768, 128 / 32768, 255 / 256])
@pytest.mark.parametrize("find", [from_forward, from_backward])
def test_kernel_mask_at_extreme_rates(find, rate, dtype):
    """Kernels compare bits with the threshold as bfloat16. Thresholds below 128 are subnormal; 255/256 gives inf."""
    key = jax.random.key(6)
    with jax.default_matmul_precision("default"):
        mask = find(lambda q, k, v: attend(q, k, v, rate, key), 1, 2, 140, 260, dtype)
    np.testing.assert_array_equal(mask, specified(rate, key, 1, 2, 140, 260))


@on_each_device
@pytest.mark.parametrize("find", [from_forward, from_backward])
def test_kernel_mask_does_not_depend_on_masks_and_offsets(find):
    key = jax.random.key(2)
    mask = find(lambda q, k, v: attend(q, k, v, 0.4, key, is_causal=True, query_offset=3), 1, 2, 40, 60)
    visible = np.tri(40, 60, 3, dtype=bool)
    np.testing.assert_array_equal(mask, specified(0.4, key, 1, 2, 40, 60) & visible)


@on_each_device
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_broadcast_dropout_has_one_mask(implementation):
    key = jax.random.key(6)
    mask = from_forward(lambda q, k, v: attend(q, k, v, 0.5, key, implementation, broadcast_dropout=True), 2, 3, 20, 30)
    np.testing.assert_array_equal(mask, np.broadcast_to(specified(0.5, key, 1, 1, 20, 30), mask.shape))


@on_each_device
def test_dropout_ids_select_batch_entries_and_heads():
    key = jax.random.key(6)
    mask = from_forward(
        lambda q, k, v: attend(q, k, v, 0.5, key, dropout_batch_ids=jnp.array([3, 1]), dropout_head_ids=jnp.array([4])),
        2, 1, 20, 30,
    )  # fmt: skip
    np.testing.assert_array_equal(mask, specified(0.5, key, 4, 5, 20, 30)[[3, 1], 4:])


def test_vmap_over_head_ids():
    key, ids = jax.random.key(6), jnp.array([[4], [0]])
    x = jax.random.normal(jax.random.key(0), (2, 1, 20, 1, 8))

    def one(x, ids):
        return attend(x, x, x, 0.5, key, dropout_head_ids=ids)

    np.testing.assert_array_equal(jax.vmap(one)(x, ids), jnp.stack([one(x[i], ids[i]) for i in range(2)]))


@on_each_device
def test_vmap_over_keys():
    keys = jax.random.split(jax.random.key(1), 6)
    query, key, value = (jax.random.normal(k, (2, 30, 2, 8)) for k in jax.random.split(jax.random.key(0), 3))

    def gradient(dropout_key):
        return jax.grad(lambda q: (attend(q, key, value, 0.3, dropout_key) ** 2).sum())(query)

    single = np.stack([gradient(k) for k in keys])
    nested = jax.vmap(jax.vmap(gradient))(keys.reshape(2, 3))
    raw = jax.vmap(gradient)(jax.random.key_data(keys))
    for batched in (jax.vmap(gradient)(keys), raw, nested.reshape(single.shape)):
        np.testing.assert_allclose(batched, single, rtol=1e-5, atol=1e-5)  # another mask would give large differences


# --- statistics, with fixed seeds, so that no test can fail by chance ---


def correlation(x, y):
    """Return the correlation in standard deviations of the correlation of independent samples."""
    return abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) * np.sqrt(x.size)


@pytest.fixture(scope="module")
def bits():
    """Random bits [seeds, B, N, T, S]."""
    ids = jnp.arange(4, dtype=jnp.uint32)
    keys = jax.random.split(jax.random.key(0), 3)
    return np.stack([dropout.random_bits(dropout.seed_from_key(key, 4), ids, ids, (256, 256)) for key in keys])


def test_bits_are_uniform(bits):
    for shift in (0, 7):  # the lower and the upper 8 of 15 random bits
        counts = np.bincount((bits >> shift & 0xFF).ravel(), minlength=256)
        expected = bits.size / 256
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 4 * np.sqrt(2 * 255)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_dropout_rate(bits, rate):
    """Check the rate over all entries, and in every row, column and position of a 16x16 tile."""
    drop = bits < dropout.threshold(rate)
    exact = dropout.threshold(rate) / 32768

    def deviation(mean, samples):
        return np.abs(mean - exact).max() / np.sqrt(exact * (1 - exact) / samples)

    assert deviation(drop.mean(), drop.size) < 4
    seeds, batch, heads, rows, columns = range(5)
    for mean_over in ((seeds, batch, heads, columns), (seeds, batch, heads, rows)):
        assert deviation(drop.mean(mean_over), drop.size / 256) < 5
    tiles = drop.reshape(-1, 16, 16, 16, 16)  # [all heads, tile row, row in the tile, tile column, column in the tile]
    assert deviation(tiles.mean((0, 1, 3)), drop.size / 256) < 5


@pytest.mark.parametrize("axis", range(5), ids=["keys", "batch", "heads", "rows", "columns"])
def test_entries_are_independent(bits, axis):
    """Test pairs at all distances within the structure of a tile, both the random bits and the dropped entries."""
    size = bits.shape[axis]
    threshold = dropout.threshold(0.1)
    for distance in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 64, 128):
        if distance < size:
            x, y = (bits.take(range(start, size - distance + start), axis) for start in (0, distance))
            assert correlation(x, y) < 4.5
            assert correlation(x < threshold, y < threshold) < 4.5


def test_words_of_one_philox_call_are_independent(bits):
    # A row of a tile is 8 i + j, and a column is 8 k + 2 l + m. A call decides the 8 entries of all (i, k, m).
    tiles = bits.reshape(-1, 16, 2, 8, 16, 2, 4, 2).transpose(2, 5, 7, 0, 1, 3, 4, 6).reshape(8, -1)
    for x, y in itertools.combinations(tiles, 2):
        assert correlation(x, y) < 4.5


def test_mean_output_equals_output_without_dropout():
    query, key, value = (jax.random.normal(k, (1, 24, 2, 8)) for k in jax.random.split(jax.random.key(9), 3))
    keys = jax.random.split(jax.random.key(10), 4096)
    o = np.asarray(jax.jit(jax.vmap(lambda k: attend(query, key, value, 0.4, k)))(keys))
    deviation = (o.mean(0) - attend(query, key, value, 0.0, None)) / (o.std(0) / np.sqrt(len(keys)))
    assert abs(deviation).max() < 4.5
    assert 0.8 < deviation.std() < 1.2  # an unbiased mean has 1


# --- extreme rates ---


@on_each_device
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_rate_0_equals_no_dropout(implementation):
    query, key, value = (jax.random.normal(k, (2, 20, 2, 8)) for k in jax.random.split(jax.random.key(9), 3))
    without = jax_flash.dot_product_attention(query, key, value, implementation=implementation)
    for dropout_key in (None, jax.random.key(0)):
        np.testing.assert_array_equal(attend(query, key, value, 0.0, dropout_key, implementation), without)


@on_each_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_rate_1_gives_zeros(implementation, dtype):
    query, key, value = (jax.random.normal(k, (2, 20, 2, 8), dtype) for k in jax.random.split(jax.random.key(9), 3))

    def function(query, key, value):
        return attend(query, key, value, 1.0, jax.random.key(0), implementation, return_residual=True)

    (o, residual), pull = jax.vjp(function, query, key, value)
    assert not o.any()
    _, expected = jax_flash.dot_product_attention(
        query, key, value, return_residual=True, implementation=implementation
    )
    np.testing.assert_allclose(residual, expected, rtol=1e-6)
    assert not any(x.any() for x in pull((jnp.ones_like(o), jnp.zeros_like(residual))))

"""Traced integers in `local_window_size` have the same meaning as concrete numbers.

`Case(traced=True)` is one of the features of `test_accuracy.py`, `test_sharding.py` and `test_sequence.py`.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from hypothesis import given
from pages import Cache

import jax_flash
from jax_flash import BlockMask, Problem, arguments, dot_product_attention, windows
from jax_flash.call import Call

Q, K, V = (
    np.random.default_rng(i).normal(size=(2, size, 2, 8)).astype(np.float32) for i, size in enumerate((24, 40, 40))
)
attend = functools.partial(dot_product_attention, Q, K, V, query_offset=9)


def same(traced, static, **tolerance):
    tolerance = {"rtol": 1e-6, "atol": 1e-6} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), traced, static)


@pytest.mark.parametrize(
    "window",
    [
        np.uint8(200),
        np.array(3, np.int64),
        (np.int16(3), 2),
        (2**70, np.uint32(2**32 - 1)),
        [np.int8(0), np.int32(2**31 - 1)],
        np.int32(7),
    ],
    ids=str,
)
def test_any_integer(window):
    """A number or a pair, of which one may be traced. Large numbers bound nothing. Concrete arrays count as numbers."""
    arrays = [x for x in jax.tree.leaves(window) if not isinstance(x, int)]

    def with_arrays(arrays):
        arrays = iter(arrays)
        return attend(local_window_size=jax.tree.map(lambda x: x if isinstance(x, int) else next(arrays), window))

    same(jax.jit(with_arrays)(arrays), attend(local_window_size=window))


def test_negative_is_zero():
    """A traced number is unknown, so it cannot be refused."""
    same(jax.jit(lambda w: attend(local_window_size=w))(jnp.int32(-5)), attend(local_window_size=0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def described(T, S, causal, window, offset, lengths):
    """Return the ranges of rows and of keys, and the values of the mask_mod."""
    q, k = (jnp.zeros((1, size, 1, 8)) for size in (T, S))
    problem, operands = arguments.problem_and_operands(q, k, k, None, None, Call(is_causal=causal))
    given = {"query_seq_lengths": lengths[:1], "key_value_seq_lengths": lengths[1:], "query_offset": offset[None]}
    _, operands = windows.as_ranges(problem, operands.replaced(given), windows.Bounds(*window))
    mod = jax.vmap(jax.vmap(windows.mask_mod(windows.Bounds(*window)), (None, None, None, 0)), (None, None, 0, None))
    return operands.keys_of_rows[0], operands.rows_of_keys[0], mod(0, 0, offset + jnp.arange(T), jnp.arange(S))


T, S = 7, 9
SIZES = st.one_of(st.integers(0, 12), st.sampled_from([2**30 - 1, 2**30 + 5, 2**31 - 1]))
OFFSETS = st.one_of(st.integers(-12, 12), st.sampled_from([2**30, -(2**30), 2**31 - T, 2**31 - 1, -(2**31)]))


@given(st.tuples(SIZES, SIZES), OFFSETS, st.tuples(st.integers(0, T), st.integers(0, S)), st.booleans())
def test_entries(window, offset, lengths, causal):
    """Ranges of rows, ranges of keys and the mask_mod equal a window of numbers. Ends of ranges never decrease."""
    i, j = np.ogrid[:T, :S]
    p = i + offset
    visible = (p - window[0] <= j) & (j <= p + window[1])
    given = (np.array(x, np.int32) for x in (window, offset, lengths))
    rows, keys, within = map(np.asarray, described(T, S, causal, *given))
    if offset <= 2**31 - T:  # positions in programs have 32 bits
        np.testing.assert_array_equal(within, visible)
    visible &= (~np.bool_(causal) | (j <= p)) & (i < lengths[0]) & (j < lengths[1])
    np.testing.assert_array_equal((rows[:, :1] <= j) & (j < rows[:, 1:]), visible)
    np.testing.assert_array_equal((keys[:, 0] <= i) & (i < keys[:, 1]), visible)
    assert (np.diff(rows, axis=0) >= 0).all() and (np.diff(keys, axis=0) >= 0).all()


BLOCKS = BlockMask.from_dense(np.random.default_rng(4).random((2, 3)) < 0.7, 24, 40, q_block=16, kv_block=16)
OTHER = BlockMask.from_function(lambda b, h, i, j: jnp.arange(40)[j] != i, 24, 40, heads=2, q_block=16, kv_block=16)


def odd(batch, head, query, key):
    return (query + key) % 3 != head


def gradients(attention, *inputs):
    """Return the result and its gradients."""
    o, pull = jax.vjp(attention, *inputs)
    return o, pull(jnp.cos(o))


@pytest.mark.parametrize(
    "options",
    [
        {"mask_mod": odd},
        {"mask_mod": lambda b, h, i, j: i - j <= 4},
        {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
        {"block_mask": BLOCKS, "mask_mod": odd},
        {"block_mask": OTHER},
    ],
    ids=["mask_mod", "mask_mod that is a window", "score_mod", "block mask, mask_mod", "block mask of a function"],
)
def test_with_other_options(options):
    """Options that `Case` does not have."""

    def results(window):
        attend = functools.partial(dot_product_attention, local_window_size=window, query_offset=5, **options)
        return gradients(attend, Q, K, V)

    same(jax.jit(results)((jnp.int32(6), jnp.int32(3))), jax.jit(lambda: results((6, 3)))())


LAYERS = [3, 2**31 - 1, 0]  # a local layer, a global one, and one with a window of 0


@pytest.mark.parametrize("options", [{}, {"query_segment_ids": np.arange(24) // 9}], ids=["ranges", "mask_mod"])
def test_layers(options):
    """Run the layers in a scan with remat, each layer in vmap, and each layer on its own device in shard_map."""
    options = {name: np.stack([x, x]) for name, x in options.items()}
    if options:
        options["key_value_segment_ids"] = options["query_segment_ids"]

    def layer(x, window):
        return x + dot_product_attention(x, x, x, is_causal=True, local_window_size=(window, 0), **options)

    def unrolled(x):
        return functools.reduce(layer, LAYERS, x)

    @jax.jit
    def scanned(x, sizes):
        def loss(x):
            return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, sizes)[0]

        return gradients(loss, x)

    sizes = np.array(LAYERS)
    same(scanned(Q, sizes), jax.jit(functools.partial(gradients, unrolled))(Q), rtol=1e-5, atol=1e-5)
    scanned(Q, sizes + 1)
    assert scanned._cache_size() == 1

    each = [gradients(functools.partial(layer, window=w), Q) for w in LAYERS]
    mapped = jax.jit(jax.vmap(lambda w: gradients(functools.partial(layer, window=w), Q)))(sizes)
    same(mapped, jax.tree.map(lambda *x: jnp.stack(x), *each), rtol=1e-5, atol=1e-5)

    mesh = jax.make_mesh((3,), ("layers",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:3])
    alone = jax.shard_map(
        lambda w: gradients(functools.partial(layer, window=w[0]), Q)[0][None],
        mesh=mesh,
        in_specs=jax.P("layers"),
        out_specs=jax.P("layers"),
    )
    same(jax.jit(alone)(sizes), mapped[0])


def test_second_derivatives():
    def loss(q, window):
        return jnp.sum(dot_product_attention(q, K, V, local_window_size=window, query_offset=5) ** 2)

    def hessian(window):
        return jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, window) ** 2))(jnp.asarray(Q))

    same(jax.jit(hessian)(jnp.int32(4)), hessian(4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_pages(implementation):
    cache = Cache((40, 17), 16, Case(T=3, N=4, K=1, D=16, E=16, sinks=2.0))
    arrays = cache.arrays("float32")
    attend = functools.partial(
        jax_flash.paged_attention, **cache.paged_arguments(arrays), implementation=implementation
    )
    for window in (5, 2**31 - 1):
        same(jax.jit(lambda w: attend(local_window_size=w))(jnp.int32(window)), attend(local_window_size=window))


def test_modules():
    """An option of the call overrides the module's attribute."""
    nnx = pytest.importorskip("flax.nnx")
    module = pytest.importorskip("jax_flash.nnx")
    layer = module.MultiHeadAttention(2, 8, is_causal=True, local_window_size=2, decode=False, rngs=nnx.Rngs(0))
    x = Q[..., 0, :]
    same(nnx.jit(lambda layer, w: layer(x, local_window_size=w))(layer, 5), layer(x, local_window_size=5))


def test_shapes_of_traced_windows():
    q, w = jax.ShapeDtypeStruct((2, 64, 4, 16), "float32"), jax.ShapeDtypeStruct((), "int32")
    assert Problem.of(q, q, q, local_window_size=w).mask.ranges
    masked = Problem.of(q, q, q, local_window_size=(w, 3), mask=jax.ShapeDtypeStruct((64, 64), "bool")).mask
    assert masked.local_window_size.right == 3
    assert Problem.of_varlen(*(jax.ShapeDtypeStruct((9, 4, 16), "float32"),) * 3, np.array([0, 9]), local_window_size=w)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (jnp.float32(3), TypeError, r"local_window_size must be an int, not float32\[\]: cast it to int32"),
        ((2, jnp.bool_(True)), TypeError, r"local_window_size\[1\] must be an int, not bool\[\]: cast"),
        (jnp.ones(2, jnp.int32), ValueError, r"must be an int or an integer scalar, not int32\[2\]: .* jax.vmap"),
    ],
)
def test_errors(window, error, message):
    for call in (attend, jax.jit(attend)):
        with pytest.raises(error, match=message):
            call(local_window_size=window)
    with pytest.raises(ValueError, match="must not be negative"):
        attend(local_window_size=jnp.int32(-1))
    with pytest.raises(TypeError, match="must be an int, not True"):
        attend(local_window_size=True)

"""A sequence divided over devices by `shard_map` gives the same results as one device.

On GPUs: JAX_PLATFORMS=cuda pytest tests/api/test_sequence*.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sequences import (
    CASE,
    CHUNKS,
    assert_close,
    divided,
    every_layout,
    exact,
    inverse,
    make_mesh,
    order_of,
    permute,
    with_gradients,
)

import jax_flash
from jax_flash import BlockMask, Layout

pytestmark = pytest.mark.usefixtures("full_precision")


# --- One feature after the other ---

BLOCKS = BlockMask.from_function(
    lambda b, h, i, j: (i // 16 + j // 16) % 3 != h % 2, 128, 128, heads=4, q_block=16, kv_block=16
)
CASES = [
    CASE(),
    CASE(causal=True, dropout=0.3),
    CASE(causal=True, window=(40, 0), segments=True),
    CASE(window=(10, 20), bias="1nts"),
    CASE(bias="b11s", mask="b1ts", lengths=True, soft_cap=1.0, dropout=0.5),
    CASE(causal=True, offset=True, bias="bnt1", K=1, sinks=1.0),
    CASE(S=256, causal=True, window=(100, 7), mask="1n1s"),
    CASE(block_mask=BLOCKS, causal=True),
    CASE(window=(40, 5), traced=True, lengths=True, causal=True),
]


@every_layout
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_device(case, layout):
    arrays = case.arrays()
    assert_close(divided(case, arrays, 4, layout), exact(case, arrays))


@every_layout
def test_with_x64(layout):
    """With x64, some indices would have 64 bits and others 32."""
    case = CASE(B=1, bias="1nts", causal=True, block_mask=BLOCKS, offset=True, dropout=0.3)
    with jax.enable_x64(True):
        arrays = case.arrays()
        assert_close(divided(case, arrays, 4, layout), exact(case, arrays))


@pytest.mark.parametrize(("devices", "layout"), [(3, "zigzag"), (6, "contiguous")])
def test_any_number_of_devices(devices, layout):
    case = CASE(T=96 * devices, S=96 * devices, causal=True, dropout=0.2)
    arrays = case.arrays()
    assert_close(divided(case, arrays, devices, layout), exact(case, arrays))


# The chunks have the order of zigzag, so the layouts must agree.
@pytest.mark.parametrize("layout", ["zigzag", Layout(np.array([[0, 3], [1, 2]], np.int32))], ids=["zigzag", "chunks"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_other_implementations(implementation, layout):
    case = CASE(B=1, T=64, S=64, K=4, causal=True, dropout=0.3)
    arrays = case.arrays()
    assert_close(divided(case, arrays, 2, layout, implementation=implementation), exact(case, arrays))


def test_gradient_of_sinks_alone():
    case = CASE(B=1, T=64, S=64, sinks=1.0)
    arrays = case.arrays()
    sinks = jnp.asarray(arrays.pop("sinks"))

    def gradient(arrays, sinks, **options):
        def loss(sinks):
            return jnp.cos(jax_flash.dot_product_attention(**arrays, sinks=sinks, **options)).sum()

        return jax.grad(loss)(sinks)

    local = functools.partial(gradient, sequence_axis="seq")
    call = jax.shard_map(local, mesh=make_mesh(seq=4), in_specs=(P(None, "seq"), P()), out_specs=P())
    np.testing.assert_allclose(jax.jit(call)(arrays, sinks), gradient(arrays, sinks), rtol=1e-5, atol=1e-6)


# --- Score and mask functions: their indices are global ---

SLOPES = np.arange(1, 5, dtype=np.float32) / 8
PROGRAMS = {
    "both functions": (
        (4, 255),
        lambda table, slopes: {
            "score_mod": lambda score, batch, head, query, key: score * slopes[head] + table[head, query - key + 127],
            "mask_mod": lambda batch, head, query, key: (query // 24 == key // 24) | (key < 8 * head),
        },
    ),
    # On one device, this score_mod would become a bias.
    "a bias": (
        (4, 128, 128),
        lambda table, slopes: {
            "score_mod": lambda score, batch, head, query, key: score + table[head, query, key],
        },
    ),
}


@every_layout
@pytest.mark.parametrize(("shape", "functions"), PROGRAMS.values(), ids=PROGRAMS)
def test_score_programs(shape, functions, layout):
    """The gradients of captured arrays, `table` and `slopes`, are sums over the devices."""
    case = CASE(causal=True, dropout=0.1)
    table = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    arrays = case.arrays() | {"table": table, "slopes": SLOPES}
    axes = {name: 1 if name in ("query", "key", "value") else None for name in arrays}
    specs = {name: P(None, "seq") if axis == 1 else P() for name, axis in axes.items()}

    def attend(arrays, **options):
        arguments = {name: x for name, x in arrays.items() if name not in ("table", "slopes")}
        mods = functions(arrays["table"], arrays["slopes"])
        return jax_flash.dot_product_attention(**arguments, **mods, **case.options, **options)

    def gradients(attend, arrays):
        inputs = {name: x for name, x in arrays.items() if name != "dropout_key"}
        return jax.jit(jax.grad(lambda inputs: jnp.cos(attend(arrays | inputs)).sum()))(inputs)

    local = functools.partial(attend, sequence_axis="seq", sequence_layout=layout)
    on_devices = jax.shard_map(local, mesh=make_mesh(seq=4), in_specs=(specs,), out_specs=P(None, "seq"))
    actual = inverse(gradients(on_devices, permute(arrays, axes, layout, 4)), axes, layout, 4)
    assert_close(actual, gradients(attend, arrays), rtol=1e-4, atol=1e-4)


# --- Packed sequences ---

VARLEN = {
    "causal": {"is_causal": True, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "window": {"local_window_size": (9, 3), "logits_soft_cap": 2.0},
    "programs": {
        "is_causal": True,
        "score_mod": lambda score, batch, head, query, key: score + 0.1 * (query - key) * (head + 1) / (batch + 1),
        "mask_mod": lambda batch, head, query, key: (query - key) % 3 < 2,
    },
}


@every_layout
@pytest.mark.parametrize("options", VARLEN.values(), ids=VARLEN)
def test_varlen(options, layout):
    """Documents cross the edges of parts, and padding follows the last document."""
    arrays = {name: x[0] for name, x in CASE().arrays().items()}
    axes = dict.fromkeys((*arrays, "o", "logsumexp"), 0)
    cu_seqlens = np.array([0, 5, 5, 60, 61, 100, 121], np.int32)

    def attend(arrays, cu_seqlens, **where):
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        return jax_flash.varlen_attention(q, k, v, cu_seqlens, **options, **where, return_residual=True)

    def pulled(attend):
        return jax.jit(lambda arrays: with_gradients(lambda arrays: attend(arrays, cu_seqlens), arrays))

    local = functools.partial(attend, sequence_axis="seq", sequence_layout=layout)
    on_devices = jax.shard_map(local, mesh=make_mesh(seq=4), in_specs=(P("seq"), P()), out_specs=P("seq"))
    actual = inverse(pulled(on_devices)(permute(arrays, axes, layout, 4)), axes, layout, 4)
    assert_close(actual, pulled(attend)(arrays))


def test_a_layout_for_each_row():
    """`vmap` over rows with their own documents and layouts, in a Flax module that gets its layout as an option."""
    pytest.importorskip("flax")
    from flax import nnx

    import jax_flash.nnx

    layer = jax_flash.nnx.MultiHeadAttention(4, 32, is_causal=True, decode=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 1024, 32)).astype(np.float32)
    ids = np.repeat([[0, 1, 2, 3], [0, 0, 0, 1]], 256, axis=1)
    layouts = [jax_flash.balance(cu_seqlens, 2) for cu_seqlens in ([0, 256, 512, 768, 1024], [0, 768, 1024])]
    stacked = jax.tree.map(lambda *chunks: np.stack(chunks), *layouts)

    def permuted(rows):
        return np.stack([layout.permute(row, 0) for layout, row in zip(layouts, rows, strict=True)])

    def attend(x, ids, **where):
        return layer(x[None], query_segment_ids=ids, key_value_segment_ids=ids, **where)[0]

    def local(x, ids, layout):
        return attend(x, ids, sequence_axis="seq", sequence_layout=layout)

    over = P(None, "seq")
    call = jax.shard_map(jax.vmap(local), mesh=make_mesh(seq=2), in_specs=(over, over, P()), out_specs=over)
    actual = np.asarray(jax.jit(call)(permuted(x), permuted(ids), stacked))
    np.testing.assert_allclose(actual, permuted(np.asarray(jax.vmap(attend)(x, ids))), rtol=1e-5, atol=1e-5)


# --- Transformations ---


@pytest.mark.parametrize("layout", ["zigzag", CHUNKS], ids=["zigzag", "chunks"])
def test_remat_scan_and_vmap(layout):
    """Two layers with remat over three sequences in vmap."""
    case = CASE(B=1, T=64, S=64, causal=True)
    arrays = {name: np.stack([case.arrays(seed=seed)[name] for seed in range(3)]) for name in ("query", "key", "value")}
    axes = dict.fromkeys(arrays, 2)

    def loss(arrays, **options):
        @jax.checkpoint
        def layer(x, _):
            return jax_flash.dot_product_attention(x, arrays["key"], arrays["value"], is_causal=True, **options), None

        return (jax.lax.scan(layer, arrays["query"], length=2)[0] ** 2).sum()

    def gradients(**options):
        return jax.vmap(jax.grad(functools.partial(loss, **options)))

    local = gradients(sequence_axis="seq", sequence_layout=layout)
    spec = P(None, None, "seq")
    call = jax.shard_map(local, mesh=make_mesh(seq=4), in_specs=(spec,), out_specs=spec)
    actual = inverse(jax.jit(call)(permute(arrays, axes, layout, 4)), axes, layout, 4)
    assert_close(actual, jax.jit(gradients())(arrays), rtol=1e-4, atol=1e-4)


SIX_CHUNKS = Layout(np.array([[0, 4], [2, 5], [1, 3]], np.int32))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", SIX_CHUNKS], ids=["contiguous", "zigzag", "chunks"])
@pytest.mark.parametrize("inside", [True, False])
def test_second_derivatives(inside, layout):
    """Take second derivatives inside or outside of `shard_map`."""
    q = np.random.default_rng(0).normal(size=(1, 24, 2, 8)).astype(np.float32)
    on_devices = functools.partial(
        jax.shard_map, mesh=make_mesh(seq=3), in_specs=P(None, "seq"), out_specs=P(None, "seq")
    )

    def attention(q, **options):
        return jax_flash.dot_product_attention(q, q, q, is_causal=True, **options)

    def second(attention):
        first = jax.grad(lambda q: jnp.sin(attention(q)).sum())
        return jax.grad(lambda q: jnp.cos(first(q)).sum())

    local = functools.partial(attention, sequence_axis="seq", sequence_layout=layout)
    call = on_devices(second(local)) if inside else second(on_devices(local))
    order = order_of(layout, 3)
    actual = order.inverse(np.asarray(jax.jit(call)(order.permute(q, 1))), 1)
    np.testing.assert_allclose(actual, jax.jit(second(attention))(q), rtol=1e-4, atol=1e-4)

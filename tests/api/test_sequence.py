"""Sharded sequences give the same results as one device, without all-gathers of K and V."""

import functools
import math
import os
import re
import subprocess
import sys

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import by_numpy
from cases import DIFFERENTIATED, Case, data_collectives
from hypothesis import given
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import BlockMask, Layout, Problem, sequence
from jax_flash.layouts import zigzag_layout
from jax_flash.sequence import Division

# The chunks of devices 0 to 3. Chunks 4 and 5 are neighbours on one device, and no device has its chunks of the zigzag
# layout.
CHUNKS = Layout(np.array([[1, 6], [0, 3], [2, 7], [4, 5]], np.int32))
LAYOUTS = ("contiguous", "zigzag", CHUNKS)
# The axis of an array's queries or keys.
ROWS = {"query": 1, "key": 1, "value": 1, "query_segment_ids": 1, "key_value_segment_ids": 1, "bias": 2, "mask": 2}


@pytest.fixture(autouse=True, scope="module")
def full_precision():
    """Use full float32 precision, also on GPUs: JAX_PLATFORMS=cuda pytest tests/api/test_sequence.py"""
    with jax.default_matmul_precision("highest"):
        yield


def require_devices(count):
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return jax.devices()[:count]


def results(case, arrays, **options):
    """Return o, logsumexp and gradients by name."""
    inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
    others = {name: x for name, x in arrays.items() if name not in DIFFERENTIATED}

    def attention(inputs):
        o, statistics = jax_flash.attention_with_statistics(**inputs, **others, **case.options | options)
        return o, statistics.logsumexp

    (o, logsumexp), pull = jax.vjp(attention, inputs)
    (gradients,) = pull((jnp.cos(o), jnp.sin(jnp.where(jnp.isfinite(logsumexp), logsumexp, 0))))
    return {"o": o, "logsumexp": logsumexp} | gradients


def exact(case, arrays):
    """Return the `results` of one device, from NumPy, which needs no compilation."""
    zeros = np.zeros((case.B, case.T, case.N, case.E)), np.zeros((case.B, case.N, case.T))
    forward = by_numpy(case, arrays, zeros)
    finite = np.where(np.isfinite(forward["logsumexp"]), forward["logsumexp"], 0)
    return by_numpy(case, arrays, (np.cos(forward["o"]), np.sin(finite)))


def axis_of(name, x):
    """Return the axis of an array's rows or keys, or None."""
    axis = {"o": 1, "logsumexp": 2}.get(name, ROWS.get(name))
    return axis if axis is not None and x.shape[axis] > 1 else None


def sharded(case, arrays, devices, layout, **options):
    """Return the results from shard_map over a mesh axis `seq`."""

    def spec(name, x):
        axis = axis_of(name, x)
        return P(*("seq" if i == axis else None for i in range(np.ndim(x)))) if axis is not None else P()

    def arranged(name, x, into):
        axis = axis_of(name, x)
        return x if axis is None else reordered(x, layout, devices, axis, into)

    arrays = {name: arranged(name, x, True) for name, x in arrays.items()}
    block_mask = {"block_mask": arrays.pop("block_mask")} if "block_mask" in arrays else {}
    options = options | {"sequence_axis": "seq"}
    # Arrays with the ranks of o and logsumexp, and with sizes above 1, for the specs of the results.
    shapes = {"o": jnp.zeros((2,) * 4), "logsumexp": jnp.zeros((2,) * 3)} | arrays
    names = ("o", "logsumexp", *(name for name in DIFFERENTIATED if name in arrays))

    @functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((devices,), ("seq",), (AxisType.Auto,), devices=require_devices(devices)),
        in_specs=({name: spec(name, x) for name, x in arrays.items()}, P()),
        out_specs={name: spec(name, shapes[name]) for name in names},
    )
    def local(arrays, chunks):
        return results(case, arrays | block_mask, sequence_layout=chunks or layout, **options)

    chunks = layout if isinstance(layout, Layout) else None
    return {name: arranged(name, x, False) for name, x in jax.jit(local)(arrays, chunks).items()}


def reordered(x, layout, devices, axis, into):
    """Return an array in the order of a layout, or with into=False in the natural order. NumPy compiles nothing."""
    if layout == "contiguous":
        return x
    layout = layout if isinstance(layout, Layout) else zigzag_layout(devices)
    return (layout.permute if into else layout.inverse)(np.asarray(x), axis)


def assert_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, **{"rtol": 2e-5, "atol": 2e-5} | tolerance, err_msg=name)


CASE = functools.partial(Case, B=2, T=128, S=128, N=4, K=2, D=8, E=8)
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


def name_of(layout):
    return "chunks" if isinstance(layout, Layout) else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_device(case, layout):
    arrays = case.arrays()
    expected = exact(case, arrays)
    assert_close(sharded(case, arrays, 4, layout), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_with_x64(layout):
    """With x64, some indices would have 64 bits and others 32."""
    case = CASE(B=1, bias="1nts", causal=True, block_mask=BLOCKS, offset=True, dropout=0.3)
    with jax.enable_x64(True):
        arrays = case.arrays()
        expected = exact(case, arrays)
        assert_close(sharded(case, arrays, 4, layout), expected)


def test_gradient_of_sinks_alone():
    case = CASE(B=1, T=64, S=64, sinks=1.0)
    arrays = case.arrays()
    sinks = jnp.asarray(arrays.pop("sinks"))

    def gradient(arrays, sinks, **options):
        return jax.grad(lambda sinks: jnp.cos(jax_flash.dot_product_attention(**arrays, sinks=sinks, **options)).sum())(
            sinks
        )

    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=require_devices(4))
    local = functools.partial(gradient, sequence_axis="seq")
    actual = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(None, "seq"), P()), out_specs=P()))(arrays, sinks)
    np.testing.assert_allclose(actual, gradient(arrays, sinks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("devices", "layout"), [(3, "zigzag"), (6, "contiguous")])
def test_any_number_of_devices(devices, layout):
    case = CASE(T=96 * devices, S=96 * devices, causal=True, dropout=0.2)
    arrays = case.arrays()
    expected = exact(case, arrays)
    assert_close(sharded(case, arrays, devices, layout), expected)


TABLE = np.random.default_rng(0).normal(size=(4, 255)).astype(np.float32)
SLOPES = np.arange(1, 5, dtype=np.float32) / 8


def table_and_documents(table, slopes):
    """Return a score_mod and a mask_mod that capture these arrays."""

    def score_mod(score, batch, head, query, key):
        return score * slopes[head] + table[head, query - key + 127]

    def mask_mod(batch, head, query, key):
        return (query // 24 == key // 24) | (key < 8 * head)

    return {"score_mod": score_mod, "mask_mod": mask_mod}


BIAS = np.random.default_rng(1).normal(size=(4, 128, 128)).astype(np.float32)


def bias_of_all_rows(table, slopes):
    """Return a score_mod that would become a bias if the sequence were not sharded."""
    return {"score_mod": lambda score, batch, head, query, key: score + table[head, query, key]}


@pytest.mark.parametrize("layout", ["zigzag", Layout(np.array([[0, 3], [1, 2]], np.int32))], ids=name_of)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_other_implementations(implementation, layout):
    case = CASE(B=1, T=64, S=64, K=4, causal=True, dropout=0.3)
    arrays = case.arrays()
    expected = exact(case, arrays)
    assert_close(sharded(case, arrays, 2, layout, implementation=implementation), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize(
    ("programs", "table"), [(table_and_documents, TABLE), (bias_of_all_rows, BIAS)], ids=["both", "a bias"]
)
def test_score_programs(programs, table, layout):
    """Indices are global. Every device adds its contribution to the gradients of captured arrays."""
    case = CASE(causal=True, dropout=0.1)
    arrays = case.arrays() | {"table": table, "slopes": SLOPES}
    over = {name: P(None, "seq") if name in ROWS else P() for name in arrays}
    arranged = {name: reordered(x, layout, 4, 1, True) if name in ROWS else x for name, x in arrays.items()}

    def loss(arrays, **options):
        arrays = dict(arrays)
        mods = programs(arrays.pop("table"), arrays.pop("slopes"))
        o = jax_flash.dot_product_attention(**arrays, **mods, **case.options, **options)
        return jnp.cos(o)

    def unsharded(arrays):
        return jax.grad(lambda x: loss(arrays | x).sum())({name: arrays[name] for name in names})

    @functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=require_devices(4)),
        in_specs=(over,),
        out_specs=P(None, "seq"),
    )
    def local(arrays):
        return loss(arrays, sequence_axis="seq", sequence_layout=layout)

    names = ("query", "key", "value", "table", "slopes")
    actual = jax.jit(jax.grad(lambda x: local(arranged | x).sum()))({name: arranged[name] for name in names})
    actual |= {name: reordered(x, layout, 4, 1, False) for name, x in actual.items() if name in ROWS}
    assert_close(actual, jax.jit(unsharded)(arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["zigzag", CHUNKS], ids=name_of)
def test_remat_scan_and_vmap(layout):
    """Two layers with remat over three sequences in vmap."""
    case = CASE(B=1, T=64, S=64, causal=True)
    arrays = {name: np.stack([case.arrays(seed=seed)[name] for seed in range(3)]) for name in ("query", "key", "value")}
    options = {"sequence_axis": "seq", "sequence_layout": layout}

    def loss(query, key, value, **options):
        @jax.checkpoint
        def layer(x, _):
            return jax_flash.dot_product_attention(x, key, value, **case.options, **options), None

        return (jax.lax.scan(layer, query, length=2)[0] ** 2).sum()

    def gradients(arrays, **options):
        return jax.vmap(jax.grad(functools.partial(loss, **options), (0, 1, 2)))(*arrays)

    given = tuple(reordered(x, layout, 4, 2, True) for x in arrays.values())
    spec = (P(None, None, "seq"),) * 3
    actual = jax.jit(
        jax.shard_map(
            functools.partial(gradients, **options),
            mesh=jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=require_devices(4)),
            in_specs=(spec,),
            out_specs=spec,
        )
    )(given)
    actual = tuple(reordered(x, layout, 4, 2, False) for x in actual)
    expected = jax.jit(gradients)(tuple(arrays.values()))
    assert_close(dict(zip("qkv", actual, strict=True)), dict(zip("qkv", expected, strict=True)), rtol=1e-4, atol=1e-4)


def test_only_shared_chunks_visit(monkeypatch):
    """Devices 1 and 2 share a document in chunks 9 and 10, and send only these. Results of other chunks stay."""
    own = [range(8), [8, 9, *range(16, 22)], [10, *range(22, 29)], [*range(11, 16), 29, 30, 31]]
    layout = Layout(np.array([[*chunks] for chunks in own], np.int32))
    blocks = BlockMask.from_mask(np.tri(512, dtype=bool), q_block=16, kv_block=16)
    options = {"bias": "b1ts", "mask": "1n1s", "sinks": 1.0, "segments": True, "block_mask": blocks}
    case = CASE(B=1, T=512, S=512, causal=True, dropout=0.3, **options)
    documents = np.repeat(np.where(np.arange(32) == 10, 9, np.arange(32)), 16).astype(np.int32)[None]
    arrays = case.arrays() | dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), documents)
    sizes, permuted = [], Division.permuted

    def recording(division, x, to):
        jax.debug.callback(lambda: sizes.append(x.size))
        return permuted(division, x, to)

    monkeypatch.setattr(Division, "permuted", recording)
    actual = jax.block_until_ready(sharded(case, arrays, 4, layout))
    jax.effects_barrier()
    assert_close(actual, exact(case, arrays))
    keys_and_values = 2 * case.K * case.D * 16  # of one of the eight chunks of a device
    assert keys_and_values <= min(sizes) and max(sizes) < 2 * keys_and_values


VARLEN = {
    "causal": {"is_causal": True, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "window": {"local_window_size": (9, 3), "logits_soft_cap": 2.0},
    "programs": {
        "is_causal": True,
        "score_mod": lambda score, batch, head, query, key: score + 0.1 * (query - key) * (head + 1) / (batch + 1),
        "mask_mod": lambda batch, head, query, key: (query - key) % 3 < 2,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("options", VARLEN.values(), ids=VARLEN)
def test_varlen(options, layout):
    """Documents cross the edges of parts, and padding follows the last document."""
    arrays = {name: x[0] for name, x in CASE().arrays().items() if name in ("query", "key", "value")}
    cu_seqlens = np.array([0, 5, 5, 60, 61, 100, 121], np.int32)

    def attend(arrays, cu_seqlens, **where):
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        return jax_flash.varlen_attention(q, k, v, cu_seqlens, **options, **where, return_residual=True)

    def pulled(attend, arrays, *rest):
        (o, logsumexp), pull = jax.vjp(lambda x: attend(x, *rest), arrays)
        cotangents = jnp.cos(o), jnp.sin(jnp.where(jnp.isfinite(logsumexp), logsumexp, 0))
        return pull(cotangents)[0] | {"o": o, "logsumexp": logsumexp}

    @functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=require_devices(4)),
        in_specs=(P("seq"), P(), P()),
        out_specs=P("seq"),
    )
    def local(arrays, cu_seqlens, chunks):
        return attend(arrays, cu_seqlens, sequence_axis="seq", sequence_layout=chunks or layout)

    expected = jax.jit(functools.partial(pulled, attend))(arrays, cu_seqlens)
    chunks = layout if isinstance(layout, Layout) else None
    given = {name: reordered(x, layout, 4, 0, True) for name, x in arrays.items()}
    actual = jax.jit(functools.partial(pulled, local))(given, cu_seqlens, chunks)
    assert_close({name: reordered(x, layout, 4, 0, False) for name, x in actual.items()}, expected)


def test_a_layout_for_each_row():
    """`vmap` over rows with their own documents and layouts, in a Flax module that gets its layout as an option."""
    pytest.importorskip("flax")
    from flax import nnx

    import jax_flash.nnx

    layer = jax_flash.nnx.MultiHeadAttention(4, 32, is_causal=True, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 1024, 32))
    ids = np.repeat([[0, 1, 2, 3], [0, 0, 0, 1]], 256, axis=1)
    layouts = [jax_flash.balance(cu_seqlens, 2) for cu_seqlens in ([0, 256, 512, 768, 1024], [0, 768, 1024])]
    stacked = jax.tree.map(lambda *x: np.stack(x), *layouts)

    def row(x, ids, layout):
        options = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        where = {} if layout is None else {"sequence_axis": "seq", "sequence_layout": layout}
        return layer(x[None], **options, **where)[0]

    mesh = jax.make_mesh((2,), ("seq",), (AxisType.Auto,), devices=require_devices(2))
    over = P(None, "seq")
    local = jax.shard_map(jax.vmap(row), mesh=mesh, in_specs=(over, over, P()), out_specs=over)
    given = [
        np.stack([layout.permute(np.asarray(x), 0) for layout, x in zip(layouts, xs, strict=True)]) for xs in (x, ids)
    ]
    found = jax.jit(local)(*given, stacked)
    found = [layout.inverse(np.asarray(x), 0) for layout, x in zip(layouts, found, strict=True)]
    np.testing.assert_allclose(found, jax.vmap(functools.partial(row, layout=None))(x, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sequence_axis": "rows"}, ValueError, "sequence_axis='rows' is no axis of an enclosing jax.shard_map"),
        ({"sequence_axis": 0}, TypeError, "sequence_axis must be the name of a mesh axis"),
        ({"sequence_axis": ()}, TypeError, "sequence_axis must be the name of a mesh axis"),
        ({"sequence_axis": ["seq"]}, TypeError, "the name of a mesh axis or a tuple of them, not list"),
        ({"sequence_axis": ("seq", "seq")}, ValueError, "names an axis twice"),
        ({"sequence_layout": "zigzag"}, ValueError, "sequence_layout needs a sequence_axis"),
        ({"sequence_axis": "seq", "sequence_layout": "striped"}, ValueError, '"zigzag" or a jax_flash.Layout, not'),
        (
            {"sequence_axis": "seq", "sequence_layout": jax_flash.balance([0, 96], 4)},
            ValueError,
            "sequence_layout has 4 devices, but sequence_axis='seq' has 2: call balance with this number",
        ),
        (
            {"sequence_axis": "seq", "sequence_layout": Layout(np.array([[0, 3], [2, 1]], np.int32))},
            ValueError,
            "chunks of sequence_layout must be the numbers 0 to 3 once each, and increase on each device",
        ),
        (
            {"sequence_axis": "seq", "sequence_layout": Layout(np.arange(10, dtype=np.int32).reshape(2, 5))},
            ValueError,
            "T = 96 and S = 96 must be multiples of 10, for 10 parts over seq in a layout of 5 chunks",
        ),
        (
            {"sequence_axis": "seq", "mask": np.ones((1, 1, 48, 48), bool)},
            ValueError,
            r"not broadcastable to \[B, N, T, S\] = \(1, 2, 48, 96\)",
        ),
        (
            {
                "sequence_axis": "seq",
                "sequence_layout": "zigzag",
                "dropout_rate": 0.5,
                "dropout_key": np.uint32([0, 1]),
            },
            ValueError,
            "dropout needs a multiple of 16 rows and keys per part, not 24 and 24 .4 parts over seq in the zigzag",
        ),
        (
            {
                "sequence_axis": "seq",
                "block_mask": BlockMask.from_mask(np.tri(96, dtype=bool), q_block=32, kv_block=32),
            },
            ValueError,
            "a block mask needs whole blocks of 32 x 32 per part, not 48 rows",
        ),
    ],
    ids=lambda x: None if isinstance(x, dict | type) else x.split(":")[0][:30],
)
def test_errors(options, error, match):
    mesh = jax.make_mesh((2,), ("seq",), (AxisType.Auto,), devices=require_devices(2))

    def attend(x):
        return jax_flash.dot_product_attention(x, x, x, **options)

    with pytest.raises(error, match=match):
        jax.shard_map(attend, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))(jnp.ones((1, 96, 2, 8)))


def test_axis_outside_shard_map_and_uneven_parts():
    x = jnp.ones((1, 48, 2, 8))
    with pytest.raises(ValueError, match=r"sequence_axis='seq' is no axis of an enclosing jax.shard_map: call inside"):
        jax_flash.dot_product_attention(x, x, x, sequence_axis="seq")
    with pytest.raises(ValueError, match=r"axis 1 must be divisible by the 10 chunks, .* the shape is \(1, 48, 2, 8\)"):
        jax_flash.zigzag(x, 5, 1)
    mesh = jax.make_mesh((2,), ("seq",), (AxisType.Auto,), devices=require_devices(2))
    odd = jax.shard_map(
        lambda x: jax_flash.dot_product_attention(x, x, x, sequence_axis="seq", sequence_layout="zigzag"),
        mesh=mesh,
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    with pytest.raises(ValueError, match="T = 90 and S = 90 must be multiples of 4, for 4 parts over seq"):
        odd(jnp.ones((1, 90, 2, 8)))


# --- layouts and work per device ---


def square(length, **options):
    x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
    return Problem.of(x, x, x, **options)


def test_zigzag_and_back():
    x = np.arange(2 * 24).reshape(2, 24)
    arranged = jax_flash.zigzag(x, 3, -1)
    np.testing.assert_array_equal(arranged[0].reshape(3, 2, 4)[:, :, 0], [[0, 20], [4, 16], [8, 12]])
    np.testing.assert_array_equal(jax_flash.unzigzag(arranged, 3, -1), x)
    assert jax_flash.zigzag(np.zeros((0, 24)), 3, -1).shape == (0, 24)


@pytest.mark.parametrize(
    ("devices", "axis", "error", "match"),
    [
        (2, 2, ValueError, "axis must be below 2 for shape .*, not 2"),
        (2, -3, ValueError, "axis must be at least -2"),
        (2, 1.0, TypeError, "axis must be an int"),
        (0, 1, ValueError, "devices must be at least 1"),
        (2.0, 1, TypeError, "devices must be an int"),
    ],
)
def test_zigzag_errors(devices, axis, error, match):
    for lay in (jax_flash.zigzag, jax_flash.unzigzag):
        with pytest.raises(error, match=match):
            lay(np.zeros((2, 24)), devices, axis)


def test_zigzag_on_explicit_axes():
    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Explicit,), devices=require_devices(4))
    x = np.arange(2 * 24).reshape(2, 24)
    place = NamedSharding(mesh, P(None, "seq"))
    arranged = jax.jit(lambda x: jax_flash.zigzag(x, 4, 1))(jax.device_put(x, place))
    assert arranged.sharding == place
    np.testing.assert_array_equal(arranged, jax_flash.zigzag(x, 4, 1))
    np.testing.assert_array_equal(jax_flash.unzigzag(arranged, 4, 1), x)


@given(
    devices=st.integers(1, 5), rows=st.integers(1, 7), keys=st.integers(1, 7), causal=st.booleans(),
    left=st.integers(-1, 40), right=st.integers(-1, 40), unbounded=st.sampled_from((10**6, 2**63 - 1)),
    layout=st.sampled_from(("contiguous", "zigzag")),
)  # fmt: skip
def test_entries_match_the_masks(devices, rows, keys, causal, left, right, unbounded, layout):
    division = Division(("seq",), devices, layout)
    parts = devices * division.parts
    x, y = (jax.ShapeDtypeStruct((1, n * parts, 1, 8), jnp.float32) for n in (rows, keys))
    window = (left if left >= 0 else unbounded, right if right >= 0 else unbounded)
    problem = Problem.of(x, y, y, is_causal=causal, local_window_size=window)
    i, j = np.ogrid[: rows * parts, : keys * parts]
    visible = (j - i <= window[1]) & (i - j <= window[0]) & (~np.bool_(causal) | (j <= i))
    found = sequence.entries(problem, division)
    assert found.sum() == visible.sum()
    for shift, a, b, device in np.ndindex(*found.shape):
        row = division.starts(device, rows * parts)[a]
        key = division.starts((device - shift) % devices, keys * parts)[b]
        assert found[shift, a, b, device] == visible[row : row + rows, key : key + keys].sum()


@pytest.mark.parametrize("devices", [2, 3, 8, 64])
def test_causal_work_is_balanced(devices):
    """In the zigzag layout, each visit is balanced within 5%. A contiguous sequence is exchanged into this layout."""
    problem = square(4096 * devices, is_causal=True)
    contiguous, zigzag = Division(("seq",), devices), Division(("seq",), devices, "zigzag")
    at_visits = sequence.entries(problem, zigzag).sum((1, 2))
    assert (at_visits.max(-1) < 1.05 * at_visits.min(-1)).all()
    assert sequence.with_best_layout(problem, contiguous) == sequence.with_best_layout(problem, zigzag) == zigzag
    assert sequence.with_best_layout(square(4096 * devices), contiguous) == contiguous


def test_windows_skip_invisible_visits():
    problem = square(8 * 1024, is_causal=True, local_window_size=(1500, 0))
    contiguous, zigzag = Division(("seq",), 8), Division(("seq",), 8, "zigzag")
    assert [visit.shift for visit in sequence.visits(problem, contiguous)] == [0, 1, 2]
    assert sequence.with_best_layout(problem, contiguous) == contiguous
    assert len(sequence.visits(problem, zigzag)) > 3
    assert sequence.with_best_layout(problem, contiguous._replace(inner=2)) == contiguous  # one ring has fewer visits


def test_one_exchange_for_several_dtypes():
    """The exchange preserves all bits, also of arrays that do not fill whole words. The exchange is differentiable."""
    devices, division = require_devices(3), Division(("seq",), 3)
    shapes = {"bfloat16": (3, 1, 5), "float32": (3, 2, 2), "int32": (3, 3), "float64": (3, 1, 3)}
    mesh = jax.make_mesh((3,), ("seq",), (AxisType.Auto,), devices=devices)
    with jax.enable_x64(True):
        arrays = {
            dtype: jnp.asarray(np.random.default_rng(0).normal(0, 9, shape)).astype(dtype)
            for dtype, shape in shapes.items()
        }
        sent = jax.jit(jax.shard_map(lambda x: division.sent(x, 2), mesh=mesh, in_specs=P("seq"), out_specs=P("seq")))
        assert sent.lower(arrays).as_text().count("collective_permute") == 1
        for dtype, x in sent(arrays).items():
            np.testing.assert_array_equal(np.asarray(x), np.roll(np.asarray(arrays[dtype]), 2, 0), err_msg=dtype)
        floats = {dtype: x for dtype, x in arrays.items() if dtype != "int32"}
        _, moved = jax.jvp(sent, (floats,), (floats,))
        (back,) = jax.vjp(sent, floats)[1](moved)
        assert all((back[dtype] == x).all() for dtype, x in floats.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("inside", [True, False])
def test_second_derivatives(inside, layout):
    """Take second derivatives inside or outside of `shard_map`."""
    q = jax.random.normal(jax.random.key(0), (1, 24, 2, 8))
    mesh = jax.make_mesh((3,), ("seq",), (AxisType.Auto,), devices=require_devices(3))
    on_devices = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))

    def attention(q, **options):
        return jax_flash.dot_product_attention(q, q, q, is_causal=True, **options)

    def second(attention):
        first = jax.grad(lambda q: jnp.sin(attention(q)).sum())
        return jax.grad(lambda q: jnp.cos(first(q)).sum())

    if layout is CHUNKS:
        layout = Layout(np.array([[0, 4], [2, 5], [1, 3]], np.int32))
    local = functools.partial(attention, sequence_axis="seq", sequence_layout=layout)
    sharded = on_devices(second(local)) if inside else second(on_devices(local))
    expected = jax.jit(second(attention))(q)
    found = jax.jit(sharded)(reordered(q, layout, 3, 1, True))
    np.testing.assert_allclose(reordered(found, layout, 3, 1, False), expected, rtol=1e-4, atol=1e-4)


def test_by_heads():
    """A call exchanges rows for heads if heads can be divided and a ring would send more."""

    def chosen(problem, devices):
        return sequence.by_heads(problem, Division(("seq",), devices), devices)[0]

    x, y = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16) for heads in (32, 8))
    assert not chosen(Problem.of(x, y, y), 2)
    assert chosen(Problem.of(x, y, y), 8)
    assert not chosen(Problem.of(x, y, y, local_window_size=100), 8)
    assert chosen(Problem.of(x, x, x), 2)
    assert not chosen(Problem.of(x, x, x, mask=jnp.ones((8192, 8192), bool)), 2)
    assert not chosen(Problem.of(x, y, y), 16)
    # Parts of 24 rows do not allow zigzag with dropout, and the ring of a causal call has unequal work.
    x, y = (jax.ShapeDtypeStruct((1, 96, heads, 64), jnp.bfloat16) for heads in (32, 8))
    dropout = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    assert not chosen(Problem.of(x, y, y, **dropout), 2)
    assert chosen(Problem.of(x, y, y, **dropout, is_causal=True), 2)


@pytest.mark.parametrize(
    ("options", "devices", "text"),
    [
        ({}, 8, "8 devices divide the sequence by heads.*: by heads, each device sends 9.18 MB; as a ring 14.7 MB"),
        ({"is_causal": True}, 3, "gathers all keys: T = 8192 and S = 8192 must be multiples of 3"),
        ({"local_window_size": 9}, 8, "as a ring in the contiguous layout: .* its keys and values 2 times"),
        ({"is_causal": True}, 16, "as a ring in the zigzag layout: 8 key/value heads cannot be divided over 16"),
    ],
)
def test_explain(options, devices, text):
    x, y = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16) for heads in (32, 8))
    problem = Problem.of(x, y, y, **options)
    explanation = jax_flash.explain(problem, arch="sm_90a", devices=devices)
    assert re.search(text, explanation.division) and explanation.division in str(explanation)
    assert not jax_flash.explain(problem, arch="sm_90a").division


def test_explain_documents():
    """The layouts have the work and the exchange of these documents."""
    x, y = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16) for heads in (32, 8))
    problem = Problem.of(x, y, y, is_causal=True)
    cu_seqlens = [0, 1024, 3072, 4096, 5120, 8192]
    text = jax_flash.explain(problem, arch="sm_90a", devices=4, cu_seqlens=cu_seqlens).division
    # Documents 1 and 4 are on devices 0 and 1, and on 2 and 3: a visit sends K and V of 2048 tokens once.
    assert "contiguous 2.00, 4.19 MB; zigzag 2.00" in text and "balanced 1.0" in text
    with pytest.raises(ValueError, match="cu_seqlens needs devices"):
        jax_flash.explain(problem, arch="sm_90a", cu_seqlens=cu_seqlens)


# --- under jit, with the partitioner ---

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RING, HEADS = "collective-permute", "all-to-all"


def placed(mesh, arrays, batch, rows, heads):
    """Shard arrays in all of these dims that they have and that are not broadcast."""
    dims = {"query": "btn", "key": "btk", "value": "btk", "bias": "bnt", "mask": "bnt", "sinks": "n"}
    dims |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), "bt")
    dims |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), "b")

    def spec(name, x):
        over = {"b": batch, "t": rows, "n": heads, "k": heads if arrays["key"].shape[2] > 1 else None}
        return P(*(over[dim] if x.shape[i] > 1 else None for i, dim in enumerate(dims.get(name, ""))))

    return {name: jax.device_put(x, NamedSharding(mesh, spec(name, x))) for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("case", "shape", "collective", "mode"),
    [
        (CASE(K=1), (1, 8, 1), RING, "auto"),
        (CASE(K=1, causal=True, dropout=0.3, bias="1nts", sinks=1.0), (1, 4, 2), RING, "explicit"),
        (CASE(B=4, causal=True, window=(20, 0), segments=True, bias="b11s", mask="b1ts"), (2, 4, 1), RING, "auto"),
        (CASE(lengths=True, soft_cap=1.0, bias="bnt1", mask="1n1s", dropout=0.5), (2, 2, 2), RING, "explicit"),
        (CASE(causal=True, offset=True), (1, 8, 1), RING, "auto"),
        (CASE(causal=True, window=(40, 0), traced=True, lengths=True), (2, 2, 2), RING, "explicit"),
        (CASE(N=8, K=8, causal=True, dropout=0.3, mask="b11s"), (1, 4, 2), HEADS, "auto"),
        (CASE(N=8, K=8, mask="b1ts"), (1, 8, 1), RING, "auto"),
        (CASE(B=4, K=4, causal=True, bias="bnts"), (2, 4, 1), HEADS, "explicit"),
    ],
    ids=str,
)
def test_under_jit(case, shape, collective, mode):
    """Batch and heads are sharded, too.

    An all-to-all exchanges rows for heads. It would have to gather an operand that has rows but no heads, so such a
    call uses ring attention.
    """
    devices = require_devices(math.prod(shape))
    mesh = jax.make_mesh(shape, ("data", "seq", "model"), (MODES[mode],) * 3, devices=devices)
    arrays = case.arrays()
    expected = exact(case, arrays)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, arrays, "data", "seq", "model")
        compiled = jax.jit(functools.partial(results, case)).lower(arrays).compile()
        actual = compiled(arrays)
    assert_close(actual, expected)
    assert set(data_collectives(compiled)) == {collective}
    # Each device holds its own part of the rows only.
    local = (case.B // shape[0], case.T // shape[1], case.N // shape[2], case.E)
    assert actual["o"].sharding.shard_shape(actual["o"].shape) == local
    assert actual["query"].sharding.shard_shape(actual["query"].shape) == local


@pytest.mark.parametrize("axes", [("b", "a"), ("a", "c"), ("c", "a"), ("c", "b", "a")], ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_sequence_over_several_axes(axes, mode):
    """The order of `axes` decides which rows a device has, also if the mesh has its axes in another order."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (MODES[mode],) * 3, devices=require_devices(8))
    case = CASE(K=1, causal=True)
    arrays = case.arrays()
    expected = exact(case, arrays)
    place = NamedSharding(mesh, P(None, axes))
    with jax.set_mesh(mesh):
        arrays = {name: jax.device_put(x, place) for name, x in arrays.items()}
        assert_close(jax.jit(functools.partial(results, case))(arrays), expected)

        @functools.partial(jax.shard_map, in_specs=P(None, axes), out_specs=P(None, axes))
        def attend(arrays):
            return jax_flash.dot_product_attention(**arrays, is_causal=True, sequence_axis=axes)

        np.testing.assert_allclose(attend(arrays), expected["o"], atol=1e-5)


@pytest.mark.parametrize("documents", [[0, 512], [0, 200, 440, 512]], ids=["one", "three"])
def test_inner_rings(documents):
    """Keys visit both devices of a host, then move to the next of four hosts, also if some visits are not needed."""
    mesh = jax.make_mesh((4, 2), ("host", "device"), (AxisType.Auto,) * 2, devices=require_devices(8))
    case = CASE(B=1, T=512, S=512, K=1, causal=True, dropout=0.3, bias="1n1s")
    ids = np.repeat(np.arange(len(documents) - 1), np.diff(documents))[None]
    arrays = case.arrays() | dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    layout = Layout(np.array([[3, 10], [2, 6], [0, 15], [1, 11], [4, 5], [7, 12], [8, 13], [9, 14]], np.int32))
    over = {name: P(None, ("host", "device")) if name in ROWS and name != "bias" else P() for name in arrays}
    arranged = {name: x if over[name] == P() else layout.permute(x, 1) for name, x in arrays.items()}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(over, P()), out_specs=P(None, ("host", "device")))
    def local(arrays, chunks):
        where = {"sequence_axis": ("host", "device"), "sequence_layout": chunks}
        return jax_flash.dot_product_attention(**arrays, **case.options, **where)

    def pulled(attend, arrays, *rest):
        inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
        o, pull = jax.vjp(lambda x: attend(arrays | x, *rest), inputs)
        return pull(jnp.cos(o))[0] | {"o": o}

    def alone(arrays):
        return jax_flash.dot_product_attention(**arrays, **case.options)

    actual = jax.jit(functools.partial(pulled, local))(arranged, layout)
    actual |= {name: layout.inverse(actual[name], 1) for name in ("query", "key", "value", "o")}
    assert_close(actual, jax.jit(functools.partial(pulled, alone))(arrays))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the GPU kernels do not support float64")
def test_sharded_float64():
    """Before jax 0.12, float64 needs x64 for the whole process. The error message explains this."""
    mesh = jax.make_mesh((2,), ("seq",), (AxisType.Auto,), devices=require_devices(2))
    case = CASE(K=1, causal=True)
    with jax.enable_x64(True):
        arrays = case.arrays("float64")
        function = jax.jit(functools.partial(results, case))
        on_mesh = placed(mesh, arrays, None, "seq", None)
        if jax.__version_info__ >= (0, 12):
            for name, x in function(arrays).items():
                np.testing.assert_allclose(function(on_mesh)[name], x, rtol=1e-12, atol=1e-12, err_msg=name)
        else:
            with pytest.raises(Exception, match="need jax_enable_x64 for the whole process"):
                function(on_mesh)


def test_indivisible_sequences_are_gathered():
    """Dropout with parts that are no multiples of 16, and query and key lengths that differ."""
    mesh = jax.make_mesh((8,), ("seq",), (AxisType.Auto,), devices=require_devices(8))
    for case in (CASE(T=40, S=40, dropout=0.3), CASE(S=64, causal=True)):
        arrays = case.arrays()
        expected = exact(case, arrays)
        with jax.set_mesh(mesh):
            assert_close(jax.jit(functools.partial(results, case))(placed(mesh, arrays, None, "seq", None)), expected)


def test_memory_of_a_device():
    """With twice the sequence on twice the devices, a device needs the same memory."""

    def temporary_bytes(devices):
        mesh = jax.make_mesh((devices,), ("seq",), (AxisType.Auto,), devices=require_devices(devices))
        place = NamedSharding(mesh, P(None, "seq"))
        x = jax.ShapeDtypeStruct((1, 1024 * devices, 1, 32), jnp.float32, sharding=place)

        def gradients(x):
            return jax.grad(lambda x: jax_flash.dot_product_attention(x, x, x, is_causal=True).sum())(x)

        with jax.set_mesh(mesh):
            return jax.jit(gradients).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 1.1 * temporary_bytes(4)


@pytest.mark.slow
def test_with_gspmd():
    """Set `jax_use_shardy_partitioner=False`, which JAX reads once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "under_jit and auto"]
    environment = os.environ | {"JAX_USE_SHARDY_PARTITIONER": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


# --- visits that no device needs ---


HAPPENED = []  # an entry for each array that was sent, and each pair of parts that was computed, on each device


@pytest.fixture
def happened(monkeypatch):
    """Return the list of what happens on the devices."""

    def reports(what, function):
        def reporting(*args, **kwargs):
            jax.debug.callback(lambda: HAPPENED.append(what))
            return function(*args, **kwargs)

        return reporting

    monkeypatch.setattr(Division, "permuted", reports("send", Division.permuted))
    monkeypatch.setattr(sequence, "_part", reports("compute", sequence._part))
    HAPPENED.clear()
    return HAPPENED


IDS = np.arange(512, dtype=np.int32)[None]
SKIPPED = [  # arrays, and the needed visits and exchanges. Keys on device 1 visit device 0 last.
    ("contiguous", {"query_segment_ids": IDS // 128, "key_value_segment_ids": IDS // 128}, 1, 0),
    ("chunks", {"query_segment_ids": IDS // 128, "key_value_segment_ids": IDS // 128}, 1, 0),
    ("contiguous", {"query_segment_ids": IDS // 256, "key_value_segment_ids": IDS // 256}, 3, 3),
    ("chunks", {"query_segment_ids": IDS // 256, "key_value_segment_ids": IDS // 256}, 2, 1),
    ("contiguous", {"key_value_seq_lengths": np.array([0], np.int32)}, 1, 0),
    ("chunks", {"query_seq_lengths": np.array([256], np.int32)}, 2, 1),
]


@pytest.mark.parametrize(("way", "masks", "visits", "sends"), SKIPPED)
def test_unneeded_visits_are_skipped(way, masks, visits, sends, happened):
    """Nothing is computed at such a visit, and nothing is sent after the last needed one. Values decide, not shapes."""
    q = jax.random.normal(jax.random.key(0), (1, 512, 2, 8))
    k = q[:, :, :1]
    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=require_devices(4))
    traced, causal = [], way == "chunks"  # a causal call in the contiguous layout exchanges halves

    def attend(q, k, masks, **where):
        traced.append(where)
        return jax_flash.dot_product_attention(q, k, k, is_causal=causal, **masks, **where)

    layout = jax_flash.balance(np.arange(0, 513, 128), 4) if way == "chunks" else way
    spec, specs = P(None, "seq"), {name: P(None, "seq") if "ids" in name else P() for name in masks}
    local = functools.partial(attend, sequence_axis="seq", sequence_layout=layout)
    call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, specs), out_specs=spec))
    everything = {name: np.full_like(x, 0 if "ids" in name else 512) for name, x in masks.items()}
    counts = []
    for values in (everything, masks):
        actual = jax.block_until_ready(call(q, k, values))
        jax.effects_barrier()
        counts.append((happened.count("compute"), happened.count("send")))
        happened.clear()
    (all_computed, all_sent), (computed, sent) = counts
    assert len(traced) == 1  # new values need no compilation
    assert (all_computed, all_sent) == (4 * 4, 4 * 3)
    assert (computed, sent) == (4 * visits, 4 * sends)
    expected = jax_flash.dot_product_attention(*(np.asarray(x) for x in (q, k, k)), is_causal=causal, **masks)
    np.testing.assert_allclose(actual, expected, atol=1e-5)

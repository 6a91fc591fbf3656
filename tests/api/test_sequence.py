"""A sequence that is divided over devices: they compute what one does, and K and V are not gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DIFFERENTIATED, Case, gathers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import BlockMask

LAYOUTS = ("contiguous", "zigzag")
ROWS = {"query": 1, "key": 1, "value": 1, "query_segment_ids": 1, "key_value_segment_ids": 1, "bias": 2, "mask": 2}


def results(case, arrays, **options):
    """o, logsumexp and gradients, of arrays by name."""
    inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
    others = {name: x for name, x in arrays.items() if name not in DIFFERENTIATED}

    def attention(inputs):
        o, statistics = jax_flash.attention_with_statistics(**inputs, **others, **case.options | options)
        return o, statistics.logsumexp

    (o, logsumexp), pull = jax.vjp(attention, inputs)
    (gradients,) = pull((jnp.cos(o), jnp.sin(jnp.where(jnp.isfinite(logsumexp), logsumexp, 0))))
    return {"o": o, "logsumexp": logsumexp} | gradients


def axis_of(name, x):
    """Of an array's rows or keys; None if it has none."""
    axis = {"o": 1, "logsumexp": 2}.get(name, ROWS.get(name))
    return axis if axis is not None and x.shape[axis] > 1 else None


def divided(case, arrays, devices, layout, **options):
    """The same inside of shard_map over a mesh axis `seq`."""

    def spec(name, x):
        axis = axis_of(name, x)
        return P(*("seq" if i == axis else None for i in range(np.ndim(x)))) if axis is not None else P()

    def laid(name, x, lay):
        axis = axis_of(name, x)
        return lay(x, devices, axis) if layout == "zigzag" and axis is not None else x

    arrays = {name: laid(name, x, jax_flash.zigzag) for name, x in arrays.items()}
    block_mask = {"block_mask": arrays.pop("block_mask")} if "block_mask" in arrays else {}
    options = options | {"sequence_axis": "seq", "sequence_layout": layout}
    shapes = {"o": jnp.zeros((2,) * 4), "logsumexp": jnp.zeros((2,) * 3)} | arrays
    names = ("o", "logsumexp", *(name for name in DIFFERENTIATED if name in arrays))

    @functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((devices,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:devices]),
        in_specs=({name: spec(name, x) for name, x in arrays.items()},),
        out_specs={name: spec(name, shapes[name]) for name in names},
    )
    def local(arrays):
        return results(case, arrays | block_mask, **options)

    return {name: laid(name, x, jax_flash.unzigzag) for name, x in jax.jit(local)(arrays).items()}


def assert_close(ours, expected, **tolerance):
    assert ours.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(ours[name], x, **{"rtol": 2e-5, "atol": 2e-5} | tolerance, err_msg=name)


DIVIDED = functools.partial(Case, B=2, T=128, S=128, N=4, K=2, D=8, E=8)
BLOCKS = BlockMask.from_function(
    lambda b, h, i, j: (i // 16 + j // 16) % 3 != h % 2, 128, 128, heads=4, q_block=16, kv_block=16
)
CASES = [
    DIVIDED(),
    DIVIDED(causal=True, dropout=0.3),
    DIVIDED(causal=True, window=(40, 0), segments=True),
    DIVIDED(window=(10, 20), bias="1nts"),
    DIVIDED(bias="b11s", mask="b1ts", lengths=True, soft_cap=1.0, dropout=0.5),
    DIVIDED(causal=True, offset=True, bias="bnt1", K=1),
    DIVIDED(S=256, causal=True, window=(100, 7), mask="1n1s"),
    DIVIDED(block_mask=BLOCKS, causal=True),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_on_one_device(case, layout):
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    assert_close(divided(case, arrays, 4, layout), expected)


# --- under jit: the partitioner divides it ---

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RING, HEADS = "collective-permute", "all-to-all"


def placed(mesh, arrays, batch, rows, heads):
    """Arrays sharded in all of these dims, where they have them and are not broadcast."""
    dims = {"query": "btn", "key": "btk", "value": "btk", "bias": "bnt", "mask": "bnt"}
    dims |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), "bt")
    dims |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), "b")

    def spec(name, x):
        over = {"b": batch, "t": rows, "n": heads, "k": heads if arrays["key"].shape[2] > 1 else None}
        return P(*(over[dim] if x.shape[i] > 1 else None for i, dim in enumerate(dims.get(name, ""))))

    return {name: jax.device_put(x, NamedSharding(mesh, spec(name, x))) for name, x in arrays.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "shape", "sends"),
    [
        (DIVIDED(K=1), (1, 8, 1), RING),
        (DIVIDED(K=1, causal=True, dropout=0.3, bias="1nts"), (1, 4, 2), RING),
        (DIVIDED(B=4, causal=True, window=(20, 0), segments=True, bias="b11s", mask="b1ts"), (2, 4, 1), RING),
        (DIVIDED(lengths=True, soft_cap=1.0, bias="bnt1", mask="1n1s", dropout=0.5), (2, 2, 2), RING),
        (DIVIDED(causal=True, offset=True), (1, 8, 1), RING),
        (DIVIDED(N=8, K=8, causal=True, dropout=0.3, mask="b1ts"), (1, 4, 2), HEADS),
        (DIVIDED(B=4, K=4, causal=True, bias="bnts"), (2, 4, 1), HEADS),
    ],
    ids=str,
)
def test_under_jit(case, shape, sends, mode):
    """Batch and heads sharded, too. What has rows and no heads may be gathered where it is divided by heads."""
    mesh = jax.make_mesh(shape, ("data", "seq", "model"), axis_types=(MODES[mode],) * 3)
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, "data", "seq", "model")
        compiled = jax.jit(functools.partial(results, case)).lower(given).compile()
        ours = compiled(given)
    assert_close(ours, expected)
    assert set(gathers(compiled)) - ({"all-gather"} if case.mask and sends == HEADS else set()) == {sends}
    # Each device has its own part of the rows.
    local = (case.B // shape[0], case.T // shape[1], case.N // shape[2], case.E)
    assert ours["o"].sharding.shard_shape(ours["o"].shape) == local
    assert ours["query"].sharding.shard_shape(ours["query"].shape) == local

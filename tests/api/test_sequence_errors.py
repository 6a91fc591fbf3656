"""Wrong arguments of calls with a sequence over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sequences import make_mesh

import jax_flash
from jax_flash import BlockMask, Layout


def layout_of(*chunks):
    return Layout(np.array(chunks, np.int32))


AXES = {
    "unknown": ("rows", ValueError, "sequence_axis='rows' is no axis of an enclosing jax.shard_map"),
    "a number": (0, TypeError, "sequence_axis must be the name of a mesh axis"),
    "no axes": ((), TypeError, "sequence_axis must be the name of a mesh axis"),
    "a list": (["seq"], TypeError, "the name of a mesh axis or a tuple of them, not list"),
    "twice": (("seq", "seq"), ValueError, "names an axis twice"),
}
LAYOUTS = {
    "a name": ("striped", '"zigzag" or a jax_flash.Layout, not'),
    "other devices": (
        jax_flash.balance([0, 96], 4),
        "sequence_layout has 4 devices, but sequence_axis='seq' has 2: call balance with this number",
    ),
    "not increasing": (
        layout_of([0, 3], [2, 1]),
        "chunks of sequence_layout must be the numbers 0 to 3 once each, and increase on each device",
    ),
    "ten chunks": (
        layout_of(range(5), range(5, 10)),
        "T = 96 and S = 96 must be multiples of 10, for 10 parts over seq in a layout of 5 chunks",
    ),
}
OPERANDS = {
    "mask": (
        {"mask": np.ones((1, 1, 48, 48), bool)},
        r"not broadcastable to \[B, N, T, S\] = \(1, 2, 48, 96\)",
    ),
    "dropout": (
        {"sequence_layout": "zigzag", "dropout_rate": 0.5, "dropout_key": np.uint32([0, 1])},
        "dropout needs a multiple of 16 rows and keys per part, not 24 and 24 .4 parts over seq in the zigzag",
    ),
    "block mask": (
        {"block_mask": BlockMask.from_mask(np.tri(96, dtype=bool), q_block=32, kv_block=32)},
        "a block mask needs whole blocks of 32 x 32 per part, not 48 rows",
    ),
}


def attend(rows=96, **options):
    """Call the function on two devices."""

    def local(x):
        return jax_flash.dot_product_attention(x, x, x, **options)

    call = jax.shard_map(local, mesh=make_mesh(seq=2), in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    call(jnp.ones((1, rows, 2, 8)))


@pytest.mark.parametrize(("axis", "error", "message"), AXES.values(), ids=AXES)
def test_axis(axis, error, message):
    with pytest.raises(error, match=message):
        attend(sequence_axis=axis)


def test_axis_outside_shard_map():
    x = jnp.ones((1, 48, 2, 8))
    with pytest.raises(ValueError, match=r"sequence_axis='seq' is no axis of an enclosing jax.shard_map: call inside"):
        jax_flash.dot_product_attention(x, x, x, sequence_axis="seq")


def test_layout_without_axis():
    with pytest.raises(ValueError, match="sequence_layout needs a sequence_axis"):
        attend(sequence_layout="zigzag")


@pytest.mark.parametrize(("layout", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout(layout, message):
    with pytest.raises(ValueError, match=message):
        attend(sequence_axis="seq", sequence_layout=layout)


@pytest.mark.parametrize(("options", "message"), OPERANDS.values(), ids=OPERANDS)
def test_operand(options, message):
    with pytest.raises(ValueError, match=message):
        attend(sequence_axis="seq", **options)


def test_uneven_parts():
    with pytest.raises(ValueError, match="T = 90 and S = 90 must be multiples of 4, for 4 parts over seq"):
        attend(rows=90, sequence_axis="seq", sequence_layout="zigzag")

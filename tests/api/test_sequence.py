"""A sequence that is divided over devices: they compute what one does, and K and V are not gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DIFFERENTIATED, Case
from jax.sharding import AxisType
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

"""Attention with a sequence divided over devices, for tests that compare it with one device.

A mesh axis `seq` divides the sequence into parts of equal size. In the `contiguous` order, device i of n has part i. In
the `zigzag` order, it has the parts i and 2 n - 1 - i of 2 n. A `Layout` lists the parts of each device, its chunks.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import by_numpy
from cases import DIFFERENTIATED, Case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import Layout
from jax_flash.layouts import zigzag_layout

CASE = functools.partial(Case, B=2, T=128, S=128, N=4, K=2, D=8, E=8)

# Devices 0 to 3 have two chunks each. No device has the chunks of the zigzag layout. Device 3 has two neighbours.
CHUNKS = Layout(np.array([[1, 6], [0, 3], [2, 7], [4, 5]], np.int32))
LAYOUTS = {"contiguous": "contiguous", "zigzag": "zigzag", "chunks": CHUNKS}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

# The axis of queries or keys of each array that has one.
SEQUENCE_AXES = {"query": 1, "key": 1, "value": 1, "query_segment_ids": 1, "key_value_segment_ids": 1}
SEQUENCE_AXES |= {"bias": 2, "mask": 2, "o": 1, "logsumexp": 2}


def make_mesh(mode=AxisType.Auto, **sizes):
    """Return a mesh with axes of these names and sizes. Skip the test if there are too few devices."""
    count = math.prod(sizes.values())
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (mode,) * len(sizes), devices=jax.devices()[:count])


def order_of(layout, devices):
    """Return a layout as a `Layout`, which reorders arrays."""
    if layout == "contiguous":
        return Layout(np.arange(devices, dtype=np.int32)[:, None])
    return zigzag_layout(devices) if layout == "zigzag" else layout


def permute(arrays, axes, layout, devices):
    """Return arrays in the order of a layout. `axes` has the axis of each, or None. NumPy compiles nothing."""
    order = order_of(layout, devices)
    return {name: x if axes[name] is None else order.permute(np.asarray(x), axes[name]) for name, x in arrays.items()}


def inverse(arrays, axes, layout, devices):
    """Return arrays in their natural order."""
    order = order_of(layout, devices)
    return {name: x if axes[name] is None else order.inverse(np.asarray(x), axes[name]) for name, x in arrays.items()}


def cotangents(o, logsumexp, numpy=jnp):
    """Return cotangents that are functions of the results. So each device computes them for its rows."""
    return numpy.cos(o), numpy.sin(numpy.where(numpy.isfinite(logsumexp), logsumexp, 0))


def with_gradients(attention, inputs):
    """Return o, logsumexp and the gradients of the inputs by name."""
    (o, logsumexp), pull = jax.vjp(attention, inputs)
    (gradients,) = pull(cotangents(o, logsumexp))
    return {"o": o, "logsumexp": logsumexp} | gradients


def results(case, arrays, **options):
    """Return o, logsumexp and gradients of a case by name."""
    inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
    others = {name: x for name, x in arrays.items() if name not in DIFFERENTIATED}

    def attention(inputs):
        o, statistics = jax_flash.attention_with_statistics(**inputs, **others, **case.options | options)
        return o, statistics.logsumexp

    return with_gradients(attention, inputs)


def exact(case, arrays):
    """Return the `results` of one device, from NumPy, which needs no compilation."""
    zeros = np.zeros((case.B, case.T, case.N, case.E)), np.zeros((case.B, case.N, case.T))
    forward = by_numpy(case, arrays, zeros)
    return by_numpy(case, arrays, cotangents(forward["o"], forward["logsumexp"], np))


def divided(case, arrays, devices, layout, **options):
    """Return the `results` of this number of devices, from `shard_map`. Inputs and results are in natural order."""
    blocks = {name: x for name, x in arrays.items() if name == "block_mask"}  # the same on all devices
    arrays = {name: x for name, x in arrays.items() if name != "block_mask"}
    axes = {name: SEQUENCE_AXES.get(name) for name in arrays}
    axes = {name: None if axis is None or arrays[name].shape[axis] == 1 else axis for name, axis in axes.items()}
    result_axes = {"o": 1, "logsumexp": 2} | {name: axes[name] for name in DIFFERENTIATED if name in arrays}

    def specs(axes):
        return {name: P() if axis is None else P(*[None] * axis, "seq") for name, axis in axes.items()}

    def local(arrays):
        return results(case, arrays | blocks, sequence_axis="seq", sequence_layout=layout, **options)

    call = jax.shard_map(local, mesh=make_mesh(seq=devices), in_specs=(specs(axes),), out_specs=specs(result_axes))
    return inverse(jax.jit(call)(permute(arrays, axes, layout, devices)), result_axes, layout, devices)


def assert_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, **{"rtol": 2e-5, "atol": 2e-5} | tolerance, err_msg=name)

"""The division of a sequence: the zigzag order, the work of each visit, and the choice of a ring or an all-to-all.

In a ring, a device attends to its own keys at visit 0, and at visit n to the keys of the device n places before it.
"""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequences import make_mesh

import jax_flash
from jax_flash import Problem, sequence
from jax_flash.sequence import Division

# --- The zigzag order ---


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
        (5, 1, ValueError, r"axis 1 must be divisible by the 10 chunks, .* the shape is \(2, 24\)"),
    ],
)
def test_zigzag_errors(devices, axis, error, match):
    for function in (jax_flash.zigzag, jax_flash.unzigzag):
        with pytest.raises(error, match=match):
            function(np.zeros((2, 24)), devices, axis)


def test_zigzag_on_explicit_axes():
    x = np.arange(2 * 24).reshape(2, 24)
    place = NamedSharding(make_mesh(AxisType.Explicit, seq=4), P(None, "seq"))
    arranged = jax.jit(lambda x: jax_flash.zigzag(x, 4, 1))(jax.device_put(x, place))
    assert arranged.sharding == place
    np.testing.assert_array_equal(arranged, jax_flash.zigzag(x, 4, 1))
    np.testing.assert_array_equal(jax_flash.unzigzag(arranged, 4, 1), x)


# --- The work of each visit ---


@given(
    devices=st.integers(1, 5), rows=st.integers(1, 7), keys=st.integers(1, 7), causal=st.booleans(),
    left=st.integers(-1, 40), right=st.integers(-1, 40), unbounded=st.sampled_from((10**6, 2**63 - 1)),
    layout=st.sampled_from(("contiguous", "zigzag")),
)  # fmt: skip
def test_entries_match_the_masks(devices, rows, keys, causal, left, right, unbounded, layout):
    """`entries` counts the visible entries of each pair of parts. A part has `rows` queries and `keys` keys."""
    division = Division(("seq",), devices, layout)
    T, S = (size * devices * division.parts for size in (rows, keys))
    window = (left if left >= 0 else unbounded, right if right >= 0 else unbounded)
    x, y = (jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32) for length in (T, S))
    found = sequence.entries(Problem.of(x, y, y, is_causal=causal, local_window_size=window), division)
    i, j = np.ogrid[:T, :S]
    visible = (j - i <= window[1]) & (i - j <= window[0]) & (~np.bool_(causal) | (j <= i))
    assert found.sum() == visible.sum()
    for visit, row_part, key_part, device in np.ndindex(*found.shape):
        row = division.starts(device, T)[row_part]
        key = division.starts((device - visit) % devices, S)[key_part]
        assert found[visit, row_part, key_part, device] == visible[row : row + rows, key : key + keys].sum()


def problem_of(length, q_heads=32, kv_heads=8, **options):
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16) for heads in (q_heads, kv_heads))
    return Problem.of(q, k, k, **options)


@pytest.mark.parametrize("devices", [2, 3, 8, 64])
def test_causal_work_is_balanced(devices):
    """In the zigzag layout, each visit is balanced within 5%. A contiguous sequence is exchanged into this layout."""
    problem = problem_of(4096 * devices, is_causal=True)
    contiguous, zigzag = Division(("seq",), devices), Division(("seq",), devices, "zigzag")
    at_visits = sequence.entries(problem, zigzag).sum((1, 2))
    assert (at_visits.max(-1) < 1.05 * at_visits.min(-1)).all()
    assert sequence.with_best_layout(problem, contiguous) == sequence.with_best_layout(problem, zigzag) == zigzag
    assert sequence.with_best_layout(problem_of(4096 * devices), contiguous) == contiguous


def test_windows_skip_invisible_visits():
    problem = problem_of(8 * 1024, is_causal=True, local_window_size=(1500, 0))
    contiguous, zigzag = Division(("seq",), 8), Division(("seq",), 8, "zigzag")
    assert [visit.shift for visit in sequence.visits(problem, contiguous)] == [0, 1, 2]
    assert sequence.with_best_layout(problem, contiguous) == contiguous
    assert len(sequence.visits(problem, zigzag)) > 3
    # One ring of 8 devices has fewer visits than rings of 2.
    assert sequence.with_best_layout(problem, contiguous._replace(inner=2)) == contiguous


# --- Under jit: a ring, or an all-to-all that exchanges rows for heads ---


@pytest.mark.parametrize(
    ("devices", "options", "by_heads"),
    [
        (2, {}, False),  # with few key/value heads, K and V are smaller than Q and O
        (8, {}, True),
        (8, {"local_window_size": 100}, False),  # a ring sends the keys of neighbours only
        (2, {"kv_heads": 32}, True),
        # The mask has rows, but no heads that could be exchanged for them.
        (2, {"kv_heads": 32, "mask": jax.ShapeDtypeStruct((8192, 8192), bool)}, False),
        (16, {}, False),  # 8 key/value heads cannot be divided
        # Parts of 24 rows do not allow zigzag with dropout. So the ring of a causal call has unequal work.
        (2, {"length": 96, "dropout_rate": 0.1, "dropout_key": np.uint32([0, 1])}, False),
        (2, {"length": 96, "dropout_rate": 0.1, "dropout_key": np.uint32([0, 1]), "is_causal": True}, True),
    ],
)
def test_by_heads(devices, options, by_heads):
    """A call exchanges rows for heads if heads can be divided and a ring would send more or have unequal work."""
    problem = problem_of(**{"length": 8192} | options)
    assert sequence.by_heads(problem, Division(("seq",), devices), devices)[0] == by_heads


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
    problem = problem_of(8192, **options)
    explanation = jax_flash.explain(problem, arch="sm_90a", devices=devices)
    assert re.search(text, explanation.division) and explanation.division in str(explanation)
    assert not jax_flash.explain(problem, arch="sm_90a").division


def test_explain_documents():
    """The text has, for each layout, the work of the slowest devices over the mean, and what a device sends."""
    problem = problem_of(8192, is_causal=True)
    cu_seqlens = [0, 1024, 3072, 4096, 5120, 8192]
    text = jax_flash.explain(problem, arch="sm_90a", devices=4, cu_seqlens=cu_seqlens).division
    # A device has 2048 tokens. A document is on at most two neighbours, so K and V move by one place.
    sent = 2 * 2048 * 8 * 64 * 2 / 1e6  # arrays, tokens, heads, head dim, bytes
    assert f"contiguous 2.00, {sent:.3g} MB; zigzag 2.00" in text and "balanced 1.0" in text
    with pytest.raises(ValueError, match="cu_seqlens needs devices"):
        jax_flash.explain(problem, arch="sm_90a", cu_seqlens=cu_seqlens)

"""`Mask`: visible entries of a call, of a tile and of a part of a sequence, and intersection by `&`."""

import dataclasses

import cases
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from hypothesis import given

from jax_flash import BlockMask
from jax_flash.description import Extent
from jax_flash.masks import Mask, WindowSize
from jax_flash.operands import DIMS, Operands

B, N, T, S = 2, 2, 32, 48
RNG = np.random.default_rng(0)
KEPT = np.kron(RNG.random((B, N, T // 16, S // 16)) < 0.6, np.ones((16, 16))) > RNG.random((B, N, T, S)) * 1.2
BLOCKS = BlockMask.from_mask(KEPT, q_block=16, kv_block=16)
SIDES = st.integers(0, 50)
CASES = st.builds(
    cases.Case, B=st.just(B), N=st.just(N), K=st.just(1), T=st.just(T), S=st.just(S), D=st.just(1), E=st.just(1),
    causal=st.booleans(), window=st.none() | st.tuples(SIDES, SIDES), lengths=st.booleans(), offset=st.booleans(),
    segments=st.booleans(), mask=st.sampled_from(["", "b11s", "1nt1"]), block_mask=st.sampled_from([None, BLOCKS]),
)  # fmt: skip
MASKS = st.builds(Mask, is_causal=st.booleans(), local_window_size=st.builds(WindowSize, *[st.integers(-1, 50)] * 2))


def described(case: cases.Case, seed: int) -> tuple[Mask, Operands, np.ndarray]:
    """Return the mask, its arrays, and the visible entries by NumPy."""
    arrays = case.arrays(seed=seed)
    problem, operands = cases.problem(case, arrays)
    return problem.mask, operands, standard.allowed(case, arrays)


def visible(mask: Mask, operands: Operands, rows: np.ndarray, columns: np.ndarray, lengths=(T, S)) -> np.ndarray:
    indices = jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)
    entries = np.asarray(mask.visible(lengths, (), operands, *indices))
    return np.broadcast_to(entries, (B, N, len(rows), len(columns)))


@given(CASES, st.integers(0, 99))
def test_entries(case, seed):
    mask, operands, expected = described(case, seed)
    np.testing.assert_array_equal(visible(mask, operands, np.arange(T), np.arange(S)), expected)
    assert mask.may_empty_rows((T, S)) or expected.any(-1).all()


@given(CASES, st.integers(0, 99), st.sampled_from([0, 16]), st.sampled_from([0, 16, 32]))
def test_tiles_that_may_be_empty(case, seed, row, column):
    """A tile with a visible entry is not skipped. For a causal mask or a window alone the decision is exact."""
    mask, operands, expected = described(case, seed)
    rows, columns = np.arange(row, row + 16), np.arange(column, column + 16)
    any_visible = expected[:, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].any()
    may_show = mask.may_show((T, S), operands, jnp.asarray(rows), jnp.asarray(columns))
    assert may_show is None or bool(may_show) or not any_visible
    if mask in (Mask(), Mask(is_causal=True), Mask(local_window_size=mask.local_window_size)):
        assert any_visible == (may_show is None or bool(may_show))


@given(CASES, st.integers(0, 99), st.sampled_from([0, 16]), st.sampled_from([0, 24]))
def test_parts(case, seed, row, key):
    """The mask of a part equals that part of the full mask."""
    case = dataclasses.replace(case, mask="", block_mask=case.block_mask if key == 0 else None)
    mask, operands, expected = described(case, seed)
    rows, keys = 16, 16 if case.block_mask else 24
    arrays = operands.arrays()
    for name, x in arrays.items():
        dims = DIMS[name]
        if "T" in dims:
            x = x[(slice(None),) * (1 + dims.index("T")) + (slice(row, row + rows),)]
        if "S" in dims:
            x = x[(slice(None),) * (1 + dims.index("S")) + (slice(key, key + keys),)]
        arrays[name] = x
    part, arrays = mask.part((T, S), (rows, keys), (jnp.int32(row), jnp.int32(key)), arrays)
    entries = visible(part, Operands.of(arrays), np.arange(rows), np.arange(keys), (rows, keys))
    np.testing.assert_array_equal(entries, expected[:, :, row : row + rows, key : key + keys])


@given(MASKS, MASKS, st.integers(1, 9), st.integers(1, 9), st.integers(-9, 9))
def test_intersection(first, second, rows, keys, ahead):
    """`&` is the intersection of two masks, and `count` counts its entries."""

    def entries(mask: Mask) -> np.ndarray:
        distance = np.arange(keys) - np.arange(rows)[:, None] - ahead
        left, right = (x if x >= 0 else 99 for x in mask.local_window_size)
        return (-left <= distance) & (distance <= right) & ((distance <= 0) | (not mask.is_causal))

    both = first & second
    np.testing.assert_array_equal(entries(both), entries(first) & entries(second))
    assert both.count(rows, keys, ahead) == entries(both).sum()


def test_intersection_keeps_arrays():
    with_array = Mask(array=Extent(True, True, True, True), query_offset=True)
    assert with_array & Mask(True, WindowSize(3)) == dataclasses.replace(
        with_array, is_causal=True, local_window_size=WindowSize(3)
    )
    with pytest.raises(ValueError, match="two masks with query_offset cannot be combined"):
        with_array & Mask(query_offset=True)

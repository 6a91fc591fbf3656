"""Interval analysis of a mask_mod over a block in the CPU kernels, and the masks that they apply."""

import time

import interpreter
import numpy as np
import pytest

pytest.importorskip("hypothesis")

from assembly import OPS, Assembly, call, captured, with_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash import _native
from jax_flash.masks import Mask
from jax_flash.problem import Problem
from jax_flash.programs.program import Program

DTYPES = {"f": "float64", "i": "int32", "u": "uint32", "b": "bool"}
NUMBERS = [0, 1, 2, 3, 5, 7, 8, 15, 31, 32, 33, 100, 65535, 2**16, 46341, 2**30, 2**31 - 1]
POOLS = {
    "f": sorted(
        [*NUMBERS, *(-x for x in NUMBERS), 0.5, -0.5, 1.5, -2.5, 0.3, -0.7, 3e9, -3e9, 1e300, -1e300, *[np.inf] * 2]
    ),
    "i": sorted([*NUMBERS, *(-x for x in NUMBERS), -(2**31)]),
    "u": [*NUMBERS, 2**31, 2**32 - 2, 2**32 - 1],
    "b": [False, False, True, True],
}


def problem(mask_mod: Program, arrays: list[np.ndarray], n: int, m: int, dtype: str) -> Problem:
    return Problem(
        batch=1, q_len=n, kv_len=m, q_heads=1, kv_heads=1, qk_dim=1, v_dim=1, dtype=dtype,
        captured=tuple(map(captured, arrays)), mask=Mask(mask_mod=mask_mod),
    )  # fmt: skip


def mask_range(
    text: str, known: dict[int, tuple[float, float]], arrays: tuple[np.ndarray, ...] = ()
) -> tuple[int, int]:
    described = problem(Program(text), list(arrays), 8, 8, "float32")
    return _native.mask_ranges(described.encode(), known)[int(text.rpartition(",")[2])]


def extremes(x: np.ndarray) -> tuple[float, float]:
    return (x.min().item(), x.max().item()) if np.isfinite(x).all() else (np.nan, np.nan)


def assert_in_ranges(asm: Assembly, result: int, arrays: list[np.ndarray]) -> None:
    """Check the ranges of all values of a program. Its values 1, 2, … are loads from the arrays."""
    mask, n = asm.result(result), len(arrays[0])
    known = {number: extremes(x) for number, x in enumerate(arrays, 1)}
    ranges = _native.mask_ranges(problem(mask, arrays, n, n, "float64").encode(), known)
    for number, (low, high) in enumerate(ranges):
        text = f"{mask.text.rpartition(';')[0]};result,{number}"
        values, _ = interpreter.run(text, {"query": np.arange(n)}, arrays)
        assert np.isnan(low) or ((low <= values) & (values <= high)).all(), (asm[number], low, high, values)


def near_each_other(rng: np.random.Generator, t: str) -> np.ndarray:
    first = rng.integers(len(POOLS[t]))
    return rng.choice(np.array(POOLS[t][first : first + rng.integers(1, 6)], DTYPES[t]), 40)


@pytest.mark.parametrize("op", OPS)
def test_value_is_in_its_range(op):
    rng = np.random.default_rng(0)
    operands, value = OPS[op]
    for _ in range(60):
        asm = Assembly(["query"])
        arrays = [near_each_other(rng, t) for t in operands]
        loaded = [asm(f"load.{t}", i, 0) for i, t in enumerate(operands)]
        result = asm(op, *loaded)
        assert_in_ranges(asm, result if value == "b" else asm(f"cast.{value}.b", result), arrays)


def grow(draw: st.DrawFn, asm: Assembly, values: dict[str, list[int]], ops: list[str], steps: int) -> None:
    """Append instructions that use existing values of the right types."""
    for op in draw(st.lists(st.sampled_from(ops), min_size=1, max_size=steps)):
        operands, value = OPS[op]
        values[value].append(asm(op, *(draw(st.sampled_from(values[t][-6:])) for t in operands)))


@st.composite
def straight_lines(draw):
    """Draw a program, its result, and the arrays that it indexes by the query, two of each type."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    asm, types = Assembly(["query"]), [*POOLS] * 2
    arrays = [near_each_other(rng, t) for t in types]
    values = {t: [] for t in POOLS}
    for i, t in enumerate(types):
        values[t].append(asm(f"load.{t}", i, 0))
    grow(draw, asm, values, sorted(OPS), 12)
    return asm, draw(st.sampled_from(values["b"])), arrays


@settings(max_examples=200)
@given(straight_lines())
def test_random_programs_stay_in_range(drawn):
    assert_in_ranges(*drawn)


INEXACT = "div rem pow atan2 exp exp2 log log1p expm1 tanh logistic erf erfc sin cos sqrt rsqrt".split()
EXACT = sorted(OPS.keys() - {f"{op}.f" for op in INEXACT})  # exact for multiples of 1/8, including floats


@st.composite
def masks(draw):
    """Draw a mask that uses queries, keys and sorted arrays. Sorted arrays make some blocks empty or full."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, m = draw(st.integers(1, 110)), draw(st.integers(1, 600))
    asm = Assembly()
    query, key = asm("query"), asm("key")
    arrays = [np.sort(rng.integers(0, 5, size)).astype("int32") for size in (n, m)]
    arrays += [np.sort(rng.integers(-20, 20, size)) / 8 for size in (n, m)]
    for x in draw(st.sampled_from([[], arrays[2:3], arrays[3:]])):
        x[rng.integers(x.size)] = draw(st.sampled_from([np.nan, np.inf]))
    arrays += [rng.random((n, m)) < 0.5, np.sort(rng.random(n)) < 0.5]
    values = {"i": [query, key, asm("load.i", 0, query), asm("load.i", 1, key)]}
    values["f"] = [asm("load.f", 2, query), asm("load.f", 3, key)]
    values["u"] = [asm("cast.i.u", x) for x in (query, key)]
    values["b"] = [asm("load.b", 4, query, key), asm("load.b", 5, query)]
    constants = draw(st.lists(st.integers(-3, 300), min_size=1, max_size=2))
    values["i"] += [asm("const.i", x) for x in constants]
    grow(draw, asm, values, EXACT, 8)
    compared = draw(st.sampled_from(["eq", "lt", "ge"]))
    a, b = (draw(st.sampled_from(values["i"])) for _ in range(2))
    return asm.result(asm("and.b", values["b"][-1], asm(f"{compared}.i", a, b))), arrays


def attend(mask: Program, arrays: list[np.ndarray], value: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return o and l of n queries with scores of 0. Then l counts the visible keys of a row."""
    described = problem(mask, arrays, n, value.size, value.dtype.name)
    operands = {"query": np.zeros((1, n, 1, 1), value.dtype), "key": np.zeros((1, value.size, 1, 1), value.dtype)}
    operands |= {"value": value.reshape(1, -1, 1, 1), "scale": np.ones((), value.dtype)}
    o, l, _ = call(described, with_ids(described, operands), arrays)
    return o[0, :, 0, 0], l[0, 0]


@settings(max_examples=60)
@given(masks(), st.sampled_from(["float32", "float64"]))
def test_masks_in_kernels(drawn, dtype):
    """The kernels apply the same mask as the interpreter."""
    mask, arrays = drawn
    arrays = [x.astype(dtype) if x.dtype.kind == "f" else x for x in arrays]
    n, m = arrays[4].shape
    value = np.random.default_rng(0).normal(size=m).astype(dtype)
    o, l = attend(mask, arrays, value, n)
    query, key = np.mgrid[:n, :m]
    visible, _ = interpreter.run(mask.text, {"query": query.ravel(), "key": key.ravel()}, arrays)
    visible = visible.reshape(n, m)
    np.testing.assert_array_equal(l, visible.sum(1))
    np.testing.assert_allclose(o * l, visible @ value, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("place", [0, 1, 30, 47])
def test_one_nan_in_a_block(place, dtype):
    """A comparison with NaN is false, although all other entries of the block are visible."""
    x, y = np.zeros(48, dtype), np.ones(256, dtype)
    mask = Program("query;key;load.f,0,0;load.f,1,1;le.f,2,3;result,4")
    for array in (x, y):
        array[place] = np.nan
        l = attend(mask, [x, y], np.zeros(256, dtype), 48)[1]
        np.testing.assert_array_equal(l, (x[:, None] <= y).sum(1))


HIDDEN, VISIBLE, PARTIAL = (0, 0), (1, 1), (0, 1)
CAUSAL = "query;key;le.i,1,0;result,2"
WINDOW = "query;key;sub.i,0,1;abs.i,2;const.i,10;le.i,3,4;result,5"
PREFIX = "query;key;le.i,1,0;const.i,20;lt.i,1,3;or.b,2,4;result,5"
DOCUMENTS = "query;key;load.i,0,0;load.i,0,1;eq.i,2,3;le.i,1,0;and.b,4,5;result,6"


@pytest.mark.parametrize(
    ("text", "known", "expected"),
    [
        (CAUSAL, {0: (64, 111), 1: (0, 63)}, VISIBLE),
        (CAUSAL, {0: (0, 47), 1: (48, 95)}, HIDDEN),
        (CAUSAL, {0: (0, 47), 1: (47, 95)}, PARTIAL),
        (WINDOW, {0: (0, 47), 1: (58, 70), 4: (10, 10)}, HIDDEN),
        (WINDOW, {0: (0, 5), 1: (3, 10), 4: (10, 10)}, VISIBLE),
        (WINDOW, {0: (0, 47), 1: (57, 70), 4: (10, 10)}, PARTIAL),
        (WINDOW, {0: (-(2**31), 0), 1: (1, 2**31 - 1), 4: (10, 10)}, PARTIAL),  # the difference wraps around
        (PREFIX, {0: (0, 9), 1: (10, 19), 3: (20, 20)}, VISIBLE),
        (PREFIX, {0: (0, 9), 1: (20, 29), 3: (20, 20)}, HIDDEN),
        (DOCUMENTS, {0: (64, 111), 1: (0, 63), 2: (3, 3), 3: (3, 3)}, VISIBLE),
        (DOCUMENTS, {0: (64, 111), 1: (0, 63), 2: (3, 5), 3: (1, 2)}, HIDDEN),
        (DOCUMENTS, {0: (0, 63), 1: (64, 111), 2: (3, 5), 3: (1, 9)}, HIDDEN),
        (DOCUMENTS, {0: (64, 111), 1: (0, 63), 2: (3, 5), 3: (1, 3)}, PARTIAL),
    ],
)
def test_range_of_mask(text, known, expected):
    assert mask_range(text, known, (np.zeros(128, np.int32),)) == expected


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_of_non_finite_floats_are_unknown(op, unknown):
    array = np.array([unknown, 0], np.float32)
    for operands in ("1,2", "2,1"):
        text = f"query;load.f,0,0;const.f,inf;{op}.f,{operands};result,3"
        assert mask_range(text, {1: extremes(array), 2: (np.nan, np.nan)}, (array,)) == PARTIAL


@pytest.mark.parametrize(("kind", "at_query", "at_key"), [("f", 16777216.0, 1.0), ("i", 2**31 - 2, 2)])
def test_ranges_round_and_wrap_like_the_kernels(kind, at_query, at_key):
    """2^24 + 1 rounds to 2^24 in float32, and sums above the largest integer wrap around."""
    a, b = (np.array([x], {"f": "float32", "i": "int32"}[kind]) for x in (at_query, at_key))
    text = f"query;key;load.{kind},0,0;load.{kind},1,1;add.{kind},2,3;gt.{kind},4,2;result,5"
    allowed = mask_range(text, {2: extremes(a), 3: extremes(b)}, (a, b))
    assert allowed == (HIDDEN if kind == "f" else PARTIAL)


def test_decided_blocks_are_not_evaluated():
    """Compare the times of a slow mask_mod with documents that align with tiles, and with ids that alternate."""
    n = 1536
    asm = Assembly()
    query, key = asm("query"), asm("key")
    far, one = asm("sub.i", query, key), asm("const.i", 1)
    for _ in range(4000):
        far = asm("add.i", far, one)
    same = asm("eq.i", asm("load.i", 0, query), asm("load.i", 0, key))
    mask = asm.result(asm("and.b", same, asm("gt.i", far, asm("const.i", -n))))

    def seconds(ids: np.ndarray) -> float:
        start = time.process_time()
        l = attend(mask, [ids], np.zeros(n, np.float32), n)[1]
        taken = time.process_time() - start
        np.testing.assert_array_equal(l, n // 2)
        return taken

    token = np.arange(n, dtype=np.int32)
    aligned, alternating = token // (n // 2), token % 2
    assert 3 * min(seconds(aligned) for _ in range(3)) < min(seconds(alternating) for _ in range(3))

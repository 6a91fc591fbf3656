"""The fused kernels: the error against the exact result is at most twice that of standard attention in the same dtype,
plus a few units in the last place. Forward and backward, every feature and dtype, any shape, on CPU and GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from cases import FEATURES, Case, oracle, run, upcast
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("device")

ULPS = 4


def errors(results, exact):
    """The largest absolute error of every result where the exact one is finite."""
    finite = {name: np.isfinite(x) for name, x in exact.items()}
    return {
        name: np.abs(results[name][finite[name]].astype(x.dtype) - x[finite[name]]).max(initial=0)
        for name, x in exact.items()
    }


def usual_errors(case, dtype, seed=0, rounding=None, draws=1):
    """Those of standard attention in this dtype; of more draws where there are few entries to take the largest of."""
    largest = {}
    for draw in range(seed, seed + max(draws, min(32, 16384 // (case.T * case.S)))):
        arrays, cotangents = case.arrays(dtype.name, draw), case.cotangents(dtype.name, draw)
        sums = np.float64 if dtype == np.float64 else np.float32
        results = standard.attention(case, arrays, cotangents, sums, rounding or dtype)
        for name, error in errors(results, by_numpy(case, arrays, cotangents)).items():
            largest[name] = max(largest.get(name, 0), error)
    return largest


def assert_accurate(results, exact, usual, cancelled, dtype):
    """Shapes and dtypes, what is infinite, and the errors: `usual` are those of standard attention, `cancelled` those
    of differences of larger numbers."""
    assert results.keys() == exact.keys()
    for name, expected in exact.items():
        kind = dtype if name != "logsumexp" else jnp.promote_types(dtype, jnp.float32)
        assert results[name].dtype == kind, name
        assert results[name].shape == expected.shape, name
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(results[name][~finite], expected[~finite], err_msg=name)

        ulp = float(jnp.finfo(kind).eps) * np.abs(expected[finite]).max(initial=0)
        error, bound = errors(results, exact)[name], 2 * usual[name] + ULPS * ulp + cancelled.get(name, 0)
        assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"


def check(case, dtype, seed=0, draws=1):
    dtype = jnp.dtype(dtype)
    usual = usual_errors(case, dtype, seed, draws=draws)
    for draw in range(seed, seed + draws):
        arrays, cotangents = case.arrays(dtype.name, draw), case.cotangents(dtype.name, draw)
        cancelled = standard.cancellation(case, arrays, cotangents, dtype)
        results = run(case, arrays, cotangents)
        assert_accurate(results, by_numpy(case, arrays, cotangents), usual, cancelled, dtype)


def check_tf32(case, draws=1):
    """float32 at a GPU's default precision, held against standard attention with operands rounded to TF32."""
    dtype = np.dtype(np.float32)
    usual = usual_errors(case, dtype, rounding="tf32", draws=draws)
    for draw in range(draws):
        arrays, cotangents = case.arrays(seed=draw), case.cotangents(seed=draw)
        with jax.default_matmul_precision("default"):
            results = run(case, arrays, cotangents)
        assert_accurate(results, by_numpy(case, arrays, cotangents), usual, {}, dtype)


def by_numpy(case, arrays, cotangents):
    """The exact results without the time to compile the reference, which `test_reference.py` holds against the same."""
    sums = np.longdouble if arrays["query"].dtype == np.float64 else np.float64
    return standard.attention(case, arrays, cotangents, sums)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature(case, dtype):
    """In float16 with keys for each head, which Hopper's backward otherwise takes one by one, adding up dK and dV."""
    check(dataclasses.replace(case, K=case.N) if dtype == "float16" else case, dtype)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature_in_f64(case):
    check(case, "float64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("D", [1, 3, 8, 17, 32, 40, 64, 72, 80, 96, 128, 160, 192, 200, 256, 264, 513])
def test_head_dim(D, dtype):
    check(Case(B=1, T=70, S=90, N=2, K=1, D=D, E=D, causal=True), dtype)
    check(Case(B=1, T=33, S=50, N=1, K=1, D=D, E=max(256 - D, 8), dropout=0.2), dtype)


SIZES = [1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 127, 128, 129, 191, 255, 257, 384]


@pytest.mark.parametrize("T", SIZES)
def test_length(T):
    """Around every tile size, alone and with what looks at positions."""
    check(Case(B=1, T=T, S=T, N=2, K=2, D=32, E=32), "float32")
    check(Case(B=1, T=T, S=SIZES[-1] + 1 - T, N=1, K=1, causal=True, offset=True), "float32")
    check(Case(B=2, T=200, S=T, N=1, K=1, window=(40, 25), lengths=True, bias="1n1s"), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long(dtype):
    """Many tiles of every kind; many terms in every sum."""
    check(Case(B=1, T=1500, S=1111, N=2, K=1, D=64, E=64), dtype)
    check(Case(B=1, T=1111, S=1500, N=2, K=2, D=64, E=64, causal=True, bias="1n1s", dropout=0.1), dtype)
    check(Case(B=1, T=1100, S=1100, N=1, K=1, D=32, E=48, window=(100, 300), segments=True), dtype)
    check(Case(T=150, S=4500, N=1, K=1, segments="mixed"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 3, 16])
def test_few_queries(T, dtype):
    """Decoding. GPUs divide the keys into parts; rows see nothing of some of them."""
    check(Case(T=T, S=1100, N=8, K=2, D=128, E=128, causal=True, offset=True, lengths=True), dtype)
    check(Case(T=T, S=1037, N=4, K=4, D=64, E=64, window=(300, 0), bias="1n1s", dropout=0.2), dtype)
    check(Case(T=T, S=1100, N=4, K=1, D=80, E=40, segments=True, mask="bnts", soft_cap=2.0), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_queries(dtype):
    """Tiles of many rows, groups that are no power of two, the least instead of the greatest score."""
    check(Case(B=1, T=33, S=1100, N=6, K=2, D=64, E=64, dropout=0.2, lengths=True, offset=True), dtype)
    case = Case(B=1, T=5, S=1100, N=9, K=3, window=(500, 100), segments=True, bias="11ts", dropout=0.1, scale=-0.3)
    check(case, dtype)
    check(Case(B=1, T=63, S=1030, N=3, K=1, D=64, E=64, mask="bnts", dropout=0.3, scale=-0.3), dtype)
    check(Case(B=9, T=3, S=1030, N=30, K=30, causal=True, offset=True, lengths=True), dtype)  # many tiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_scores(dtype):
    """One-hot softmax, where exp would overflow without the maximum. Only rows with two keys that are nearly equal have
    an error, and those are few: several draws."""
    check(Case(T=130, S=150, spread=12.0, scale=1.0), dtype, draws=8)
    check(Case(T=130, S=150, spread=12.0, scale=1.0, soft_cap=30.0, causal=True), dtype, draws=8)


def extents():
    return st.one_of(st.just(""), st.tuples(*(st.sampled_from([e, "1"]) for e in "bnts")).map("".join))


def cases():
    length = st.one_of(st.integers(1, 40), st.sampled_from(SIZES), st.integers(1, 300))
    dim = st.one_of(st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 256))
    flag = st.booleans()
    window = st.one_of(st.none(), st.tuples(st.integers(0, 300), st.integers(0, 300)))

    def build(group, K, **fields):
        return Case(N=group * K, K=K, **fields)

    return st.builds(
        build, group=st.integers(1, 3), K=st.integers(1, 3), B=st.integers(1, 3), T=length, S=length, D=dim, E=dim,
        causal=flag, window=window, bias=extents(), mask=extents(), lengths=flag, segments=flag, offset=flag,
        soft_cap=st.sampled_from([None, 0.5, 5.0]), dropout=st.sampled_from([0.0, 0.1, 0.8]), broadcast_dropout=flag,
        scale=st.sampled_from([None, 0.3, -1.0]), spread=st.sampled_from([1.0, 3.0]), logsumexp=flag,
    )  # fmt: skip


@given(cases(), st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"]), st.integers(0, 1000))
def test_any_case(case, dtype, seed):
    check(case, dtype, seed)


@pytest.mark.parametrize("bias_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bias_of_another_dtype(dtype, bias_dtype):
    """Its gradient has the dtype of the bias."""
    case = Case(bias="1nts", causal=True)
    arrays, cotangents = case.arrays(dtype), case.cotangents(dtype)
    arrays["bias"] = arrays["bias"].astype(jnp.dtype(bias_dtype))
    results = run(case, arrays, cotangents)
    exact = standard.attention(case, upcast(arrays), upcast(cotangents), np.float64)
    assert results["bias"].dtype == jnp.dtype(bias_dtype)
    eps = max(float(jnp.finfo(d).eps) for d in (dtype, bias_dtype))
    for name in ("o", "bias"):
        scale = np.abs(exact[name]).max()
        np.testing.assert_allclose(results[name].astype(np.float64), exact[name], rtol=0, atol=ULPS * eps * scale)


@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9, -1e4])
def test_large_negative_bias(fill):
    """Masks as libraries write them: what is left decides, and a row with nothing else is the mean of the values."""
    case = Case(B=1, T=50, S=70, bias="11ts")
    arrays, cotangents = case.arrays(), case.cotangents()
    arrays["bias"] = np.where(np.tri(50, 70, -1, dtype=bool)[None, None], 0, fill).astype(np.float32)
    results, exact = run(case, arrays, cotangents), oracle(case, arrays, cotangents)
    usual = errors(standard.attention(case, arrays, cotangents, np.float32), exact)
    assert_accurate(results, exact, usual, {}, np.dtype(np.float32))


def test_bias_of_minus_infinity_masks():
    case, masked = Case(bias="11ts"), Case(mask="11ts")
    arrays, cotangents = masked.arrays(), case.cotangents()
    visible = arrays.pop("mask")
    visible[0, 0, 3] = False
    expected = run(masked, arrays | {"mask": visible}, cotangents)
    results = run(case, arrays | {"bias": np.where(visible, 0, -np.inf).astype(np.float32)}, cotangents)
    assert not results["o"][:, 3].any() and np.isneginf(results["logsumexp"][:, :, 3]).all()
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, rtol=1e-6, atol=1e-6, err_msg=name)
    assert not results["bias"][~visible].any()


def test_results_are_the_same_every_time():
    """Threads share the work; the order of sums does not depend on who is first, on a GPU if it is asked for."""
    case = Case(B=1, T=600, S=600, N=2, K=1, D=64, E=64, bias="111s", deterministic=True)
    arrays, cotangents = case.arrays(), case.cotangents()
    first = run(case, arrays, cotangents)
    for _ in range(5):
        for name, x in run(case, arrays, cotangents).items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)

"""Holds the fused kernels against the exact results: the error is at most twice that of standard attention in the same
dtype, plus a few units in the last place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import standard
from cases import run

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

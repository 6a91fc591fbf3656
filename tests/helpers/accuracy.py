"""Compares the fused kernels with exact results.

The error must be at most twice the error of standard attention in the same dtype, plus a few units in the last place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import standard
from cases import run

ULPS = 4


def errors(results, exact):
    """Return the largest absolute error of every result, over the entries whose exact value is finite."""
    finite = {name: np.isfinite(x) for name, x in exact.items()}
    return {
        name: np.abs(results[name][finite[name]].astype(x.dtype) - x[finite[name]]).max(initial=0)
        for name, x in exact.items()
    }


def baseline_errors(case, dtype, seed=0, rounding=None, draws=1):
    """Return the errors of standard attention in this dtype, and the inputs and exact results of the first draws.

    Cases with few entries take the largest error of more draws.
    """
    largest, checked = {}, []
    for draw in range(seed, seed + max(draws, min(32, 16384 // (case.T * case.S)))):
        inputs = case.arrays(dtype.name, draw), case.cotangents(dtype.name, draw)
        sums = np.float64 if dtype == np.float64 else np.float32
        exact = by_numpy(case, *inputs)
        for name, error in errors(standard.attention(case, *inputs, sums, rounding or dtype), exact).items():
            largest[name] = max(largest.get(name, 0), error)
        if len(checked) < draws:
            checked.append((inputs, exact))
    return largest, checked


def assert_accurate(results, exact, baseline, cancelled, dtype):
    """Check shapes, dtypes, non-finite entries and errors.

    Args:
      baseline: the errors of standard attention.
      cancelled: the errors from cancellation.
    """
    assert results.keys() == exact.keys()
    for name, expected in exact.items():
        kind = dtype if name != "logsumexp" else jnp.promote_types(dtype, jnp.float32)
        assert results[name].dtype == kind, name
        assert results[name].shape == expected.shape, name
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(results[name][~finite], expected[~finite], err_msg=name)

        ulp = float(jnp.finfo(kind).eps) * np.abs(expected[finite]).max(initial=0)
        error, bound = errors(results, exact)[name], 2 * baseline[name] + ULPS * ulp + cancelled.get(name, 0)
        assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"


def check(case, dtype, seed=0, draws=1):
    dtype = jnp.dtype(dtype)
    baseline, checked = baseline_errors(case, dtype, seed, draws=draws)
    for inputs, exact in checked:
        cancelled = standard.cancellation(case, *inputs, dtype)
        assert_accurate(run(case, *inputs), exact, baseline, cancelled, dtype)


def check_tf32(case, draws=1):
    """Check float32 at a GPU's default precision. The baseline is standard attention with operands rounded to TF32."""
    dtype = np.dtype(np.float32)
    baseline, checked = baseline_errors(case, dtype, rounding="tf32", draws=draws)
    for inputs, exact in checked:
        with jax.default_matmul_precision("default"):
            results = run(case, *inputs)
        assert_accurate(results, exact, baseline, {}, dtype)


def by_numpy(case, arrays, cotangents):
    """Return the exact results from NumPy, which needs no compilation. `test_reference.py` compares them with JAX."""
    sums = np.longdouble if arrays["query"].dtype == np.float64 else np.float64
    return standard.attention(case, arrays, cotangents, sums)

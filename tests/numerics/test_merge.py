"""`merge` of attention over disjoint sets of keys, for any division of the keys and any order of merging."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case

import jax_flash

pytestmark = pytest.mark.usefixtures("device")

CASE = Case(B=2, T=20, S=33, N=4, K=2, D=8, E=8)
TOLERANCES = {"float64": 1e-12, "float32": 5e-5, "bfloat16": 3e-2}
# The index of the part that each key belongs to.
SPLITS = {
    "two": np.arange(33) // 15,
    "uneven": np.arange(33) // 32,
    "eleven": np.arange(33) // 3,
    "one key each": np.arange(33),
    "interleaved": np.arange(33) % 4,
}


def arrays_and_mask(dtype):
    """Return query, key and value, and a mask: row 3 sees no key, row 7 one key, row 8 only the last keys."""
    mask = np.random.default_rng(2).random((1, 1, CASE.T, CASE.S)) < 0.4
    mask[..., 3, :] = mask[..., 7, :] = mask[..., 8, :] = False
    mask[..., 7, 10] = mask[..., 8, 25:] = True
    return [jnp.asarray(CASE.arrays(dtype)[name]) for name in ("query", "key", "value")], jnp.asarray(mask)


def parts(arrays, mask, part_of_key):
    """Return the result over the keys of each part. Many rows see no key of some parts."""
    return [
        jax_flash.attention_with_statistics(*arrays, mask=mask & (part_of_key == part))
        for part in range(part_of_key.max() + 1)
    ]


def assert_close(actual, expected, tolerance):
    (o, statistics), (full, full_statistics) = actual, expected
    assert o.dtype == full.dtype and statistics.l.dtype == full_statistics.l.dtype
    for name, x, y in (
        ("o", o, full),
        ("m", statistics.m, full_statistics.m),
        ("l", statistics.l, full_statistics.l),
        ("logsumexp", statistics.logsumexp, full_statistics.logsumexp),
    ):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(params=TOLERANCES)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.mark.parametrize("split", SPLITS)
def test_any_split(dtype, split):
    arrays, mask = arrays_and_mask(dtype)
    full = jax_flash.attention_with_statistics(*arrays, mask=mask)
    merged = functools.reduce(jax_flash.merge, parts(arrays, mask, SPLITS[split]))
    assert_close(merged, full, TOLERANCES[dtype])
    assert (
        (merged[0][:, 3] == 0).all() and (merged[1].l[:, :, 3] == 0).all() and (merged[1].m[:, :, 3] == -np.inf).all()
    )


def test_any_order(dtype):
    """Check that merging is commutative and associative up to rounding, with all orders of four parts."""
    arrays, mask = arrays_and_mask(dtype)
    full = jax_flash.attention_with_statistics(*arrays, mask=mask)
    merge = jax.jit(jax_flash.merge)
    for a, b, c, d in itertools.permutations(parts(arrays, mask, SPLITS["interleaved"])):
        assert_close(merge(merge(merge(a, b), c), d), full, TOLERANCES[dtype])
        assert_close(merge(merge(a, b), merge(c, d)), full, TOLERANCES[dtype])


def test_merge_with_empty_result(dtype):
    """A result without visible keys changes no bit of the other. Merging two of them gives no NaN."""
    arrays, mask = arrays_and_mask(dtype)
    some = jax_flash.attention_with_statistics(*arrays, mask=mask)
    nothing = jax_flash.attention_with_statistics(*arrays, mask=mask & False)
    for first, second, expected in ((some, nothing, some), (nothing, some, some), (nothing, nothing, nothing)):
        merged = jax_flash.merge(first, second)
        jax.tree.map(np.testing.assert_array_equal, merged, expected)


@pytest.mark.parametrize("split", ["two", "interleaved"])
def test_gradients(dtype, split):
    """Gradients of O and the logsumexp through `merge` equal full attention's. They are 0 in empty rows."""
    arrays, mask = arrays_and_mask(dtype)
    do, dlogsumexp = map(jnp.asarray, CASE.cotangents(dtype))

    def gradients(attend):
        def loss(arrays):
            o, statistics = attend(arrays)
            logsumexp = jnp.where(statistics.l == 0, 0, statistics.logsumexp)
            return (o * do).sum(dtype=dlogsumexp.dtype) + (logsumexp * dlogsumexp).sum()

        return jax.jit(jax.grad(loss))(arrays)

    full = gradients(lambda arrays: jax_flash.attention_with_statistics(*arrays, mask=mask))
    merged = gradients(lambda arrays: functools.reduce(jax_flash.merge, parts(arrays, mask, SPLITS[split])))
    for name, actual, expected in zip(("query", "key", "value"), merged, full, strict=True):
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        error, largest = np.abs(actual - expected).max(), np.abs(expected).max()
        assert error <= TOLERANCES[dtype] * largest, f"{name}: {error:.3g} of {largest:.3g}"
    assert (merged[0][:, 3] == 0).all()


def test_slices_of_the_keys():
    """Keys in two slices, with lengths that end in either slice, both batched and for a single batch entry."""
    case = dataclasses.replace(CASE, lengths=True)
    arrays = case.arrays()
    expected = jax_flash.attention_with_statistics(**arrays)
    pieces = [
        jax_flash.attention_with_statistics(
            **arrays
            | {"key": arrays["key"][:, start:end], "value": arrays["value"][:, start:end]}
            | {"key_value_seq_lengths": (arrays["key_value_seq_lengths"] - start).clip(0, end - start)}
        )
        for start, end in ((0, 15), (15, 33))
    ]
    assert_close(jax_flash.merge(*pieces), expected, TOLERANCES["float32"])
    unbatched, expected = (jax.tree.map(lambda x: x[0], results) for results in (pieces, expected))
    assert_close(jax_flash.merge(*unbatched), expected, TOLERANCES["float32"])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda o, l, m: None, TypeError, "second must be a pair .* not None"),
        (lambda o, l, m: (o, l), TypeError, "second must be a pair .* residual"),
        (lambda o, l, m: (o, (l.astype(int), m)), TypeError, "second's l has dtype int"),
        (lambda o, l, m: (o, (l, m.astype("bfloat16"))), TypeError, "second's l and m .* float32 and bfloat16"),
        (lambda o, l, m: (o, (l.astype("float16"), m.astype("float16"))), TypeError, "dtypes, not float32 and float16"),
        (lambda o, l, m: (o[..., 0], (l, m)), ValueError, "second's l and m must have shape"),
        (lambda o, l, m: (o[0, ..., 0], (l, m)), ValueError, "second's O must have shape"),
        (lambda o, l, m: (o[:, :, :1], (l, m)), ValueError, "second's l and m must have shape"),
        (lambda o, l, m: (o[:, :, :1], (l[:, :1], m[:, :1])), ValueError, "equal shapes"),
        (lambda o, l, m: (o[:, :1], (l[..., :1], m[..., :1])), ValueError, "equal shapes"),
        (lambda o, l, m: (o[:1], (l[:1], m[:1])), ValueError, "equal shapes"),
        (lambda o, l, m: (o[0], (l[0], m[0])), ValueError, "equal shapes"),
    ],
)
def test_invalid_arguments(change, error, match):
    """Refuse arrays that JAX would broadcast, and values that are not results of `attention_with_statistics`."""
    first = jnp.ones((2, 5, 4, 3)), jax_flash.Statistics(*jnp.ones((2, 2, 4, 5)))
    with pytest.raises(error, match=match):
        jax_flash.merge(first, change(first[0], *first[1]))

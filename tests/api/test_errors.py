"""Invalid input: errors at trace time name the argument, NaN and inf spread as in standard attention, empty is zero."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from cases import Case, run

import jax_flash
from jax_flash import dropout

pytestmark = pytest.mark.usefixtures("device")

IMPLEMENTATIONS = ["flash", "xla", "reference"]
B, T, S, N, K, D = 2, 7, 9, 4, 2, 8


def arrays(**changes):
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, D)} | changes
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


def attend(implementation="flash", *args, **arguments):
    names = dict(zip(("query", "key", "value"), args, strict=False))
    return jax_flash.dot_product_attention(**(arrays() | names | arguments), implementation=implementation)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"query": (T, D)}, "query"),
        ({"query": (1, B, T, N, D)}, "query"),
        ({"key": (S, D)}, "key"),
        ({"value": (1, B, S, K, D)}, "value"),
        ({"query": (3, T, N, D)}, "query"),
        ({"key": (3, S, K, D)}, "key"),
        ({"value": (3, S, K, D)}, "value"),
        ({"key": (B, S + 1, K, D)}, "key"),
        ({"value": (B, S, K + 2, D)}, "value"),
        ({"key": (B, S, K, D + 1)}, "key"),
        ({"query": (B, T, N, D + 1)}, "query"),
        ({"query": (B, T, 3, D)}, "heads"),
        ({"query": (B, T, 1, D)}, "heads"),
        ({"key": (B, S, 0, D), "value": (B, S, 0, D)}, "heads"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes(changes, match, implementation):
    with pytest.raises(ValueError, match=match):
        attend(implementation, **arrays(**changes))


def test_shapes_without_a_batch():
    message = r"query \[T, N, D\], .* do not fit together: .* \(7, 4, 8\), \(9, 2, 9\), \(9, 2, 8\)"
    with pytest.raises(ValueError, match=message):
        attend(**arrays(query=(T, N, D), key=(S, K, D + 1), value=(S, K, D)))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_dtypes(name, dtype):
    with pytest.raises(TypeError, match=f"{name}.*{dtype}|{dtype}.*{name}"):
        attend(**{name: arrays()[name].astype(dtype)})


def test_warning_if_a_gpu_lacks_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()  # the warning is emitted at trace time
    with pytest.warns(UserWarning, match='implementation="xla", which is slower: head dim 20'):
        attend(None, **{name: x[..., :1].repeat(20, -1) for name, x in arrays().items()})


def test_mixed_dtypes():
    with pytest.raises(TypeError, match="key"):
        attend(key=arrays()["key"].astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="value"):
        attend(value=arrays()["value"].astype(jnp.float16))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"bias": jnp.ones((B, N, T, S + 1))}, ValueError, "bias"),
        ({"bias": jnp.ones((3, 1, 1, 1))}, ValueError, "bias"),
        ({"bias": jnp.ones((1, 1, 1, 1, 1))}, ValueError, "bias"),
        ({"bias": jnp.ones((1, K, T, S))}, ValueError, "bias"),
        ({"bias": jnp.ones((T, S), jnp.int32)}, TypeError, "bias"),
        ({"bias": jnp.ones((T, S), bool)}, TypeError, "bias must be a float array, not a boolean array: .* mask="),
        ({"mask": jnp.ones((B, N, T + 1, S), bool)}, ValueError, "mask"),
        ({"mask": jnp.ones((B, N, T, S))}, TypeError, "mask"),
        ({"mask": jnp.ones((B, N, T, S), jnp.int32)}, TypeError, "mask"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"scale": float("inf")}, ValueError, "scale"),
        ({"scale": "large"}, TypeError, "scale"),
        ({"scale": 1e39}, ValueError, "scale"),
        ({"scale": 10**400}, ValueError, "scale"),
        ({"scale": jnp.ones(D)}, TypeError, "scale"),
        ({"scale": np.True_}, TypeError, "scale must be a real number"),
        ({"logits_soft_cap": np.complex64(3 + 1j)}, TypeError, "logits_soft_cap must be a real number, not complex64"),
        ({"logits_soft_cap": jnp.asarray(True)}, TypeError, "logits_soft_cap must be a"),
        ({"local_window_size": -1}, ValueError, "local_window_size"),
        ({"local_window_size": (3, -2)}, ValueError, r"local_window_size\[1\] must not be negative, but is -2"),
        ({"local_window_size": (-1, -1)}, ValueError, r"size\[0\] must not .* is -1: .* leave it out for no window"),
        ({"local_window_size": (3, None)}, TypeError, r"size\[1\] must be an int, not None: .* the longest sequence"),
        ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size must be .* a pair .* of ints, not 3 elements"),
        ({"local_window_size": 1.5}, TypeError, "local_window_size"),
        ({"query_seq_lengths": jnp.ones(3, jnp.int32)}, ValueError, "query_seq_lengths"),
        ({"query_seq_lengths": jnp.ones(B)}, TypeError, "query_seq_lengths"),
        ({"key_value_seq_lengths": jnp.ones((B, 1), jnp.int32)}, ValueError, "key_value_seq_lengths"),
        ({"key_value_seq_lengths": jnp.ones(B, bool)}, TypeError, "key_value_seq_lengths"),
        ({"query_segment_ids": jnp.ones((B, T), jnp.int32)}, ValueError, "key_value_segment_ids"),
        ({"key_value_segment_ids": jnp.ones((B, S), jnp.int32)}, ValueError, "query_segment_ids"),
        (
            {"query_segment_ids": jnp.ones((B, S), jnp.int32), "key_value_segment_ids": jnp.ones((B, S), jnp.int32)},
            ValueError,
            "query_segment_ids",
        ),
        (
            {"query_segment_ids": jnp.ones((B, T), jnp.int32), "key_value_segment_ids": jnp.ones((B, S))},
            TypeError,
            "key_value_segment_ids",
        ),
        ({"query_offset": jnp.ones(3, jnp.int32)}, ValueError, "query_offset"),
        ({"query_offset": 1.5}, TypeError, "query_offset"),
        ({"query_offset": False}, TypeError, "query_offset must be integers, not bool"),
        ({"query_offset": 2**31}, ValueError, "query_offset"),
        ({"query_offset": np.int64(2**31)}, ValueError, "query_offset"),
        ({"query_offset": np.full(B, -(2**31) - 1)}, ValueError, "query_offset"),
        (
            {"query_segment_ids": np.full((B, T), 1), "key_value_segment_ids": np.full((B, S), 2**32 + 1)},
            ValueError,
            "key_value_segment_ids must be 32-bit integers",
        ),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must not be 0: leave it out"),
        ({"causal": True}, TypeError, "unexpected keyword argument 'causal': use is_causal instead"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap"),
        ({"logits_soft_cap": 1e36}, ValueError, "logits_soft_cap"),
        ({"logits_soft_cap": float("nan")}, ValueError, "logits_soft_cap"),
        ({"logits_soft_cap": 1e-39}, ValueError, "logits_soft_cap must be from 2.94e-31 to 3.4e.30, not 1e-39"),
        ({"logits_soft_cap": 1e-310}, ValueError, "logits_soft_cap"),
        ({"logits_soft_cap": "1.0"}, TypeError, "logits_soft_cap must be a real number, not '1.0'"),
        ({"logits_soft_cap": np.ones(1)}, TypeError, "logits_soft_cap must be a real number, not ndarray"),
        ({"sinks": jnp.zeros(K)}, ValueError, r"sinks must have shape \(4,\), not \(2,\)"),
        ({"sinks": jnp.zeros((B, N))}, ValueError, "sinks must have shape"),
        ({"sinks": 0.0}, ValueError, "sinks must have shape"),
        ({"sinks": jnp.zeros(N, jnp.int32)}, TypeError, "sinks has dtype int32"),
        ({"precision": "exact"}, ValueError, "precision"),
        ({"precision": ("highest", "exact")}, ValueError, "precision"),
        ({"precision": []}, ValueError, "precision"),
        ({"precision": ("highest",) * 3}, ValueError, "precision"),
        ({"query_offset": 2**70}, ValueError, "query_offset"),
        ({"implementation": "cudnn"}, ValueError, "cudnn"),
        ({"implementation": "fast"}, ValueError, "implementation"),
        ({"implementation": ["flash"]}, ValueError, "implementation must be .* not list"),
        ({"implementation": np.array(["flash", "xla"])}, ValueError, "implementation must be .* not ndarray"),
        ({"local_window_size": "3"}, TypeError, "local_window_size"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_key"),
        ({"dropout_rate": -0.1, "dropout_key": jax.random.key(0)}, ValueError, "dropout_rate"),
        ({"dropout_rate": 1.1, "dropout_key": jax.random.key(0)}, ValueError, "dropout_rate"),
        ({"dropout_rate": float("nan"), "dropout_key": jax.random.key(0)}, ValueError, "dropout_rate"),
        ({"dropout_rate": 0.999, "dropout_key": jax.random.key(0)}, ValueError, "at most 0.99609375, or 1"),
        ({"dropout_rate": 10**400, "dropout_key": jax.random.key(0)}, ValueError, "dropout_rate"),
        ({"dropout_rate": "0.5", "dropout_key": jax.random.key(0)}, TypeError, "dropout_rate"),
        ({"dropout_rate": "half", "dropout_key": jax.random.key(0)}, TypeError, "dropout_rate"),
        ({"dropout_rate": np.complex64(0.5), "dropout_key": jax.random.key(0)}, TypeError, "dropout_rate"),
        ({"dropout_batch_ids": "abc"}, TypeError, "dropout_batch_ids must be an array"),
        ({"dropout_head_ids": 1.5}, TypeError, "dropout_head_ids must be integers"),
        ({"dropout_key": "x"}, TypeError, "dropout_key must be a key .* not 'x'"),
        ({"dropout_rate": 0.1, "dropout_key": 0}, TypeError, "dropout_key"),
        ({"dropout_rate": 0.1, "dropout_key": jnp.ones(2)}, TypeError, "dropout_key"),
        ({"dropout_rate": 0.1, "dropout_key": jnp.ones(2, jnp.int32)}, TypeError, "dropout_key"),
        ({"dropout_rate": 0.1, "dropout_key": jnp.ones(3, jnp.uint32)}, ValueError, "dropout_key"),
        ({"dropout_rate": 0.1, "dropout_key": jnp.ones((B, 2), jnp.uint32)}, ValueError, "dropout_key"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0), B)}, ValueError, "dropout_key"),
        (
            {"dropout_rate": 0.1, "dropout_key": jax.random.key(0), "dropout_head_ids": jnp.arange(K)},
            ValueError,
            "dropout_head_ids",
        ),
        (
            {"dropout_rate": 0.1, "dropout_key": jax.random.key(0), "dropout_batch_ids": jnp.ones(B)},
            TypeError,
            "dropout_batch_ids",
        ),
        (
            {
                "dropout_rate": 0.1,
                "dropout_key": jax.random.key(0),
                "broadcast_dropout": True,
                "dropout_batch_ids": jnp.arange(B),
            },
            ValueError,
            "broadcast_dropout",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options(options, error, match):
    """Errors are raised at trace time, so also under jit. Other implementations have the same checks."""
    with pytest.raises(error, match=match):
        attend(**options)
    static = {name: x for name, x in options.items() if not isinstance(x, jax.Array)}
    traced = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda traced: attend(**static, **traced), traced)


ARRAYS = ["query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "query_offset"]
ARRAYS += ["sinks"]
IDS = ["query_segment_ids", "key_value_segment_ids", "dropout_batch_ids", "dropout_head_ids"]


NO_ARRAYS = ["array", b"array", "08", ["08"], "\0", object(), 10**400, [[1.0], [1.0, 2.0]], {}]


@pytest.mark.parametrize(
    ("name", "bad"),
    [*itertools.product(ARRAYS + IDS, NO_ARRAYS), *itertools.product(ARRAYS[:3], [None])],
    ids=lambda x: x if x in ARRAYS + IDS else type(x).__name__,
)
def test_non_arrays(name, bad):
    dropout_options = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)} if name.startswith("dropout") else {}
    with pytest.raises((TypeError, ValueError), match=name):
        attend(**dropout_options, **{name: bad})


@pytest.mark.parametrize(
    "name", ["local_window_size", "precision", "scale", "dropout_rate", "dropout_key", "implementation"]
)
def test_errors_do_not_print_arrays(name):
    for bad in (np.ones(999), [np.ones(999)] * 3):
        with pytest.raises((TypeError, ValueError), match=name) as error:
            attend(**{name: bad})
        assert len(str(error.value)) < 200


@pytest.mark.parametrize("bad", ["False", 0, None, np.array([True, False]), jnp.ones(2, bool)])
@pytest.mark.parametrize("name", ["is_causal", "deterministic", "broadcast_dropout", "return_residual"])
def test_flags_must_be_bools(name, bad):
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        attend(**{name: bad})
    attend(**{name: np.True_})
    with pytest.raises(TypeError, match=rf"{name} must be True or False, not the traced bool\[\]: .* static"):
        jax.jit(lambda flag: attend(**{name: flag}))(True)


@pytest.mark.parametrize("vary", ["query", "key_value"])
def test_traced_64_bit_ids(vary, x64):
    """Traced 64-bit ids are refused, because the kernels would compare only their lower 32 bits."""
    ids = {"query_segment_ids": np.full((B, T), 1, np.int32), "key_value_segment_ids": np.full((B, S), 1, np.int32)}
    singles = {name: x.astype("float32") for name, x in arrays().items()}
    name = f"{vary}_segment_ids"

    @jax.jit
    def traced(given):
        return attend(**singles | ids | {name: given})

    assert traced(ids[name]).all()
    with pytest.raises(TypeError, match=f"{name} are traced int64.*cast them to int32"):
        traced(ids[name].astype(np.int64) + 2**32)


@pytest.mark.parametrize("transformed", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_kernels_for_a_tpu(transformed):
    traced = jax.jit(transformed(lambda *args: attend("flash", *args).sum())).trace(*arrays().values())
    with pytest.raises(NotImplementedError, match='implementation="flash": no fused kernels for platform .tpu'):
        traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("cap", "dtype"), [(3e-31, "float32"), (3e30, "float32"), (6e-301, "float64")])
def test_extreme_soft_caps(cap, dtype, implementation):
    """Capped scores are nearly 0 or nearly unchanged, also scores that are exactly 0."""
    case = Case(T=20, S=30, soft_cap=cap)
    given = case.arrays(dtype)
    given["query"][:, ::2] = 0
    capped, plain = (
        run(c, given, c.cotangents(dtype), implementation) for c in (case, dataclasses.replace(case, soft_cap=None))
    )
    assert all(np.isfinite(x).all() for x in capped.values())
    expected = plain["o"] if cap > 1 else given["value"].mean(1, keepdims=True).repeat(2, 2).repeat(20, 1)
    np.testing.assert_allclose(capped["o"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_of_any_width(implementation):
    expected = attend(implementation, local_window_size=(S, 2))
    for width in (2**31, 2**63 - 1, 2**63, 2**70):
        np.testing.assert_array_equal(attend(implementation, local_window_size=(width, 2)), expected)


def test_traced_dropout_rate_is_refused():
    with pytest.raises(TypeError, match="dropout_rate"):
        jax.jit(lambda rate: attend(dropout_rate=rate, dropout_key=jax.random.key(0)))(0.1)
    with pytest.raises(TypeError, match="concrete"):
        jax.eval_shape(dropout.threshold, 0.1)


# --- empty arrays and rows ---


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "empty", [{"B": 0}, {"T": 0}, {"S": 0}, {"D": 0}, {"E": 0}, {"T": 0, "S": 0}, {"N": 0}], ids=str
)
@pytest.mark.parametrize("case", [Case(), Case(bias="bnts", causal=True, dropout=0.3)], ids=str)
def test_empty_arrays(case, empty, implementation):
    case = dataclasses.replace(case, **{"T": 5, "S": 6} | empty)
    results = run(case, case.arrays(), case.cotangents(), implementation)
    assert results["o"].shape == (case.B, case.T, case.N, case.E)
    if case.S == 0:
        assert not results["o"].any() and np.isneginf(results["logsumexp"]).all() and not results["query"].any()
    if case.T == 0 or case.B == 0:
        assert not results["key"].any() and not results["value"].any()
    assert not any(np.isnan(x).any() for x in results.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["mask", "lengths", "segments", "causal", "window", "bias"])
def test_empty_rows(kind, implementation):
    """Outputs and gradients are 0, and the logsumexp is -inf, for every kind of mask."""
    options = {
        "causal": {"causal": True, "offset": True},
        "window": {"window": (3, 3), "offset": True},
        "mask": {"mask": "1111"},
        "bias": {"bias": "1111"},
    }
    case = Case(B=2, T=40, S=50, **options.get(kind, {kind: True}))
    given = case.arrays()
    empty = {
        "mask": {"mask": np.zeros((1, 1, 1, 1), bool)},
        "lengths": {"key_value_seq_lengths": np.zeros(2, np.int32)},
        "segments": {"query_segment_ids": np.full((2, 40), 9, np.int32)},
        "causal": {"query_offset": np.full(2, -40, np.int32)},
        "window": {"query_offset": np.full(2, 1000, np.int32)},
        "bias": {"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)},
    }[kind]
    results = run(case, given | empty, case.cotangents(), implementation)
    assert np.isneginf(results.pop("logsumexp")).all()
    assert not any(x.any() for x in results.values())  # fails for NaN, too


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_outside_the_arrays(implementation):
    """Lengths are clamped to the range from 0 to the size of the array."""
    case = Case(lengths=True)
    given = case.arrays()
    limits = [(100, 200), (-3, -1)]
    given["query_seq_lengths"], given["key_value_seq_lengths"] = np.array(limits, np.int32).T
    inside = given | {"query_seq_lengths": np.array([case.T, 0]), "key_value_seq_lengths": np.array([case.S, 0])}
    actual, expected = (run(case, x, case.cotangents(), implementation) for x in (given, inside))
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
    assert not actual["o"][1].any() and actual["o"][0].all()


@pytest.mark.parametrize(
    "lengths",
    [
        np.full(B, 2**32 - 1, np.uint32),
        np.full(B, 2**32),
        [2**63 - 1] * B,
        [2**70] * B,
        jnp.full(B, 2**32 - 1, jnp.uint32),
    ],
    ids=lambda x: f"{type(x).__name__}_{np.asarray(x).dtype}",
)
def test_lengths_beyond_int32(lengths):
    """Such lengths exceed every array, so they have no effect."""
    np.testing.assert_array_equal(attend(key_value_seq_lengths=lengths), attend())
    np.testing.assert_array_equal(attend(query_seq_lengths=lengths), attend())


def test_integers_in_lists_of_tracers():
    expected = attend(is_causal=True, query_offset=np.array([3, 4]), key_value_seq_lengths=np.array([4, 5]))

    @jax.jit
    def with_tracers(a, b):
        return attend(is_causal=True, query_offset=[a, b], key_value_seq_lengths=[b, b + 1])

    np.testing.assert_array_equal(with_tracers(3, 4), expected)


def test_ids_may_be_signed_or_unsigned():
    def ids(query, key):
        return {"query_segment_ids": np.full((B, T), query), "key_value_segment_ids": np.full((B, S), key)}

    large = {name: x.astype(np.uint32) for name, x in ids(2**31 + 1, 2**31 + 1).items()}
    np.testing.assert_array_equal(attend(**large), attend())
    np.testing.assert_array_equal(attend(**ids(2**31 + 1, 2**31 + 1)), attend())
    assert not attend(**ids(2**31 + 1, 1)).any()


def test_empty_batch_with_lengths():
    empty = {name: x[:0] for name, x in arrays().items()}
    for implementation in (None, *IMPLEMENTATIONS):
        o = attend(implementation, **empty, key_value_seq_lengths=np.zeros(0, int), query_seq_lengths=np.zeros(0, int))
        assert o.shape == (0, T, N, D)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [2**30, -(2**30), 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (True, (2**31 + 5, 3)),
        (False, (2**31 + 5, 2**31 + 5)),
        (False, (2**31 - 1, 2**31 - 1)),
        (False, (2**40, 2**40)),
        (False, (2**30 + 5, 2**30 + 5)),
    ],
)
def test_extreme_offsets(offset, causal, window, implementation):
    """No arithmetic on positions overflows."""
    case = Case(causal=causal, offset=True, window=window)
    arrays = case.arrays() | {"query_offset": np.full(2, offset, np.int32)}
    results = run(case, arrays, case.cotangents(), implementation)
    expected = standard.attention(case, arrays, case.cotangents(), np.float64)
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


# --- NaN and inf ---


def nan_rows(results):
    return np.isnan(results).any(-1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_bad_query_affects_its_row(dtype, bad, implementation):
    case = Case(T=70, S=80)
    given = case.arrays(dtype)
    given["query"][1, 33, 2, 5] = bad
    results = run(case, given, case.cotangents(dtype), implementation)
    expected = np.zeros((case.B, case.T, case.N), bool)
    expected[1, 33, 2] = True
    np.testing.assert_array_equal(nan_rows(results["o"]), expected)
    np.testing.assert_array_equal(np.isnan(results["logsumexp"]).transpose(0, 2, 1), expected)
    np.testing.assert_array_equal(nan_rows(results["query"]), expected)
    assert np.isnan(results["key"][1, :, 1]).all() and not np.isnan(results["key"][0]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "bad"), [("float32", np.nan), ("bfloat16", np.nan), ("bfloat16", np.inf), ("float16", np.inf)]
)
def test_bad_query_with_a_soft_cap(dtype, bad, implementation):
    """NaN stays NaN, and infinite scores become plus or minus the cap. In full float32 infinity becomes NaN."""
    case = Case(T=70, S=80, soft_cap=50.0)
    given = case.arrays(dtype)
    baseline = run(case, given, case.cotangents(dtype), implementation)
    given["query"][1, 33, 2, 5] = bad
    results = run(case, given, case.cotangents(dtype), implementation)
    o, logsumexp = baseline["o"].astype(np.float32), baseline["logsumexp"].copy()
    positive = given["key"][1, :, 1, 5] > 0
    o[1, 33, 2] = given["value"][1, positive, 1].astype(np.float32).mean(0) if bad == np.inf else np.nan
    logsumexp[1, 2, 33] = 50.0 + np.log(positive.sum()) if bad == np.inf else np.nan
    bound = 10 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(results["o"].astype(np.float32), o, rtol=bound, atol=bound)
    np.testing.assert_allclose(results["logsumexp"], logsumexp, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_key_affects_the_rows_that_see_it(implementation):
    case = Case(T=70, S=80, causal=True)
    given = case.arrays()
    given["key"][0, 40, 0, 3] = np.nan
    results = run(case, given, case.cotangents(), implementation)
    expected = np.zeros((case.B, case.T, case.N), bool)
    expected[0, 40:, :2] = True
    np.testing.assert_array_equal(nan_rows(results["o"]), expected)
    np.testing.assert_array_equal(np.isnan(results["logsumexp"]).transpose(0, 2, 1), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_value_affects_its_column(bad, implementation):
    case = Case(T=70, S=80)
    given = case.arrays()
    given["value"][0, 40, 1, 3] = bad
    results = run(case, given, case.cotangents(), implementation)
    actual = ~np.isfinite(results["o"])
    expected = np.zeros_like(actual)
    expected[0, :, 2:, 3] = True
    np.testing.assert_array_equal(actual, expected)
    assert np.isfinite(results["logsumexp"]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_bias_affects_its_row(bad, implementation):
    case = Case(T=70, S=80, bias="11ts")
    given = case.arrays()
    given["bias"][0, 0, 20, 65] = bad
    results = run(case, given, case.cotangents(), implementation)
    expected = np.zeros((case.B, case.T, case.N), bool)
    expected[:, 20] = True
    np.testing.assert_array_equal(nan_rows(results["o"]), expected)
    np.testing.assert_array_equal(np.isnan(results["bias"][0, 0]).any(-1), expected[0, :, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_infinite_sinks(dtype, implementation):
    """A sink of +inf takes all probability, as 1e4 does here. -inf has no effect. NaN affects only its head."""
    case = Case(T=70, S=80, K=4, sinks=1.0, logsumexp=False)
    sinks = np.array([np.inf, -np.inf, np.nan, 0.5])
    given, cotangents = case.arrays(dtype) | {"sinks": sinks.astype(dtype)}, case.cotangents(dtype)
    results = run(case, given, cotangents, implementation)
    finite = given | {"sinks": np.where(sinks == np.inf, 1e4, sinks)}
    tolerance = 1e-5 if dtype != "bfloat16" else 0.1
    for name, x in standard.attention(case, finite, cotangents, np.float64).items():
        found = results[name].astype(np.float64)
        np.testing.assert_allclose(found, x, rtol=tolerance, atol=tolerance, err_msg=name)
    assert not any(results[name][:, :, 0].any() for name in ("o", "query", "key", "value"))
    assert not results["sinks"][:2].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_cotangent_affects_its_row(implementation):
    case = Case(T=70, S=80)
    do, dlogsumexp = case.cotangents()
    do[1, 12, 3, 4] = np.nan
    results = run(case, case.arrays(), (do, dlogsumexp), implementation)
    expected = np.zeros((case.B, case.T, case.N), bool)
    expected[1, 12, 3] = True
    np.testing.assert_array_equal(nan_rows(results["query"]), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scores_near_the_largest_number(dtype, implementation):
    """The kernels apply exp to differences of scores only."""
    case = Case(T=40, S=50, D=8, scale=1.0)
    given = case.arrays(dtype)
    given["query"][:] = np.eye(8)[0] * 200.0
    given["key"][:] = np.float32(200.0) * np.sign(given["key"])
    results = run(case, given, case.cotangents(dtype), implementation)
    assert all(np.isfinite(x).all() for x in results.values())
    weight = (given["key"][:, :, :, 0] > 0).astype(np.float32)
    mean = (weight[..., None] * given["value"]).sum(1) / weight.sum(1)[..., None]
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(results["o"][:, 0, ::2].astype(np.float32), mean, atol=4 * eps, rtol=4 * eps)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [1e8, 1e9, 1e30])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"bias": np.zeros((B, N, S, S), np.float32)}], ids=list)
def test_large_scores_are_one_hot(options, scale, implementation):
    """The maximum of a row must come from the same scores as P.

    XLA's optimisations may otherwise compute the scores twice with different rounding.
    """
    query, key, value = np.random.default_rng(0).normal(size=(3, B, S, N, D)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    def gradients(*args):
        o, pull = jax.vjp(functools.partial(attend, implementation, scale=scale, **options), *args)
        return o, *pull(o)

    o, *gradients = gradients(query, key, value)
    scores = np.einsum("btnd,bsnd->bnts", query, key)
    visible = np.tri(S, dtype=bool) if options.get("is_causal") else True
    weights = np.eye(S)[np.where(visible, scores, -np.inf).argmax(-1)]
    np.testing.assert_allclose(o, np.einsum("bnts,bsnd->btnd", weights, value), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients[2], np.einsum("bnts,btnd->bsnd", weights, o), rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients)

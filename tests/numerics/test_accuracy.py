"""Errors of the fused kernels, forward and backward, for every feature and dtype, on CPU and GPU.

The error may be at most twice the error of standard attention in the same dtype, plus a few units in the last place.
Where terms cancel, another order of the terms may change a result by more than that. The tests allow this change as
well (`cancelled`, from `standard.cancellation`).
"""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from accuracy import ULPS, assert_accurate, by_numpy, check, errors
from block_masks import block_mask, entries
from cases import FEATURES, SIZES, Case, run, upcast
from processes import one_device

import jax_flash

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature(case, dtype):
    """In float16 each query head has its own keys; in most other cases heads share keys.

    So Hopper's backward is tested with dK and dV of one query head, which are stored, and of several, which are added.
    """
    check(dataclasses.replace(case, K=case.N) if dtype == "float16" else case, dtype)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature_in_f64(case):
    check(case, "float64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "D", [1, 3, 8, 17, 32, 40, 64, 72, 80, 96, 128, 160, 192, 200, 256, 264, 320, 384, 512, 513, 576]
)
def test_head_dim(D, dtype):
    check(Case(B=1, T=70, S=90, N=2, K=1, D=D, E=D, causal=True), dtype)
    check(Case(B=1, T=33, S=50, N=1, K=1, D=D, E=max(256 - D, 8), dropout=0.2), dtype)


@pytest.mark.parametrize("T", SIZES)
def test_length(T):
    """Lengths around every tile size, for the plain call and for features that depend on positions."""
    check(Case(B=1, T=T, S=T, N=2, K=2, D=32, E=32), "float32")
    check(Case(B=1, T=T, S=SIZES[-1] + 1 - T, N=1, K=1, causal=True, offset=True), "float32")
    check(Case(B=2, T=200, S=T, N=1, K=1, window=(40, 25), lengths=True, bias="1n1s"), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long(dtype):
    """Many tiles of every kind, and sums of many terms."""
    check(Case(B=1, T=1500, S=1111, N=2, K=1, D=64, E=64), dtype)
    check(Case(B=1, T=1111, S=1500, N=2, K=2, D=64, E=64, causal=True, bias="1n1s", dropout=0.1), dtype)
    check(Case(B=1, T=1100, S=1100, N=1, K=1, D=32, E=48, window=(100, 300), segments=True), dtype)
    check(Case(T=150, S=4500, N=1, K=1, segments="mixed"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 3, 16])
def test_few_queries(T, dtype):
    """Decoding. GPUs split the keys, and some rows see no key of a split. CPUs merge the heads of a group."""
    check(Case(T=T, S=1100, N=8, K=2, D=128, E=128, causal=True, offset=True, lengths=True), dtype)
    check(Case(T=T, S=1037, N=4, K=4, D=64, E=64, sinks=2.0, window=(300, 0), bias="1n1s", dropout=0.2), dtype)
    check(Case(T=T, S=1100, N=4, K=1, D=80, E=40, segments=True, mask="bnts", soft_cap=2.0), dtype)
    masks = {"window": (300, 0), "causal": True, "offset": True, "lengths": True}
    check(Case(T=T, S=600, N=22, K=2, D=40, E=24, sinks=2.0, soft_cap=2.0, **masks), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_queries(dtype):
    """Many rows in a tile, groups that are not powers of two, and a negative scale, which reverses the scores."""
    check(Case(B=1, T=33, S=1100, N=6, K=2, D=64, E=64, dropout=0.2, lengths=True, offset=True), dtype)
    case = Case(
        B=1, T=5, S=1100, N=9, K=3, sinks=2.0, window=(500, 100), segments=True, bias="11ts", dropout=0.1, scale=-0.3
    )
    check(case, dtype)
    check(Case(B=1, T=63, S=1030, N=3, K=1, D=64, E=64, mask="bnts", dropout=0.3, scale=-0.3), dtype)
    check(Case(B=9, T=3, S=1030, N=30, K=30, causal=True, offset=True, lengths=True), dtype)  # many tiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_scores(dtype):
    """A nearly one-hot softmax, in which exp would overflow if the maximum were not subtracted.

    Only rows with two nearly equal largest scores have an error. They are rare, so the test uses several draws.
    """
    check(Case(T=130, S=150, spread=12.0, scale=1.0), dtype, draws=8)
    check(Case(T=130, S=150, spread=12.0, scale=1.0, soft_cap=30.0, causal=True), dtype, draws=8)


@pytest.mark.parametrize(
    ("sinks", "logsumexp"), [([-np.inf, -200, 1, 40], True), ([70, 120, 3e4, 6e4], False)], ids=["low", "high"]
)
@pytest.mark.parametrize(
    "options", [{}, {"bias": "11ts"}, {"T": 3, "S": 1100, "causal": True, "offset": True}], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sinks_of_any_size(sinks, logsumexp, options, dtype):
    """Sinks of -inf, sinks that are negligible, and sinks that take all of the probability."""
    case, dtype = Case(sinks=1.0, logsumexp=logsumexp, **options), jnp.dtype(dtype)
    arrays, cotangents = case.arrays(dtype.name), case.cotangents(dtype.name)
    arrays["sinks"] = np.array(sinks, dtype)
    exact = by_numpy(case, arrays, cotangents)
    baseline = errors(standard.attention(case, arrays, cotangents, np.float32, dtype), exact)
    cancelled = standard.cancellation(case, arrays, cotangents, dtype)
    assert_accurate(run(case, arrays, cotangents), exact, baseline, cancelled, dtype)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"bias": "1nts"}], ids=str)
@pytest.mark.parametrize("inputs", [("sinks",), ("query", "sinks"), ("bias", "sinks")], ids="-".join)
def test_gradient_of_sinks_with_few_other_gradients(inputs, options):
    case = Case(T=70, S=90, sinks=1.0, **options)
    arrays, cotangents = case.arrays("bfloat16"), case.cotangents("bfloat16")

    @jax.jit
    def gradients(inputs):
        return jax.vjp(lambda inputs: jax_flash.dot_product_attention(**arrays | inputs, **case.options), inputs)[1](
            cotangents[0]
        )[0]

    expected = run(dataclasses.replace(case, logsumexp=False), arrays, cotangents)
    for name, x in gradients({name: arrays[name] for name in inputs if name in arrays}).items():
        np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (x, expected[name])), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bias_of_another_dtype(dtype, bias_dtype):
    """The gradient of the bias has the dtype of the bias."""
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


@pytest.mark.parametrize("case", [
    Case(B=2, T=200, S=264, D=64, E=64, bias="1nts"),
    Case(B=2, T=136, S=328, D=64, E=64, bias="bnts", mask="b11s", dropout=0.2),
    Case(B=1, T=200, S=264, D=128, E=128, bias="11ts", causal=True),
    Case(B=2, T=136, S=264, D=96, E=128, bias="b1ts", soft_cap=2.0, window=(100, 9)),
    Case(B=1, T=136, S=264, D=32, E=32, bias="1nts", segments=True, lengths=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float16", "float32"])
def test_bias_in_tiles(case, bias_dtype):
    """Hopper's kernels load a bias in tiles by TMA if its rows are multiples of 16 bytes."""
    dtype = jnp.dtype("bfloat16")
    arrays, cotangents = case.arrays(dtype.name), case.cotangents(dtype.name)
    arrays["bias"] = arrays["bias"].astype(jnp.dtype(bias_dtype))
    exact = by_numpy(case, arrays, cotangents)
    baseline = errors(standard.attention(case, arrays, cotangents, np.float32, dtype), exact)
    results = run(case, arrays, cotangents)
    results["bias"] = results["bias"].astype(dtype)
    assert_accurate(results, exact, baseline, standard.cancellation(case, arrays, cotangents, dtype), dtype)


@pytest.mark.parametrize("case", [
    Case(B=1, T=200, S=264, D=256, E=256, soft_cap=2.0, causal=True, window=(100, 0)),
    Case(B=1, T=200, S=264, D=192, E=128, soft_cap=2.0, dropout=0.2, mask="1nts"),
    Case(B=1, T=200, S=264, D=256, E=256, mask="b1ts", bias="11ts"),
    Case(B=1, T=200, S=300, D=160, E=200, block_mask=block_mask(1, 200, 300, 64, 128), segments=True),
    Case(B=1, T=200, S=264, D=128, E=128, soft_cap=2.0, causal=True, mask="b1ts"),
    Case(B=1, T=136, S=264, D=128, E=128, soft_cap=2.0, bias="1nts", causal=True, dropout=0.2),
    Case(B=1, T=136, S=264, D=112, E=128, soft_cap=0.001, bias="1nts", mask="1nts"),
    Case(B=1, T=300, S=400, D=128, E=128, mask="11ts", segments=True),
], ids=str)  # fmt: skip
def test_few_registers(case):
    """Cases in which Hopper's backward has the fewest registers: head dims from 112 to 256."""
    check(case, "bfloat16")


@pytest.mark.parametrize(("case", "dtype"), [
    (Case(T=40, S=140, N=2, K=1, D=512, E=256, causal=True, lengths=True, offset=True, sinks=1.0), "bfloat16"),
    (Case(B=1, T=70, S=90, N=1, K=1, D=320, E=320, segments=True, mask="1nts", dropout=0.2, soft_cap=2.0), "float16"),
    (Case(B=1, T=140, S=200, N=2, K=1, D=512, E=512, window=(90, 40), segments=True, soft_cap=2.0), "float16"),
    (Case(B=1, T=70, S=90, N=1, K=1, D=64, E=264, window=(30, 20), bias="11ts", deterministic=True), "bfloat16"),
    (Case(B=1, T=70, S=90, N=1, K=1, D=264, E=8, window=(30, 20)), "float32"),
    (Case(B=1, T=80, S=100, N=2, K=1, D=8, E=384, block_mask=block_mask(1, 80, 100, 16, 32)), "bfloat16"),
    (Case(B=2, T=1, S=1030, N=4, K=1, D=576, E=512, causal=True, offset=True, lengths=True), "bfloat16"),
], ids=str)  # fmt: skip
def test_heads_in_slices(case, dtype):
    """Wide heads (head dims above 256), whose tiles GPUs process in slices."""
    check(case, dtype)


@pytest.mark.parametrize("cap", [1e-5, 1e-2, 50.0, 1e8])
@pytest.mark.parametrize(
    ("dtype", "D"), [("bfloat16", 64), ("float16", 64), ("float32", 64), ("bfloat16", 192), ("float16", 192)]
)
def test_soft_caps_of_any_size(cap, D, dtype):
    check(Case(B=1, T=70, S=90, N=2, K=1, D=D, E=D, soft_cap=cap), dtype)


@pytest.mark.parametrize(("case", "factor"), [
    (Case(B=1, T=200, S=264, N=2, K=1, D=64, E=64, soft_cap=5.0), 8.0),
    (Case(B=1, T=200, S=264, N=2, K=1, D=128, E=128, soft_cap=5.0, causal=True, dropout=0.2), 8.0),
    (Case(B=1, T=136, S=264, N=2, K=1, D=64, E=64, soft_cap=5.0, bias="1nts"), 8.0),
    (Case(B=1, T=136, S=200, N=2, K=1, D=192, E=192, soft_cap=5.0, mask="11ts"), 8.0),
    (Case(B=1, T=70, S=90, N=2, K=1, D=32, E=32, soft_cap=2000.0), 2048.0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_and_large_scores_with_a_soft_cap(case, factor, dtype):
    """Some warps of a tile have small and large scores, others only small ones.

    A warp of a GPU uses a cheaper tanh if all of its scores are small.
    """
    arrays, cotangents = case.arrays(dtype), case.cotangents(dtype)
    arrays["query"][:, ::40] *= np.asarray(factor, arrays["query"].dtype)
    dtype = jnp.dtype(dtype)
    exact = by_numpy(case, arrays, cotangents)
    baseline = errors(standard.attention(case, arrays, cotangents, np.float32, dtype), exact)
    cancelled = standard.cancellation(case, arrays, cotangents, dtype)
    assert_accurate(run(case, arrays, cotangents), exact, baseline, cancelled, dtype)


MANY_TILES = functools.partial(Case, T=150, S=700, D=8, E=8)


@pytest.mark.parametrize("case", [
    MANY_TILES(mask="11ts"),
    MANY_TILES(mask="b1ts", bias="1nts", dropout=0.2),
    MANY_TILES(mask="1nts", bias="11ts", segments=True, soft_cap=2.0),
    MANY_TILES(mask="bnts", bias="b11s", causal=True, offset=True, lengths=True),
    MANY_TILES(mask="1n1s", bias="1nt1", window=(300, 40), offset=True),
    MANY_TILES(mask="b1t1", bias="bnts", dropout=0.2, segments=True),
    MANY_TILES(mask="bn11", bias="1n1s"),
    MANY_TILES(mask="11ts", bias="1nts", dropout=0.2, block_mask=block_mask(1, 150, 700, 64, 80)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mask_with_empty_and_full_tiles(case, dtype):
    """Masks in every broadcast form, with other features that restrict tiles, and with every extent of a bias."""
    arrays, cotangents = case.arrays(dtype), case.cotangents(dtype)
    dtype = np.dtype(dtype)
    batch, heads, T, S = case.shape(case.mask)
    mask = entries(4, case.T, case.S, q_block=50, kv_block=300, batch=batch, heads=heads)
    arrays["mask"] = mask[:, :, -T:, -S:]
    exact = by_numpy(case, arrays, cotangents)
    baseline = errors(standard.attention(case, arrays, cotangents, dtype.type), exact)
    cancelled = standard.cancellation(case, arrays, cotangents, dtype)
    assert_accurate(run(case, arrays, cotangents), exact, baseline, cancelled, dtype)


@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9, -1e4])
def test_large_negative_bias(fill):
    """Finite masks as in many libraries: the other keys decide, and a fully masked row is the mean of the values."""
    case = Case(B=1, T=50, S=70, bias="11ts")
    arrays, cotangents = case.arrays(), case.cotangents()
    arrays["bias"] = np.where(np.tri(50, 70, -1, dtype=bool)[None, None], 0, fill).astype(np.float32)
    results, exact = run(case, arrays, cotangents), by_numpy(case, arrays, cotangents)
    baseline = errors(standard.attention(case, arrays, cotangents, np.float32), exact)
    assert_accurate(results, exact, baseline, {}, np.dtype(np.float32))


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


def test_results_are_reproducible():
    """Two runs have the same bits: on a CPU with the same number of threads, on a GPU if `deterministic` is set."""
    case = Case(B=1, T=600, S=600, N=2, K=1, D=64, E=64, bias="111s", deterministic=True)
    arrays, cotangents = case.arrays(), case.cotangents()
    first = run(case, arrays, cotangents)
    for _ in range(5):
        for name, x in run(case, arrays, cotangents).items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)


GRADIENTS = """
import hashlib
import jax
from jax_flash import dot_product_attention

names = ("query", "bias", "table", "scale", "sinks")
keys = dict(zip(names, jax.random.split(jax.random.key(0), 5)))
shapes = {"query": (1, 600, 3, 24), "bias": (1, 1, 1, 600), "table": (3, 1199), "scale": (), "sinks": (3,)}
arrays = {name: jax.random.normal(keys[name], shapes[name]) for name in names}

def loss(arrays, deterministic):
    table = arrays.pop("table")
    score_mod = lambda score, batch, head, query, key: score + table[head, query - key + 599]
    query = arrays.pop("query")
    options = {"score_mod": score_mod, "deterministic": deterministic, **arrays}
    return (dot_product_attention(query, query, query, **options) ** 2).sum()

for deterministic in (False, True):
    gradients = jax.jit(jax.grad(loss), static_argnums=1)(arrays, deterministic)
    print(hashlib.sha256(b"".join(gradients[name].tobytes() for name in names)).hexdigest())
"""


def test_deterministic_gradients_do_not_depend_on_the_number_of_threads():
    def hashes(threads):
        environment = one_device(NPROC=str(threads), JAX_PLATFORMS="cpu")  # XLA reads NPROC as its number of threads
        return subprocess.check_output([sys.executable, "-c", GRADIENTS], env=environment, text=True).split()

    (default, deterministic), (other_default, other_deterministic) = hashes(1), hashes(3)
    assert deterministic == other_deterministic
    assert default != other_default  # otherwise NPROC has no effect

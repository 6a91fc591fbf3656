"""The paper's algorithms on counted memory: results, counts and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from cases import Case

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

import jax_flash
from jax_flash import io_model
from jax_flash.io_model import flash, hbm_accesses
from jax_flash.io_model import standard as materialised

FORWARD = ("algorithm_0", "algorithm_1", "algorithm_2", "algorithm_5", "kernel_forward")
# Not run by `run_all` without a block mask. `memory_efficient_forward` works entry by entry and has its own test file.
OTHERS = ("algorithm_5", "block_sparse_backward", "memory_efficient_forward")
DENSE = tuple(a for a in io_model.ALGORITHMS if a not in OTHERS)


def inputs(N, d, seed=0):
    """Return Q, K, V and dO."""
    return np.random.default_rng(seed).normal(size=(4, N, d))


def tangents(Q, K, V):
    return np.cos(3 * Q), np.sin(K), np.cos(V)


def run_all(Q, K, V, dO, M, block_mask=None, *, dropout_rate=0.0, R=(0, 0, 0, 0), **options):
    """Run every algorithm that supports the problem. With a block mask these are the block-sparse ones."""
    runs, N_options = {}, {"dropout_rate": dropout_rate, **options}
    if block_mask is None:
        forward = runs["algorithm_2"] = io_model.algorithm_2(Q, K, V, M, R=R, **N_options)
    else:
        forward = runs["algorithm_5"] = io_model.algorithm_5(Q, K, V, M, block_mask, R=R, **N_options)
    O, l, m, R = forward.outputs
    if block_mask is not None:
        backward = io_model.block_sparse_backward(Q, K, V, O, dO, l, m, R, M, block_mask, **N_options)
        return runs | {"block_sparse_backward": backward}
    runs["kernel_forward"] = io_model.kernel_forward(Q, K, V, R, M, **N_options)
    runs["algorithm_4"] = io_model.algorithm_4(Q, K, V, O, dO, l, m, R, M, **N_options)
    runs["kernel_backward"] = io_model.kernel_backward(Q, K, V, O, dO, l, m, R, M, **N_options)
    runs["kernel_tangent"] = io_model.kernel_tangent(Q, K, V, O, *tangents(Q, K, V), l, m, R, M, **N_options)
    if not options and not dropout_rate:
        runs["algorithm_0"] = io_model.algorithm_0(Q, K, V, M)
        runs["algorithm_1"] = io_model.algorithm_1(Q, K, V, M)
        runs["algorithm_3"] = io_model.algorithm_3(Q, K, V, runs["algorithm_0"].hbm.arrays["P"], dO, M)
    return runs


def check(runs, expected, tolerance=1e-11):
    """Compare with `expected`, which holds O, logsumexp, dQ, dK and dV."""
    O, logsumexp, *gradients, dO, dlogsumexp = expected
    for name, run in runs.items():
        if name == "kernel_tangent":
            l = runs["kernel_forward"].outputs[1]
            got = run.outputs[0], (run.outputs[1] / np.where(l == 0, 1, l))[:, 0]
            for x, tangent in zip(got, (dO, dlogsumexp), strict=True):
                np.testing.assert_allclose(x, tangent, atol=tolerance, rtol=tolerance, err_msg=name)
            continue
        if name in FORWARD:
            np.testing.assert_allclose(run.outputs[0], O, atol=tolerance, rtol=tolerance, err_msg=name)
        else:
            for got, gradient in zip(run.outputs, gradients, strict=True):
                np.testing.assert_allclose(got, gradient, atol=tolerance, rtol=tolerance, err_msg=name)
        if len(run.outputs) == 4:
            _, l, m, _ = run.outputs
            assert (m[l == 0] == -np.inf).all()
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose((m + np.log(l))[:, 0], logsumexp, atol=tolerance, rtol=tolerance)


def oracle(Q, K, V, dO, scale=1.0, allowed=None, dropout_rate=0.0, key=None):
    """Return the results by NumPy in extended precision."""
    N, d = Q.shape
    mask = "11ts" if allowed is not None else ""
    case = Case(B=1, T=N, S=N, N=1, K=1, D=d, E=d, scale=scale, mask=mask, dropout=dropout_rate)
    arrays = {name: x[None, :, None] for name, x in zip(("query", "key", "value"), (Q, K, V), strict=True)}
    if allowed is not None:
        arrays["mask"] = allowed[None, None]
    if dropout_rate:
        arrays["dropout_key"] = key
    results = standard.attention(case, arrays, (dO[None, :, None], np.zeros((1, 1, N))), np.longdouble)
    return [
        results["o"][0, :, 0],
        results["logsumexp"][0, 0],
        *(results[x][0, :, 0] for x in ("query", "key", "value")),
        *tangent_oracle(Q, K, V, scale, allowed, dropout_rate, key),
    ]


def tangent_oracle(Q, K, V, scale, allowed, dropout_rate, key):
    """Return the tangents of O and the logsumexp: imaginary parts at a point that is moved by an imaginary step."""
    step, N = 1e-100, len(Q)
    Q, K, V = (x + 1j * step * dx for x, dx in zip((Q, K, V), tangents(Q, K, V), strict=True))
    S = scale * (Q @ K.T)
    m = S.real.max(axis=1, keepdims=True)
    P = np.exp(S - m) * (1 if allowed is None else allowed)
    l = P.sum(axis=1, keepdims=True)
    R = io_model.generator_state(key) if dropout_rate else np.zeros(4, np.uint32)
    O = (P * flash.dropout_mask(R, dropout_rate, slice(0, N), slice(0, N))) @ V / np.where(l == 0, 1, l)
    return O.imag / step, np.log(np.where(l == 0, 1, l))[:, 0].imag / step


def library(Q, K, V, dO, scale, allowed, dropout_rate, key, implementation):
    """Return the results of the public function in float64, from `reference.py` or the custom calls."""

    @jax.jit
    def attend(q, k, v):
        o, statistics = jax_flash.attention_with_statistics(
            *(x[None, :, None] for x in (q, k, v)),
            mask=allowed[None, None],
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_key=key,
            implementation=implementation,
        )
        return o[0, :, 0], statistics.logsumexp[0, 0]

    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in (Q, K, V)]
        (o, logsumexp), pull = jax.vjp(attend, *arrays)
        along = jax.jvp(attend, arrays, [jnp.asarray(x) for x in tangents(Q, K, V)])[1]
        return [np.asarray(x) for x in (o, logsumexp, *pull((jnp.asarray(dO), jnp.zeros_like(logsumexp))), *along)]


@st.composite
def problems(draw, max_length=40):
    """Draw N, d and M. Blocks are often incomplete, and M ranges from d to beyond Nd."""
    N, d = draw(st.integers(1, max_length)), draw(st.integers(8, 24))
    rows = draw(st.floats(1, 5 * N))  # M / d: how many rows SRAM could hold
    return N, d, max(d, int(rows * d))


def random_blocks(draw, N, d, M):
    B_c, B_r = io_model.block_sizes(d, M)
    shape = (-(-N // B_r), -(-N // B_c))
    block_mask = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from((0.0, 0.3, 0.7)))
    return block_mask, np.repeat(np.repeat(block_mask, B_r, axis=0)[:N], B_c, axis=1)[:, :N]


# --- the memories ---


def test_hbm_counts_accesses():
    hbm = io_model.HBM(Q=np.arange(12.0).reshape(4, 3))
    assert (hbm.reads, hbm.writes, hbm.allocated) == (0, 0, 0)
    block = hbm["Q", 1:3]
    block[:] = 0  # a read returns a copy
    assert (hbm["Q", 1:3, :2] == [[3, 4], [6, 7]]).all()
    assert hbm.reads == 6 + 4
    hbm.allocate(S=(4, 4))
    assert np.isnan(hbm["S", :]).all()
    assert (hbm.writes, hbm.allocated) == (0, 16)
    hbm["S", :2, 1:] = 0  # counts the written elements, even if the value is a scalar
    hbm.initialize(m=np.full((4, 1), -np.inf))
    assert (hbm.writes, hbm.allocated) == (6 + 4, 16 + 4)
    with pytest.raises(ValueError, match="broadcast"):
        hbm["S", :2] = np.zeros((3, 4))


def test_sram_capacity():
    sram = io_model.SRAM(10)
    sram.Q, sram.K = np.zeros((2, 3)), np.zeros(4)
    assert sram.held == {"Q": 6, "K": 4}
    sram.K = np.ones(2)  # replaces the previous K
    assert (sum(sram.held.values()), sram.peak) == (8, 10)
    with pytest.raises(MemoryError, match=r"10 elements cannot hold 11: {'Q': 6, 'K': 2, 'S': 3}"):
        sram.S = np.zeros(3)
    with pytest.raises(AttributeError, match="S is not in SRAM"):
        sram.S  # noqa: B018
    sram.K += 1
    assert (sram.K == 2).all()
    sram.clear()
    sram.S = np.zeros(10)
    assert sram.peak == 10


def test_blocks_cover_the_rows():
    for length, size in ((7, 3), (6, 3), (2, 3), (1, 1)):
        divided = io_model.memory.blocks(length, size)
        assert [i for block in divided for i in range(length)[block]] == list(range(length))
        assert len(divided) == -(-length // size)
        assert all(block.stop - block.start == size for block in divided[:-1])


# --- results ---


@given(problems(), st.integers(0, 9))
def test_results_and_counts(problem, seed):
    """Dense algorithms have the oracle's results, and exactly the accesses and extra memory of the formulas."""
    N, d, M = problem
    Q, K, V, dO = inputs(N, d, seed)
    runs = run_all(Q, K, V, dO, M)
    assert set(runs) == set(DENSE)
    check(runs, oracle(Q, K, V, dO))
    for name, run in runs.items():
        reads, writes = run.hbm.reads, run.hbm.writes
        assert (reads, writes) == io_model.reads_and_writes(name, N, d, M), name
        assert hbm_accesses(name, N, d, M) == reads + writes
        results = N * d * (1 if name in (*FORWARD, "kernel_tangent") else 3)
        assert run.hbm.allocated - results == io_model.extra_memory(name, N), name
        assert not any(np.isnan(x).any() for x in run.hbm.arrays.values()), "some elements were never written"


@given(problems(), st.sampled_from((0.0, 0.3)), st.integers(0, 99), st.booleans())
def test_scale_mask_and_dropout(problem, dropout_rate, seed, is_causal):
    N, d, M = problem
    Q, K, V, dO = inputs(N, d, seed)
    if is_causal:
        mask, allowed = io_model.causal, np.tri(N, dtype=bool)
    else:
        allowed = np.random.default_rng(seed).random((N, N)) < 0.6
        allowed[:: seed % 5 + 1] = False  # empty rows

        def mask(rows, columns):
            return allowed[rows, columns]

    key = jax.random.PRNGKey(seed)
    options = {"scale": 0.3, "mask": mask, "dropout_rate": dropout_rate, "R": io_model.generator_state(key)}
    runs = run_all(Q, K, V, dO, M, **options)
    assert set(runs) == {"algorithm_2", "algorithm_4", "kernel_forward", "kernel_backward", "kernel_tangent"}
    check(runs, oracle(Q, K, V, dO, 0.3, allowed, dropout_rate, np.asarray(key)))
    for name, run in runs.items():
        assert (run.hbm.reads, run.hbm.writes) == io_model.reads_and_writes(name, N, d, M), "masks are not read"


@given(st.data(), problems(), st.sampled_from((0.0, 0.3)), st.booleans())
def test_block_sparse(data, problem, dropout_rate, is_causal):
    N, d, M = problem
    block_mask, allowed = random_blocks(data.draw, N, d, M)
    Q, K, V, dO = inputs(N, d)
    key = jax.random.PRNGKey(3)
    options = {"scale": 0.5, "dropout_rate": dropout_rate, "R": io_model.generator_state(key)}
    if is_causal:  # inside the non-zero blocks
        options["mask"], allowed = io_model.causal, allowed & np.tri(N, dtype=bool)
    runs = run_all(Q, K, V, dO, M, block_mask, **options)
    assert set(runs) == {"algorithm_5", "block_sparse_backward"}
    check(runs, oracle(Q, K, V, dO, 0.5, allowed, dropout_rate, np.asarray(key)))
    for name, run in runs.items():
        assert (run.hbm.reads, run.hbm.writes) == io_model.reads_and_writes(name, N, d, M, block_mask), name
        results = N * d * (1 if name in FORWARD else 3)
        assert run.hbm.allocated - results == io_model.extra_memory(name, N), name


@pytest.mark.parametrize("implementation", ["reference", "flash"])
@pytest.mark.parametrize("sparse", [False, True], ids=["causal", "block-sparse"])
def test_library_has_the_same_results(implementation, sparse):
    """Compare with the reference and the custom calls, with equal dropout masks. 83 rows give blocks of 24 and 16."""
    N, d, M, scale, dropout_rate = 83, 16, 1500, 0.25, 0.2
    B_c, B_r = io_model.block_sizes(d, M)
    assert N % B_c and N % B_r
    Q, K, V, dO = inputs(N, d)
    if sparse:
        block_mask = np.random.default_rng(1).random((-(-N // B_r), -(-N // B_c))) < 0.5
        block_mask[2] = False
        allowed, mask = np.repeat(np.repeat(block_mask, B_r, axis=0)[:N], B_c, axis=1)[:, :N], None
    else:
        block_mask, allowed, mask = None, np.tri(N, dtype=bool), io_model.causal
    key = jax.random.key(5)
    options = {"scale": scale, "mask": mask, "dropout_rate": dropout_rate, "R": io_model.generator_state(key)}
    runs = run_all(Q, K, V, dO, M, block_mask, **options)
    check(runs, library(Q, K, V, dO, scale, allowed, dropout_rate, key, implementation), 1e-11)


def test_dropout_of_another_head():
    """R contains the batch entry and the head. The mask equals the library's mask for them."""
    key, B, H, N, rate = jax.random.key(1), 2, 3, 40, 0.4
    bits = standard.random_bits(
        np.asarray(jax.random.bits(key, (1, 2), jnp.uint32)).repeat(B, 0), range(B), range(H), N, N
    )
    Z = flash.dropout_mask(io_model.generator_state(key, 1, 2), rate, slice(5, 31), slice(17, 40))
    threshold = round(rate * 32768)
    np.testing.assert_array_equal(Z, (bits[1, 2, 5:31, 17:40] >= threshold) * 32768 / (32768 - threshold))


# --- SRAM ---


@pytest.mark.parametrize(("d", "M"), [(8, 8), (8, 32), (8, 33), (16, 90), (16, 1024), (24, 1153), (9, 360)])
def test_sram_holds_a_constant_times_m(d, M):
    """Each run raises an error above its limit. This test checks the peaks."""
    peaks = {name: run.sram.peak / M for name, run in run_all(*inputs(40, d), M).items()}
    assert peaks["algorithm_0"] <= io_model.STANDARD_SRAM and peaks["algorithm_3"] <= io_model.STANDARD_SRAM
    assert max(peaks[name] for name in FORWARD[1:] if name in peaks) <= io_model.FORWARD_SRAM
    assert max(peaks["algorithm_4"], peaks["kernel_backward"], peaks["kernel_tangent"]) <= io_model.BACKWARD_SRAM
    if M == 8:  # the worst case: the constants are as small as possible
        assert peaks["algorithm_0"] > io_model.STANDARD_SRAM - 1
        assert peaks["algorithm_2"] > io_model.FORWARD_SRAM - 1
        assert peaks["algorithm_4"] > io_model.BACKWARD_SRAM - 1
    if M == 1024 and d == 16:  # M = 4d², where the paper's blocks of K, V, Q and O fill M
        B_c, B_r = io_model.block_sizes(d, M)
        assert 2 * B_c * d + 2 * B_r * d == M


def test_oversized_blocks_are_refused(monkeypatch):
    Q, K, V, dO = inputs(200, 8)
    R = io_model.generator_state(jax.random.key(0))
    O, l, m, _ = io_model.algorithm_2(Q, K, V, 64).outputs
    sizes = flash.block_sizes
    monkeypatch.setattr(flash, "block_sizes", lambda d, M: tuple(8 * size for size in sizes(d, M)))
    monkeypatch.setattr(io_model.kernels, "block_sizes", flash.block_sizes)
    tile = materialised.product_tile
    monkeypatch.setattr(materialised, "product_tile", lambda *args: tuple(2 * side for side in tile(*args)))
    for run in (
        lambda: io_model.algorithm_0(Q, K, V, 64),
        lambda: io_model.algorithm_1(Q, K, V, 64),
        lambda: io_model.algorithm_2(Q, K, V, 64),
        lambda: io_model.algorithm_4(Q, K, V, O, dO, l, m, R, 64),
        lambda: io_model.kernel_forward(Q, K, V, R, 64),
        lambda: io_model.kernel_backward(Q, K, V, O, dO, l, m, R, 64),
        lambda: io_model.kernel_tangent(Q, K, V, O, Q, K, V, l, m, R, 64),
    ):
        with pytest.raises(MemoryError, match="SRAM of"):
            run()


# --- FLOPs ---


class Counting(np.ndarray):
    """An array that counts the FLOPs of its matrix products."""

    flops = 0

    def __array_ufunc__(self, ufunc, method, *args, out=None, **options):
        plain = [np.asarray(x) if isinstance(x, Counting) else x for x in args]
        if out is not None:
            options["out"] = tuple(np.asarray(x) if isinstance(x, Counting) else x for x in out)
        if ufunc is np.matmul:
            Counting.flops += 2 * plain[0].size * plain[1].shape[-1]
        return getattr(ufunc, method)(*plain, **options)


@pytest.mark.parametrize(("N", "d", "M"), [(40, 8, 64), (37, 12, 700), (16, 8, 8)])
def test_flops(N, d, M):
    """Theorem 1: O(N²d) FLOPs. The forward has 4N²d, the backward 10N²d, or 8N²d if P is stored."""
    Q, K, V, dO = (x.view(Counting) for x in inputs(N, d))
    O, l, m, R = io_model.algorithm_2(Q, K, V, M).outputs
    P = io_model.algorithm_0(Q, K, V, M).hbm.arrays["P"].view(Counting)
    B_c, B_r = io_model.block_sizes(d, M)
    block_mask = np.random.default_rng(0).random((-(-N // B_r), -(-N // B_c))) < 0.5
    calls = {
        "algorithm_0": lambda: io_model.algorithm_0(Q, K, V, M),
        "memory_efficient_forward": lambda: io_model.memory_efficient_forward(Q, K, V),
        "algorithm_1": lambda: io_model.algorithm_1(Q, K, V, M),
        "algorithm_2": lambda: io_model.algorithm_2(Q, K, V, M),
        "algorithm_5": lambda: io_model.algorithm_5(Q, K, V, M, block_mask),
        "kernel_forward": lambda: io_model.kernel_forward(Q, K, V, R, M),
        "algorithm_3": lambda: io_model.algorithm_3(Q, K, V, P, dO, M),
        "algorithm_4": lambda: io_model.algorithm_4(Q, K, V, O, dO, l, m, R, M),
        "block_sparse_backward": lambda: io_model.block_sparse_backward(Q, K, V, O, dO, l, m, R, M, block_mask),
        "kernel_backward": lambda: io_model.kernel_backward(Q, K, V, O, dO, l, m, R, M),
        "kernel_tangent": lambda: io_model.kernel_tangent(
            Q, K, V, O, *(x.view(Counting) for x in tangents(Q, K, V)), l, m, R, M
        ),
    }
    assert set(calls) == set(io_model.ALGORITHMS)
    for name, call in calls.items():
        Counting.flops = 0
        call()
        sparsity = block_mask if "block_mask" in call.__code__.co_freevars else 1
        assert Counting.flops == io_model.flops(name, N, d, M, sparsity), name
    assert io_model.flops("algorithm_1", N, d, M) == 4 * N * N * d
    assert io_model.flops("algorithm_3", N, d, M) == 8 * N * N * d
    assert io_model.flops("algorithm_4", N, d, M) == 10 * N * N * d


# --- comparison with the paper's measurements ---


def test_figure_2():
    """GPT-2 medium (N = 1024, d = 64, 1024 heads, float16), forward and backward, B_c = 256, counted in a run.

    The paper measured 40.3 GB and 4.4 GB on an A100, including masks and dropout.
    """
    N, d, M = 1024, 64, 65536
    assert io_model.block_sizes(d, M) == (256, 64)
    runs = run_all(*inputs(N, d), M)
    traffic = {name: 1024 * io_model.in_bytes(run.hbm.reads + run.hbm.writes, "float16") for name, run in runs.items()}
    assert traffic["algorithm_0"] + traffic["algorithm_3"] == pytest.approx(26.8e9, rel=0.005)
    assert traffic["algorithm_1"] + traffic["algorithm_4"] == pytest.approx(5.69e9, rel=0.005)
    assert traffic["kernel_forward"] + traffic["kernel_backward"] == pytest.approx(4.46e9, rel=0.005)
    for name, run in runs.items():
        assert run.hbm.reads + run.hbm.writes == hbm_accesses(name, N, d, M), name


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algorithm_6", 64, 8, 64), "algorithm must be one of algorithm_0, "),
        (("algorithm_1", 0, 8, 64), "N = 0"),
        (("algorithm_1", 64, 8, 7), "d = 8, M = 7"),
        (("algorithm_0", 64, 0, 7), "d = 0, M = 7"),
        (("algorithm_1", 64, 8, 64, 0.5), "algorithm_1 is dense"),
        (("kernel_backward", 64, 8, 64, np.ones((32, 32), bool)), "kernel_backward is dense"),
        (("algorithm_5", 64, 8, 64, 1.5), r"\[0, 1\], not 1.5"),
        (("algorithm_5", 64, 8, 64, np.ones((32, 31), bool)), r"bool \[32, 32\], not bool \[32, 31\]"),
        (("algorithm_5", 64, 8, 64, np.ones((32, 32))), r"bool \[32, 32\], not float64"),
    ],
)
def test_invalid_arguments_of_formulas(arguments, message):
    for function in (io_model.reads_and_writes, hbm_accesses, io_model.flops):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def test_too_little_sram_is_refused():
    """The theorems require M >= d, which is one row."""
    Q, K, V, dO = inputs(64, 8)
    O, l, m, R = io_model.algorithm_2(Q, K, V, 8).outputs
    for run in (
        lambda: io_model.algorithm_1(Q, K, V, 7),
        lambda: io_model.algorithm_2(Q, K, V, 7),
        lambda: io_model.algorithm_4(Q, K, V, O, dO, l, m, R, 7),
        lambda: io_model.kernel_forward(Q, K, V, R, 7),
        lambda: io_model.kernel_backward(Q, K, V, O, dO, l, m, R, 7),
        lambda: io_model.kernel_tangent(Q, K, V, O, Q, K, V, l, m, R, 7),
    ):
        with pytest.raises(ValueError, match="d = 8, M = 7"):
            run()


def test_matrices_of_different_shapes_are_refused():
    Q, K, V, dO = inputs(64, 8)
    O, l, m, R = io_model.algorithm_2(Q, K, V, 64).outputs
    P = np.ones((64, 64))
    for other in (K[:40], K[:, :7], np.concatenate([K, K]), K[:, 0]):
        for run in (
            lambda K: io_model.algorithm_0(Q, K, V, 64),
            lambda K: io_model.algorithm_1(Q, K, V, 64),
            lambda K: io_model.algorithm_2(Q, K, V, 64),
            lambda K: io_model.algorithm_3(Q, K, V, P, dO, 64),
            lambda K: io_model.algorithm_4(Q, K, V, O, dO, l, m, R, 64),
            lambda K: io_model.kernel_forward(Q, K, V, R, 64),
            lambda K: io_model.kernel_backward(Q, K, V, O, dO, l, m, R, 64),
            lambda K: io_model.kernel_tangent(Q, K, V, O, Q, K, V, l, m, R, 64),
        ):
            with pytest.raises(ValueError, match=r"must all be \[N, d\] with N positive, not \(64, 8\), "):
                run(other)
    with pytest.raises(ValueError, match="N positive"):
        io_model.algorithm_0(Q[:0], Q[:0], Q[:0], 64)


def test_block_masks_of_another_shape_are_refused():
    Q, K, V, dO = inputs(64, 8)
    O, l, m, R = io_model.algorithm_2(Q, K, V, 64).outputs
    for block_mask in (np.ones((32, 33), bool), np.ones((32, 32))):
        with pytest.raises(ValueError, match=r"bool \[32, 32\], not"):
            io_model.algorithm_5(Q, K, V, 64, block_mask)
        with pytest.raises(ValueError, match=r"bool \[32, 32\], not"):
            io_model.block_sparse_backward(Q, K, V, O, dO, l, m, R, 64, block_mask)

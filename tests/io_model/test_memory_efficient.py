"""The memory-efficient forward of appendix B.1: exact, linear memory, quadratic HBM accesses for every M."""

import numpy as np
import pytest

from jax_flash import io_model


@pytest.mark.parametrize(("N", "d"), [(1, 8), (2, 8), (23, 5), (40, 16)])
def test_results_and_counts(N, d):
    Q, K, V = np.random.default_rng(N).normal(size=(3, N, d))
    (O,), hbm, sram = io_model.memory_efficient_forward(Q, K, V)
    np.testing.assert_allclose(O, io_model.algorithm_0(Q, K, V, M=N * d).outputs[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(hbm.arrays["L"][:, 0], np.exp(Q @ K.T).sum(axis=1), rtol=1e-13)
    reads, writes = hbm.reads, hbm.writes
    assert (reads, writes) == (2 * N * d + N + 3 * N**2 * d, N * d + N)
    for M in {d, N * d}:
        assert (reads, writes) == io_model.reads_and_writes("memory_efficient_forward", N, d, M)
    # Extra memory: L in HBM, O(N), and the rows of one query and one key in SRAM, O(d).
    assert hbm.allocated - N * d == io_model.extra_memory("memory_efficient_forward", N) == N
    assert sram.peak == 4 * d + 2


def test_only_flash_attention_benefits_from_more_sram():
    """Both need linear memory, but here "the number of HBM accesses is still quadratic", even for the largest M."""
    N, d = 4096, 64
    two_passes, flash = (
        [io_model.hbm_accesses(algorithm, N, d, M) for M in (d, 64 * d, N * d)]
        for algorithm in ("memory_efficient_forward", "algorithm_1")
    )
    assert two_passes[0] == two_passes[-1] > 3 * N**2 * d
    assert two_passes[0] < flash[0] and two_passes[1] > 10 * flash[1] and two_passes[-1] > 500 * flash[-1]


def test_different_shapes_are_refused():
    x = np.ones((4, 8))
    with pytest.raises(ValueError, match=r"must all be \[N, d\]"):
        io_model.memory_efficient_forward(x, x[:3], x)

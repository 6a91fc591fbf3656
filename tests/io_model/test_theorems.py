"""The theorems about the counts, comparisons with the paper's measurements, and the document that shows both."""

import itertools
import math
import pathlib
import re
import shlex

import numpy as np
import pytest

from jax_flash import io_model
from jax_flash.__main__ import main
from jax_flash.io_model import hbm_accesses

LINEAR = tuple(a for a in io_model.ALGORITHMS if a not in ("algorithm_0", "algorithm_3"))


# --- the theorems ---

GRID = [
    (N, d, M)
    for d in (8, 9, 16, 23, 64, 100, 128, 256)
    for N in (d, d + 1, 3 * d + 5, 512, 1000, 4096, 65536)
    if d <= N
    for M in sorted(
        {min(N * d, k * d + e) for k in range(1, 30) for e in (0, 1)}
        | {int(M) for M in np.geomspace(d, N * d, 40)}
        | {min(N * d, max(d, d * d + e)) for e in (-1, 0, 1)}
    )
]


@pytest.mark.parametrize("algorithm", io_model.ALGORITHMS)
def test_accesses_are_within_constants(algorithm):
    """Theorems 2 and 5 and Proposition 4: within the stated constants for all d <= M <= Nd."""
    low, high = io_model.CONSTANTS[algorithm]
    shares = (0, 0.01, 0.1, 0.5, 1) if algorithm in ("algorithm_5", "block_sparse_backward") else (1,)
    ratios = [
        hbm_accesses(algorithm, *problem, s) / io_model.theta(algorithm, *problem, s)
        for problem in GRID
        for s in shares
    ]
    assert low <= min(ratios) < 1.1 * low
    assert 0.7 * high < max(ratios) <= high


def test_theta():
    """The expressions equal the paper's (for standard attention with M >= d²)."""
    N, d, M = 512, 64, 8192
    assert io_model.theta("algorithm_0", N, d, M) == io_model.theta("algorithm_3", N, d, M) == N * d + N**2
    for algorithm in ("algorithm_1", "algorithm_2", "algorithm_4", "kernel_forward", "kernel_backward"):
        assert io_model.theta(algorithm, N, d, M) == N**2 * d**2 / M
    for algorithm in ("algorithm_5", "block_sparse_backward"):
        assert io_model.theta(algorithm, N, d, M, 0.125) == N * d + N**2 * d**2 / M * 0.125


def test_standard_attention_needs_m_of_d_squared():
    """For M = d the accesses of standard attention exceed any constant times Nd + N². The products grow like √d."""
    excess = [hbm_accesses("algorithm_0", 4096, d, d) / (4096 * d + 4096**2) for d in (16, 64, 256)]
    assert excess[0] > 1.5 * io_model.CONSTANTS["algorithm_0"][1]
    assert excess[1] / excess[0] > 1.7 and excess[2] / excess[1] > 1.7
    at_d_squared = [hbm_accesses("algorithm_0", 4096, d, d * d) / (4096 * d + 4096**2) for d in (16, 64, 256)]
    assert max(at_d_squared) < io_model.CONSTANTS["algorithm_0"][1]


def exponents(algorithm, problems):
    """Return the exponents of N, d and M, by least squares of the logarithms."""
    logs = np.log([(N, d, M, hbm_accesses(algorithm, N, d, M)) for N, d, M in problems])
    fit, *_ = np.linalg.lstsq(np.c_[logs[:, :3], np.ones(len(logs))], logs[:, 3])
    return fit[:3]


def test_exponents_by_regression():
    """N²d²/M for FlashAttention and N² for standard attention, where these terms dominate. M is no multiple of 4d."""
    small = [(N, d, k * d + 3) for N in (2**14, 30011, 2**17) for d in (64, 128) for k in (50, 100, 300)]
    for algorithm in ("algorithm_1", "algorithm_2", "algorithm_4", "kernel_forward", "kernel_backward"):
        np.testing.assert_allclose(exponents(algorithm, small), (2, 2, -1), atol=0.05, err_msg=algorithm)
    large = [(N, d, M) for N in (2**14, 30011, 2**17) for d in (16, 32) for M in (2**18, 2**20, 2**21)]
    for algorithm in ("algorithm_0", "algorithm_3"):
        np.testing.assert_allclose(exponents(algorithm, large), (2, 0, 0), atol=0.05, err_msg=algorithm)


@pytest.mark.parametrize(("algorithm", "constants"), [("algorithm_5", (3, 12)), ("block_sparse_backward", (7, 20))])
def test_block_sparse_accesses_by_regression(algorithm, constants):
    """Proposition 4: a Nd + b N²d²s/M and no other term. As T_c = 4Nd/M, b is four times the accesses of one pass."""
    d = 512  # makes the vectors, 1/d of a matrix, small
    problems = [(N, 4 * d * k, s) for N in (2**12, 2**14) for k in (64, 256) for s in (0.01, 0.1, 0.5, 1)]
    counts = np.array([hbm_accesses(algorithm, N, d, M, s) for N, M, s in problems])
    terms = np.array([(N * d, N**2 * d**2 * s / M) for N, M, s in problems])
    fit, *_ = np.linalg.lstsq(terms / counts[:, None], np.ones(len(counts)))
    np.testing.assert_allclose(fit, constants, rtol=0.01)
    np.testing.assert_allclose(terms @ fit, counts, rtol=0.01)


def test_fraction_of_blocks_gives_the_mean_count():
    N, d, M = 21, 8, 320
    B_c, B_r = io_model.block_sizes(d, M)
    T_r, T_c = -(-N // B_r), -(-N // B_c)
    assert (N % B_c, N % B_r) == (1, 5) and T_r * T_c == 9
    for nonzero in (0, 1, 4, 9):
        masks = np.zeros((math.comb(9, nonzero), 9), bool)
        for mask, indices in zip(masks, itertools.combinations(range(9), nonzero), strict=True):
            mask[list(indices)] = True
        for count in (hbm_accesses, io_model.flops):
            for algorithm in ("algorithm_5", "block_sparse_backward"):
                mean = np.mean([count(algorithm, N, d, M, mask.reshape(T_r, T_c)) for mask in masks])
                assert count(algorithm, N, d, M, nonzero / 9) == pytest.approx(mean, rel=1e-12)


def test_extra_memory_is_linear():
    """Theorem 1: O(N) in addition to inputs and output. `test_results_and_counts` checks the formula's values."""
    for algorithm in io_model.ALGORITHMS:
        ratio = io_model.extra_memory(algorithm, 20000) / max(1, io_model.extra_memory(algorithm, 10000))
        assert ratio <= 2 if algorithm in LINEAR else ratio == 4
        assert io_model.extra_memory(algorithm, 10000) <= 20004 or algorithm not in LINEAR


def test_kernel_loop_order_saves_accesses():
    """The kernels always have fewer accesses: by 3/2 forward and 5/4 backward if the passes dominate."""
    for problem in GRID:
        assert hbm_accesses("kernel_forward", *problem) < hbm_accesses("algorithm_2", *problem)
        assert hbm_accesses("kernel_backward", *problem) < hbm_accesses("algorithm_4", *problem)
    long = (2**20, 128, 2**15)
    assert hbm_accesses("algorithm_2", *long) / hbm_accesses("kernel_forward", *long) == pytest.approx(1.5, rel=0.02)
    assert hbm_accesses("algorithm_4", *long) / hbm_accesses("kernel_backward", *long) == pytest.approx(1.25, rel=0.02)


# --- comparison with the paper's measurements ---

KiB = 1024


def forward_and_backward(forward, backward, N, d, M, s=1):
    return hbm_accesses(forward, N, d, M, s) + hbm_accesses(backward, N, d, M, s)


def access_ratio(N, d, M):
    """Return the ratio of accesses, standard attention to FlashAttention, forward and backward."""
    standard = forward_and_backward("algorithm_0", "algorithm_3", N, d, M)
    return standard / forward_and_backward("algorithm_1", "algorithm_4", N, d, M)


@pytest.mark.parametrize(
    ("M", "ratio_1024", "ratio_64k"),
    [(100 * KiB // 4, 2.22, 3.00), (100 * KiB // 2, 3.55, 5.69), (100 * KiB, 5.83, 9.16)],
    ids=["100 KiB of f32", "100 KiB of f16", "100 Ki elements"],
)
def test_access_ratios(M, ratio_1024, ratio_64k):
    """d = 64. The paper measured 40.3 GB / 4.4 GB = 9.2 on a GPU, with masks and dropout, for N = 1024."""
    assert access_ratio(1024, 64, M) == pytest.approx(ratio_1024, abs=0.005)
    assert access_ratio(65536, 64, M) == pytest.approx(ratio_64k, abs=0.005)


def test_flash_attention_needs_m_of_twice_d_squared():
    """With smaller M standard attention has fewer accesses."""
    for N, d in itertools.product((1024, 4096, 16384, 65536), (64, 128)):
        assert access_ratio(N, d, int(1.6 * d * d)) < 1 < access_ratio(N, d, int(2.2 * d * d))


# --- docs/io-complexity.md ---

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/io-complexity.md").read_text()


def test_documentation_matches_command(capsys, monkeypatch, tmp_path):
    examples = re.findall(r"\$ python -m jax_flash (io .*)\n([^$]*?)```", DOCUMENT)
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for command, output in examples:
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out
        assert [line.strip() for line in printed.split("\n")] == [line.strip() for line in output.split("\n")]


def test_documentation_examples(capsys):
    """The Python examples, and the tables that compare with the paper."""
    code = "".join(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL))
    exec(code, {})
    comments = [comment.partition(",")[0] for comment in re.findall(r"  # (.*)", code)]
    assert capsys.readouterr().out.split("\n")[:-1] == comments

    sizes = (25600, 51200, 102400)
    for M in sizes:
        ratios = " | ".join(f"{access_ratio(N, 64, M):.1f}" for N in (1024, 65536))
        assert f"(M = {M}) | {io_model.block_sizes(64, M)[0]} | {ratios} |" in DOCUMENT
    rows = {"FlashAttention": "algorithm_1", "in the kernels' order": "kernel_forward", "standard": "algorithm_0"}
    for title, algorithm in rows.items():
        traffic = [1024 * 2e-9 * hbm_accesses(algorithm, 1024, 64, 4 * 64 * B_c) for B_c in (64, 128, 256, 512)]
        assert f"| {title} | {' | '.join(f'{x:#.3g}' for x in traffic)} |" in DOCUMENT
    for algorithm in (
        "algorithm_1",
        "algorithm_4",
        "algorithm_5",
        "block_sparse_backward",
        "algorithm_0",
        "algorithm_3",
        "kernel_tangent",
    ):
        low, high = io_model.CONSTANTS[algorithm]
        assert re.search(rf"\b{low} (and|to) {high}\b", DOCUMENT), algorithm

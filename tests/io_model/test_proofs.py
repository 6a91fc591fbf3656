"""Two proofs step by step: the induction of Theorem 1 (appendix C), and Proposition 3."""

import itertools

import jax
import numpy as np
import pytest

from jax_flash import io_model
from jax_flash.io_model import flash, hbm_accesses

FORWARD = ("algorithm_0", "memory_efficient_forward", "algorithm_1", "algorithm_2", "algorithm_5", "kernel_forward")

# --- Theorem 1: the contents of HBM after each iteration of the outer loop ---


def by_definition(S, V, Z):
    """Compute O, ℓ and m over the columns of S in one step. Empty rows are 0, 0 and -inf."""
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.where(m == -np.inf, 0, m))
    l = P.sum(axis=1, keepdims=True)
    return {"O": (P / np.where(l == 0, 1, l) * Z) @ V, "l": l, "m": m}


def check_invariant(run, S, V, Z, d, M):
    """Check that O^(j), ℓ^(j) and m^(j) are those of attention to the first j blocks of columns, for every j.

    Args:
      run: runs the algorithm with an `after_j`.
      S: the masked scores, [N, N].
      Z: the factors of dropout, [N, N].
    """
    N, ends = len(S), []

    def after_j(j, hbm):
        ends.append(j.stop)
        for name, expected in by_definition(S[:, : j.stop], V[: j.stop], Z[:, : j.stop]).items():
            np.testing.assert_allclose(
                hbm.arrays[name], expected, rtol=1e-12, atol=1e-13, err_msg=f"{name} of the first {j.stop} columns"
            )

    run(after_j)
    B_c, _ = io_model.block_sizes(d, M)
    assert ends == [*range(B_c, N, B_c), N]


@pytest.mark.parametrize(("N", "d", "M"), [(40, 8, 64), (37, 12, 700), (33, 16, 1100), (9, 8, 8), (20, 8, 5000)])
def test_invariant_of_algorithm_1(N, d, M):
    Q, K, V = np.random.default_rng(N).normal(size=(3, N, d))
    check_invariant(
        lambda after_j: io_model.algorithm_1(Q, K, V, M, after_j=after_j), Q @ K.T, V, np.ones((N, N)), d, M
    )


@pytest.mark.parametrize("dropout_rate", [0.0, 0.4])
@pytest.mark.parametrize("mask", [None, "causal", "some", "blocks"])
def test_invariant_of_algorithms_2_and_5(mask, dropout_rate):
    """With scale, mask and dropout. Some rows see no key in the first blocks, or in any block."""
    N, d, M, scale = 37, 12, 300, 0.3
    generator = np.random.default_rng(1)
    Q, K, V = generator.normal(size=(3, N, d))
    allowed, algorithm, options = np.ones((N, N), bool), io_model.algorithm_2, {}
    if mask == "causal":
        allowed, options["mask"] = np.tri(N, dtype=bool), io_model.causal
    elif mask == "some":
        allowed = generator.random((N, N)) < 0.3
        allowed[::5] = False
        options["mask"] = lambda rows, columns: allowed[rows, columns]
    elif mask == "blocks":
        B_c, B_r = io_model.block_sizes(d, M)
        block_mask = generator.random((-(-N // B_r), -(-N // B_c))) < 0.4
        allowed = block_mask.repeat(B_r, axis=0)[:N].repeat(B_c, axis=1)[:, :N]
        algorithm, options["block_mask"] = io_model.algorithm_5, block_mask
    R = io_model.generator_state(jax.random.key(2))
    options |= {"scale": scale, "dropout_rate": dropout_rate, "R": R}
    check_invariant(
        lambda after_j: algorithm(Q, K, V, M, after_j=after_j, **options),
        np.where(allowed, scale * (Q @ K.T), -np.inf),
        V,
        np.ones((N, N)) * flash.dropout_mask(R, dropout_rate, slice(0, N), slice(0, N)),
        d,
        M,
    )


# --- Proposition 3: no algorithm has o(N²d²/M) accesses for all M in [d, Nd] ---


def inputs_and_outputs(algorithm):
    """Return the number of matrices [N, d] read and written.

    A forward has Q, K, V and O, a backward Q, K, V, dO, dQ, dK and dV, and a tangent all of these.
    """
    return 8 if algorithm == "kernel_tangent" else 4 if algorithm in FORWARD else 7


def test_every_input_must_be_read():
    """Some element of O depends on each element of Q, K and V, so exact attention reads all 3Nd."""
    N, d = 3, 8
    inputs = np.random.default_rng(0).normal(size=(3, N, d))
    (O,), *_ = io_model.algorithm_0(*inputs, M=N * d)
    for index in np.ndindex(inputs.shape):
        other = inputs.copy()
        other[index] += 1
        assert np.abs(io_model.algorithm_0(*other, M=N * d).outputs[0] - O).max() > 1e-3, index


@pytest.mark.parametrize("algorithm", io_model.ALGORITHMS)
def test_accesses_at_m_of_nd(algorithm):
    """For M = Nd, N²d²/M is Nd. An algorithm with o(N²d²/M) accesses would not even read its inputs."""
    for N, d in itertools.product((256, 1000, 65536), (8, 64, 100, 256)):
        M = N * d
        reads, writes = io_model.reads_and_writes(algorithm, N, d, M)
        outputs = 1 if algorithm in (*FORWARD, "kernel_tangent") else 3
        assert writes >= outputs * N * d
        assert reads >= (inputs_and_outputs(algorithm) - outputs) * N * d
        assert (reads + writes) / (N**2 * d**2 / M) >= inputs_and_outputs(algorithm)


@pytest.mark.parametrize(
    "algorithm", ["algorithm_1", "algorithm_2", "kernel_forward", "algorithm_4", "kernel_backward", "kernel_tangent"]
)
def test_flash_attention_is_within_a_constant_of_the_bound(algorithm):
    """Accesses are at most five times inputs and outputs for M = Nd, and within a constant of N²d²/M for every M."""
    _, constant = io_model.CONSTANTS[algorithm]
    for N, d in itertools.product((256, 1000, 65536), (8, 64, 100, 256)):
        assert hbm_accesses(algorithm, N, d, N * d) <= 5 * inputs_and_outputs(algorithm) * N * d
        for M in np.geomspace(d, N * d, 200).astype(int).tolist():
            assert hbm_accesses(algorithm, N, d, M) <= constant * N**2 * d**2 / M


def test_fewer_accesses_for_some_m():
    """The bound holds only for all M: standard attention needs less than N²d²/M at M = d, and far more at M = Nd."""
    N, d = 65536, 256
    assert hbm_accesses("algorithm_0", N, d, d) < 0.5 * N**2 * d**2 / d
    assert hbm_accesses("algorithm_0", N, d, N * d) > 100 * N * d

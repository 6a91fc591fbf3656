"""Algorithms 1, 2, 4 and 5: FlashAttention as in the paper, with its names and its line numbers.

All arrays are for one head. Q, K, V, O and their gradients are [N, d]. Vectors such as ℓ and m are columns [N, 1].
Algorithm 2 is Algorithm 5 without a block mask (lines 9 to 16 are the same). The block-sparse backward is Algorithm 4
with a block mask.

Size of SRAM: the blocks of K, V, Q and O fill M. S_ij and the statistics need more, and ⌈M/4d⌉ rounds up. With
B_r <= B_c = ⌈M/4d⌉ and the buffers of the code below, the forward holds at most
2 B_c d + 2 B_r d + 2 B_r B_c + 6 B_r + 4 elements, and the backward 4 B_c d + 4 B_r d + 6 B_r B_c + 3 B_r + 4. For
d >= 8:

* B_c = 1 (M <= 4d): 4d + 12 and 8d + 13 elements. Because M >= d, this is at most 5.5M and 9.7M.
* B_c >= 2: M > 4d (B_c - 1) >= 2d B_c, so B_r B_c <= d B_c < M/2. This is less than 3.5M and 7.4M.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from numpy.typing import ArrayLike

from jax_flash import dropout
from jax_flash.io_model.memory import HBM, SRAM, Array, Run, blocks, shape

# The capacity of SRAM in units of M, for d >= 8.
FORWARD_SRAM = 6
BACKWARD_SRAM = 10

# mask(rows [R, 1], columns [C]) -> bool [R, C], true: may attend. A function of positions: it costs no accesses.
Mask = Callable[[Array, Array], Array]

# after_j(j, hbm): called with the block of columns that the outer loop is done with, to look at `hbm.arrays`.
Observer = Callable[[slice, HBM], None]


def block_sizes(d: int, M: int) -> tuple[int, int]:
    """Return B_c = ⌈M/4d⌉, the rows in a block of K and V, and B_r = min(⌈M/4d⌉, d), the rows in a block of Q and O.

    Raises:
      ValueError: unless 1 <= d <= M.
    """
    if not 1 <= d <= M:
        raise ValueError(f"1 <= d <= M must hold, not d = {d}, M = {M}")
    B_c = -(-M // (4 * d))
    return B_c, min(B_c, d)


def algorithm_1(Q: Array, K: Array, V: Array, M: int, *, after_j: Observer | None = None) -> Run:
    """Algorithm 1, FlashAttention: O = softmax(QKᵀ)V.

    Args:
      Q, K, V: arrays [N, d].
      M: size of SRAM in elements. The algorithm holds at most 6M.
      after_j: function (columns, hbm) that is called after each iteration of the outer loop.

    Returns:
      O [N, d].
    """
    N, d = shape(Q, K, V)
    hbm, sram = HBM(Q=Q, K=K, V=V), SRAM(FORWARD_SRAM * M)
    B_c, B_r = block_sizes(d, M)  # 1
    hbm.initialize(O=np.zeros((N, d)), l=np.zeros((N, 1)), m=np.full((N, 1), -np.inf))  # 2
    columns, rows = blocks(N, B_c), blocks(N, B_r)  # 3, 4
    for j in columns:  # 5
        sram.K, sram.V = hbm["K", j], hbm["V", j]  # 6: load K_j, V_j
        for i in rows:  # 7
            sram.Q, sram.O, sram.l, sram.m = (hbm[x, i] for x in ("Q", "O", "l", "m"))  # 8: load Q_i, O_i, ℓ_i, m_i
            sram.S = sram.Q @ sram.K.T  # 9
            sram.m_tilde = sram.S.max(axis=1, keepdims=True)  # 10
            sram.P_tilde = np.exp(sram.S - sram.m_tilde)
            sram.l_tilde = sram.P_tilde.sum(axis=1, keepdims=True)
            sram.m_new = np.maximum(sram.m, sram.m_tilde)  # 11
            sram.l_new = np.exp(sram.m - sram.m_new) * sram.l + np.exp(sram.m_tilde - sram.m_new) * sram.l_tilde
            hbm["O", i] = (  # 12: write O_i
                sram.l * np.exp(sram.m - sram.m_new) * sram.O
                + np.exp(sram.m_tilde - sram.m_new) * (sram.P_tilde @ sram.V)
            ) / sram.l_new
            hbm["l", i], hbm["m", i] = sram.l_new, sram.m_new  # 13: write ℓ_i, m_i
        if after_j:
            after_j(j, hbm)
    return Run((hbm.arrays["O"],), hbm, sram)  # 16


def algorithm_2(
    Q: Array,
    K: Array,
    V: Array,
    M: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    R: ArrayLike = (0, 0, 0, 0),
    after_j: Observer | None = None,
) -> Run:
    """Algorithm 2, the forward with scale, mask and dropout: `algorithm_5` without a block mask."""
    return algorithm_5(Q, K, V, M, scale=scale, mask=mask, dropout_rate=dropout_rate, R=R, after_j=after_j)


def algorithm_5(
    Q: Array,
    K: Array,
    V: Array,
    M: int,
    block_mask: Array | None = None,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    R: ArrayLike = (0, 0, 0, 0),
    after_j: Observer | None = None,
) -> Run:
    """Algorithm 5, the block-sparse forward: O = dropout(softmax(mask(τQKᵀ)))V over the non-zero blocks.

    Args:
      Q, K, V: arrays [N, d].
      M: size of SRAM in elements. The algorithm holds at most 6M.
      block_mask: bool array [T_r, T_c], M_ij in the paper. It is part of the program, so reading it is not counted.
      scale: τ.
      mask: function of rows and columns. True means that the row may attend to the column.
      dropout_rate: p_drop.
      R: state of the random number generator, see `generator_state`.
      after_j: function (columns, hbm) that is called after each iteration of the outer loop.

    Returns:
      O [N, d], ℓ and m [N, 1], and R. A row that sees no column has O = 0, ℓ = 0 and m = -inf.
    """
    N, d = shape(Q, K, V)
    hbm, sram = HBM(Q=Q, K=K, V=V), SRAM(FORWARD_SRAM * M)
    sram.R = np.asarray(R, np.uint32)
    hbm.initialize(R=sram.R)  # 1: save R
    B_c, B_r = block_sizes(d, M)
    hbm.initialize(O=np.zeros((N, d)), l=np.zeros((N, 1)), m=np.full((N, 1), -np.inf))  # 2
    columns, rows = blocks(N, B_c), blocks(N, B_r)  # 3, 4
    nonzero = nonzero_blocks(block_mask, len(rows), len(columns))
    for j in columns:  # 5
        sram.K, sram.V = hbm["K", j], hbm["V", j]  # 6: load K_j, V_j
        for i in rows:  # 7
            if nonzero[i.start // B_r, j.start // B_c]:  # 8
                sram.Q, sram.O, sram.l, sram.m = (hbm[x, i] for x in ("Q", "O", "l", "m"))  # 9: load Q_i, O_i, ℓ_i, m_i
                sram.S = scale * (sram.Q @ sram.K.T)  # 10
                sram.S = masked(sram.S, mask, i, j)  # 11
                sram.m_tilde = sram.S.max(axis=1, keepdims=True)  # 12
                sram.P_tilde = exp_minus(sram.S, sram.m_tilde)
                sram.l_tilde = sram.P_tilde.sum(axis=1, keepdims=True)
                sram.m_new = np.maximum(sram.m, sram.m_tilde)  # 13
                sram.l_new = exp_minus(sram.m, sram.m_new) * sram.l + exp_minus(sram.m_tilde, sram.m_new) * sram.l_tilde
                sram.P_tilde = sram.P_tilde * dropout_mask(sram.R, dropout_rate, i, j)  # 14
                hbm["O", i] = divide(  # 15: write O_i
                    sram.l * exp_minus(sram.m, sram.m_new) * sram.O
                    + exp_minus(sram.m_tilde, sram.m_new) * (sram.P_tilde @ sram.V),
                    sram.l_new,
                )
                hbm["l", i], hbm["m", i] = sram.l_new, sram.m_new  # 16: write ℓ_i, m_i
        if after_j:
            after_j(j, hbm)
    return Run(tuple(hbm.arrays[x] for x in ("O", "l", "m", "R")), hbm, sram)  # 20


def algorithm_4(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    dO: Array,
    l: Array,
    m: Array,
    R: Array,
    M: int,
    block_mask: Array | None = None,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Run:
    """Algorithm 4, the backward.

    Args:
      Q, K, V, O, dO: arrays [N, d].
      l, m, R: results of the forward: arrays [N, 1], and the state of the random number generator.
      M: size of SRAM in elements. The algorithm holds at most 10M.
      block_mask, scale, mask, dropout_rate: as in the forward.

    Returns:
      dQ, dK, dV [N, d].
    """
    N, d = shape(Q, K, V, O, dO)
    hbm, sram = HBM(Q=Q, K=K, V=V, O=O, dO=dO, l=l, m=m, R=R), SRAM(BACKWARD_SRAM * M)
    sram.R = hbm["R", :]  # 1
    B_c, B_r = block_sizes(d, M)  # 2
    columns, rows = blocks(N, B_c), blocks(N, B_r)  # 3, 4
    nonzero = nonzero_blocks(block_mask, len(rows), len(columns))
    hbm.initialize(dQ=np.zeros((N, d)), dK=np.zeros((N, d)), dV=np.zeros((N, d)))  # 5
    for j in columns:  # 6
        sram.K, sram.V = hbm["K", j], hbm["V", j]  # 7: load K_j, V_j
        sram.dK, sram.dV = np.zeros_like(sram.K), np.zeros_like(sram.V)  # 8
        for i in rows:  # 9
            if nonzero[i.start // B_r, j.start // B_c]:  # 8 of Algorithm 5
                sram.Q, sram.O, sram.dO = (hbm[x, i] for x in ("Q", "O", "dO"))  # 10: load Q_i, O_i, dO_i,
                sram.dQ, sram.l, sram.m = (hbm[x, i] for x in ("dQ", "l", "m"))  # dQ_i, ℓ_i, m_i
                sram.S = scale * (sram.Q @ sram.K.T)  # 11
                sram.S = masked(sram.S, mask, i, j)  # 12
                sram.P = divide(exp_minus(sram.S, sram.m), sram.l)  # 13
                sram.Z = dropout_mask(sram.R, dropout_rate, i, j)  # 14
                sram.P_dropped = sram.P * sram.Z  # 15
                sram.dV += sram.P_dropped.T @ sram.dO  # 16
                sram.dP = sram.dO @ sram.V.T  # 17
                sram.dP = sram.dP * sram.Z  # 18
                sram.D = (sram.dO * sram.O).sum(axis=1, keepdims=True)  # 19
                sram.dS = sram.P * (sram.dP - sram.D)  # 20
                hbm["dQ", i] = sram.dQ + scale * (sram.dS @ sram.K)  # 21: write dQ_i
                sram.dK += scale * (sram.dS.T @ sram.Q)  # 22
        hbm["dK", j], hbm["dV", j] = sram.dK, sram.dV  # 24: write dK_j, dV_j
    return Run((hbm.arrays["dQ"], hbm.arrays["dK"], hbm.arrays["dV"]), hbm, sram)  # 26


def block_sparse_backward(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    dO: Array,
    l: Array,
    m: Array,
    R: Array,
    M: int,
    block_mask: Array,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Run:
    """Backward of Algorithm 5: `algorithm_4` over the non-zero blocks. The paper implies this algorithm."""
    return algorithm_4(Q, K, V, O, dO, l, m, R, M, block_mask, scale=scale, mask=mask, dropout_rate=dropout_rate)


# --- parts of lines 11 to 15, which kernels.py shares ---


def nonzero_blocks(block_mask: Array | None, T_r: int, T_c: int) -> Array:
    """Return M_ij, bool [T_r, T_c]. Without a block mask all entries are true."""
    if block_mask is None:
        return np.ones((T_r, T_c), bool)
    if block_mask.shape != (T_r, T_c) or block_mask.dtype != bool:
        raise ValueError(f"block_mask must be bool {[T_r, T_c]}, not {block_mask.dtype} {list(block_mask.shape)}")
    return block_mask


def causal(rows: Array, columns: Array) -> Array:
    """Return the causal mask: row i may attend to columns up to i."""
    return columns <= rows


def masked(S: Array, mask: Mask | None, i: slice, j: slice) -> Array:
    """Return S_ij with -inf in masked entries."""
    if mask is None:
        return S
    return np.where(mask(np.arange(i.start, i.stop)[:, None], np.arange(j.start, j.stop)), S, -np.inf)


def exp_minus(x: Array, m: Array) -> Array:
    """Return exp(x - m), and 0 where m = -inf. Such rows have seen no column yet. They do not occur in the paper."""
    return np.exp(x - np.where(m == -np.inf, 0.0, m))


def divide(x: Array, l: Array) -> Array:
    """Return diag(ℓ)⁻¹ x, and 0 in rows that see no column."""
    return x / np.where(l == 0, 1.0, l)


def generator_state(key: jax.Array, batch_id: int = 0, head_id: int = 0) -> Array:
    """Return R, uint32 [4]: the two words that the library draws from a JAX key, the batch index and the head index.

    The generator is counter-based. R and the position of an entry give its random bits, and R never changes.
    """
    return np.array([*np.asarray(dropout.seed_from_key(key, 1))[0], batch_id, head_id], np.uint32)


def dropout_mask(R: Array, dropout_rate: float, i: slice, j: slice) -> Array:
    """Return Z_ij, the library's dropout mask: 1 / (1 - p_drop) for kept entries of rows i and columns j, else 0."""
    threshold = dropout.threshold(dropout_rate)
    if not threshold:
        return np.ones(())
    top, left = (x.start // dropout.TILE * dropout.TILE for x in (i, j))
    bits = np.asarray(_random_bits(R, _room(i.stop - top), _room(j.stop - left), top, left))[0, 0]
    return dropout.keep_scale(threshold) * (
        bits[i.start - top : i.stop - top, j.start - left : j.stop - left] >= threshold
    )


def _room(length: int) -> int:
    """Return the next power of two. It limits the number of shapes to compile for."""
    return 1 << (length - 1).bit_length()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(R: jax.Array, rows: int, columns: int, top: jax.Array, left: jax.Array) -> jax.Array:
    return dropout.random_bits(R[None, :2], R[2:3], R[3:], (rows, columns), top, left)

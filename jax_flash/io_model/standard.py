"""Algorithms 0 and 3: standard attention, with the N×N matrices in HBM.

The paper does not specify how matrices are streamed "by blocks". Here every product keeps the largest possible tile of
its result in SRAM, which is optimal up to a constant (Hong and Kung, STOC 1981).
"""

from __future__ import annotations

import math

import numpy as np

from jax_flash.io_model.memory import HBM, SRAM, Array, Run, blocks, shape

# The capacity of SRAM in units of M. A product needs three tiles of at most M elements each. The softmax needs less:
# two blocks and the statistics of their rows, 2M + √M.
STANDARD_SRAM = 3


def algorithm_0(Q: Array, K: Array, V: Array, M: int) -> Run:
    """Algorithm 0, standard attention: O = softmax(QKᵀ)V.

    Args:
      Q, K, V: arrays [N, d].
      M: size of SRAM in elements. The algorithm holds at most 3M.

    Returns:
      O [N, d]. S and P [N, N] stay in HBM. Algorithm 3 takes P from `run.hbm.arrays["P"]`.
    """
    N, d = shape(Q, K, V)
    hbm, sram = HBM(Q=Q, K=K, V=V), SRAM(STANDARD_SRAM * M)
    hbm.allocate(S=(N, N), P=(N, N), O=(N, d))
    _multiply(hbm, sram, M, "S", "Q", "K.T")  # 1: load Q, K by blocks, compute S = QKᵀ, write S
    _softmax(hbm, sram, M)  # 2: read S, compute P = softmax(S), write P
    _multiply(hbm, sram, M, "O", "P", "V")  # 3: load P and V by blocks, compute O = PV, write O
    return Run((hbm.arrays["O"],), hbm, sram)  # 4


def algorithm_3(Q: Array, K: Array, V: Array, P: Array, dO: Array, M: int) -> Run:
    """Algorithm 3, the backward of standard attention.

    Args:
      Q, K, V, dO: arrays [N, d].
      P: array [N, N], saved by the forward.
      M: size of SRAM in elements. The algorithm holds at most 3M.

    Returns:
      dQ, dK, dV [N, d].
    """
    N, d = shape(Q, K, V, dO)
    hbm, sram = HBM(Q=Q, K=K, V=V, P=P, dO=dO), SRAM(STANDARD_SRAM * M)
    hbm.allocate(dP=(N, N), dS=(N, N), dQ=(N, d), dK=(N, d), dV=(N, d))
    _multiply(hbm, sram, M, "dV", "P.T", "dO")  # 1: load P, dO by blocks, compute dV = PᵀdO, write dV
    _multiply(hbm, sram, M, "dP", "dO", "V.T")  # 2: load dO, V by blocks, compute dP = dO Vᵀ, write dP
    _softmax_gradient(hbm, sram, M)  # 3: read P, dP, compute dS_ij = P_ij (dP_ij - Σ_l P_il dP_il), write dS
    _multiply(hbm, sram, M, "dQ", "dS", "K")  # 4: load dS and K by blocks, compute dQ = dS K, write dQ
    _multiply(hbm, sram, M, "dK", "dS.T", "Q")  # 5: load dS and Q by blocks, compute dK = dSᵀQ, write dK
    return Run((hbm.arrays["dQ"], hbm.arrays["dK"], hbm.arrays["dV"]), hbm, sram)  # 6


def product_tile(rows: int, columns: int, M: int) -> tuple[int, int]:
    """Return the rows and columns of the product tile that stays in SRAM.

    The tile has at most M elements and is as square as the result allows. The tiles of the two factors have at most M
    elements each.
    """
    tile_columns = min(columns, math.isqrt(M))
    return min(rows, M // tile_columns), tile_columns


def softmax_block(N: int, M: int) -> tuple[int, int]:
    """Return the rows and columns of a softmax's block: whole rows of N if one fits, else part of a row."""
    return max(1, min(N, M // N)), min(N, M)


def _multiply(hbm: HBM, sram: SRAM, M: int, C: str, A: str, B: str) -> None:
    """Compute C = AB by tiles of C. A name that ends in ".T" refers to the transposed matrix."""
    a, b, c = (hbm.arrays[name.removesuffix(".T")] for name in (A, B, C))
    (rows, columns), inner = c.shape, a.size // c.shape[0]
    assert inner == b.size // columns
    tile_rows, tile_columns = product_tile(rows, columns, M)
    for i in blocks(rows, tile_rows):
        for j in blocks(columns, tile_columns):
            sram.C = np.zeros((i.stop - i.start, j.stop - j.start))
            for k in blocks(inner, M // max(tile_rows, tile_columns)):
                sram.A = hbm[A, i, k] if A in hbm.arrays else hbm[A[:-2], k, i].T
                sram.B = hbm[B, k, j] if B in hbm.arrays else hbm[B[:-2], j, k].T
                sram.C += sram.A @ sram.B
            hbm[C, i, j] = sram.C
    sram.clear()


def _softmax(hbm: HBM, sram: SRAM, M: int) -> None:
    """Compute P = softmax(S). If one row does not fit, all of its blocks except the last are read twice."""
    N = len(hbm.arrays["S"])
    row_block, column_block = softmax_block(N, M)
    for i in blocks(N, row_block):
        *earlier, last = blocks(N, column_block)
        sram.m, sram.l = np.full((i.stop - i.start, 1), -np.inf), np.zeros((i.stop - i.start, 1))
        for j in (*earlier, last):
            sram.S = hbm["S", i, j]
            sram.m_new = np.maximum(sram.m, sram.S.max(axis=1, keepdims=True))
            sram.l = np.exp(sram.m - sram.m_new) * sram.l + np.exp(sram.S - sram.m_new).sum(axis=1, keepdims=True)
            sram.m = sram.m_new
        hbm["P", i, last] = np.exp(sram.S - sram.m) / sram.l
        for j in earlier:
            sram.S = hbm["S", i, j]
            hbm["P", i, j] = np.exp(sram.S - sram.m) / sram.l
    sram.clear()


def _softmax_gradient(hbm: HBM, sram: SRAM, M: int) -> None:
    """Compute dS = P ∘ (dP - rowsum(P ∘ dP)), streamed like `_softmax`."""
    N = len(hbm.arrays["P"])
    row_block, column_block = softmax_block(N, M)
    for i in blocks(N, row_block):
        *earlier, last = blocks(N, column_block)
        sram.D = np.zeros((i.stop - i.start, 1))
        for j in (*earlier, last):
            sram.P, sram.dP = hbm["P", i, j], hbm["dP", i, j]
            sram.D += (sram.P * sram.dP).sum(axis=1, keepdims=True)
        hbm["dS", i, last] = sram.P * (sram.dP - sram.D)
        for j in earlier:
            sram.P, sram.dP = hbm["P", i, j], hbm["dP", i, j]
            hbm["dS", i, j] = sram.P * (sram.dP - sram.D)
    sram.clear()

"""The loop order of jax_flash's kernels on the same memories, which saves accesses compared with the paper.

* The forward keeps Q_i, O_i, ℓ_i and m_i in SRAM and loops over K and V (FlashAttention-2, arXiv 2307.08691). O, ℓ and
  m are written once and never read or initialised. The block sizes exchange roles: a block of Q has ⌈M/4d⌉ rows.
* O_i is divided by ℓ_i once, at the end. This changes no accesses and saves work.
* The backward keeps K_j and V_j as in Algorithm 4. It computes D = rowsum(dO ∘ O) once in advance, so O is not read in
  every pass. L = m + log ℓ replaces m and ℓ. dK and dV are not initialised in HBM.
* The tangent (forward mode) has the loops of the forward. The kernels also subtract a reference from Ṡ. This changes no
  accesses.
"""

from __future__ import annotations

import numpy as np

from jax_flash.io_model.flash import (
    BACKWARD_SRAM,
    FORWARD_SRAM,
    Mask,
    block_sizes,
    divide,
    dropout_mask,
    exp_minus,
    masked,
)
from jax_flash.io_model.memory import HBM, SRAM, Array, Run, blocks, shape


def kernel_forward(
    Q: Array,
    K: Array,
    V: Array,
    R: Array,
    M: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Run:
    """Forward with Q resident in SRAM, which holds at most 6M elements.

    Arguments and results are as in `algorithm_2`.
    """
    N, d = shape(Q, K, V)
    hbm, sram = HBM(Q=Q, K=K, V=V, R=R), SRAM(FORWARD_SRAM * M)
    hbm.allocate(O=(N, d), l=(N, 1), m=(N, 1))
    sram.R = hbm["R", :]
    B_r, B_c = block_sizes(d, M)
    for i in blocks(N, B_r):
        sram.Q = hbm["Q", i]
        sram.O, sram.l, sram.m = (
            np.zeros_like(sram.Q),
            np.zeros_like(sram.Q[:, :1]),
            np.full_like(sram.Q[:, :1], -np.inf),
        )
        for j in blocks(N, B_c):
            sram.K, sram.V = hbm["K", j], hbm["V", j]
            sram.S = masked(scale * (sram.Q @ sram.K.T), mask, i, j)
            sram.m_new = np.maximum(sram.m, sram.S.max(axis=1, keepdims=True))
            sram.P_tilde = exp_minus(sram.S, sram.m_new)
            sram.l = exp_minus(sram.m, sram.m_new) * sram.l + sram.P_tilde.sum(axis=1, keepdims=True)
            sram.P_tilde = sram.P_tilde * dropout_mask(sram.R, dropout_rate, i, j)
            sram.O = exp_minus(sram.m, sram.m_new) * sram.O + sram.P_tilde @ sram.V
            sram.m = sram.m_new
        hbm["O", i] = divide(sram.O, sram.l)
        hbm["l", i], hbm["m", i] = sram.l, sram.m
    return Run(tuple(hbm.arrays[x] for x in ("O", "l", "m", "R")), hbm, sram)


def kernel_backward(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    dO: Array,
    l: Array,
    m: Array,
    R: Array,
    M: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Run:
    """Backward with K and V resident in SRAM, which holds at most 10M elements.

    Arguments and results are as in `algorithm_4`.
    """
    N, d = shape(Q, K, V, O, dO)
    hbm, sram = HBM(Q=Q, K=K, V=V, O=O, dO=dO, l=l, m=m, R=R), SRAM(BACKWARD_SRAM * M)
    hbm.allocate(D=(N, 1), L=(N, 1), dK=(N, d), dV=(N, d))
    hbm.initialize(dQ=np.zeros((N, d)))
    B_c, B_r = block_sizes(d, M)

    for i in blocks(N, B_r):  # a separate kernel
        sram.O, sram.dO, sram.l, sram.m = (hbm[x, i] for x in ("O", "dO", "l", "m"))
        hbm["D", i] = (sram.dO * sram.O).sum(axis=1, keepdims=True)
        hbm["L", i] = sram.m + np.log(np.where(sram.l == 0, 1.0, sram.l))  # -inf if no key is visible
    sram.clear()

    sram.R = hbm["R", :]
    for j in blocks(N, B_c):
        sram.K, sram.V = hbm["K", j], hbm["V", j]
        sram.dK, sram.dV = np.zeros_like(sram.K), np.zeros_like(sram.V)
        for i in blocks(N, B_r):
            sram.Q, sram.dO, sram.dQ, sram.L, sram.D = (hbm[x, i] for x in ("Q", "dO", "dQ", "L", "D"))
            sram.S = masked(scale * (sram.Q @ sram.K.T), mask, i, j)
            sram.P = exp_minus(sram.S, sram.L)
            sram.Z = dropout_mask(sram.R, dropout_rate, i, j)
            sram.P_dropped = sram.P * sram.Z
            sram.dV += sram.P_dropped.T @ sram.dO
            sram.dP = (sram.dO @ sram.V.T) * sram.Z
            sram.dS = sram.P * (sram.dP - sram.D)
            hbm["dQ", i] = sram.dQ + scale * (sram.dS @ sram.K)  # on a GPU: added by the memory system
            sram.dK += scale * (sram.dS.T @ sram.Q)
        hbm["dK", j], hbm["dV", j] = sram.dK, sram.dV
    return Run((hbm.arrays["dQ"], hbm.arrays["dK"], hbm.arrays["dV"]), hbm, sram)


def kernel_tangent(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    dQ: Array,
    dK: Array,
    dV: Array,
    l: Array,
    m: Array,
    R: Array,
    M: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Run:
    """Tangent of the forward with Q resident in SRAM, which holds at most 10M elements.

    Args:
      Q, K, V, O: arrays [N, d].
      dQ, dK, dV: the tangents of Q, K and V.
      l, m, R, M, scale, mask, dropout_rate: as in `algorithm_4`.

    Returns:
      The tangents of O [N, d] and of l [N, 1].
    """
    N, d = shape(Q, K, V, O, dQ, dK, dV)
    hbm, sram = HBM(Q=Q, K=K, V=V, O=O, dQ=dQ, dK=dK, dV=dV, l=l, m=m, R=R), SRAM(BACKWARD_SRAM * M)
    hbm.allocate(dO=(N, d), dl=(N, 1))
    sram.R = hbm["R", :]
    B_r, B_c = block_sizes(d, M)
    for i in blocks(N, B_r):
        sram.Q, sram.dQ, sram.O, sram.l, sram.m = (hbm[x, i] for x in ("Q", "dQ", "O", "l", "m"))
        sram.A, sram.dl = np.zeros_like(sram.Q), np.zeros_like(sram.l)
        for j in blocks(N, B_c):
            sram.K, sram.V, sram.dK, sram.dV = (hbm[x, j] for x in ("K", "V", "dK", "dV"))
            sram.P = exp_minus(masked(scale * (sram.Q @ sram.K.T), mask, i, j), sram.m)
            sram.dS = sram.P * (scale * (sram.dQ @ sram.K.T + sram.Q @ sram.dK.T))
            sram.dl += sram.dS.sum(axis=1, keepdims=True)
            sram.Z = dropout_mask(sram.R, dropout_rate, i, j)
            sram.A += (sram.Z * sram.dS) @ sram.V + (sram.Z * sram.P) @ sram.dV
        hbm["dO", i] = divide(sram.A - sram.dl * sram.O, sram.l)
        hbm["dl", i] = sram.dl
    return Run((hbm.arrays["dO"], hbm.arrays["dl"]), hbm, sram)

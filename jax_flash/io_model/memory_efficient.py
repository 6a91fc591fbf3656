"""The memory-efficient forward pass of the paper's appendix B.1: linear memory without blocks.

Softmax couples the keys of a row only through its normalization constant. The algorithm computes this constant first.
Then it visits the keys one by one and needs no N×N matrix. Its cost is high: each row reads all of K twice and all of V
once, even if SRAM is large.
"""

from __future__ import annotations

import numpy as np

from jax_flash.io_model.memory import HBM, SRAM, Array, Run, shape


def memory_efficient_forward(Q: Array, K: Array, V: Array) -> Run:
    """Compute O = softmax(QKᵀ)V in two passes. As in the paper, the softmax does not subtract the row maximum.

    It holds at most 4d + 2 elements in SRAM.

    Args:
      Q, K, V: arrays [N, d]. exp(QKᵀ) must be finite.

    Returns:
      O [N, d]. L [N, 1] stays in HBM.
    """
    N, d = shape(Q, K, V)
    hbm, sram = HBM(Q=Q, K=K, V=V), SRAM(4 * d + 2)
    hbm.allocate(L=(N, 1), O=(N, d))
    rows = [slice(i, i + 1) for i in range(N)]
    for i in rows:  # 1: compute L_i for all i according to (1), which takes O(N) extra memory
        sram.q, sram.L = hbm["Q", i], np.zeros((1, 1))
        for j in rows:
            sram.k = hbm["K", j]
            sram.L += np.exp(sram.q @ sram.k.T)  # (1): L_i = Σ_j exp(q_iᵀ k_j)
        hbm["L", i] = sram.L
    for i in rows:  # 2: compute o_i for all i according to (2), which takes O(d) extra memory
        sram.q, sram.L, sram.o = hbm["Q", i], hbm["L", i], np.zeros((1, d))
        for j in rows:
            sram.k, sram.v = hbm["K", j], hbm["V", j]
            sram.p = np.exp(sram.q @ sram.k.T) / sram.L
            sram.o += sram.p @ sram.v  # (2): o_i = Σ_j exp(q_iᵀ k_j) / L_i v_j
        hbm["O", i] = sram.o
    return Run((hbm.arrays["O"],), hbm, sram)

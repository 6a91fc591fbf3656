"""Formulas for HBM accesses, FLOPs and extra memory of the algorithms. They equal the counts of a run.

Letters: N sequence length, d head dim, M size of SRAM in elements, s fraction of non-zero blocks. All results are for
one head and in elements; `in_bytes` converts them. Each algorithm has the name of the function that runs it.

With B_c = ⌈M/4d⌉ and T_c = ⌈N/B_c⌉, FlashAttention makes T_c passes over the rows of Q:

| algorithm | reads | writes |
|---|---|---|
| 1 | 2Nd (K, V) + T_c N (2d + 2) (Q, O, ℓ, m) | Nd + 2N (initialised) + T_c N (d + 2) (O, ℓ, m) |
| 2, 5 | the same, with s T_c for T_c | the same, and 4 (R) |
| 4, block-sparse backward | 4 + 2Nd + s T_c N (4d + 2) (Q, O, dO, dQ, ℓ, m) | 3Nd + s T_c Nd (dQ) + 2Nd (dK, dV) |
| kernels' forward | 4 + Nd + 2Nd T_c (T_c blocks of Q; K, V) | Nd + 2N |
| kernels' backward | 4 + 4Nd + 2N (O, dO, ℓ, m; K, V) + T_c N (3d + 2) (Q, dO, dQ, L, D) | 3Nd + 2N + T_c Nd (dQ) |
| kernels' tangent | 4 + 3Nd + 2N (Q, dQ, O, ℓ, m) + 4Nd T_c (T_c blocks of Q; K, V, dK, dV) | Nd + N |
| memory-efficient forward | 2Nd + N (Q twice, L) + 3N²d (K twice and V, for every row) | Nd + N (O, L) |
| 0 | `product_reads` of QKᵀ and PV, `softmax_reads` of S | 2N² (S, P) + Nd |
| 3 | `product_reads` of four products, `softmax_reads` of P and dP | 2N² (dP, dS) + 3Nd |
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from jax_flash.io_model.flash import block_sizes, nonzero_blocks
from jax_flash.io_model.memory import Array, blocks
from jax_flash.io_model.standard import product_tile, softmax_block

Algorithm = Literal[
    "algorithm_0",
    "memory_efficient_forward",
    "algorithm_1",
    "algorithm_2",
    "algorithm_5",
    "kernel_forward",
    "algorithm_3",
    "algorithm_4",
    "block_sparse_backward",
    "kernel_backward",
    "kernel_tangent",
]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
BLOCK_SPARSE = ("algorithm_5", "block_sparse_backward")
STATE = 4  # elements of R


class Accesses(NamedTuple):
    """Numbers of elements read from and written to HBM."""

    reads: float  #: elements read from HBM
    writes: float  #: elements written to HBM


def hbm_accesses(algorithm: Algorithm, N: int, d: int, M: int, sparsity: float | Array = 1) -> float:
    """Return the exact number of elements that one head reads from and writes to HBM.

    Args:
      algorithm: one of `ALGORITHMS`.
      N, d, M: sequence length, head dim, and size of SRAM in elements, with d <= M.
      sparsity: the block mask, bool [T_r, T_c], or the fraction s of its non-zero blocks. Only for the block-sparse
        algorithms. For a fraction, the result is the mean over all placements of the blocks, and may not be an int.

    Raises:
      ValueError: if the algorithm does not exist, or N, d, M or sparsity is out of range.
    """
    return sum(reads_and_writes(algorithm, N, d, M, sparsity))


def reads_and_writes(algorithm: Algorithm, N: int, d: int, M: int, sparsity: float | Array = 1) -> Accesses:
    """Return the reads and the writes of `hbm_accesses` separately. The arguments and errors are the same."""
    _check(algorithm, N, d, M, sparsity)
    T_c = _ceil(N, block_sizes(d, M)[0])
    rows = _visited(N, d, M, sparsity).rows
    Nd = N * d
    match algorithm:
        case "algorithm_0":
            reads = product_reads(N, N, d, M) + softmax_reads(N, M) + product_reads(N, d, N, M)
            return Accesses(reads, 2 * N**2 + Nd)
        case "memory_efficient_forward":
            return Accesses(2 * Nd + N + 3 * N * Nd, Nd + N)
        case "algorithm_1":
            return Accesses(2 * Nd + rows * (2 * d + 2), Nd + 2 * N + rows * (d + 2))
        case "algorithm_2" | "algorithm_5":
            return Accesses(2 * Nd + rows * (2 * d + 2), STATE + Nd + 2 * N + rows * (d + 2))
        case "algorithm_3":
            reads = product_reads(N, N, d, M) + 2 * softmax_reads(N, M) + 3 * product_reads(N, d, N, M)
            return Accesses(reads, 2 * N**2 + 3 * Nd)
        case "algorithm_4" | "block_sparse_backward":
            return Accesses(STATE + 2 * Nd + rows * (4 * d + 2), 5 * Nd + rows * d)
        case "kernel_forward":
            return Accesses(STATE + Nd + 2 * Nd * T_c, Nd + 2 * N)
        case "kernel_backward":
            return Accesses(STATE + 4 * Nd + 2 * N + rows * (3 * d + 2), 3 * Nd + 2 * N + rows * d)
        case "kernel_tangent":
            return Accesses(STATE + 3 * Nd + 2 * N + 4 * Nd * T_c, Nd + N)


def product_reads(rows: int, columns: int, inner: int, M: int) -> int:
    """Return the elements read for a product [rows, inner] [inner, columns] with the tiles of `product_tile`.

    Each tile of the result needs its rows of the first matrix and its columns of the second. The first matrix is read
    once for every column of tiles, and the second once for every row of tiles.
    """
    tile_rows, tile_columns = product_tile(rows, columns, M)
    return inner * (rows * _ceil(columns, tile_columns) + columns * _ceil(rows, tile_rows))


def softmax_reads(N: int, M: int) -> int:
    """Return the elements read for a softmax over the rows of an [N, N] matrix.

    The result is N² if a row fits in SRAM, else at most 2N².
    """
    _, piece = softmax_block(N, M)
    return N**2 + N * piece * (_ceil(N, piece) - 1)


def flops(algorithm: Algorithm, N: int, d: int, M: int, sparsity: float | Array = 1) -> float:
    """Return the FLOPs of the matrix products of one head (Theorem 1: O(N²d)).

    Each product needs 2d FLOPs per entry of S. The forward has two products, and the backward has four. Recomputing S
    costs one more product, in a backward or in the second pass of the memory-efficient forward. The tangent has five
    products, two of them for the tangent of S and two for that of O. The arguments and
    errors are those in `hbm_accesses`.
    """
    _check(algorithm, N, d, M, sparsity)
    if algorithm in ("algorithm_4", "block_sparse_backward", "kernel_backward", "kernel_tangent"):
        products = 5
    else:
        products = {"algorithm_3": 4, "memory_efficient_forward": 3}.get(algorithm, 2)
    return 2 * d * products * _visited(N, d, M, sparsity).entries


def extra_memory(algorithm: Algorithm, N: int) -> int:
    """Return the elements of HBM in addition to inputs, O and gradients (Theorem 1: O(N) for FlashAttention)."""
    match algorithm:
        case "algorithm_0" | "algorithm_3":
            return 2 * N**2  # S, P; dP, dS
        case "memory_efficient_forward":
            return N  # L
        case "algorithm_1":
            return 2 * N  # ℓ, m
        case "algorithm_2" | "algorithm_5":
            return 2 * N + STATE
        case "kernel_forward" | "kernel_backward":
            return 2 * N  # ℓ, m; D, L
        case "kernel_tangent":
            return N  # the tangent of ℓ
    return 0


def theta(algorithm: Algorithm, N: int, d: int, M: int, sparsity: float = 1) -> float:
    """Return the value of f(N, d, M, s), where `hbm_accesses` is Θ(f) for d <= M <= Nd.

    `CONSTANTS` has the constants of the lower and upper bounds.

    * Algorithms 1, 2, 4 and the kernels' order (Theorems 2 and 5): f = N²d²/M.
    * Algorithm 5 and the block-sparse backward (Proposition 4): f = Nd + N²d²s/M.
    * Algorithms 0 and 3 (Theorems 2 and 5): f = Nd + N² if M >= d². If M < d², f = Nd + N²d/√M, because a product then
      needs Ω(N²d/√M) accesses (Hong and Kung, STOC 1981). The paper's proofs assume that each matrix is read once.
    * The memory-efficient forward (appendix B.1): f = N²d for every M.
    """
    if algorithm == "memory_efficient_forward":
        return N**2 * d
    if algorithm in ("algorithm_0", "algorithm_3"):
        return N * d + N**2 * max(1, d / math.sqrt(M))
    return N**2 * d**2 / M * sparsity + (N * d if algorithm in BLOCK_SPARSE else 0)


# The constants c and C in c theta <= hbm_accesses <= C theta, for 8 <= d <= N and d <= M <= Nd.
#
# FlashAttention, with x = N²d²/M >= Nd. B_c <= M/d gives T_c Nd >= x, and B_c >= M/4d gives T_c Nd < 4x + Nd <= 5x. The
# table above, with ℓ, m, L and D at most 1/8 of a matrix each, is at least a T_c Nd and at most a' T_c Nd + b' Nd:
# (a, a', b') = (3, 3.5, 3.4) for 1 and 2, (5, 5.25, 7.1) for 4, and for the kernels' order (2, 2, 2.4), (4, 4.25, 7.6)
# and (4, 4, 4.5).
# So c = a and C = 5a' + b', and block-sparse C = max(4a', a' + b').
#
# Standard attention. A tile has at most M elements. So a product [N, d] [d, N] or [N, N] [N, d] reads at least 2N²d/√M,
# and each of its matrices at least once. A side of a tile is at least 0.7√M (M >= 8), or a whole side of the result. So
# the first product reads at most 2.9 N²d/√M + 2Nd, and the second at most 2.9 N²d/√M + N² + Nd.
#
# The memory-efficient forward: 3N²d + 3Nd + 2N, and Nd <= N²d/8.
CONSTANTS: dict[Algorithm, tuple[float, float]] = {
    "algorithm_0": (4, 11),
    "memory_efficient_forward": (3, 4),
    "algorithm_1": (3, 21),
    "algorithm_2": (3, 21),
    "algorithm_5": (3, 14),
    "kernel_forward": (2, 13),
    "algorithm_3": (7, 21),
    "algorithm_4": (5, 34),
    "block_sparse_backward": (5, 21),
    "kernel_backward": (4, 29),
    "kernel_tangent": (4, 25),
}


def in_bytes(elements: float, dtype: str) -> float:
    """Return the size in bytes of a number of elements of a named dtype, such as "bfloat16"."""
    return elements * jnp.dtype(dtype).itemsize


class _Visited(NamedTuple):
    """The rows of Q_i and the entries of S in all non-zero blocks together."""

    rows: float
    entries: float


def _visited(N: int, d: int, M: int, sparsity: float | Array) -> _Visited:
    B_c, B_r = block_sizes(d, M)
    if not isinstance(sparsity, np.ndarray):
        return _Visited(sparsity * N * _ceil(N, B_c), sparsity * N**2)
    rows, columns = ([x.stop - x.start for x in blocks(N, size)] for size in (B_r, B_c))
    rows_of_column = rows @ sparsity
    return _Visited(int(rows_of_column.sum()), int(rows_of_column @ columns))


def _check(algorithm: str, N: int, d: int, M: int, sparsity: float | Array) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if N < 1:
        raise ValueError(f"N must be positive, not N = {N}")
    B_c, B_r = block_sizes(d, M)
    if algorithm not in BLOCK_SPARSE and (isinstance(sparsity, np.ndarray) or sparsity != 1):
        raise ValueError(f"{algorithm} is dense: sparsity must be 1, not {sparsity}")
    if isinstance(sparsity, np.ndarray):
        nonzero_blocks(sparsity, _ceil(N, B_r), _ceil(N, B_c))
    elif not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], not {sparsity}")


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

"""The algorithms of the paper as it writes them, in NumPy, on two memories that count: where its theorems can be run.

FlashAttention: Dao, Fu, Ermon, Rudra, Ré, NeurIPS 2022, arXiv 2205.14135. What comes out is told in
docs/io-complexity.md; `python -m jax_flash io` prints it for a problem.

Read `memory.py` (HBM and SRAM), then `flash.py` (Algorithms 1, 2, 4, 5) beside the paper, `standard.py` (0, 3),
`memory_efficient.py` (appendix B.1), `kernels.py` (the loop order of the kernels) and `closed_forms.py` (the same
counts as formulas)::

    run = algorithm_1(Q, K, V, M=1024)
    run.outputs, run.hbm.reads, run.hbm.writes, run.sram.peak
"""

from jax_flash.io_model.closed_forms import (
    ALGORITHMS,
    CONSTANTS,
    Accesses,
    Algorithm,
    extra_memory,
    flops,
    hbm_accesses,
    in_bytes,
    reads_and_writes,
    theta,
)
from jax_flash.io_model.flash import (
    BACKWARD_SRAM,
    FORWARD_SRAM,
    Mask,
    Observer,
    algorithm_1,
    algorithm_2,
    algorithm_4,
    algorithm_5,
    block_sizes,
    block_sparse_backward,
    causal,
    generator_state,
)
from jax_flash.io_model.kernels import kernel_backward, kernel_forward
from jax_flash.io_model.memory import HBM, SRAM, Run
from jax_flash.io_model.memory_efficient import memory_efficient_forward
from jax_flash.io_model.standard import STANDARD_SRAM, algorithm_0, algorithm_3

__all__ = [
    "ALGORITHMS",
    "BACKWARD_SRAM",
    "CONSTANTS",
    "FORWARD_SRAM",
    "HBM",
    "SRAM",
    "STANDARD_SRAM",
    "Accesses",
    "Algorithm",
    "Mask",
    "Observer",
    "Run",
    "algorithm_0",
    "algorithm_1",
    "algorithm_2",
    "algorithm_3",
    "algorithm_4",
    "algorithm_5",
    "block_sizes",
    "block_sparse_backward",
    "causal",
    "extra_memory",
    "flops",
    "generator_state",
    "hbm_accesses",
    "in_bytes",
    "kernel_backward",
    "kernel_forward",
    "memory_efficient_forward",
    "reads_and_writes",
    "theta",
]

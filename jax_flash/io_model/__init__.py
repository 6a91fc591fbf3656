"""NumPy implementations of the FlashAttention paper's algorithms that count memory accesses.

They follow the paper line by line (Dao, Fu, Ermon, Rudra, Ré, NeurIPS 2022, arXiv 2205.14135). Tests use them to check
its theorems. docs/io-complexity.md has the results. `python -m jax_flash io` prints the counts for a problem.

Start with `memory.py` (HBM and SRAM). Then read `flash.py` (Algorithms 1, 2, 4, 5), `standard.py` (0, 3),
`memory_efficient.py` (appendix B.1), `kernels.py` (the loop order of the kernels), and `closed_forms.py` (the counts as
formulas)::

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
from jax_flash.io_model.kernels import kernel_backward, kernel_forward, kernel_tangent
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
    "kernel_tangent",
    "memory_efficient_forward",
    "reads_and_writes",
    "theta",
]

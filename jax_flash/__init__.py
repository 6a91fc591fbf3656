"""FlashAttention for JAX: exact, IO-aware attention as XLA custom calls."""

import importlib.machinery
import importlib.util
import pathlib
import pkgutil

# In a clone, this source folder hides the installed package. Import the modules of the installed package instead.
if importlib.util.find_spec("jax_flash._native") is None:
    __path__[:] = [
        folder
        for folder in pkgutil.extend_path(__path__, __name__)
        if importlib.machinery.PathFinder.find_spec("jax_flash._native", [folder])
        and pathlib.Path(folder, "__init__.py").exists()
    ]
    if not __path__:
        raise ImportError(
            f"jax_flash is not installed: {__file__} belongs to a clone, which has no compiled kernels. "
            "Run 'pip install .' in the clone"
        )
    if pathlib.Path(__path__[0], "__init__.py").read_bytes() != pathlib.Path(__file__).read_bytes():
        raise ImportError(
            f"{__file__} belongs to a clone with another version than the jax_flash installed in {__path__[0]}: "
            "run 'pip install .' in the clone"
        )

from jax_flash import kernels, patterns
from jax_flash.attention import (
    Choice,
    Statistics,
    attention_with_statistics,
    choose_implementation,
    dot_product_attention,
    merge,
)
from jax_flash.block_sparse import BlockMask
from jax_flash.custom_calls import export_checks
from jax_flash.derivatives import RESIDUAL_NAMES
from jax_flash.jax_nn import JaxNNPatch, patch_jax_nn
from jax_flash.kernel_sums import kernel_sum
from jax_flash.layouts import Layout, balance, unzigzag, zigzag
from jax_flash.mla import append_to_latent_pages, mla_attention, paged_mla_attention
from jax_flash.paged import append_to_pages, paged_attention
from jax_flash.plan import Explanation, Kernel, explain
from jax_flash.problem import Problem
from jax_flash.sparse_matrix import block_sparse_matmul, blocks_to_matrix, matrix_to_blocks
from jax_flash.varlen import varlen_attention

__version__ = "0.2.0"

__all__ = [
    "RESIDUAL_NAMES",
    "BlockMask",
    "Choice",
    "Explanation",
    "JaxNNPatch",
    "Kernel",
    "Layout",
    "Problem",
    "Statistics",
    "append_to_latent_pages",
    "append_to_pages",
    "attention_with_statistics",
    "balance",
    "block_sparse_matmul",
    "blocks_to_matrix",
    "choose_implementation",
    "dot_product_attention",
    "explain",
    "export_checks",
    "kernel_sum",
    "kernels",
    "matrix_to_blocks",
    "merge",
    "mla_attention",
    "paged_attention",
    "paged_mla_attention",
    "patch_jax_nn",
    "patterns",
    "unzigzag",
    "varlen_attention",
    "zigzag",
]


def __dir__() -> list[str]:
    """Return the public names, for tab completion. Modules that the user imports, such as `linen`, are public too."""
    modules = ("equinox", "io_model", "keras", "linen", "nnx")
    return [*__all__, "__version__", *(name for name in modules if name in globals())]

"""FlashAttention for JAX: exact, IO-aware attention as XLA custom calls."""

from jax_flash import patterns
from jax_flash.attention import (
    Choice,
    Statistics,
    attention_with_statistics,
    choose_implementation,
    dot_product_attention,
)
from jax_flash.block_sparse import BlockMask
from jax_flash.plan import Explanation, Kernel, explain
from jax_flash.problem import Problem
from jax_flash.vjp import RESIDUAL_NAMES

__version__ = "0.1.0"

__all__ = [
    "RESIDUAL_NAMES",
    "BlockMask",
    "Choice",
    "Explanation",
    "Kernel",
    "Problem",
    "Statistics",
    "attention_with_statistics",
    "choose_implementation",
    "dot_product_attention",
    "explain",
    "patterns",
]

"""FlashAttention's recomputation compared with gradient checkpointing: time and memory of forward + backward.

Measures standard attention that keeps P for the backward, the same under `jax.checkpoint`, which recomputes it, Rabe
and Staats's chunked attention (also checkpointed), and this library. The problem is the same as in `figure3`.
"""

from .. import attentions
from ..results import Results
from .figure3 import METHODS, Method, compare


def run(results: Results, quick: bool) -> None:
    methods = {
        "standard": METHODS["standard"],
        "checkpointed": Method(attentions.checkpointed),
        "chunked": METHODS["chunked"],
        "jax_flash": METHODS["jax_flash"],
    }
    lengths = (128,) if quick else (1024, 2048, 4096, 8192)
    compare(results, methods, lengths, *((1, 2) if quick else (16, 8)))

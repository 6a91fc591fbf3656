"""Draw score programs: which keys (columns) each query (row) attends to, and how much, as the kernels compute it.

    python examples/draw_programs.py --output docs/score_programs.png

Scores are 0 before the programs, and the values are the rows of the identity, so the output is P itself.
"""

import argparse
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jax_flash import dot_product_attention

LENGTH = 64
PREFIX = jnp.array([20])
DOCUMENT = jnp.repeat(jnp.arange(4), jnp.array([20, 12, 24, 8]))
TABLE = jnp.sin(jnp.arange(2 * LENGTH - 1) / 5)

Program = Callable[..., jax.Array]
MASKS: dict[str, Program] = {
    "causal": lambda batch, head, query, key: key <= query,
    "window": lambda batch, head, query, key: (key <= query) & (query - key < 16),
    "prefix LM": lambda batch, head, query, key: (key <= query) | (key < PREFIX[batch]),
    "documents": lambda batch, head, query, key: (DOCUMENT[query] == DOCUMENT[key]) & (key <= query),
    "dilated window": lambda batch, head, query, key: (abs(query - key) <= 24) & ((query - key) % 4 == 0),
    "neighbours in a plane of 8 x 8": lambda batch, head, query, key: (
        (abs(query // 8 - key // 8) <= 1) & (abs(query % 8 - key % 8) <= 1)
    ),
}
SCORES: dict[str, Program] = {
    "ALiBi": lambda score, batch, head, query, key: score - 0.1 * abs(query - key),
    "relative table": lambda score, batch, head, query, key: score + TABLE[query - key + LENGTH - 1],
}


def probabilities(score_mod: Program | None = None, mask_mod: Program | None = None) -> jax.Array:
    """P of one head, [T, S]."""
    zeros, identity = jnp.zeros((1, LENGTH, 1, 64)), jnp.eye(LENGTH)[None, :, None]
    return dot_product_attention(zeros, zeros, identity, score_mod=score_mod, mask_mod=mask_mod)[0, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("score_programs.png"))
    args = parser.parse_args()
    drawn = {name: probabilities(mask_mod=f) for name, f in MASKS.items()}
    drawn |= {name: probabilities(score_mod=f) for name, f in SCORES.items()}
    figure, axes = plt.subplots(2, 4, figsize=(11, 5.8), layout="constrained")
    for ax, (name, p) in zip(axes.flat, drawn.items(), strict=True):
        visible = p / p.max(1, keepdims=True)  # relative to the largest entry of each row
        ax.imshow(np.ones_like(p), alpha=visible, cmap="Blues", vmin=0, vmax=1.2)
        ax.set(title=name, xticks=[], yticks=[])
    axes[1, 0].set(xlabel="key", ylabel="query")
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

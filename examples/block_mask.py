"""Draw block masks of the literature and a custom one, and measure the speed-up of a call with each.

    python examples/block_mask.py                              # seconds on a CPU
    python examples/block_mask.py --length 16384 --heads 16 --block 128 --dtype bfloat16    # a GPU

White blocks are empty and take no time. Dark blocks are full. Light blocks have visible and masked entries.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jax_flash import BlockMask, dot_product_attention, patterns


def masks(length: int, block: int) -> dict[str, BlockMask]:
    """Return masks of length x length entries, by name."""
    size = {"q_block": block, "kv_block": block}
    causal = patterns.causal(length, length, **size)
    document = np.sort(np.random.default_rng(0).integers(0, 5, length))

    def dilating(batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """Allow keys near the query, and earlier blocks at a distance that is a power of two."""
        distance = query // block - key // block
        return (key <= query) & (distance & (distance - 1) == 0)

    return {
        "causal": causal,
        "documents, causal": patterns.document(document, **size) & causal,
        "Longformer": patterns.longformer(length, length, length // 8, global_tokens=range(block), **size),
        "BigBird": patterns.bigbird(length, length, **size),
        "butterfly": patterns.butterfly(length, length, **size),
        "one's own": BlockMask.from_function(dilating, length, length, **size),
    }


def seconds(q: jax.Array, k: jax.Array, v: jax.Array, mask: BlockMask | None) -> float:
    """Return the smallest time of several calls, forward and backward."""

    @jax.jit
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        def loss(*arrays: jax.Array) -> jax.Array:
            return dot_product_attention(*arrays, block_mask=mask).astype("float32").sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    def once() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(gradients(q, k, v))
        return time.perf_counter() - begin

    once()  # compiles
    return min(once() for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--block", type=int, default=64, help="block size; use 128 on a GPU")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=Path("block_mask.png"))
    args = parser.parse_args()

    shape = (3, 1, args.length, args.heads, args.head_dim)
    q, k, v = jax.random.normal(jax.random.key(0), shape, jnp.dtype(args.dtype))
    dense = seconds(q, k, v, None)
    figure, axes = plt.subplots(2, 3, figsize=(9, 6.4), layout="constrained")
    for ax, (name, mask) in zip(axes.flat, masks(args.length, args.block).items(), strict=True):
        faster = dense / seconds(q, k, v, mask)
        said = f"{mask.kept:.0%} kept, {faster:.1f} times as fast"
        mask.plot(ax=ax)
        ax.set_title(f"{name}\n{said}", fontsize=9)
        print(f"{name}: {said}")
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

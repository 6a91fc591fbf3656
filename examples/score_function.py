"""Train attention with a score function that looks up a learned table of relative positions.

    python examples/score_function.py                                                           # seconds on a CPU
    python examples/score_function.py --seq-len 4096 --head-dim 64 --steps 400 --dtype bfloat16              # a GPU

The tokens are random. Each head must name the token at a fixed distance before: 3, 7, 12 or 20. The content of a query
and a key does not reveal their distance, but the score adds `table[head, distance]` to the content. `score_mod`
captures the table, so it has a gradient and is trained like all other parameters. After training, the row of each head
peaks at the distance of the head, as the picture shows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

from jax_flash import dot_product_attention

VOCABULARY = 32


class Model(nnx.Module):
    """Map tokens [B, T] to logits [B, T, heads, VOCABULARY]: each head predicts an earlier token."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        heads, dim = len(args.distances), args.head_dim
        self.embed = nnx.Embed(VOCABULARY, dim, dtype=args.dtype, rngs=rngs)
        self.project = nnx.LinearGeneral(dim, (3, heads, dim), dtype=args.dtype, rngs=rngs)
        self.table = nnx.Param(jnp.zeros((heads, args.table_size)))
        self.out = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (heads, dim, VOCABULARY)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.table[...]
        furthest = table.shape[1] - 1

        def relative(
            score: jax.Array, batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
        ) -> jax.Array:
            """Add the table entry of the distance; the last entry of a row covers all larger distances."""
            return score + table[head, jnp.clip(query - key, 0, furthest)]

        q, k, v = jnp.moveaxis(self.project(self.embed(tokens)), 2, 0)
        attended = dot_product_attention(q, k, v, score_mod=relative, is_causal=True)
        return jnp.einsum("bthd,hdv->bthv", attended.astype(jnp.float32), self.out[...])


def loss_of(model: Model, tokens: jax.Array, distances: tuple[int, ...]) -> jax.Array:
    earlier = jnp.stack([jnp.roll(tokens, distance, axis=1) for distance in distances], axis=-1)  # [B, T, heads]
    exists = jnp.arange(tokens.shape[1])[:, None] >= jnp.array(distances)  # nothing comes before the first token
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), earlier).mean(where=exists)


@nnx.jit(static_argnames="distances")
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, distances: tuple[int, ...]) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, distances)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--distances", type=int, nargs="+", default=[3, 7, 12, 20], help="distance for each head")
    parser.add_argument(
        "--table-size", type=int, default=32, help="entries for each head; must exceed the largest distance"
    )
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--output", type=Path, default=Path("score_function.png"))
    args = parser.parse_args()
    distances = tuple(args.distances)
    if min(distances) < 0 or max(distances) >= min(args.table_size - 1, args.seq_len):
        parser.error("--distances must be at least 0, less than --seq-len and less than --table-size - 1")

    model = Model(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(args.learning_rate), wrt=nnx.Param)
    for step in range(args.steps):
        tokens = jax.random.randint(jax.random.key(step), (args.batch, args.seq_len), 0, VOCABULARY)
        loss = train_step(model, optimizer, tokens, distances)
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss:.4f}")

    table = model.table[...]
    print(f"Distances to learn: {args.distances}")
    print(f"Peaks of the table: {table.argmax(axis=1).tolist()}")
    figure, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    figure.colorbar(ax.imshow(table, cmap="Blues", aspect="auto"), label="added to the score")
    names = [f"head {head}: {distance}" for head, distance in enumerate(distances)]
    ax.set(xlabel="distance of query and key", yticks=range(len(names)), yticklabels=names)
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

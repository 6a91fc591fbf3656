"""Train a small language model on documents of many lengths, packed into rows, and with one document in each row.

    python examples/packed_training.py                                                               # seconds on a CPU
    python examples/packed_training.py --seq-len 4096 --width 1024 --heads 16 --learning-rate 1e-4   # a GPU

Both runs see the same documents in every step: paragraphs of Python's standard library. When packed, each row is filled
with documents, and segment ids separate them. The losses are the same, with less padding to compute. The picture shows
one batch in both forms, and the losses.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_flash.nnx

PADDING = -1  # the document id of padding


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadAttention(heads, width, is_causal=True, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, document: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), query_segment_ids=document, key_value_segment_ids=document)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Map bytes, documents and positions, each [B, T], to logits [B, T, 256] of the next byte."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, args.width, rngs=rngs)
        self.embed_position = nnx.Embed(args.seq_len, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args.width, args.heads, rngs) for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array, document: jax.Array, position: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.embed_position(position)
        for block in self.blocks:
            x = block(x, document)
        return self.head(x)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    """Return the loss for tokens, documents and positions, stacked to [3, B, T]."""
    tokens, document, position = rows
    following = jnp.roll(tokens, -1, 1)
    # The last token of a document has no next one, and padding has no tokens.
    counts = (document == jnp.roll(document, -1, 1)) & (document != PADDING)
    counts = counts.at[:, -1].set(False)

    def loss_of(model: Model) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens, document, position), following)
        return jnp.sum(losses, where=counts) / jnp.sum(counts)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def in_rows(documents: list[bytes], seq_len: int, packed: bool) -> list[list[bytes]]:
    """Assign documents to rows: one to each row, or each document to the first row with enough room."""
    rows: list[list[bytes]] = []
    for document in documents:
        room = (row for row in rows if packed and sum(map(len, row)) + len(document) <= seq_len)
        row = next(room, None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    return rows


def arrays(rows: list[list[bytes]], count: int, seq_len: int) -> np.ndarray:
    """Return tokens, documents and positions: int32 [3, count, seq_len]."""
    tokens, numbers, positions = result = np.zeros((3, count, seq_len), np.int32)
    numbers[:] = PADDING
    for row, documents in enumerate(rows):
        begin = 0
        for number, document in enumerate(documents):
            place = row, slice(begin, begin + len(document))
            tokens[place], numbers[place] = np.frombuffer(document, np.uint8), number
            positions[place] = np.arange(len(document))
            begin += len(document)
    return result


def train(args: argparse.Namespace, batches: list[np.ndarray]) -> tuple[list[float], float]:
    """Return the losses, and the seconds of all steps except the first, which compiles."""
    model = Model(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(args.learning_rate), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, jnp.asarray(batches[0])))]
    begin = time.perf_counter()
    losses += [float(train_step(model, optimizer, jnp.asarray(batch))) for batch in batches[1:]]
    return losses, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=512, help="length of a row; longer documents are cut")
    parser.add_argument("--documents", type=int, default=32, help="number of documents in a batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("packed_training.png"))
    args = parser.parse_args()

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    paragraphs = b"\n".join(path.read_bytes() for path in files).split(b"\n\n")
    documents = [text[: args.seq_len] for text in paragraphs if len(text) > 1]
    chosen = np.random.default_rng(0).integers(0, len(documents), (args.steps, args.documents))

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    results = {}
    for axis, packed in zip(axes, (False, True), strict=False):
        name = "packed" if packed else "one document a row"
        rows = [in_rows([documents[i] for i in step], args.seq_len, packed) for step in chosen]
        batches = [arrays(batch, max(map(len, rows)), args.seq_len) for batch in rows]
        results[name], seconds = train(args, batches)
        padding = np.mean([batch[1] == PADDING for batch in batches])
        print(f"{name}: {batches[0].shape[1]} rows, {padding:.0%} padding, {seconds:.2f} s")
        shown = np.ma.masked_equal(batches[0][1], PADDING)
        axis.imshow(shown % 20, cmap="tab20", aspect="auto", interpolation="nearest")
        axis.set(title=name, xlabel="token", ylabel="row")
        axes[2].plot(results[name], "--" if packed else "-", label=name)
    axes[2].set(title="loss", xlabel="step")
    axes[2].legend()
    figure.savefig(args.output, dpi=80)
    one, all_ = results.values()
    print(f"Largest difference of the losses: {np.abs(np.subtract(one, all_)).max():.2g}")


if __name__ == "__main__":
    main()

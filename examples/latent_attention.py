"""Train a small language model with multi-head latent attention (MLA), and serve it from a paged latent cache.

    python examples/latent_attention.py    # half a minute on a CPU; for a GPU, with the dims of DeepSeek-V3:
    python examples/latent_attention.py --width 2048 --heads 16 --q-rank 1536 --rank 512 --nope 128 --rope 64 --layers 4

The model learns the source of this script. Training expands the latents to a key and a value for each head. Serving
attends to the latents themselves, with absorbed weights: first prompts of different lengths in one call, then token by
token. At the end, the expanded computation checks each token. The picture shows the loss, and the bytes of the cache
for each token and layer: of the latents, and of keys and values with the same number of heads, or fewer.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_flash.nnx

PAGE = 16  # tokens in a page


class Block(nnx.Module):
    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        width = args.width
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadLatentAttention(
            args.heads,
            width,
            q_lora_rank=args.q_rank,
            kv_lora_rank=args.rank,
            qk_nope_head_dim=args.nope,
            qk_rope_head_dim=args.rope,
            v_head_dim=args.nope,
            rngs=rngs,
        )
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, table: jax.Array | None, lengths: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), page_table=table, lengths=lengths)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Map bytes [B, T] to logits [B, T, 256] of the next byte. With a page table and lengths, use the cache."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args, rngs) for _ in range(args.layers)])
        self.norm, self.head = nnx.RMSNorm(args.width, rngs=rngs), nnx.Linear(args.width, 256, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, table: jax.Array | None = None, lengths: jax.Array | None = None
    ) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, table, lengths)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    """Return the loss for bytes [B, T + 1]."""

    def loss_of(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(rows[:, :-1]), rows[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@functools.partial(nnx.jit, donate_argnums=0)  # the pages are updated in place
def next_tokens(model: Model, tokens: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Write the last tokens [B, T] of sequences of these lengths into the cache, and return the next tokens [B]."""
    return model(tokens, table, lengths)[:, -1].argmax(-1)


def serve(model: Model, prompts: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Return each prompt with `count` generated tokens."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = max(map(len, prompts))
    pages = -(-(longest + count) // PAGE)
    table = np.random.default_rng(0).permutation(len(prompts) * pages).reshape(len(prompts), pages).astype(np.int32)
    for block in model.blocks:
        block.attention.init_pages(table.size, PAGE)
    step = nnx.cached_partial(next_tokens, model)  # collects the arrays of the model once
    tokens = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    written = []
    for _ in range(count):
        written.append(np.asarray(step(*map(jnp.asarray, (tokens, table, lengths)))))
        tokens, lengths = written[-1][:, None], lengths + 1
    return [np.concatenate([prompt, more]) for prompt, more in zip(prompts, np.stack(written, 1), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--generate", type=int, default=64, help="number of tokens to generate after each prompt")
    for name, default in (("layers", 2), ("width", 64), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default, help_ in (
        ("q-rank", 32, "dim of the compressed queries"),
        ("rank", 32, "dim of the compressed keys and values"),
        ("nope", 16, "dim of a head without rotary embeddings, and of its values"),
        ("rope", 8, "dim of a head with rotary embeddings"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_)
    parser.add_argument("--output", type=Path, default=Path("latent_attention.png"))
    args = parser.parse_args()

    rng, text = np.random.default_rng(0), np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    model = Model(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(args.learning_rate), wrt=nnx.Param)
    losses = []
    for i in range(args.steps):
        begins = rng.integers(0, len(text) - args.seq_len, args.batch)
        rows = np.stack([text[begin : begin + args.seq_len + 1] for begin in begins])
        losses.append(float(train_step(model, optimizer, jnp.asarray(rows))))
        if i % 50 == 0 or i == args.steps - 1:
            print(f"step {i}: loss {losses[-1]:.3f}")

    prompts = [text[begin : begin + length] for begin, length in ((0, 20), (len(text) // 2, 7), (len(text) // 3, 33))]
    sequences = serve(model, prompts, args.generate)
    equal = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expanded = np.asarray(model(jnp.asarray(sequence)[None])[0].argmax(-1))
        equal.append(expanded[len(prompt) - 1 : -1] == sequence[len(prompt) :])
        shown = bytes(sequence.astype(np.uint8)).decode(errors="replace")
        print(f"{shown[: len(prompt)]!r} continues with {shown[len(prompt) :]!r}")
    print(f"Tokens equal to those of the expanded computation: {np.mean(equal):.1%}")

    bytes_of = {f"kv heads: {n}": 4 * n * (2 * args.nope + args.rope) for n in (args.heads, args.heads // 2, 1)}
    bytes_of["latents"] = 4 * (args.rank + args.rope)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.plot(losses)
    left.set(title="loss", xlabel="step", ylim=0)
    right.barh(list(bytes_of), list(bytes_of.values()))
    right.set(title="cache of a token in a layer", xlabel="bytes in float32")
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

"""Generate tokens with a key/value cache, and without one: the tokens are the same, the time is not.

    python examples/decode.py                                                      # seconds on a CPU
    python examples/decode.py --prompt 16000 --length 16384 --width 2048 --heads 16 --kv-heads 4 --layers 8   # a GPU

The prompt enters the cache in one call, then each new token enters it. Without a cache, every token computes the whole
sequence again. The weights are random, so the output is not text. The picture shows the milliseconds of every token.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jax_flash.nnx


class Block(nnx.Module):
    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        width = args.width
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadAttention(
            args.heads, width, num_kv_heads=args.kv_heads, is_causal=True, decode=False, rngs=rngs
        )
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), decode=decode)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Map tokens [B, T], which start at position `begin`, to logits [B, T, vocabulary]."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.embed = nnx.Embed(args.vocabulary, args.width, rngs=rngs)
        self.embed_position = nnx.Embed(args.length, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args, rngs) for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, args.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array, begin: jax.Array | int = 0, decode: bool = False) -> jax.Array:
        x = self.embed(tokens) + self.embed_position(begin + jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, decode)
        return self.head(x)


@nnx.jit
def with_cache(model: Model, tokens: jax.Array, begin: int) -> jax.Array:
    """Write new tokens [B, T] into the cache, and return the token after them, [B]."""
    return model(tokens, begin, decode=True)[:, -1].argmax(-1)


@nnx.jit
def without_cache(model: Model, tokens: jax.Array, length: int) -> jax.Array:
    """Return the token [B] after the first `length` of the tokens [B, longest]."""
    return model(tokens)[:, length - 1].argmax(-1)


def decode(model: Model, prompt: np.ndarray, length: int, cached: bool) -> tuple[np.ndarray, list[float]]:
    """Return tokens [B, length] that start with the prompt, and the milliseconds of each new token."""
    tokens, known = np.zeros((len(prompt), length), np.int32), prompt.shape[1]
    tokens[:, :known] = prompt
    new, milliseconds = prompt, []
    step = nnx.cached_partial(with_cache if cached else without_cache, model)  # collects the model's arrays once
    for place in range(known, length):
        begin = time.perf_counter()
        chosen = step(jnp.asarray(new), place - new.shape[1]) if cached else step(jnp.asarray(tokens), place)
        tokens[:, place] = np.asarray(chosen)
        milliseconds.append(1e3 * (time.perf_counter() - begin))
        new = tokens[:, place : place + 1]
    return tokens, milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=32, help="number of tokens in the prompt")
    parser.add_argument("--length", type=int, default=256, help="total number of tokens, and length of the cache")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path("decode.png"))
    args = parser.parse_args()

    model = Model(args, nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, args.vocabulary, (args.batch, args.prompt), np.int32)
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    written = {}
    for name, cached in (("with a cache", True), ("without", False)):
        for block in model.blocks:
            block.attention.init_cache((args.batch, args.length, args.width))
        written[name], milliseconds = decode(model, prompt, args.length, cached)
        later = milliseconds[2:]  # the first two calls compile: the prompt, and one token
        axes.plot(range(args.prompt + 2, args.length), later, label=name)
        print(f"{name}: median {np.median(later):.2f} ms per token")
    axes.set(xlabel="tokens so far", ylabel="ms a token", ylim=0)
    axes.legend()
    figure.savefig(args.output, dpi=80)
    one, other = written.values()
    print(f"Equal tokens: {np.mean(one == other):.1%}")


if __name__ == "__main__":
    main()

"""Serve requests with continuous batching: a finished sequence frees its pages and its slot for the next one.

    python examples/serve.py    # seconds on a CPU; for a GPU:
    python examples/serve.py --requests 96 --longest 512 --slots 32 --pages 4096 --width 2048 --heads 16 --layers 8

All sequences share a cache in pages. A prompt enters in one call. Each step then generates one token for every
sequence. The weights are random. At the end, some requests are served alone for comparison. On a GPU, the order of sums
depends on the other lengths in the batch, so a token may differ in a near tie. The picture shows the sequence in each
slot, and the pages in use.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jax_flash.nnx

VOCABULARY = 256


class Block(nnx.Module):
    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        width = args.width
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadAttention(args.heads, width, num_kv_heads=args.kv_heads, rngs=rngs)
        self.attention.init_pages(args.pages, args.page)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), page_table=table, lengths=lengths)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, args.width, rngs=rngs)
        self.embed_position = nnx.Embed(args.longest, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args, rngs) for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, VOCABULARY, rngs=rngs)


@functools.partial(nnx.jit, donate_argnums=0)  # the pages are updated in place
def next_tokens(model: Model, tokens: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Write the last tokens [B, T] of sequences of these lengths into the cache, and return the next tokens [B]."""
    places = (lengths[:, None] - tokens.shape[1] + jnp.arange(tokens.shape[1])).clip(min=0)
    x = model.embed(tokens) + model.embed_position(places)
    for block in model.blocks:
        x = block(x, table, lengths)
    return model.head(x[:, -1]).argmax(-1)


class Server:
    """Slots for sequences, and the pages that they share."""

    def __init__(self, model: Model, args: argparse.Namespace):
        self.next_tokens = nnx.cached_partial(next_tokens, model)  # collects the arrays of the model once
        self.page, self.free = args.page, list(range(args.pages))
        self.table = np.zeros((args.slots, -(-args.longest // args.page)), np.int32)
        self.lengths = np.zeros(args.slots, np.int32)
        self.taken: list[list[int]] = [[] for _ in range(args.slots)]  # the pages of each slot
        self.written: list[list[int]] = [[] for _ in range(args.slots)]

    def start(self, slot: int, prompt: np.ndarray, tokens: int) -> None:
        """Reserve pages for all tokens of the sequence, and write the prompt into them."""
        self.taken[slot] = [self.free.pop() for _ in range(-(-tokens // self.page))]
        self.table[slot, : len(self.taken[slot])] = self.taken[slot]
        self.lengths[slot] = len(prompt)
        rows = 2 ** int(np.ceil(np.log2(len(prompt))))  # powers of two limit compilation; the first rows are padding
        padded = np.pad(prompt, (rows - len(prompt), 0))[None]
        token = self.next(padded, self.table[slot : slot + 1], self.lengths[slot : slot + 1])
        self.written[slot] = [*prompt.tolist(), int(token[0])]

    def step(self) -> None:
        """Generate one token for every sequence."""
        self.lengths[busy := self.lengths > 0] += 1
        last = np.array([[written[-1] if written else 0] for written in self.written], np.int32)
        for slot, token in enumerate(self.next(last, self.table, self.lengths)):
            if busy[slot]:
                self.written[slot].append(int(token))

    def next(self, *arrays: np.ndarray) -> np.ndarray:
        return np.asarray(self.next_tokens(*map(jnp.asarray, arrays)))

    def end(self, slot: int) -> list[int]:
        self.free += self.taken[slot]
        written, self.written[slot], self.lengths[slot] = self.written[slot], [], 0
        return written


def serve(server: Server, requests: list[tuple[np.ndarray, int]]) -> tuple[list[list[int]], np.ndarray, list[int]]:
    """Prompts, and how many tokens each sequence has at the end -> those; who was where at each step; pages in use."""
    slots, pages = len(server.lengths), len(server.free)
    answers: list[list[int]] = [[] for _ in requests]
    waiting, at = list(range(len(requests))), np.full(slots, -1)
    history, in_use = [], []
    while waiting or (at >= 0).any():
        for slot in np.flatnonzero(at < 0).tolist():
            if waiting and len(server.free) * server.page >= requests[waiting[0]][1]:
                at[slot] = waiting.pop(0)
                server.start(slot, *requests[at[slot]])
        history.append(at.copy())
        in_use.append(pages - len(server.free))
        server.step()
        for slot in np.flatnonzero(at >= 0).tolist():
            if len(server.written[slot]) >= requests[at[slot]][1]:
                answers[at[slot]], at[slot] = server.end(slot), -1
    return answers, np.stack(history), in_use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4, help="number of sequences at a time")
    parser.add_argument("--longest", type=int, default=128, help="largest length of a sequence, including its prompt")
    parser.add_argument("--pages", type=int, default=24)
    parser.add_argument("--page", type=int, default=16, help="tokens in a page")
    for name, default in (("layers", 2), ("width", 64), ("heads", 4), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=Path("serve.png"))
    args = parser.parse_args()
    if args.pages * args.page < args.longest:
        parser.error("there are too few pages for the longest sequence")

    rng, model = np.random.default_rng(0), Model(args, nnx.Rngs(0))
    lengths = rng.integers(max(args.longest // 8, 4), args.longest + 1, args.requests)
    requests = [(rng.integers(0, VOCABULARY, rng.integers(1, n // 2 + 1), np.int32), int(n)) for n in lengths]
    answers, history, in_use = serve(Server(model, args), requests)
    alone = [serve(Server(model, args), [request])[0][0] for request in requests[:3]]
    print(f"{args.requests} sequences of {sum(lengths)} tokens in {len(history)} steps of at most {args.slots}")
    same = np.mean(np.concatenate(answers[:3]) == np.concatenate(alone))
    print(f"Tokens equal to those of the sequence alone: {same:.1%}")

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 4), sharex=True, layout="constrained")
    top.imshow(np.ma.masked_less(history.T, 0), aspect="auto", interpolation="none", cmap="tab20")
    top.set(ylabel="slot", title="Which sequence is where")
    bottom.plot(in_use)
    bottom.set(xlabel="step", ylabel="pages in use", ylim=(0, args.pages))
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

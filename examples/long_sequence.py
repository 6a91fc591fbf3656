"""Trains a small language model on a long sequence that is divided over all devices, and on one device beside it.

    python examples/long_sequence.py                                  # eight virtual devices of a CPU: a minute
    python examples/long_sequence.py --seq-len 131072 --width 512 --learning-rate 3e-4 --dtype bfloat16    # GPUs

The tokens are placed on a mesh, sharded over time, and the train step is the same for one device and for many: under
`jit` what works on tokens one by one is divided by XLA, and attention by jax_flash, whose keys and values go round the
devices. The losses are compared at the end.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jax_flash.nnx


class Block(nnx.Module):
    """A pre-norm transformer block with one key/value head, so that attention is a ring."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        width, dtype = args.width, args.dtype
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = jax_flash.nnx.MultiHeadAttention(
            args.heads, width, num_kv_heads=1, is_causal=True, decode=False, dtype=dtype, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Bytes [B, T] -> logits [B, T, 256] of the byte after each."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, args.width, dtype=args.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(args, rngs) for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, 256, rngs=rngs)  # in float32

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, following: jax.Array) -> jax.Array:
    def loss_of(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), following).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(args: argparse.Namespace, text: np.ndarray, devices: list[jax.Device]) -> tuple[list[float], float]:
    """The losses, and tokens a second after the first step, which compiles."""
    mesh = jax.make_mesh((len(devices),), ("seq",), (AxisType.Auto,), devices=devices)
    place = NamedSharding(mesh, PartitionSpec(None, "seq"))
    model = Model(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(args.learning_rate), wrt=nnx.Param)
    everywhere = jax.device_put(nnx.state((model, optimizer)), NamedSharding(mesh, PartitionSpec()))
    nnx.update((model, optimizer), everywhere)  # as a step leaves them, or the second one would compile again
    losses, starts = [], np.random.default_rng(0).integers(0, len(text) - args.seq_len, args.steps)
    with jax.set_mesh(mesh):
        for step, start in enumerate(starts):
            if step == 1:
                begin = time.perf_counter()
            window = text[None, start : start + args.seq_len + 1]
            tokens, following = (jax.device_put(jnp.asarray(x), place) for x in (window[:, :-1], window[:, 1:]))
            losses.append(float(train_step(model, optimizer, tokens, following)))
        jax.block_until_ready(nnx.state(model))
    return losses, args.seq_len * (args.steps - 1) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048, help="a multiple of twice the devices")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # of no meaning where there are GPUs
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)
    table = Table("devices", "first loss", "last loss", "tokens/s")
    losses = {}
    for devices in (jax.devices()[:1], jax.devices()):
        losses[len(devices)], rate = train(args, text, devices)
        first, *_, last = losses[len(devices)]
        table.add_row(str(len(devices)), f"{first:.4f}", f"{last:.4f}", f"{rate:.0f}")
    Console().print(table)
    one, all_ = losses.values()
    Console().print(f"Largest difference of the losses: {np.abs(np.subtract(one, all_)).max():.2g}")


if __name__ == "__main__":
    main()

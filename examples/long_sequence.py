"""Train a small language model on a long sequence that is divided over all devices, and on one device for comparison.

    python examples/long_sequence.py                                # eight virtual devices of a CPU: 15 seconds
    python examples/long_sequence.py --mesh 2 2 2                   # they divide batch, sequence and heads
    python examples/long_sequence.py --seq-len 131072 --width 512 --learning-rate 3e-4 --dtype bfloat16    # GPUs

The tokens are sharded over batch and time. The weights of the attention projections are sharded over the heads. The
train step is the same for one device and for many. Under `jit`, XLA divides the operations on single tokens. jax_flash
divides attention: its keys and values move around the devices of the axis `seq`. Both runs train on the same rows, one
row for each device of the axis `batch`. At the end, their losses are compared and drawn. `packed_sequence.py` divides
a sequence of packed documents.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jax_flash.nnx

AXES = ("batch", "seq", "heads")
SPLIT: dict[str, Any] = {  # how the mesh's axis `heads` divides the weights of attention's projections
    "kernel_metadata": {"out_sharding": (None, "heads")},  # queries, keys and values: [width, heads, head dim]
    "bias_metadata": {"out_sharding": ("heads",)},
    "out_kernel_metadata": {"out_sharding": ("heads",)},  # [heads, head dim, width]
    "out_bias_metadata": {"out_sharding": ()},
}


class Block(nnx.Module):
    """A pre-norm transformer block. Each device has one key/value head, which makes attention a ring."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        width, dtype = args.width, args.dtype
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = jax_flash.nnx.MultiHeadAttention(
            args.heads, width, num_kv_heads=args.mesh[2], is_causal=True, decode=False, dtype=dtype, rngs=rngs, **SPLIT
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Map bytes [B, T] to logits [B, T, 256] of the next byte."""

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


def train(args: argparse.Namespace, text: np.ndarray, shape: tuple[int, ...]) -> tuple[list[float], float]:
    """Return the losses on a mesh of this shape, and the tokens per second after two steps.

    The first two steps compile. The second compiles again for the sharding of weights that XLA chose in the first.
    """
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=jax.devices()[: math.prod(shape)])
    place = NamedSharding(mesh, PartitionSpec("batch", "seq"))
    losses, rows = [], args.mesh[0]
    starts = np.random.default_rng(0).integers(0, len(text) - args.seq_len, (args.steps, rows, 1))
    with jax.set_mesh(mesh):
        model = Model(args, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(args.learning_rate), wrt=nnx.Param)
        for step, start in enumerate(starts):
            if step == 2:
                begin = time.perf_counter()
            window = text[start + np.arange(args.seq_len + 1)]
            tokens, following = (jax.device_put(x, place) for x in (window[:, :-1], window[:, 1:]))
            losses.append(float(train_step(model, optimizer, tokens, following)))
        jax.block_until_ready(nnx.state(model))
    return losses, rows * args.seq_len * (args.steps - 2) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mesh", type=int, nargs=3, metavar=AXES, help="number of devices along each axis (default: 1, all, 1)"
    )
    parser.add_argument(
        "--seq-len", type=int, default=2048, help="sequence length, a multiple of twice the devices along `seq`"
    )
    parser.add_argument("--steps", type=int, default=20, help="number of steps, at least 3; the first two compile")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("long_sequence.png"))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # has no effect on GPUs
    count = jax.device_count()
    args.mesh = tuple(args.mesh or (1, count, 1))
    if min(args.mesh) < 1 or math.prod(args.mesh) != count:
        parser.error(f"--mesh {' '.join(map(str, args.mesh))} must have a product of {count}, the number of devices")
    if args.steps < 3:
        parser.error(f"--steps {args.steps} must be at least 3")
    if args.heads % args.mesh[2]:
        parser.error(f"--heads {args.heads} must be a multiple of the {args.mesh[2]} devices of `heads`")
    if args.seq_len % (2 * args.mesh[1]):
        parser.error(f"--seq-len {args.seq_len} must be a multiple of twice the {args.mesh[1]} devices of `seq`")

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)
    table = Table("devices", "batch × seq × heads", "first loss", "last loss", "tokens/s")
    figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    results = []
    for shape, style in (((1, 1, 1), "-"), (args.mesh, "--")):
        losses, rate = train(args, text, shape)
        results.append(losses)
        sizes = " × ".join(map(str, shape))
        table.add_row(str(math.prod(shape)), sizes, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{rate:.0f}")
        ax.plot(losses, style, label=f"{sizes} devices")
    ax.set(xlabel="step", ylabel="loss")
    ax.legend()
    figure.savefig(args.output, dpi=80)
    Console().print(table)
    Console().print(f"Largest difference of the losses: {np.max(np.ptp(results, axis=0)):.2g}")


if __name__ == "__main__":
    main()

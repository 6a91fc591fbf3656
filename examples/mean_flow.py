"""Train a small MeanFlow model, which generates an image in one step, and draw samples.

    python examples/mean_flow.py                                                           # half a minute on a CPU
    python examples/mean_flow.py --image 64 --width 384 --heads 6 --layers 8 --steps 20000 # a GPU

MeanFlow (arXiv 2505.13447) learns the mean velocity u(z, r, t) of the path from an image x to noise e, between the
times r and t. Its target contains the derivative of u along the path: a Jacobian-vector product through the model, and
so through attention. The gradient does not pass through it. The model is a diffusion transformer (DiT) in Flax. The
images are soft discs of random size and place. In the end, the same loss and gradient are computed with materialised
attention and compared. The picture shows images of the data set, and samples of one step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import jax_flash.nnx

LEAST_TIME = 0.05  # the velocity of a predicted image is divided by the time


class Block(nnx.Module):
    """A transformer block in which the times modulate norms and residuals (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.modulate = nnx.Linear(width, 6 * width, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        scale1, shift1, gate1, scale2, shift2, gate2 = jnp.split(self.modulate(condition)[:, None], 6, axis=-1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.down(jax.nn.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class MeanFlow(nnx.Module):
    """Map noisy images [B, side, side], r and t [B] to the mean velocity [B, side, side]."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.patch, tokens = args.patch, (args.image // args.patch) ** 2
        self.embed = nnx.Linear(args.patch**2, args.width, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, args.width)))
        self.time = nnx.Linear(2 * args.width, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args.width, args.heads, rngs) for _ in range(args.layers)])
        self.norm = nnx.LayerNorm(args.width, rngs=rngs)
        self.head = nnx.Linear(args.width, args.patch**2, rngs=rngs)

    def __call__(self, z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
        (batch, side, _), p, n = z.shape, self.patch, z.shape[1] // self.patch
        frequencies = jnp.exp(jnp.linspace(0, 2, self.time.in_features // 4))  # higher ones have large derivatives
        waves = jnp.concatenate([x[:, None] * frequencies for x in (t, t - r)], axis=-1)
        condition = jax.nn.silu(self.time(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)))
        patches = z.reshape(batch, n, p, n, p).swapaxes(2, 3).reshape(batch, n * n, p * p)
        x = self.embed(patches) + self.position[...]
        for block in self.blocks:
            x = block(x, condition)
        image = self.head(self.norm(x)).reshape(batch, n, n, p, p).swapaxes(2, 3).reshape(batch, side, side)
        return (z - image) / jnp.maximum(t, LEAST_TIME)[:, None, None]  # predicting the image is easier


def discs(key: jax.Array, count: int, side: int) -> jax.Array:
    """Return images [count, side, side] of one soft disc each, with values from -1 to 1."""
    x, y, radius = jax.random.uniform(key, (3, count, 1, 1), minval=0.25, maxval=0.75)
    rows, columns = jnp.mgrid[:side, :side] / side
    distance = jnp.hypot(rows - y, columns - x)
    return jnp.tanh(side * (0.15 + 0.2 * (radius - 0.25) - distance))


def loss_of(model: MeanFlow, key: jax.Array, images: jax.Array) -> jax.Array:
    """Return the loss of MeanFlow, weighted so that times and examples count alike."""
    to_noise, to_times, to_choice = jax.random.split(key, 3)
    noise = jax.random.normal(to_noise, images.shape)
    times = jax.random.uniform(to_times, (2, len(images)), minval=LEAST_TIME)
    t, r = times.max(0), times.min(0)
    r = jnp.where(jax.random.bernoulli(to_choice, 0.75, r.shape), t, r)  # if r = t, u is the velocity itself
    z = images + t[:, None, None] * (noise - images)
    velocity = noise - images
    u, derivative = jax.jvp(lambda z, t: model(z, r, t), (z, t), (velocity, jnp.ones_like(t)))
    target = jax.lax.stop_gradient(velocity - (t - r)[:, None, None] * derivative)
    errors = t**2 * ((u - target) ** 2).mean((1, 2))
    return (errors / jax.lax.stop_gradient(errors + 0.1)).mean()  # no example dominates


@nnx.jit
def train_step(model: MeanFlow, optimizer: nnx.Optimizer, key: jax.Array, images: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, key, images)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def sample(model: MeanFlow, noise: jax.Array) -> jax.Array:
    """Return images from noise in one step: the mean velocity over the whole path."""
    return noise - model(noise, jnp.zeros(len(noise)), jnp.ones(len(noise)))


def compare(model: MeanFlow, key: jax.Array, images: jax.Array) -> float:
    """Return the largest difference of loss and gradients from those with materialised attention."""
    results = []
    for implementation in ("reference", None):
        for block in model.blocks:
            block.attention.implementation = implementation
        results.append(nnx.jit(nnx.value_and_grad(loss_of))(model, key, images))
    return max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, results), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, default=16, help="side of an image, in pixels")
    parser.add_argument("--patch", type=int, default=4, help="side of a patch, in pixels; must divide --image")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=Path("mean_flow.png"))
    args = parser.parse_args()

    key = jax.random.key(0)
    model = MeanFlow(args, nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)), wrt=nnx.Param)
    begin = time.perf_counter()
    for step in range(args.steps):
        to_images, to_loss = jax.random.split(jax.random.fold_in(key, step))
        loss = train_step(model, optimizer, to_loss, discs(to_images, args.batch, args.image))
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - begin:.1f} s")

    difference = compare(model, key, discs(key, args.batch, args.image))
    print(f"Difference from materialised attention: {difference:.2g}")

    rows = {
        "data": discs(key, 10, args.image),
        "one step": sample(model, jax.random.normal(key, (10, args.image, args.image))),
    }
    figure, axes = plt.subplots(2, 10, figsize=(11, 2.6), layout="constrained")
    for row, (name, images) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(name)
        for ax, image in zip(row, images, strict=True):
            ax.imshow(image, cmap="gray", vmin=-1, vmax=1)
            ax.set(xticks=[], yticks=[])
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

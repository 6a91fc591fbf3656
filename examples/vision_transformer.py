"""Train a small vision transformer on sequences of odd length: the tokens of the patches and one class token.

    python examples/vision_transformer.py                                                      # seconds on a CPU
    python examples/vision_transformer.py --image 224 --patch 16 --width 768 --heads 12 --layers 12 --batch 64  # a GPU

14 x 14 patches and the class token are 197 tokens, a prime number. Nothing is padded, because the kernels take any
length. The images are stripes in noise, and the class is their direction. The first loss is compared with materialised
attention. The picture shows images that the model has not seen, and its predictions.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_flash.nnx

CLASSES = 8


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = jax_flash.nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class VisionTransformer(nnx.Module):
    """Map images [B, height, width, 1] to logits [B, CLASSES], read from the class token."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        patch = (args.patch, args.patch)
        self.embed = nnx.Conv(1, args.width, patch, strides=patch, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, args.width)))
        tokens = (args.image // args.patch) ** 2 + 1
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, args.width)))
        self.blocks = nnx.List([Block(args.width, args.heads, rngs) for _ in range(args.layers)])
        self.norm, self.head = nnx.LayerNorm(args.width, rngs=rngs), nnx.Linear(args.width, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.embed(images).reshape(len(images), -1, self.token.shape[-1])
        token = jnp.broadcast_to(self.token[...], (len(images), *self.token.shape[1:]))
        x = jnp.concatenate([token, patches], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def stripes(rng: np.random.Generator, count: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Images [count, size, size, 1] and their classes: stripes in one of eight directions, at any place, in noise."""
    classes = rng.integers(0, CLASSES, count)
    angle, shift = (np.pi / CLASSES * classes)[:, None, None], rng.uniform(0, 2 * np.pi, (count, 1, 1))
    x, y = np.meshgrid(np.arange(size), np.arange(size))
    wave = np.sin(16 * np.pi / size * (np.cos(angle) * x + np.sin(angle) * y) + shift)
    noisy = (wave + rng.normal(0, 0.7, wave.shape)).astype(np.float32)
    return jnp.asarray(noisy[..., None]), jnp.asarray(classes, jnp.int32)


def loss_of(model: VisionTransformer, images: jax.Array, classes: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), classes).mean()


@nnx.jit
def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, images: jax.Array, classes: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, images, classes)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, default=56, help="side of an image, in pixels")
    parser.add_argument("--patch", type=int, default=4, help="side of a patch, in pixels; must divide --image")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("vision_transformer.png"))
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    model = VisionTransformer(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(args.learning_rate), wrt=nnx.Param)
    print(f"{len(model.position[...])} tokens in an image")

    batch = stripes(rng, args.batch, args.image)
    fused = nnx.jit(loss_of)(model, *batch)
    for block in model.blocks:
        block.attention.implementation = "reference"
    print(f"Difference from materialised attention: {abs(fused - nnx.jit(loss_of)(model, *batch)):.2g}")
    for block in model.blocks:
        block.attention.implementation = None

    for step in range(args.steps):
        loss = train_step(model, optimizer, *stripes(rng, args.batch, args.image))
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")

    images, classes = stripes(rng, 64, args.image)
    said = nnx.jit(lambda model, images: model(images).argmax(-1))(model, images)
    print(f"Correct: {jnp.mean(said == classes):.0%} of {len(images)} new images")
    figure, axes = plt.subplots(2, 8, figsize=(11, 3.2), layout="constrained")
    for ax, image, right, answer in zip(axes.flat, images, classes, said, strict=False):
        ax.imshow(image[..., 0], cmap="gray")
        ax.set(title=f"{180 * answer / CLASSES:.0f}°", xticks=[], yticks=[])
        ax.title.set_color("black" if answer == right else "red")
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()

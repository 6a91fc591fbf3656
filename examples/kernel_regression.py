"""Kernel ridge regression by conjugate gradients, without the kernel matrix, and with learned length scales.

    python examples/kernel_regression.py                                                   # a minute on a CPU
    python examples/kernel_regression.py --points 100000 --sample 10000                    # a GPU

The data is a noisy function of two coordinates, which is rougher in the first one. A third coordinate has no influence.
The model is (K + noise) weights = values, where K is a Matérn kernel with a length scale for each coordinate. First,
samples of the points teach the length scales and the noise: half of a sample predicts the other half, and the gradient
of the error passes through the solution of the linear system. The third length scale grows, because that makes the
kernel ignore its coordinate. Then all points are fitted. Each step of conjugate gradients is one `kernel_sum`.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy.sparse.linalg import cg

from jax_flash import kernel_sum, kernels

NOISE = 0.3  # standard deviation in the data
Parameters = dict[str, jax.Array]


def function(x: np.ndarray) -> np.ndarray:
    return np.sin(9 * x[..., 0]) + np.cos(3 * x[..., 1])


def solve(parameters: Parameters, x: jax.Array, values: jax.Array, iterations: int) -> jax.Array:
    """Return the weights [N, 1] of the points: the solution of (K + noise) weights = values."""
    kernel = kernels.matern32(jnp.exp(parameters["log_scales"]))
    noise = jnp.exp(parameters["log_noise"])
    weights, _ = cg(lambda w: kernel_sum(x, x, w, kernel) + noise * w, values, tol=1e-3, maxiter=iterations)
    return weights


def predict(parameters: Parameters, x: jax.Array, weights: jax.Array, at: jax.Array) -> jax.Array:
    return kernel_sum(at, x, weights, kernels.matern32(jnp.exp(parameters["log_scales"])))


def loss_of(parameters: Parameters, x: jax.Array, values: jax.Array, iterations: int) -> jax.Array:
    """Return the mean squared error with which the first half of the points predicts the second."""
    half = len(x) // 2
    weights = solve(parameters, x[:half], values[:half], iterations)
    return ((predict(parameters, x[:half], weights, x[half:]) - values[half:]) ** 2).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000, help="N")
    parser.add_argument("--sample", type=int, default=1000, help="points in a sample that teaches the length scales")
    parser.add_argument("--steps", type=int, default=40, help="samples")
    parser.add_argument("--iterations", type=int, default=100, help="of conjugate gradients, at most")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("kernel_regression.png"))
    args = parser.parse_args()
    if args.sample > args.points:
        parser.error(f"--sample {args.sample} must be at most --points {args.points}")

    rng = np.random.default_rng(0)
    points = rng.random((args.points, 3), np.float32)
    noisy = function(points) + NOISE * rng.standard_normal(args.points)
    x, values = jnp.asarray(points), jnp.asarray(noisy[:, None], jnp.float32)

    parameters: Parameters = {"log_scales": jnp.zeros(3), "log_noise": jnp.float32(0)}
    optimizer = optax.adam(args.learning_rate)
    state = optimizer.init(parameters)
    loss_and_gradients = jax.jit(jax.value_and_grad(functools.partial(loss_of, iterations=args.iterations)))
    history = []
    start = time.perf_counter()
    for step in range(args.steps):
        sample = rng.permutation(args.points)[: args.sample]
        loss, gradients = loss_and_gradients(parameters, x[sample], values[sample])
        updates, state = optimizer.update(gradients, state)
        parameters = optax.apply_updates(parameters, updates)
        history.append(np.exp(parameters["log_scales"]))
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: error {loss:.3f}, length scales {history[-1].round(2)}", flush=True)
    print(f"Learned the length scales in {time.perf_counter() - start:.1f} s.")

    fit = jax.jit(functools.partial(solve, iterations=args.iterations)).lower(parameters, x, values).compile()
    start = time.perf_counter()
    weights = jax.block_until_ready(fit(parameters, x, values))
    seconds = time.perf_counter() - start
    memory = fit.memory_analysis()
    used = "" if memory is None else f" in {memory.temp_size_in_bytes / 1e6:.1f} MB"
    print(
        f"Fitted {args.points} points in {seconds:.1f} s{used}. Their kernel matrix has {4 * len(x) ** 2 / 1e6:.0f} MB."
    )

    side = np.linspace(0, 1, 60, dtype=np.float32)
    grid = np.stack([*np.meshgrid(side, side, indexing="ij"), np.full((60, 60), 0.5, np.float32)], -1)
    predicted = np.asarray(predict(parameters, x, weights, jnp.asarray(grid.reshape(-1, 3)))).reshape(60, 60)
    error = np.sqrt(np.mean((predicted - function(grid)) ** 2))
    print(f"Error of the prediction: {error:.3f} (the noise of the data: {NOISE})")

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for ax, image, title in zip(axes, (function(grid), predicted), ("function", "prediction"), strict=False):
        shown = ax.imshow(image.T, origin="lower", extent=(0, 1, 0, 1), vmin=-2, vmax=2)
        ax.set(title=title, xlabel="first coordinate", ylabel="second coordinate")
    figure.colorbar(shown, ax=axes[:2])
    for name, scales in zip(("first", "second", "third"), np.array(history).T, strict=True):
        axes[2].plot(scales, label=f"{name} coordinate")
    axes[2].set(title="learned length scales", xlabel="step", yscale="log")
    axes[2].legend()
    figure.savefig(args.output)
    print(f"Written: {args.output}")


if __name__ == "__main__":
    main()

"""Path-X (128 x 128 pixels, 16K tokens) and Path-256 (64K): a transformer learns to follow dashed curves.

    python -m benchmarks.paper pathfinder --side 32 --minutes 9 --checkpoint path    # then 64, 128, 256, from there

It learns on small images first. For larger ones its positions are interpolated. The checkpoint is a directory with the
weights and with what was reached at each stage; a stage goes on from it. Its optimiser begins anew, as its learning
rate does. Attention is dense up to 128 x 128, and block-sparse for 256 x 256.
"""

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import pathfinder_images
from .models import Config, block_mask
from .training import Batch, Trainer, label, train

RATE = 5e-4
LEVELS = 16  # of grey, each a token
TOKENS = 2**18  # of a batch
TESTED = {32: 10_000, 64: 10_000, 128: 2048, 256: 2048}  # images
CONFIDENCE = 0.99
ROWS = 16  # of pixels above and below that the block-sparse attention sees in full
EASIEST = 3  # dashes of a curve


def run(quick: bool, side: int, minutes: float, checkpoint: Path) -> dict[str, Any]:
    config = make_config(side, quick)
    trainer = Trainer(config, label)
    weights, log = checkpoint / "weights.npz", checkpoint / "stages.json"
    stages = json.loads(log.read_text()) if log.exists() else []
    if stages:
        trainer.weights = interpolated(weights, trainer.weights)
    batch, tested = (2, 8) if quick else (TOKENS // side**2, TESTED[side])
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        images_per_second = generation_rate(pool, side, batch)
        losses = list(
            train(trainer, stream(pool, side, batch, 1 + len(stages)), RATE, seconds=3 if quick else 60 * minutes)
        )
        tests = [pool.submit(make_batch, side, batch, [0, i], False) for i in range(-(-tested // batch))]
        accuracy = trainer.accuracy((test.result() for test in tests), CONFIDENCE)
    stage = {
        "side": side,
        "length": config.length,
        "attention": config.attention,
        "kept_blocks": float(block_mask(config).kept) if config.attention == "block-sparse" else 1.0,
        "parameters": trainer.parameters,
        "minutes": minutes,
        "batch": batch,
        "steps": len(losses),
        "images_seen": batch * len(losses),
        "images_generated_per_second": images_per_second,
        "cores": os.cpu_count(),
        "training": [float(x.mean()) for x in np.array_split(losses, min(200, len(losses)))],
    }
    stages.append(stage | accuracy)
    checkpoint.mkdir(parents=True, exist_ok=True)
    np.savez(weights, *jax.tree.leaves(trainer.weights))
    log.write_text(json.dumps(stages, indent=1))
    return {"stages": stages}


def make_config(side: int, quick: bool) -> Config:
    return Config(
        layers=1 if quick else 6,
        width=64 if quick else 256,
        heads=1 if quick else 4,
        hidden=128 if quick else 512,
        grid=(side, side),
        vocabulary=LEVELS,
        classes=2,
        dropout=0.0,  # no image comes twice
        attention="block-sparse" if side == 256 else "flash",
        window=ROWS * side,
    )


def interpolated(path: Path, weights: Any) -> Any:
    """The weights in the file, the tables of positions stretched to as many as there are now."""
    leaves, structure = jax.tree.flatten(weights)
    with np.load(path) as saved:
        loaded = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
    fitted = [jax.image.resize(old, new.shape, "linear") for old, new in zip(loaded, leaves, strict=True)]
    return jax.tree.unflatten(structure, fitted)


def make_batch(side: int, count: int, seed: list[int], varied: bool) -> Batch:
    """Half of the varied batches have shorter curves, on which it is easier to begin."""
    style = pathfinder_images.STYLES[side]
    random = np.random.default_rng(seed)
    if varied and random.random() < 0.5:
        style = style._replace(dashes=int(random.integers(EASIEST, style.dashes)))
    images, labels = pathfinder_images.examples(side, count, seed, style)
    return {"tokens": (images // (256 // LEVELS)).reshape(count, -1), "labels": labels}


def stream(pool: concurrent.futures.Executor, side: int, batch: int, stage: int) -> Iterator[Batch]:
    """Made ahead of time, in the same order whatever the number of processes. A stage has images of its own."""
    numbers = itertools.count()
    ahead = 2 * (os.cpu_count() or 1)
    waiting = deque(pool.submit(make_batch, side, batch, [stage, next(numbers)], True) for _ in range(ahead))
    try:
        while True:
            yield waiting.popleft().result()
            waiting.append(pool.submit(make_batch, side, batch, [stage, next(numbers)], True))
    finally:
        for future in waiting:
            future.cancel()


def generation_rate(pool: concurrent.futures.Executor, side: int, batch: int) -> float:
    """Images a second of all processes together."""
    cores = os.cpu_count() or 1
    list(pool.map(make_batch, [side] * cores, [1] * cores, [[0, 0]] * cores, [False] * cores))  # starts them
    start = time.perf_counter()
    jobs = 2 * cores
    list(pool.map(make_batch, [side] * jobs, [batch] * jobs, [[2, i] for i in range(jobs)], [False] * jobs))
    return jobs * batch / (time.perf_counter() - start)

"""Path-X (128 x 128 pixels, 16K tokens) and Path-256 (64K): a transformer learns to follow dashed curves.

    python -m benchmarks.paper pathfinder --side 32 --minutes 5 --checkpoint path    # then 64, 128, 256, from there

It learns on small images first, and goes on with larger ones: since its positions rotate queries and keys, pixel by
pixel, its weights do not depend on the size. The checkpoint is a directory with the weights and with what was reached
at each stage; a stage goes on from it. Its optimiser begins anew, as its learning rate does. Attention is dense up to
128 x 128, and block-sparse for 256 x 256.

In training, each pixel of a curve has a target, too: how many discs lie on its curve. `--labels-alone` goes without.
The file of results has the stages of each checkpoint.
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
import measure
import numpy as np

from .. import pathfinder_images
from ..models import Config, block_mask
from ..results import Results, Row
from ..training import Batch, Trainer, label, label_and_targets, train

RATES = {32: 1e-3, 64: 5e-4, 128: 3e-4, 256: 3e-4}  # the larger ones go on from what was learned
LEVELS = 16  # of grey; each level is a token
TOKENS = 2**18  # in a batch
TESTED = {32: 10_000, 64: 10_000, 128: 10_000, 256: 2048}  # how many images the test has
CONFIDENCE = 0.99
ROWS = 16  # how many rows of pixels above and below the block-sparse attention sees in full
EASIEST = 3  # dashes in a curve of the easiest images
TRAINING, TEST, TIMING = range(3)  # the first part of a seed says what it is for
PROCESSES = max(1, (os.cpu_count() or 1) - 2)  # that make images; the other cores feed the device
SHARE = 0.8  # of the minutes is spent on training; the rest is for compilation and for the test


def run(results: Results, quick: bool, side: int, labels_alone: bool, checkpoint: Path) -> None:
    config = make_config(side, quick)
    trainer = Trainer(config, label if labels_alone else label_and_targets)
    weights, log = checkpoint / "weights.npz", checkpoint / "stages.json"
    stages: list[Row] = json.loads(log.read_text()) if log.exists() else []
    if stages:
        trainer.weights = loaded(weights, trainer.weights)
    batch, tested = (2, 8) if quick else (TOKENS // side**2, TESTED[side])
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        images_per_second = generation_rate(pool, side, batch)
        seconds = 1 if quick else SHARE * results.seconds_left()
        losses = list(train(trainer, stream(pool, side, batch, len(stages)), RATES[side], seconds=seconds))
        stage: Row = {
            "checkpoint": checkpoint.name,
            "device": jax.devices()[0].device_kind,
            "side": side,
            "targets": not labels_alone,
            "length": config.length,
            "attention": config.attention,
            "kept_blocks": float(block_mask(config).kept) if config.attention == "block-sparse" else 1.0,
            "parameters": trainer.parameters,
            "seconds": seconds,
            "batch": batch,
            "steps": len(losses),
            "images_seen": batch * len(losses),
            "images_generated_per_second": images_per_second,
            "processes": PROCESSES,
            "training": [float(x.mean()) for x in np.array_split(losses, min(200, len(losses)))],
        }
        stages.append(stage)
        save(trainer, weights)
        measure.save(log, stages)
        # What was learned is kept, even if the test does not come to its end.
        tests = [pool.submit(make_batch, side, batch, [TEST, side, i], False) for i in range(-(-tested // batch))]
        stage |= trainer.accuracy((test.result() for test in tests), CONFIDENCE)
    measure.save(log, stages)
    results.begin()
    results.rows = [row for row in results.rows if row["checkpoint"] != checkpoint.name] + stages
    results.save()


def save(trainer: Trainer, path: Path) -> None:
    """Whole or not at all, so that a run that is cut off leaves the weights that were there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name("part.npz")
    np.savez(written, *jax.tree.leaves(trainer.weights))
    os.replace(written, path)


def make_config(side: int, quick: bool) -> Config:
    return Config(
        layers=1 if quick else 4,
        width=64 if quick else 128,
        heads=1 if quick else 2,
        hidden=128 if quick else 256,
        grid=(side, side),
        vocabulary=LEVELS,
        classes=2,
        background=0,
        dropout=0.0,  # no image comes twice
        rotary=True,
        attention="block-sparse" if side == 256 else "flash",
        window=ROWS * side,
    )


def loaded(path: Path, weights: Any) -> Any:
    """What is in the file, arranged as these weights are."""
    with np.load(path) as saved:
        return jax.tree.unflatten(jax.tree.structure(weights), [jnp.asarray(saved[name]) for name in saved.files])


def make_batch(side: int, count: int, seed: list[int], varied: bool) -> Batch:
    """Half of the varied batches are easier."""
    random = np.random.default_rng(seed)
    easy = varied and random.random() < 0.5
    style = easier(side, random) if easy else pathfinder_images.STYLES[side]
    images, targets, labels = pathfinder_images.examples(side, count, seed, style)
    tokens = images // (256 // LEVELS)
    return {"tokens": tokens.reshape(count, -1), "targets": targets.reshape(count, -1), "labels": labels}


def easier(side: int, random: np.random.Generator) -> pathfinder_images.Style:
    """Drawn with lines between those of half the size and those of this size; of the smallest, with shorter ones."""
    style, half = pathfinder_images.STYLES[side], pathfinder_images.STYLES.get(side // 2)
    if half is None:
        return style._replace(dashes=int(random.integers(EASIEST, style.dashes)))
    return style.mixed(half, random.random())


def stream(pool: concurrent.futures.Executor, side: int, batch: int, stage: int) -> Iterator[Batch]:
    """Made ahead of time, in the same order whatever the number of processes. A stage has images of its own."""
    seeds = ([TRAINING, stage, number] for number in itertools.count())
    waiting = deque(pool.submit(make_batch, side, batch, next(seeds), True) for _ in range(4 * PROCESSES))
    try:
        while True:
            made = waiting.popleft().result()
            waiting.append(pool.submit(make_batch, side, batch, next(seeds), True))
            yield made
    finally:
        for future in waiting:
            future.cancel()


def generation_rate(pool: concurrent.futures.Executor, side: int, batch: int) -> float:
    """Images a second of all processes together."""

    def made(jobs: int, count: int) -> None:
        list(pool.map(make_batch, *zip(*((side, count, [TIMING, count, i], False) for i in range(jobs)), strict=True)))

    made(PROCESSES, 1)  # starts them
    start = time.perf_counter()
    made(2 * PROCESSES, batch)
    return 2 * PROCESSES * batch / (time.perf_counter() - start)

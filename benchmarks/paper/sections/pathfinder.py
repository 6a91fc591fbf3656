"""Path-X (128 x 128 pixels, 16K tokens) and Path-256 (64K): a transformer learns to follow dashed curves.

    python -m benchmarks.paper pathfinder --side 32 --minutes 5 --checkpoint path    # then 64, 128 and 256

Training starts with small images and continues with larger ones. The positions are rotary, pixel by pixel, so the
weights do not depend on the image size. The checkpoint is a directory with the weights and the results of each stage,
and the next stage resumes from it. Optimizer state and learning rate restart. Attention is dense up to 128 x 128 and
block-sparse for 256 x 256, unless `--attention` selects another. A batch is sharded over all GPUs.

A block of tokens is a tile of the image. Block-sparse attention keeps all tiles within a reach, so curves can be
followed in every direction. (With pixels in row-major order, the same number of blocks would be 16 rows above and
below, which a vertical curve leaves soon.)

In training, each pixel of a curve also has a target: the number of discs on its curve. `--labels-alone` trains without
them. The result file has the stages of each checkpoint, with the GPU and the command of each.
"""

import concurrent.futures
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np

from .. import pathfinder_images
from ..models import Attention, Config, block_mask, in_tiles
from ..results import Results, Row
from ..training import Batch, Trainer, label, label_and_targets, train

RATES = {32: 1e-3, 64: 5e-4, 128: 3e-4, 256: 3e-4}  # larger images continue from trained weights
LEVELS = 16  # levels of grey; each is a token
BATCH = {32: 256, 64: 64, 128: 16, 256: 8}
IMAGES = 256  # images per job of a process
TESTED = {32: 10_000, 64: 10_000, 128: 10_000, 256: 2048}  # number of test images
CONFIDENCE = 0.99
TILE = (8, 16)  # pixels: a block of block-sparse attention
REACH = 48  # pixels that block-sparse attention covers in each direction, at least
EASIEST = 5  # dashes in a curve of the easiest images
SHARES = (0.25, 0.5, 0.75, 1.0)  # weight of the style of half the size in easier images
TRAINING, TEST, TIMING = range(1, 4)  # the first part of a seed: its purpose
PROCESSES = max(1, (os.cpu_count() or 1) - 2)  # that generate images; the other cores feed the device
RESERVED = 50  # seconds for compilation and the test

Kind = tuple[pathfinder_images.Style, pathfinder_images.Odds]


def run(
    results: Results, quick: bool, side: int, attention: Attention | None, labels_alone: bool, checkpoint: Path
) -> None:
    config = make_config(side, quick, attention or ("block-sparse" if side == 256 else "flash"))
    batch, tested, count = (2, 8, 16) if quick else (BATCH[side], TESTED[side], IMAGES)
    devices = jax.devices()[: math.gcd(batch, jax.device_count())]
    trainer = Trainer(config, label if labels_alone else label_and_targets, devices=devices)
    weights, log = checkpoint / "weights.npz", checkpoint / "stages.json"
    stages: list[Row] = json.loads(log.read_text())["stages"] if log.exists() else []
    if stages:
        if stages[-1]["targets"] == labels_alone:
            raise SystemExit(f"{checkpoint} was trained {'with targets' if labels_alone else 'without targets'}")
        trainer.weights = trainer.placed(loaded(weights, trainer.weights))
    # Each process that generates images has one core. One thread per core in every process would be many times slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        styles = [pathfinder_images.STYLES[side], *easier(side)]
        kinds = [(style, pathfinder_images.odds_from_discs(side, style, pool.map)) for style in styles]
        images_per_second = generation_rate(pool, side, kinds, count)
        seconds = 1.0 if quick else max(1.0, results.seconds_left() - RESERVED)
        with contextlib.closing(batched(images(pool, side, [TRAINING, len(stages)], kinds, count), batch)) as batches:
            losses = list(train(trainer, batches, RATES[side], seconds=seconds))
        stage: Row = {
            "checkpoint": checkpoint.name,
            "device": devices[0].device_kind,
            "devices": len(devices),
            "command": results.environment["command"],
            "commit": results.environment["commit"],
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
        measure.save(log, {"stages": stages})
        # The weights are already saved, in case the test does not finish.
        with contextlib.closing(batched(images(pool, side, [TEST, side], kinds[:1], count), batch)) as tests:
            stage |= trainer.accuracy(itertools.islice(tests, -(-tested // batch)), CONFIDENCE)
    measure.save(log, {"stages": stages})
    results.begin()
    found = json.loads(results.path.read_text())["rows"] if results.path.exists() else []
    results.rows = [row for row in found if row["checkpoint"] != checkpoint.name] + stages
    results.save()


def save(trainer: Trainer, path: Path) -> None:
    """Write the weights atomically, so an interrupted run leaves the previous ones intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name("part.npz")
    np.savez(written, *jax.tree.leaves(trainer.weights))
    os.replace(written, path)


def make_config(side: int, quick: bool, attention: Attention) -> Config:
    return Config(
        layers=1 if quick else 4,
        width=64 if quick else 128,
        heads=1 if quick else 2,
        hidden=128 if quick else 256,
        grid=(side, side),
        tile=TILE,
        vocabulary=LEVELS,
        classes=2,
        background=0,
        dropout=0.0,  # no image is repeated
        rotary=True,
        attention=attention,
        reach=REACH,
    )


def loaded(path: Path, weights: Any) -> Any:
    """Load weights from a file, in the structure of `weights`."""
    leaves, structure = jax.tree.flatten(weights)
    with np.load(path) as saved:
        found = [saved[name] for name in saved.files]
    if [x.shape for x in found] != [x.shape for x in leaves]:
        raise SystemExit(f"{path} has the weights of another model")
    return jax.tree.unflatten(structure, found)


def make_images(side: int, seed: list[int], kinds: Sequence[Kind], count: int) -> Batch:
    """Generate images. Half of them are of the first kind, the others of a random other kind, if there are several."""
    random = np.random.default_rng(seed)
    parts = [kinds[0]]
    if len(kinds) > 1:
        parts.append(kinds[int(random.integers(1, len(kinds)))])
    examples = [
        pathfinder_images.examples(side, count // len(parts), [*seed, part], *kind)
        for part, kind in enumerate(parts, 1)  # the seed without a part is used for the order
    ]
    order = random.permutation(count)
    pixels, targets, labels = (np.concatenate(arrays)[order] for arrays in zip(*examples, strict=True))
    tokens = pixels // (256 // LEVELS)
    return {"tokens": in_tiles(tokens, TILE), "targets": in_tiles(targets, TILE), "labels": labels}


def easier(side: int) -> list[pathfinder_images.Style]:
    """Return styles between this size and half the size. For the smallest size, return styles with shorter curves."""
    style, half = pathfinder_images.STYLES[side], pathfinder_images.STYLES.get(side // 2)
    if half is None:
        return [style._replace(dashes=dashes) for dashes in range(EASIEST, style.dashes)]
    return [style.mixed(half, share) for share in SHARES]


def images(
    pool: concurrent.futures.Executor, side: int, seed: list[int], kinds: Sequence[Kind], count: int
) -> Generator[Batch]:
    """Generate images forever, ahead of time. Their order does not depend on the number of processes."""
    numbers = itertools.count()
    waiting = deque(pool.submit(make_images, side, [*seed, next(numbers)], kinds, count) for _ in range(2 * PROCESSES))
    try:
        while True:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(make_images, side, [*seed, next(numbers)], kinds, count))
            yield batch
    finally:
        for future in waiting:
            future.cancel()


def batched(batches: Generator[Batch], size: int) -> Generator[Batch]:
    """Split batches into smaller ones of this size, which divides theirs. Closing it closes `batches`."""
    with contextlib.closing(batches):
        for arrays in batches:
            for begin in range(0, len(arrays["labels"]), size):
                yield {name: x[begin : begin + size] for name, x in arrays.items()}


def generation_rate(pool: concurrent.futures.Executor, side: int, kinds: Sequence[Kind], count: int) -> float:
    """Return the images per second of all processes."""

    def make(jobs: int) -> None:
        list(pool.map(make_images, *zip(*((side, [TIMING, i], kinds, count) for i in range(jobs)), strict=True)))

    make(PROCESSES)  # starts the processes
    start = time.perf_counter()
    make(2 * PROCESSES)
    return 2 * PROCESSES * count / (time.perf_counter() - start)

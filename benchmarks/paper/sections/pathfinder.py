"""Path-X (128 x 128 pixels, 16K tokens) and Path-256 (64K): a transformer learns to follow dashed curves.

    python -m benchmarks.paper pathfinder --side 32 --minutes 5 --checkpoint path    # then 64, 128, 256, from there

It learns on small images first, and goes on with larger ones: since its positions rotate queries and keys, pixel by
pixel, its weights do not depend on the size. The checkpoint is a directory with the weights and with what was reached
at each stage; a stage goes on from it. Its optimiser begins anew, as its learning rate does. Attention is dense up to
128 x 128 and block-sparse for 256 x 256, unless `--attention` says another. A batch is shared by all GPUs.

A block of tokens is a tile of the image. Block-sparse attention sees the tiles around each, within a reach, so that a
curve can be followed in every direction. (With the pixels in rows, as many blocks are 16 rows on both sides, and what
runs upwards leaves them soon.)

In training, each pixel of a curve has a target, too: how many discs lie on its curve. `--labels-alone` goes without.
The file of results has the stages of each checkpoint, with the GPU and the command of each.
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

RATES = {32: 1e-3, 64: 5e-4, 128: 3e-4, 256: 3e-4}  # the larger ones go on from what was learned
LEVELS = 16  # of grey; each level is a token
BATCH = {32: 256, 64: 64, 128: 16, 256: 8}
IMAGES = 256  # that a process makes at a time
TESTED = {32: 10_000, 64: 10_000, 128: 10_000, 256: 2048}  # how many images the test has
CONFIDENCE = 0.99
TILE = (8, 16)  # pixels: a block of block-sparse attention
REACH = 48  # pixels that block-sparse attention sees in each direction, at least
EASIEST = 5  # dashes in a curve of the easiest images
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the style of half the size in easier images
TRAINING, TEST, TIMING = range(1, 4)  # the first part of a seed says what it is for
PROCESSES = max(1, (os.cpu_count() or 1) - 2)  # that make images; the other cores feed the device
RESERVED = 50  # seconds for compilation and for the test

Kind = tuple[pathfinder_images.Style, pathfinder_images.Odds]


def run(
    results: Results, quick: bool, side: int, attention: Attention | None, labels_alone: bool, checkpoint: Path
) -> None:
    config = make_config(side, quick, attention or ("block-sparse" if side == 256 else "flash"))
    batch, tested = (2, 8) if quick else (BATCH[side], TESTED[side])
    devices = jax.devices()[: math.gcd(batch, jax.device_count())]
    trainer = Trainer(config, label if labels_alone else label_and_targets, devices=devices)
    weights, log = checkpoint / "weights.npz", checkpoint / "stages.json"
    stages: list[Row] = json.loads(log.read_text())["stages"] if log.exists() else []
    if stages:
        if stages[-1]["targets"] == labels_alone:
            raise SystemExit(f"{checkpoint} has learned {'with targets' if labels_alone else 'from labels alone'}")
        trainer.weights = trainer.placed(loaded(weights, trainer.weights))
    # The processes that make images have a core each. With a thread for every core each of them is many times slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        styles = [pathfinder_images.STYLES[side], *easier(side)]
        kinds = [(style, pathfinder_images.odds_of(side, style, pool.map)) for style in styles]
        images_per_second = generation_rate(pool, side, kinds)
        seconds = 1.0 if quick else max(1.0, results.seconds_left() - RESERVED)
        with contextlib.closing(batched(images(pool, side, [TRAINING, len(stages)], kinds), batch)) as batches:
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
        # What was learned is kept, even if the test does not come to its end.
        with contextlib.closing(batched(images(pool, side, [TEST, side], kinds[:1]), batch)) as tests:
            stage |= trainer.accuracy(itertools.islice(tests, -(-tested // batch)), CONFIDENCE)
    measure.save(log, {"stages": stages})
    results.begin()
    found = json.loads(results.path.read_text())["rows"] if results.path.exists() else []
    results.rows = [row for row in found if row["checkpoint"] != checkpoint.name] + stages
    results.save()


def save(trainer: Trainer, path: Path) -> None:
    """Whole or not at all, so that a run that is cut off leaves the weights that were there."""
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
        dropout=0.0,  # no image comes twice
        rotary=True,
        attention=attention,
        reach=REACH,
    )


def loaded(path: Path, weights: Any) -> Any:
    """What is in the file, arranged as these weights are."""
    leaves, structure = jax.tree.flatten(weights)
    with np.load(path) as saved:
        found = [saved[name] for name in saved.files]
    if [x.shape for x in found] != [x.shape for x in leaves]:
        raise SystemExit(f"{path} is of another model")
    return jax.tree.unflatten(structure, found)


def make_images(side: int, seed: list[int], kinds: Sequence[Kind]) -> Batch:
    """Half of them are of one of the kinds after the first, if there are any."""
    random = np.random.default_rng(seed)
    parts = [kinds[0]]
    if len(kinds) > 1:
        parts.append(kinds[int(random.integers(1, len(kinds)))])
    made = [
        pathfinder_images.examples(side, IMAGES // len(parts), [*seed, part], *kind)
        for part, kind in enumerate(parts, 1)  # without a part it is the order's
    ]
    order = random.permutation(IMAGES)
    drawn, targets, labels = (np.concatenate(arrays)[order] for arrays in zip(*made, strict=True))
    tokens = drawn // (256 // LEVELS)
    return {"tokens": in_tiles(tokens, TILE), "targets": in_tiles(targets, TILE), "labels": labels}


def easier(side: int) -> list[pathfinder_images.Style]:
    """Between the lines of this size and those of half the size; of the smallest, with shorter ones."""
    style, half = pathfinder_images.STYLES[side], pathfinder_images.STYLES.get(side // 2)
    if half is None:
        return [style._replace(dashes=dashes) for dashes in range(EASIEST, style.dashes)]
    return [style.mixed(half, share) for share in SHARES]


def images(pool: concurrent.futures.Executor, side: int, seed: list[int], kinds: Sequence[Kind]) -> Generator[Batch]:
    """Without end, made ahead of time, in the same order whatever the number of processes."""
    numbers = itertools.count()
    waiting = deque(pool.submit(make_images, side, [*seed, next(numbers)], kinds) for _ in range(2 * PROCESSES))
    try:
        while True:
            made = waiting.popleft().result()
            waiting.append(pool.submit(make_images, side, [*seed, next(numbers)], kinds))
            yield made
    finally:
        for future in waiting:
            future.cancel()


def batched(made: Generator[Batch], size: int) -> Generator[Batch]:
    """The same in batches of this size, which divides theirs. When it is closed, they are."""
    with contextlib.closing(made):
        for arrays in made:
            for begin in range(0, IMAGES, size):
                yield {name: x[begin : begin + size] for name, x in arrays.items()}


def generation_rate(pool: concurrent.futures.Executor, side: int, kinds: Sequence[Kind]) -> float:
    """Images a second of all processes together."""

    def make(jobs: int) -> None:
        list(pool.map(make_images, *zip(*((side, [TIMING, i], kinds) for i in range(jobs)), strict=True)))

    make(PROCESSES)  # starts them
    start = time.perf_counter()
    make(2 * PROCESSES)
    return 2 * PROCESSES * IMAGES / (time.perf_counter() - start)

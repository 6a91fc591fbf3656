"""Tasks as in Long Range Arena, learned with ours and with ours block-sparse; accuracy with a 99 % interval.

* ListOps: Long Range Arena's own task, from a generator like its own.
* Text: in place of reviews, which are not on every machine, the bytes of Python sources: which of ten packages is a
  stretch of 4096 bytes from? Files that are read in training are not tested on.
* Image: in place of CIFAR-10, the digits of scikit-learn, if it is installed: 8 x 8 pixels, each drawn 4 x 4 times,
  which makes 1024. It is a far easier task.
"""

import collections
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from . import listops, text
from .lra import TASKS
from .models import Attention, Config
from .training import Batch, Trainer, label, train

RATE = 1e-3
CONFIDENCE = 0.99
PACKAGES = 10
ATTENTIONS: tuple[Attention, ...] = ("flash", "block-sparse")


class Task(NamedTuple):
    config: Config
    training: Iterator[Batch]  # without end
    test: list[Batch]
    share: float  # of the time


def run(quick: bool, minutes: float) -> dict[str, Any]:
    tasks = {"listops": listops_task(quick), "text": text_task(quick)}
    if importlib.util.find_spec("sklearn"):
        tasks["image"] = image_task(quick)
    seconds = 5 if quick else 60 * minutes
    rows = []
    attentions = ATTENTIONS[1:] if quick else ATTENTIONS
    for name, task in tasks.items():
        for attention in attentions:
            trainer = Trainer(dataclasses.replace(task.config, attention=attention), label)
            share = seconds * task.share / len(attentions)
            losses = list(train(trainer, task.training, RATE, seconds=share))
            result = {"task": name, "attention": attention, "steps": len(losses), "seconds": share}
            rows.append(result | {"training": losses[:: max(1, len(losses) // 200)]})
            rows[-1] |= trainer.accuracy(task.test, CONFIDENCE)
            jax.clear_caches()
    return {"chance": {name: 1 / task.config.classes for name, task in tasks.items()}, "rows": rows}


def listops_task(quick: bool) -> Task:
    config, batch = TASKS["listops"]
    shortest, examples, parts = (50, 64, 2) if quick else (500, 96_000, 64)
    if quick:
        config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 8
    training = listops_examples(examples, parts, shortest, config.length, seed=0)
    test = listops_examples(32 if quick else 4000, 2, shortest, config.length, seed=1_000_000)
    return Task(config, shuffled(training, batch), in_order(test, batch), 0.6)


def listops_examples(count: int, parts: int, shortest: int, longest: int, seed: int) -> Batch:
    """Written by all cores; what is written depends on the number of parts and not on that of the cores."""
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = (count // parts, shortest, longest)
        futures = [pool.submit(listops.examples, *wanted, seed + part) for part in range(parts)]
        arrays = [np.concatenate(arrays) for arrays in zip(*(f.result() for f in futures), strict=True)]
    return dict(zip(("tokens", "lengths", "labels"), arrays, strict=True))


def text_task(quick: bool) -> Task:
    config, batch = TASKS["text"]
    if quick:
        config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 8
    files = text.sources(200 if quick else None)
    sizes = collections.Counter[str]()
    for file in files:
        sizes[file.package] += len(file.content)
    largest = [package for package, _ in sizes.most_common(PACKAGES)]
    texts = {
        held_out: [text.tokens([file for file in files if file.package == package], held_out) for package in largest]
        for held_out in (False, True)
    }
    # A package whose held-out files have no stretch of that length is left out.
    usable = [i for i in range(len(largest)) if min(len(texts[held_out][i]) for held_out in texts) > config.length]
    config = dataclasses.replace(config, classes=len(usable))

    def batches(held_out: bool, seed: int) -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        streams = [text.windows(texts[held_out][i], 1, config.length, seed=i) for i in usable]
        while True:
            labels = random.integers(len(usable), size=batch, dtype=np.int32)
            yield {"tokens": np.concatenate([next(streams[i]) for i in labels]), "labels": labels}

    return Task(config, batches(False, 0), list(itertools.islice(batches(True, 1), 2 if quick else 64)), 0.25)


def image_task(quick: bool) -> Task:
    from sklearn.datasets import load_digits

    config, batch = TASKS["image"]
    config = dataclasses.replace(config, vocabulary=17)  # levels of grey
    images, labels = load_digits(return_X_y=True)
    tokens = np.kron(images.reshape(-1, 8, 8), np.ones((4, 4))).reshape(len(images), -1).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(tokens))
    examples = {"tokens": tokens[order], "labels": labels[order].astype(np.int32)}
    training, test = ({name: x[part] for name, x in examples.items()} for part in (slice(400, None), slice(400)))
    batch = 8 if quick else batch
    return Task(config, shuffled(training, batch), in_order(test, 8 if quick else 100), 0.15)


def shuffled(examples: Batch, batch: int) -> Iterator[Batch]:
    """Epoch after epoch, each in another order."""
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(examples["labels"]))
        for begin in range(0, len(order) - batch + 1, batch):
            yield rows_of(examples, order[begin : begin + batch])


def in_order(examples: Batch, batch: int) -> list[Batch]:
    return [rows_of(examples, part) for part in np.arange(len(examples["labels"])).reshape(-1, batch)]


def rows_of(examples: Batch, rows: np.ndarray) -> Batch:
    return {name: x[rows].astype(np.int32) for name, x in examples.items()}

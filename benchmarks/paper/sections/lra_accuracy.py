"""Tasks like Long Range Arena's, trained with standard attention, jax_flash, and block-sparse, from three seeds each.

* ListOps: Long Range Arena's own task, from a generator like its own.
* Text: the bytes of Python sources instead of reviews, which are not available on every machine. Which of ten packages
  is a section of 4096 bytes from? Files used for training are not tested, and a tested file gives one section.
* Image: the digits of scikit-learn, if installed, instead of CIFAR-10: 8 x 8 pixels, each repeated 4 x 4 times, 1024 in
  total. This task is much easier.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .. import listops, text
from ..lra_tasks import TASKS
from ..models import Attention, Config
from ..results import Results, Row
from ..training import Batch, Trainer, attempted, label, train

RATE = 1e-3
CONFIDENCE = 0.99
PACKAGES = 10
SEEDS = (0, 1, 2)
STEPS_PER_PROGRAM = 10  # since one step takes only a few milliseconds


class Task(NamedTuple):
    config: Config
    batches: Callable[[int], Iterator[Batch]]  # an infinite iterator for a seed
    test: list[Batch]
    steps: int


def run(results: Results, quick: bool) -> None:
    names = ["listops", "text", *(["image"] if importlib.util.find_spec("sklearn") else [])]
    attentions = ("block-sparse",) if quick else ("standard", "flash", "block-sparse")

    @functools.cache
    def task_of(name: str) -> Task:
        return {"listops": listops_task, "text": text_task, "image": image_task}[name](quick)

    @functools.lru_cache(maxsize=1)
    def trainer_of(name: str, attention: Attention) -> Trainer:
        return Trainer(dataclasses.replace(task_of(name).config, attention=attention), label)

    def trained(name: str, attention: Attention, seed: int) -> Row:
        task, trainer = task_of(name), trainer_of(name, attention)
        trainer.restart(seed)
        count = 2 if quick else STEPS_PER_PROGRAM
        losses = list(train(trainer, task.batches(seed), RATE, steps=task.steps, steps_per_program=count))
        row = {"steps": len(losses), "chance": chance(task.test), "training": losses[:: max(1, len(losses) // 200)]}
        return row | trainer.accuracy(task.test, CONFIDENCE)

    def rows_of(task: str, attention: Attention, seed: int) -> list[Row]:
        return [attempted(lambda: trained(task, attention, seed))]

    results.begin(rate=RATE)
    keys = itertools.product(names, attentions, SEEDS[:1] if quick else SEEDS)
    results.measure([{"task": name, "attention": attention, "seed": seed} for name, attention, seed in keys], rows_of)


def chance(test: list[Batch]) -> float:
    """Return the accuracy of always predicting the largest class."""
    labels = np.concatenate([batch["labels"] for batch in test])
    return float(np.max(np.bincount(labels))) / labels.size


def listops_task(quick: bool) -> Task:
    config, batch = TASKS["listops"]
    shortest, examples, parts, steps = (50, 64, 2, 6) if quick else (500, 96_000, 64, 5000)
    if quick:
        config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 8
    training = listops_examples(examples, parts, shortest, config.length, seed=0)
    test = listops_examples(32 if quick else 4000, 2, shortest, config.length, seed=1_000_000)
    return Task(config, functools.partial(shuffled, training, batch), in_order(test, batch), steps)


def listops_examples(count: int, parts: int, shortest: int, longest: int, seed: int) -> Batch:
    """Generate examples on all cores. They depend on the number of parts but not on the number of cores."""
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        arguments = (count // parts, shortest, longest)
        futures = [pool.submit(listops.examples, *arguments, seed + part) for part in range(parts)]
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
    texts = [text.tokens([file for file in files if file.package == package], False) for package in largest]
    # Test the middle of a file, since its beginning may be a licence.
    tests = [
        [middle(file.content, config.length) for file in files if tested(file, package, config.length)]
        for package in largest
    ]
    # Omit packages that are too small for training or for the test.
    usable = [i for i in range(len(largest)) if tests[i] and len(texts[i]) > config.length]
    config = dataclasses.replace(config, classes=len(usable))

    def batches(seed: int) -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        streams = [text.windows(texts[i], 1, config.length, seed) for i in usable]
        while True:
            labels = random.integers(len(usable), size=batch, dtype=np.int32)
            yield {"tokens": np.concatenate([next(streams[i]) for i in labels]), "labels": labels}

    stretches = np.stack([stretch for i in usable for stretch in tests[i]])
    examples = {"tokens": stretches, "labels": np.repeat(np.arange(len(usable)), [len(tests[i]) for i in usable])}
    return Task(config, batches, in_order(examples, batch), 2 if quick else 1500)


def tested(file: text.Source, package: str, length: int) -> bool:
    return file.held_out and file.package == package and len(file.content) >= length


def middle(content: bytes, length: int) -> np.ndarray:
    return np.frombuffer(content, np.uint8, length, (len(content) - length) // 2)


def image_task(quick: bool) -> Task:
    from sklearn.datasets import load_digits

    config, batch = TASKS["image"]
    config = dataclasses.replace(config, layers=1 if quick else config.layers, vocabulary=17)  # levels of grey
    images, labels = load_digits(return_X_y=True)
    tokens = np.kron(images.reshape(-1, 8, 8), np.ones((4, 4))).reshape(len(images), -1).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(tokens))
    examples = {"tokens": tokens[order], "labels": labels[order].astype(np.int32)}
    batch, tested = (8, 16) if quick else (batch, 400)
    training, test = ({name: x[part] for name, x in examples.items()} for part in (slice(400, None), slice(tested)))
    return Task(config, functools.partial(shuffled, training, batch), in_order(test, batch), 2 if quick else 400)


def shuffled(examples: Batch, batch: int, seed: int) -> Iterator[Batch]:
    """Yield batches of one epoch after another, each in a different order."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(examples["labels"]))
        for begin in range(0, len(order) - batch + 1, batch):
            yield rows_of(examples, order[begin : begin + batch])


def in_order(examples: Batch, batch: int) -> list[Batch]:
    rows = np.arange(len(examples["labels"]))
    return [rows_of(examples, rows[begin : begin + batch]) for begin in range(0, len(rows), batch)]


def rows_of(examples: Batch, rows: np.ndarray) -> Batch:
    return {name: x[rows].astype(np.int32) for name, x in examples.items()}

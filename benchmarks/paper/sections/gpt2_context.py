"""GPT-2 small with 4096 bytes of context compared with 1024: held-out perplexity after the same number of bytes.

Both models continue from one model trained with 1024. Its positions are repeated for 4096. If the weights were new, a
batch of a few long rows would spend most of the time learning words.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import scipy.stats

from .. import text
from ..gpt2_training import CONFIGS
from ..results import Results, Row
from ..training import Batch, Trainer, next_token, stacked, timed

RATE = 6e-4
SEEDS = (0, 1, 2)
TOKENS = 16384  # in a batch
STEPS = 1500  # for the shared model, and again for each of the two models
CONFIDENCE = 0.95


def run(results: Results, quick: bool) -> None:
    lengths, tokens, steps, validated = ((64, 256), 512, 3, 1024) if quick else ((1024, 4096), TOKENS, STEPS, 2**22)
    seeds = SEEDS[:2] if quick else SEEDS
    training, held_out = text.training_and_held_out(quick)

    @functools.cache
    def compiled(length: int) -> Trainer:
        config = dataclasses.replace(CONFIGS["tiny" if quick else "small"], grid=(length,), vocabulary=text.VOCABULARY)
        trainer = Trainer(config, next_token)
        trainer.compile(stacked(itertools.islice(batches_of(length, 0), 1)))
        return trainer

    def batches_of(length: int, *seed: int) -> Iterator[Batch]:
        return ({"tokens": rows} for rows in text.windows(training, tokens // length, length + 1, seed))

    def learn(length: int, seed: int, stage: int, learned: Any) -> Row:
        """Train the model for a length, from learned or new weights. Return how it went."""
        trainer = compiled(length)
        trainer.restart(seed)
        if learned is not None:
            trainer.weights = jax.tree.map(lambda new, old: np.resize(old, new.shape), trainer.weights, learned)
        seconds, losses = timed(trainer, batches_of(length, seed, stage), RATE, steps)
        return {"length": length, "seconds_a_step": seconds / steps, "training": losses}

    def test(length: int) -> Row:
        stretches = text.stretches(held_out, tokens // length, length, validated)
        loss = compiled(length).mean_loss({"tokens": rows} for rows in stretches)
        return {"held_out": loss, "perplexity": math.exp(loss)}

    def rows_of(seed: int) -> list[Row]:
        learn(lengths[0], seed, 0, None)
        learned = jax.device_get(compiled(lengths[0]).weights)
        return [learn(length, seed, 1, learned) | test(length) for length in lengths]

    results.begin(
        vocabulary=f"{text.VOCABULARY} bytes",
        training_bytes=len(training),
        held_out_bytes=min(validated, len(held_out)),
        steps=steps,
        batch_tokens=tokens,
        bytes_seen=2 * steps * tokens,
    )
    results.measure([{"seed": seed} for seed in seeds], rows_of)
    found = {(row["length"], row["seed"]): row["perplexity"] for row in results.rows}
    by_length = {length: [found[length, seed] for seed in seeds] for length in lengths}
    differences = [long - short for short, long in zip(*by_length.values(), strict=True)]
    results.save(
        perplexity={length: mean_and_spread(values) for length, values in by_length.items()},
        difference=mean_and_spread(differences) | {"interval": interval(differences), "confidence": CONFIDENCE},
    )


def mean_and_spread(values: list[float]) -> dict[str, float]:
    """Return the mean, and the standard deviation of the sample as the spread."""
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values)}


def interval(differences: list[float]) -> list[float]:
    """Return Student's interval for the mean of paired differences."""
    found = scipy.stats.ttest_1samp(differences, 0).confidence_interval(CONFIDENCE)
    return [float(found.low), float(found.high)]

"""GPT-2 small with 4096 bytes of context beside 1024: perplexity on held-out text after the same number of bytes."""

import dataclasses
import statistics
from typing import Any

import numpy as np

from . import text
from .gpt2 import CONFIGS
from .training import Trainer, next_token, seconds_a_step, train

RATE = 6e-4
SEEDS = (0, 1, 2)
TOKENS = 32768  # of a batch


def run(quick: bool, minutes: float) -> dict[str, Any]:
    lengths, tokens, validated = ((64, 256), 512, 4096) if quick else ((1024, 4096), TOKENS, 2**22)
    seeds, seconds = (SEEDS[:2], 4) if quick else (SEEDS, 60 * minutes)
    files = text.sources(200 if quick else None)
    training, held_out = text.tokens(files, False), text.tokens(files, True)
    trainers = {length: make_trainer(length, quick) for length in lengths}
    times = {}
    for length, trainer in trainers.items():
        batch = {"tokens": next(text.windows(training, tokens // length, length + 1, seed=0))}
        trainer.compile(batch)
        times[length] = seconds_a_step(trainer, batch, seconds / 100)
    # As many steps as the time suffices for, a tenth of which is for what is not training.
    steps = max(2, int(0.9 * seconds / (len(seeds) * sum(times.values()))))

    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for length, trainer in trainers.items():
            trainer.restart(seed)
            batches = ({"tokens": rows} for rows in text.windows(training, tokens // length, length + 1, seed))
            losses = list(train(trainer, batches, RATE, steps=steps))
            stretches = text.stretches(held_out, max(lengths) // length, length, validated)
            held_out_loss = trainer.mean_loss({"tokens": rows} for rows in stretches)
            rows.append(
                {
                    "length": length,
                    "seed": seed,
                    "training": losses[:: max(1, steps // 200)],
                    "held_out": held_out_loss,
                    "perplexity": float(np.exp(held_out_loss)),
                }
            )
    by_length = {length: [row["perplexity"] for row in rows if row["length"] == length] for length in lengths}
    differences = [long - short for short, long in zip(*by_length.values(), strict=True)]
    return {
        "vocabulary": f"{text.VOCABULARY} bytes",
        "training_bytes": len(training),
        "bytes_seen": steps * tokens,
        "batch_tokens": tokens,
        "steps": steps,
        "seconds_a_step": times,
        "rows": rows,
        "perplexity": {length: mean_and_spread(values) for length, values in by_length.items()},
        "difference": mean_and_spread(differences),
    }


def make_trainer(length: int, quick: bool) -> Trainer:
    config = CONFIGS["tiny" if quick else "small"]
    return Trainer(dataclasses.replace(config, grid=(length,), vocabulary=text.VOCABULARY), next_token)


def mean_and_spread(values: list[float]) -> dict[str, float]:
    """The spread is the standard deviation of the sample."""
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values)}

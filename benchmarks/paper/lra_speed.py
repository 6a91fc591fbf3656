"""Long Range Arena: training steps a second of each task with standard attention, ours, and ours block-sparse.

A batch has as many tokens in each task, more than is usual for these small models, since the time of a step would be
that of launching its kernels.
"""

import dataclasses

import jax
import numpy as np

from .lra import TASKS
from .models import Config, block_mask
from .results import Results, Row
from .training import Batch, attentions, compare, label

TOKENS = 2**18  # of a batch


def run(results: Results, quick: bool) -> None:
    """Of random tokens, since a step takes as long whatever they are. Rows of ListOps have random lengths, as there."""
    random = np.random.default_rng(0)

    def rows_of(task: str) -> list[Row]:
        config = TASKS[task][0]
        if quick:
            config = dataclasses.replace(config, layers=1, grid=(256,))

        def make_batch(count: int, config: Config = config) -> Batch:
            made = {
                "tokens": random.integers(config.vocabulary, size=(count, config.length), dtype=np.int32),
                "labels": random.integers(config.classes, size=count // config.documents, dtype=np.int32),
            }
            if task == "listops":
                made["lengths"] = random.integers(config.length // 4, config.length + 1, count, dtype=np.int32)
            return jax.device_put(made)  # once, and not in every step

        batch = 2 if quick else TOKENS // config.length
        rows = compare(config, label, make_batch, batch, attentions("block-sparse"), 0.1 if quick else 4)
        jax.clear_caches()
        return [{"kept_blocks": float(block_mask(config).kept)} | row for row in rows]

    results.begin(tokens=TOKENS)
    results.measure([{"task": task} for task in (("listops", "retrieval") if quick else TASKS)], rows_of)

"""Long Range Arena: training steps a second of each task with standard attention, ours, and ours block-sparse."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .lra import TASKS
from .models import Config, block_mask
from .training import Batch, attentions, compare, label


def run(quick: bool) -> dict[str, Any]:
    """Of random tokens, since a step takes as long whatever they are. Rows of ListOps have random lengths, as there."""
    random = np.random.default_rng(0)
    rows = []
    for task in ("listops", "retrieval") if quick else TASKS:
        config, batch = TASKS[task]
        if quick:
            config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 2

        def make_batch(count: int, task: str = task, config: Config = config) -> Batch:
            made = {
                "tokens": random.integers(config.vocabulary, size=(count, config.length), dtype=np.int32),
                "labels": random.integers(config.classes, size=count // config.documents, dtype=np.int32),
            }
            if task == "listops":
                made["lengths"] = random.integers(config.length // 4, config.length + 1, count, dtype=np.int32)
            return made

        compared = compare(config, label, make_batch, batch, attentions("block-sparse"), 0.1 if quick else 4)
        rows += [{"task": task, "kept_blocks": float(block_mask(config).kept)} | row for row in compared]
        jax.clear_caches()
    return {"rows": rows}

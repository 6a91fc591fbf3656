"""Long Range Arena: training steps a second of each task with standard attention, ours, and ours block-sparse."""

import dataclasses

import numpy as np

from ..lra_tasks import TASKS
from ..models import FLOPS_FORMULA, Attention, block_mask
from ..results import Results, Row
from ..training import PEAK_FLOPS, Batch, attentions, compare, label

TOGETHER = 10  # steps of a program, so that their kernels are timed and not their launches


def run(results: Results, quick: bool) -> None:
    """Of random tokens, since a step takes as long whatever they are. Rows of ListOps have random lengths, as there."""
    random = np.random.default_rng(0)

    def rows_of(task: str) -> list[Row]:
        config, batch = TASKS[task]
        if quick:
            config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 2

        def make_batch(count: int) -> Batch:
            made = {
                "tokens": random.integers(config.vocabulary, size=(count, config.length), dtype=np.int32),
                "labels": random.integers(config.classes, size=count // config.documents, dtype=np.int32),
            }
            if task == "listops":
                made["lengths"] = random.integers(config.length // 4, config.length + 1, count, dtype=np.int32)
            return made

        kept = {"kept_blocks": float(block_mask(config).kept)}
        names: list[Attention] = ["block-sparse"] if quick else attentions("block-sparse")
        seconds, together = (0.1, 2) if quick else (4, TOGETHER)
        return [kept | row for row in compare(config, label, make_batch, batch, names, seconds, together)]

    results.begin(flops=FLOPS_FORMULA, peak_flops=PEAK_FLOPS)
    results.measure([{"task": task} for task in (("retrieval",) if quick else TASKS)], rows_of)

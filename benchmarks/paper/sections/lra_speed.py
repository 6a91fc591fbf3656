"""Long Range Arena: training speed for each task with standard attention, jax_flash, and block-sparse."""

import dataclasses

import numpy as np

from ..lra_tasks import TASKS
from ..models import FLOPS_FORMULA, Attention, block_mask
from ..results import Results, Row
from ..training import PEAK_FLOPS, Batch, attentions, compare, label

STEPS_PER_PROGRAM = 10  # enough to measure kernels rather than launches


def run(results: Results, quick: bool) -> None:
    """Measure with random tokens, since the time of a step does not depend on them. ListOps has random lengths."""
    random = np.random.default_rng(0)

    def rows_of(task: str) -> list[Row]:
        config, batch = TASKS[task]
        if quick:
            config, batch = dataclasses.replace(config, layers=1, grid=(256,)), 2

        def make_batch(count: int) -> Batch:
            arrays = {
                "tokens": random.integers(config.vocabulary, size=(count, config.length), dtype=np.int32),
                "labels": random.integers(config.classes, size=count // config.documents, dtype=np.int32),
            }
            if task == "listops":
                arrays["lengths"] = random.integers(config.length // 4, config.length + 1, count, dtype=np.int32)
            return arrays

        kept = {"kept_blocks": float(block_mask(config).kept)}
        names: list[Attention] = ["block-sparse"] if quick else attentions("block-sparse")
        seconds, steps_per_program = (0.1, 2) if quick else (4, STEPS_PER_PROGRAM)
        return [kept | row for row in compare(config, label, make_batch, batch, names, seconds, steps_per_program)]

    results.begin(flops=FLOPS_FORMULA, peak_flops=PEAK_FLOPS)
    results.measure([{"task": task} for task in (("retrieval",) if quick else TASKS)], rows_of)

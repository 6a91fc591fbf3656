"""A GPT with block-sparse attention and sparse MLPs compared with the dense one: speed, parameters, held-out loss.

Appendix D.2 names sparse MLPs as a further direction. Both models see the same bytes. The sparse one keeps a butterfly
and a low-rank term of its blocks, in the attention matrix and in the weights of the MLPs (arXiv 2112.00029).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from .. import text
from ..gpt2_training import CONFIGS
from ..models import Config
from ..results import Results, Row
from ..training import Batch, Trainer, next_token, stacked, timed
from .gpt2_context import mean_and_spread

RATE = 6e-4
SEEDS = (0, 1, 2)
LAYERS = 4  # of GPT-2 medium's 24, so that six trainings take a minute
LENGTH, TOKENS = 4096, 16384  # of a row, and in a batch
STEPS = 300
MODELS = ("dense", "sparse")


def run(results: Results, quick: bool) -> None:
    length, tokens, steps, validated = (256, 512, 3, 1024) if quick else (LENGTH, TOKENS, STEPS, 2**20)
    seeds = SEEDS[:2] if quick else SEEDS
    training, held_out = text.training_and_held_out(quick)

    def config_of(model: str) -> Config:
        config = CONFIGS["tiny"] if quick else dataclasses.replace(CONFIGS["medium"], layers=LAYERS)
        config = dataclasses.replace(config, grid=(length,), vocabulary=text.VOCABULARY)
        if model == "dense":
            return config
        return dataclasses.replace(config, attention="block-sparse", mlp_block=16 if quick else 64)

    @functools.cache
    def compiled(model: str) -> Trainer:
        trainer = Trainer(config_of(model), next_token)
        trainer.compile(stacked(itertools.islice(batches_of(0), 1)))
        return trainer

    def batches_of(seed: int) -> Iterator[Batch]:
        return ({"tokens": rows} for rows in text.windows(training, tokens // length, length + 1, seed))

    def row_of(model: str, seed: int) -> Row:
        trainer = compiled(model)
        trainer.restart(seed)
        seconds, losses = timed(trainer, batches_of(seed), RATE, steps)
        stretches = text.stretches(held_out, tokens // length, length, validated)
        return {
            "model": model,
            "parameters": trainer.parameters,
            "tokens_per_second": steps * tokens / seconds,
            "training": losses,
            "held_out": trainer.mean_loss({"tokens": rows} for rows in stretches),
        }

    results.begin(
        vocabulary=f"{text.VOCABULARY} bytes",
        training_bytes=len(training),
        held_out_bytes=min(validated, len(held_out)),
        steps=steps,
        batch_tokens=tokens,
        length=length,
        layers=config_of("dense").layers,
    )
    results.measure([{"seed": seed} for seed in seeds], lambda seed: [row_of(model, seed) for model in MODELS])
    for field in ("held_out", "tokens_per_second"):
        by_model = {model: [row[field] for row in results.rows if row["model"] == model] for model in MODELS}
        results.save(**{f"{field}_of": {model: mean_and_spread(values) for model, values in by_model.items()}})

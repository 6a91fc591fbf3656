"""GPT-2 small on real text with each attention, from the same seed and without dropout: the losses are the same.

Two curves differ by the rounding of bfloat16, which training amplifies. How much that is, the gap between standard
attention and cuDNN's tells.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from . import text
from .gpt2 import CONFIGS, TOKENS
from .models import FLOPS_FORMULA
from .training import Trainer, attentions, next_token, train

RATE = 6e-4
EVERY = 50  # steps from one validation to the next


def run(quick: bool) -> dict[str, Any]:
    length, batch, steps, validated = (64, 2, 12, 2048) if quick else (1024, TOKENS // 1024, 1000, 2**19)
    files = text.sources(200 if quick else None)
    training, held_out = text.tokens(files, False), text.tokens(files, True)
    config = dataclasses.replace(
        CONFIGS["tiny" if quick else "small"], grid=(length,), vocabulary=text.VOCABULARY, dropout=0.0
    )
    curves: dict[str, dict[str, list[float]]] = {}
    for name in attentions():
        trainer = Trainer(dataclasses.replace(config, attention=name), next_token)
        batches = ({"tokens": rows} for rows in text.windows(training, batch, length + 1, seed=0))
        curve = curves[name] = {"training": [], "held_out": []}
        for step, loss in enumerate(train(trainer, batches, RATE, steps=steps), 1):
            curve["training"].append(loss)
            if step % (5 if quick else EVERY) == 0:
                rows = ({"tokens": rows} for rows in text.stretches(held_out, batch, length, validated))
                curve["held_out"].append(trainer.mean_loss(rows))
        parameters = trainer.parameters
    gaps = {
        f"{a} and {b}": {
            part: float(np.abs(np.subtract(curves[a][part], curves[b][part])).max())
            for part in ("training", "held_out")
        }
        for a, b in itertools.combinations(curves, 2)
    }
    return {
        "parameters": parameters,
        "vocabulary": f"{text.VOCABULARY} bytes",
        "training_bytes": len(training),
        "held_out_bytes": len(held_out),
        "length": length,
        "batch": batch,
        "every": 5 if quick else EVERY,
        "flops": FLOPS_FORMULA,
        "curves": curves,
        "largest_gap": gaps,
    }

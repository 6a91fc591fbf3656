"""GPT-2 small on real text with each attention, from the same seed and without dropout: the losses are the same.

Two curves differ by bfloat16 rounding, which training amplifies. The gap between standard attention and cuDNN shows how
large this effect is.
"""

import dataclasses
import itertools

import numpy as np

from .. import text
from ..gpt2_training import CONFIGS, TOKENS
from ..models import FLOPS_FORMULA, Attention
from ..results import Results, Row
from ..training import Trainer, attempted, attentions, next_token, train

RATE = 6e-4
EVERY = 50  # steps between validations


def run(results: Results, quick: bool) -> None:
    length, batch, steps, every, validated = (
        (64, 2, 10, 5, 1024) if quick else (1024, TOKENS // 1024, 1000, EVERY, 2**19)
    )
    training, held_out = text.training_and_held_out(quick)
    config = dataclasses.replace(
        CONFIGS["tiny" if quick else "small"], grid=(length,), vocabulary=text.VOCABULARY, dropout=0.0
    )

    def curve(attention: Attention) -> Row:
        trainer = Trainer(dataclasses.replace(config, attention=attention), next_token)
        batches = ({"tokens": rows} for rows in text.windows(training, batch, length + 1, seed=0))
        losses, validations = [], []
        for step, loss in enumerate(train(trainer, batches, RATE, steps=steps), 1):
            losses.append(loss)
            if step % every == 0:
                rows = ({"tokens": rows} for rows in text.stretches(held_out, batch, length, validated))
                validations.append(trainer.mean_loss(rows))
        return {"parameters": trainer.parameters, "training": losses, "held_out": validations}

    results.begin(
        vocabulary=f"{text.VOCABULARY} bytes",
        training_bytes=len(training),
        held_out_bytes=len(held_out),
        length=length,
        batch=batch,
        steps=steps,
        every=every,
        flops=FLOPS_FORMULA,
    )
    results.measure(
        [{"attention": name} for name in attentions()], lambda attention: [attempted(lambda: curve(attention))]
    )
    curves = {row["attention"]: row for row in results.rows if row["failure"] is None}
    gaps = {
        f"{a} and {b}": {
            part: float(np.abs(np.subtract(curves[a][part], curves[b][part])).max())
            for part in ("training", "held_out")
        }
        for a, b in itertools.combinations(curves, 2)
    }
    results.save(largest_gap=gaps)

"""GPT-2, small and medium, and the speed of training it (tables 2 and 4 of the paper)."""

import dataclasses

import numpy as np

from .models import FLOPS_FORMULA, Config
from .results import Results, Row
from .training import PEAK_FLOPS, Batch, attentions, compare, next_token

VOCABULARY = 50304  # GPT-2's 50257, padded to a multiple of 128
CONFIGS = {
    "tiny": Config(1, 64, 1, 128, (1024,), 512, causal=True),
    "small": Config(12, 768, 12, 3072, (1024,), VOCABULARY, causal=True),
    "medium": Config(24, 1024, 16, 4096, (1024,), VOCABULARY, causal=True),
}
TOKENS = 16384  # per batch


DROPOUTS = (0.1, 0.0)  # cuDNN has no dropout of the attention matrix; with 0.0, all attentions compute the same


def speeds(results: Results, name: str, quick: bool) -> None:
    """Measure with random tokens, since the time of a step does not depend on them."""
    random = np.random.default_rng(0)

    def rows_of(length: int, dropout: float) -> list[Row]:
        config = dataclasses.replace(CONFIGS["tiny" if quick else name], grid=(length,), dropout=dropout)

        def make_batch(count: int) -> Batch:
            return {"tokens": random.integers(config.vocabulary, size=(count, config.length + 1), dtype=np.int32)}

        batch = 2 if quick else TOKENS // length
        return compare(config, next_token, make_batch, batch, attentions(), 0.1 if quick else 4)

    results.begin(model=name, flops=FLOPS_FORMULA, peak_flops=PEAK_FLOPS)
    lengths, dropouts = ((64,), DROPOUTS[:1]) if quick else ((1024, 2048, 4096), DROPOUTS)
    results.measure([{"length": length, "dropout": dropout} for length in lengths for dropout in dropouts], rows_of)

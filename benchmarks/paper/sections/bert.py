"""BERT-large as trained for MLPerf: training speed on rows of 512 tokens with padding and 76 masked tokens."""

import dataclasses

import numpy as np

from .. import text
from ..models import FLOPS_FORMULA, Config
from ..results import Results, Row
from ..training import PEAK_FLOPS, Batch, attentions, compare, masked_tokens

MASK = 103  # the mask token of BERT's vocabulary
MASKED = 0.15  # fraction of the full length; shorter rows have the same number of masked tokens
LARGE = Config(24, 1024, 16, 4096, (512,), 30592, projected=MASKED)  # 30522 tokens, padded to a multiple of 128
TINY = Config(1, 64, 1, 128, (128,), 512, projected=MASKED)
SHORTEST = 0.25  # length of the shortest row relative to the longest


def run(results: Results, quick: bool) -> None:
    training = text.tokens(text.sources(200 if quick else None), held_out=False)

    def rows_of(dropout: float) -> list[Row]:
        config = dataclasses.replace(TINY if quick else LARGE, dropout=dropout)

        def make_batch(count: int) -> Batch:
            return masked_batch(training, count, config.length)

        return compare(config, masked_tokens, make_batch, 2 if quick else 32, attentions(), 0.1 if quick else 6)

    formula = FLOPS_FORMULA + "; padding counts as tokens"
    results.begin(flops=formula, peak_flops=PEAK_FLOPS, shortest_row=SHORTEST, masked=MASKED)
    results.measure([{"dropout": dropout} for dropout in ((0.1,) if quick else (0.1, 0.0))], rows_of)


def masked_batch(training: np.ndarray, count: int, length: int) -> Batch:
    """Return rows of random lengths. All have the same number of masked positions, outside the padding."""
    random = np.random.default_rng(0)
    tokens = next(text.windows(training, count, length, seed=0)) + 256  # bytes; smaller numbers are special tokens
    lengths = random.integers(int(SHORTEST * length), length + 1, count).astype(np.int32)
    masked = int(MASKED * length)
    positions = np.stack([random.permutation(size)[:masked] for size in lengths]).astype(np.int32)
    targets = np.take_along_axis(tokens, positions, 1)
    np.put_along_axis(tokens, positions, MASK, 1)
    return {"tokens": tokens, "lengths": lengths, "positions": positions, "targets": targets}

"""GPT-2, small and medium, and the speed of training it (tables 2 and 4 of the paper)."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .models import FLOPS_FORMULA, Config
from .training import PEAK_FLOPS, Batch, attentions, compare, next_token

VOCABULARY = 50304  # GPT-2's 50257, padded to a multiple of 128
CONFIGS = {
    "tiny": Config(1, 64, 1, 128, (1024,), 512, causal=True),
    "small": Config(12, 768, 12, 3072, (1024,), VOCABULARY, causal=True),
    "medium": Config(24, 1024, 16, 4096, (1024,), VOCABULARY, causal=True),
}
TOKENS = 16384  # of a batch


def speeds(name: str, dropouts: tuple[float, ...], quick: bool) -> dict[str, Any]:
    """Of random tokens, since a step takes as long whatever they are."""
    random = np.random.default_rng(0)
    rows = []
    for length in (64,) if quick else (1024, 2048, 4096):
        for dropout in dropouts[:1] if quick else dropouts:
            config = dataclasses.replace(CONFIGS["tiny" if quick else name], grid=(length,), dropout=dropout)

            def make_batch(count: int, config: Config = config) -> Batch:
                return {"tokens": random.integers(config.vocabulary, size=(count, config.length + 1), dtype=np.int32)}

            batch = 2 if quick else TOKENS // length
            rows += compare(config, next_token, make_batch, batch, attentions(), 0.1 if quick else 4)
            jax.clear_caches()
    return {"model": name, "flops": FLOPS_FORMULA, "peak_flops": PEAK_FLOPS, "rows": rows}

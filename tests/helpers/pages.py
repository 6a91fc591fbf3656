"""Paged key/value caches for tests. The oracle receives the same keys in one contiguous array."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import standard
from accuracy import assert_accurate, by_numpy, errors
from cases import Arrays, Case

import jax_flash

RESULTS = ("o", "logsumexp")


@dataclasses.dataclass(frozen=True)
class Cache:
    """Paged caches of sequences with these lengths. `case` gives T, the heads, the dims and the other options."""

    lengths: tuple[int, ...]
    page: int
    case: Case
    extra_pages: int = 1  # columns of the page table beyond the longest sequence

    def __str__(self) -> str:
        return f"{self.lengths}-{self.page}-{self.contiguous}".replace(" ", "")

    @property
    def contiguous(self) -> Case:
        pages = -(-max(self.lengths) // self.page) + self.extra_pages
        return dataclasses.replace(
            self.case, B=len(self.lengths), S=pages * self.page, causal=True, lengths=True, offset=True
        )

    def arrays(self, dtype: str) -> Arrays:
        """Return the arrays of the contiguous case."""
        lengths = np.array(self.lengths, np.int32)
        positions = {"key_value_seq_lengths": lengths, "query_offset": lengths - self.case.T}
        positions["query_seq_lengths"] = np.full_like(lengths, self.case.T)
        return self.contiguous.arrays(dtype) | positions

    def paged_arguments(self, arrays: Arrays) -> Arrays:
        """Return the arguments of `paged_attention`. Pages are in random order, and unused pages and rows hold NaN."""
        rng = np.random.default_rng(0)
        B, S = arrays["key"].shape[:2]
        page_counts = -(-np.array(self.lengths) // self.page)
        numbers = iter(rng.permutation(page_counts.sum() + 3))
        table = rng.choice([-1, 2**31 - 1], (B, S // self.page)).astype(np.int32)
        pools = {}
        for name in ("key", "value"):
            shape = (page_counts.sum() + 3, self.page, *arrays[name].shape[2:])
            pools[f"{name}_pages"] = np.full(shape, np.nan, arrays[name].dtype)
        for b, count in enumerate(page_counts):
            for i in range(count):
                table[b, i] = next(numbers)
                for name in ("key", "value"):
                    rows = slice(i * self.page, min((i + 1) * self.page, self.lengths[b]))
                    pools[f"{name}_pages"][table[b, i], : rows.stop - rows.start] = arrays[name][b, rows]
        return {"query": arrays["query"], **pools, "page_table": table, "lengths": arrays["key_value_seq_lengths"]}


def run(cache: Cache, arrays: Arrays, **options: Any) -> dict[str, np.ndarray]:
    case = cache.case
    options |= {"local_window_size": case.window, "logits_soft_cap": case.soft_cap, "scale": case.scale}
    options |= {name: arrays[name] for name in ("sinks",) if name in arrays}
    o, logsumexp = jax_flash.paged_attention(**cache.paged_arguments(arrays), **options, return_residual=True)
    return {"o": np.asarray(o), "logsumexp": np.swapaxes(np.asarray(logsumexp), 1, 2)}


def check(cache: Cache, dtype: str, **options: Any) -> None:
    """Check that the error is at most twice the error of standard attention in the same dtype, plus a few ulps."""
    case, kind, arrays = cache.contiguous, np.dtype(dtype), cache.arrays(dtype)
    cotangents = case.cotangents(dtype)

    def results(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: found[name] for name in RESULTS}

    exact = results(by_numpy(case, arrays, cotangents))
    sums = np.float64 if dtype == "float64" else np.float32
    baseline = errors(results(standard.attention(case, arrays, cotangents, sums, kind)), exact)
    cancelled = standard.cancellation(case, arrays, cotangents, kind)
    assert_accurate(run(cache, arrays, **options), exact, baseline, cancelled, kind)

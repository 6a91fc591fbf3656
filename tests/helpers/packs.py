"""Packed sequences for tests, and ways to run them.

The oracle is standard attention over all tokens, with a mask that is built sequence by sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import standard
from accuracy import assert_accurate, by_numpy, errors
from cases import Arrays, Case, Results, with_gradients

import jax_flash


@dataclasses.dataclass(frozen=True)
class Pack:
    """Packed sequences with these lengths. `case` gives the heads, the dims and the other options."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    padding: int = 0  # tokens after the last sequence, among the queries and among the keys
    case: Case = Case()

    def __str__(self) -> str:
        return f"{self.q_lengths}-{self.k_lengths}-{self.dense_case}".replace(" ", "").replace("mask=11ts-", "")

    @property
    def dense_case(self) -> Case:
        """All tokens as one sequence with a mask."""
        sizes = (sum(x) + self.padding for x in (self.q_lengths, self.k_lengths))
        T, S = sizes
        return dataclasses.replace(self.case, B=1, T=T, S=S, mask="11ts", causal=False, window=None)

    @property
    def options(self) -> dict[str, Any]:
        given = self.case.options
        del given["broadcast_dropout"]
        return given

    def mask(self) -> np.ndarray:
        """Return the visible entries: bool [1, 1, T, S]."""
        visible = np.zeros((1, 1, self.dense_case.T, self.dense_case.S), bool)
        for q0, q1, k0, k1 in zip(*self.edges(), strict=True):
            query, key = np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), np.arange(k1 - k0)
            allowed = (key <= query) | (not self.case.causal)
            if self.case.window is not None:
                left, right = self.case.window
                allowed &= (query - left <= key) & (key <= query + right)
            visible[0, 0, q0:q1, k0:k1] = allowed
        return visible

    def edges(self) -> list[Sequence[int]]:
        """Return the first and last indices of each sequence: query starts, query ends, key starts, key ends."""
        return [x.tolist() for c in self.cu_seqlens() for x in (c[:-1], c[1:])]

    def cu_seqlens(self) -> tuple[np.ndarray, np.ndarray]:
        q, k = (np.cumsum((0, *x)).astype(np.int32) for x in (self.q_lengths, self.k_lengths))
        return q, k

    def arrays(self, dtype: str, seed: int = 0) -> tuple[Arrays, Any]:
        """Return the arrays, including the mask, and the cotangents."""
        dense = self.dense_case
        return dense.arrays(dtype, seed) | {"mask": self.mask()}, dense.cotangents(dtype, seed)


@functools.cache
def _compiled(pack: Pack, implementation: str | None):
    def attention(arrays):
        inputs = {name: x[0] if name in ("query", "key", "value") else x for name, x in arrays.items()}
        options = pack.options | {"implementation": implementation}
        o, logsumexp = jax_flash.varlen_attention(**inputs, **options, return_residual=True)
        return o[None], logsumexp.T[None]

    return jax.jit(functools.partial(with_gradients, attention, logsumexp=pack.case.logsumexp))


def run(pack: Pack, arrays: Arrays, cotangents: Any, implementation: str | None = "flash") -> Results:
    """Run `varlen_attention`, jitted, forward and backward, on the arrays of `pack.dense_case`."""
    given = {name: x for name, x in arrays.items() if name != "mask"}
    given |= pack.case.traced_window() | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pack.cu_seqlens(), strict=True))
    with jax.enable_x64(arrays["query"].dtype == np.float64):
        return jax.tree.map(np.asarray, _compiled(pack, implementation)(given, cotangents))


def check(pack: Pack, dtype: str, implementation: str | None = "flash") -> None:
    """Check that the error is at most twice the error of standard attention in the same dtype, plus a few ulps."""
    dense, kind = pack.dense_case, np.dtype(dtype)
    sums = np.float64 if dtype == "float64" else np.float32
    baseline: dict[str, float] = {}
    for draw in range(max(1, min(32, 16384 // (dense.T * dense.S + 1)))):
        given = pack.arrays(dtype, draw)
        found = errors(standard.attention(dense, *given, sums, kind), by_numpy(dense, *given))
        baseline = {name: max(baseline.get(name, 0), x) for name, x in found.items()}
    given = pack.arrays(dtype)
    cancelled = standard.cancellation(dense, *given, kind)
    assert_accurate(run(pack, *given, implementation), by_numpy(dense, *given), baseline, cancelled, kind)

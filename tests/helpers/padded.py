"""Calls with NaN or inf in the padding. The oracle receives the same call with finite padding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packs
import pytest
import standard
from accuracy import assert_accurate, by_numpy, errors
from cases import Arrays, Case, refusal, upcast

import jax_flash
from jax_flash import BlockMask

POISONS = (np.nan, np.inf)
DIFFERENTIATED = ("query", "key", "value", "bias", "sinks", "scale")


@dataclasses.dataclass(frozen=True)
class Padded:
    """A call with padding from one cause."""

    case: Case  # the case that the oracle computes
    arrays: Arrays  # the oracle's arrays
    ends: np.ndarray  # the end of each sequence's keys, [B]
    attention: Callable[..., tuple[jax.Array, jax.Array]]  # from arrays and options to O and the logsumexp

    @property
    def visible_rows(self) -> np.ndarray:
        """Mark the rows with at least one visible key: bool [B, N, T]."""
        return standard.allowed(self.case, self.arrays).any(-1)

    @property
    def finite_rows(self) -> np.ndarray:
        """Mark the rows with at least one finite score: bool [B, N, T]."""
        allowed = standard.allowed(self.case, self.arrays)
        return (allowed & (self.arrays["bias"] != -np.inf)).any(-1) if self.case.bias else self.visible_rows

    def poisoned(self, arrays: Arrays, cotangents: Any, poison: float) -> tuple[Arrays, Any]:
        """Return the arrays and the cotangents with `poison` in the padding."""

        def replaced(keep: np.ndarray, x: np.ndarray) -> np.ndarray:
            return np.where(keep, x, np.asarray(poison, x.dtype))

        do, dlogsumexp = cotangents
        keys = (np.arange(self.case.S) < self.ends[:, None])[..., None, None]
        query = replaced(self.visible_rows.swapaxes(1, 2)[..., None], arrays["query"])
        key, value = (replaced(keys, arrays[name]) for name in ("key", "value"))
        finite_rows = self.finite_rows
        row_cotangents = replaced(finite_rows.swapaxes(1, 2)[..., None], do), replaced(finite_rows, dlogsumexp)
        return arrays | {"query": query, "key": key, "value": value}, row_cotangents


def padded(cause: str, dtype: str, **fields: Any) -> Padded:
    """Return the call for one of `CAUSES`. `fields` override fields of its `Case`."""
    if cause == "packs":
        return _packs(dtype, **fields)
    case = Case(**CASES[cause] | fields)
    B, N, T, S = case.B, case.N, case.T, case.S
    if cause == "window":
        case = dataclasses.replace(case, T=S + 9)
    if cause == "blocks":
        case = dataclasses.replace(case, block_mask=_blocks(T, S))
    arrays = case.arrays(dtype)
    b, i, j = np.ogrid[:B, :T, :S]
    changes: Arrays = {}
    omitted, options = set[str](), dict[str, Any]()
    match cause:
        case "query lengths":
            changes = {"query_seq_lengths": np.resize([T - 5, T // 2], B), "key_value_seq_lengths": np.full(B, S)}
            omitted = {"key_value_seq_lengths"}
        case "key lengths":
            changes = {"query_seq_lengths": np.full(B, T), "key_value_seq_lengths": np.resize([S - 7, 0], B)}
            omitted = {"query_seq_lengths"}
        case "lengths" | "traced window" | "lengths and bias" | "lengths and score_mod" | "decoding":
            changes = {"query_seq_lengths": np.resize([T, T // 2], B)}
            changes["key_value_seq_lengths"] = np.resize([S // 2 + 3, S - 1], B)
        case "mask":
            changes = {"mask": ((i + b) % 5 != 0)[:, None] & ((i + j) % 3 != 0)[:, None]}
        case "mask of heads":
            changes = {"mask": ((i + b)[:, None] + np.arange(N)[:, None, None]) % 3 != 0}
        case "mask_mod":
            changes = {"mask": ((i + b) % 5 != 0)[:, None] & (j <= i + 9)[:, None]}
            options = {"mask_mod": lambda b, h, i, j: ((i + b) % 5 != 0) & (j <= i + 9)}
            omitted = {"mask"}
        case "segments":
            rows, keys = np.arange(T) * 4 // T, np.arange(S) * 3 // S + 1
            changes = {"query_segment_ids": rows + np.zeros((B, 1)), "key_value_segment_ids": keys + np.zeros((B, 1))}
        case "offset" | "window and offset":
            changes = {"query_offset": np.resize([-1, -T // 2], B)}
        case "bias":
            changes = {"bias": np.where((i + b)[:, None] % 4 == 0, -np.inf, arrays["bias"]).astype(dtype)}
    integers = {name: x.astype(np.int32) for name, x in changes.items() if name not in ("mask", "bias")}
    arrays |= changes | integers
    ends = arrays.get("key_value_seq_lengths", np.full(B, S))

    def attention(arrays: Arrays, **more: Any) -> tuple[jax.Array, jax.Array]:
        given = {name: x for name, x in arrays.items() if name not in omitted}
        if cause == "lengths and score_mod":
            table = given.pop("bias")[0, :, 0]
            given["score_mod"] = lambda s, b, h, i, j: jnp.maximum(s, -1e30) + table[h, j]
        o, statistics = jax_flash.attention_with_statistics(**case.options | options | given | more)
        return o, statistics.logsumexp

    return Padded(case, arrays, ends, attention)


def _packs(dtype: str, **fields: Any) -> Padded:
    """Packed sequences, some with more queries than keys, and padding tokens after the last one."""
    case = Case(**{"causal": True} | fields)
    T, S = case.T // 4, case.S // 4
    pack = packs.Pack((T, T + 3, 0, T), (S, T // 2, 5, 0), 9, case)
    arrays, _ = pack.arrays(dtype)
    begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pack.cu_seqlens(), strict=True))

    def attention(arrays: Arrays, **more: Any) -> tuple[jax.Array, jax.Array]:
        given = {name: x[0] if name in ("query", "key", "value") else x for name, x in arrays.items() if name != "mask"}
        o, logsumexp = jax_flash.varlen_attention(**pack.options | given | begins | more, return_residual=True)
        return o[None], logsumexp.T[None]

    return Padded(pack.dense_case, arrays, begins["cu_seqlens_k"][-1:], attention)


def _blocks(T: int, S: int) -> BlockMask:
    """Return a block mask with an empty row of blocks, and with empty rows inside other blocks."""
    size = 16 if T < 128 else 128
    i, j = np.ogrid[:T, :S]
    return BlockMask.from_mask((i // size != 1) & (i % 7 != 3) & ((i + j) % 3 != 0), q_block=size, kv_block=size)


CASES: dict[str, dict[str, Any]] = {
    "query lengths": {"lengths": True},
    "key lengths": {"lengths": True},
    "lengths": {"lengths": True, "causal": True},
    "lengths and bias": {"lengths": True, "causal": True, "bias": "1nts"},
    "lengths and score_mod": {"lengths": True, "bias": "1n1s"},
    "decoding": {"lengths": True, "T": 1, "S": 1100, "N": 8},
    "mask": {"mask": "b1ts"},
    "mask of heads": {"mask": "bnt1"},
    "mask_mod": {"mask": "b1ts"},
    "segments": {"segments": True},
    "offset": {"causal": True, "offset": True},
    "window": {"window": (3, 2)},
    "window and offset": {"window": (9, 4), "offset": True},
    "traced window": {"window": (9, 4), "traced": True, "lengths": True},
    "blocks": {},
    "bias": {"bias": "bnts"},
}
CAUSES = (*CASES, "packs")


def _results(call: Padded, options: dict[str, Any], arrays: Arrays, cotangents: Any) -> dict[str, jax.Array]:
    inputs = {name: arrays[name] for name in DIFFERENTIATED if name in arrays}
    others = {name: x for name, x in arrays.items() if name not in inputs}
    (o, logsumexp), pull = jax.vjp(lambda inputs: call.attention(others | inputs, **options), inputs)
    (gradients,) = pull((cotangents[0].astype(o.dtype), cotangents[1].astype(logsumexp.dtype)))
    return {"o": o, "logsumexp": logsumexp} | gradients


Function = Callable[[Arrays, Any], dict[str, jax.Array]]  # from arrays and cotangents to results


def check(
    cause: str,
    dtype: str,
    implementation: str | None = "flash",
    options: dict[str, Any] | None = None,
    divided: Callable[[Function], Function] = lambda function: function,
    **fields: Any,
) -> None:
    """Check that padding has no effect. Results must be as accurate as with finite padding.

    Outputs and gradients of the padding itself must be 0.

    Args:
      dtype: of the arrays; "tf32" means float32 arrays with the precision "default".
      divided: transforms the function that computes all results, for example to divide it among devices.
    """
    kind, rounding = (jnp.dtype(x) for x in (("float32", "float16") if dtype == "tf32" else (dtype, dtype)))
    call = padded(cause, kind.name, **fields)
    case, clean = call.case, (call.arrays, call.case.cotangents(kind.name))
    if implementation == "flash" and (reason := refusal(case, call.arrays)):
        pytest.skip(reason)
    assert not call.finite_rows.all() or (call.ends < case.S).any()
    exact = by_numpy(case, *clean)
    sums = np.float64 if dtype == "float64" else np.float32
    baseline = errors(standard.attention(case, *clean, sums, "tf32" if dtype == "tf32" else kind), exact)
    cancelled = standard.cancellation(case, *clean, kind)
    scale = np.asarray(case.scale or case.D**-0.5, sums)
    products = upcast(call.arrays["query"]) * exact["query"] / scale
    beyond = np.arange(case.S) >= call.ends[:, None]
    precision = {"precision": "default"} if dtype == "tf32" else {}
    with jax.enable_x64(dtype == "float64"):
        options = {"implementation": implementation} | precision | (options or {})
        compiled = jax.jit(divided(functools.partial(_results, call, options)))
        for poison in POISONS:
            arrays, cotangents = call.poisoned(*clean, poison)
            results = jax.tree.map(np.asarray, compiled(arrays | {"scale": scale}, cotangents))
            dscale = results.pop("scale")
            np.testing.assert_allclose(
                dscale, products.sum(), rtol=0, atol=4 * jnp.finfo(rounding).eps * abs(products).sum()
            )
            assert_accurate(results, exact, baseline, cancelled, kind)
            for name in ("o", "query"):
                assert not results[name].swapaxes(1, 2)[~call.finite_rows].any(), name
            for name in ("key", "value"):
                assert not results[name][beyond].any(), name

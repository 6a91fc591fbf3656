"""Standard attention in NumPy, independent of jax_flash.

In extended precision it checks `reference.py`. In the dtype of the inputs it gives the rounding error that the
kernels are compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import Arrays, Case, Results


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Compute Philox4x32-7 with 64-bit integers: uint32 [..., 4] and [..., 2] -> [..., 4]."""
    word = np.uint64(0xFFFFFFFF)
    c, k = counter.astype(np.uint64), key.astype(np.uint64)
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[..., 0], np.uint64(0xCD9E8D57) * c[..., 2]
        high, low = np.uint64(32), word
        c = np.stack([(b >> high) ^ c[..., 1] ^ k[..., 0], b & low, (a >> high) ^ c[..., 3] ^ k[..., 1], a & low], -1)
        k = (k + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & word
    return c.astype(np.uint32)


def random_bits(seed: np.ndarray, batch_id: Any, head_id: Any, T: int, S: int) -> np.ndarray:
    """Return the dropout bits of every entry, uint32 [B, N, T, S]. Eight entries share a counter, half a word each."""
    rows, columns = np.arange(-(-T // 16) * 8), np.arange(-(-S // 16) * 4)
    b, n, row, column = np.meshgrid(batch_id, head_id, rows, columns, indexing="ij")
    words = philox(np.stack([column, row, n, b], -1), seed[:, None, None, None, :])
    i, j = np.ogrid[:T, :S]
    word = words[:, :, i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, i // 8 % 2 * 2 + j // 8 % 2]
    return np.where(j % 2, word >> 16, word) & 0x7FFF


def z(case: Case, arrays: Arrays) -> np.ndarray:
    """Return Z, the factors by which dropout multiplies the entries of P."""
    threshold = round(case.dropout * 32768)
    if not threshold:
        return np.ones(())
    seed = np.asarray(jax.random.bits(jnp.asarray(arrays["dropout_key"]), (2,), jnp.uint32))
    ids = (np.arange(case.B), np.arange(case.N)) if not case.broadcast_dropout else (np.zeros(case.B), np.zeros(case.N))
    bits = random_bits(np.broadcast_to(seed, (case.B, 2)), *ids, case.T, case.S)
    return (bits >= threshold) * (32768 / (32768 - threshold) if threshold < 32768 else 0.0)


def allowed(case: Case, arrays: Arrays) -> np.ndarray:
    """Return the visible entries, bool [B, N, T, S]."""
    b, _, i, j = np.ogrid[: case.B, : case.N, : case.T, : case.S]
    allowed = np.ones((case.B, case.N, case.T, case.S), bool)
    p = i + (arrays["query_offset"][b] if case.offset else 0)
    if case.causal:
        allowed &= j <= p
    if case.window:
        allowed &= (p - case.window[0] <= j) & (j <= p + case.window[1])
    if case.lengths:
        allowed &= (i < arrays["query_seq_lengths"][b]) & (j < arrays["key_value_seq_lengths"][b])
    if case.segments:
        allowed &= arrays["query_segment_ids"][b, i] == arrays["key_value_segment_ids"][b, j]
    if case.mask:
        allowed &= arrays["mask"]
    if case.block_mask is not None:
        allowed &= arrays["block_mask"].to_mask()
    return allowed


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 to the 10 mantissa bits of TF32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFF) + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


class Forward(NamedTuple):
    """Intermediate results of the forward, heads first: [B, N, T or S, ...]. k and v are repeated per query head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    c: np.ndarray  # scaled and capped scores
    p: np.ndarray
    sink: np.ndarray  # the probability of each row's sink
    plain: np.ndarray  # P without the sink
    keep: np.ndarray  # Z
    o: np.ndarray
    logsumexp: np.ndarray


def _rounded(x: Any, sums: Any, dtype: Any) -> np.ndarray:
    x = np.asarray(x)
    return (to_tf32(x) if dtype == "tf32" else x.astype(dtype)).astype(sums)


def _scale(case: Case, sums: Any) -> Any:
    return sums(case.scale if case.scale is not None else 1 / np.sqrt(np.longdouble(case.D)))


def _forward(case: Case, arrays: Arrays, sums: Any, dtype: Any) -> Forward:
    q, k, v = (_rounded(arrays[name], sums, dtype).transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
    k, v = (np.repeat(x, case.N // case.K, 1) for x in (k, v))
    c = _scale(case, sums) * (q @ k.swapaxes(2, 3))
    if case.soft_cap:
        c = sums(case.soft_cap) * np.tanh(c / sums(case.soft_cap))
    s = np.where(allowed(case, arrays), c + arrays["bias"].astype(sums) if case.bias else c, sums(-np.inf))
    m = s.max(-1, keepdims=True, initial=-np.inf)
    empty = m == -np.inf
    p = np.exp(s - np.where(empty, 0, m))
    l = p.sum(-1, keepdims=True)
    p /= np.where(empty, 1, l)
    plain, sink = p, np.zeros_like(m)
    if case.sinks:
        logits = arrays["sinks"].astype(sums)[:, None, None]
        largest = np.where(empty, 0, np.maximum(m, logits))
        p, sink = np.exp(s - largest), np.where(empty, 0, np.exp(logits - largest))
        both = np.where(empty, 1, p.sum(-1, keepdims=True) + sink)
        p, sink = p / both, sink / both
    keep = z(case, arrays).astype(sums)
    o = _rounded(_rounded(keep * p, sums, dtype) @ v, sums, dtype)
    logsumexp = np.where(empty, -np.inf, m + np.log(np.where(empty, 1, l)))[..., 0]
    return Forward(q, k, v, c, p, sink, plain, keep, o, logsumexp)


def _propagate(case: Case, q: np.ndarray, k: np.ndarray, c: np.ndarray, ds: np.ndarray) -> Results:
    """Compute the gradients of query, key and bias from dS."""
    scale = _scale(case, ds.dtype.type)
    dx = scale * (ds * (1 - (c / ds.dtype.type(case.soft_cap)) ** 2) if case.soft_cap else ds)
    results = {"query": (dx @ k).transpose(0, 2, 1, 3), "key": _per_kv_head(case, dx.swapaxes(2, 3) @ q)}
    if case.bias:
        broadcast = tuple(axis for axis, e in enumerate(case.bias) if e == "1")
        results["bias"] = ds.sum(broadcast, keepdims=True)
    return results


def _per_kv_head(case: Case, g: np.ndarray) -> np.ndarray:
    return g.reshape(case.B, case.K, case.N // case.K, *g.shape[2:]).sum(2).transpose(0, 2, 1, 3)


def attention(case: Case, arrays: Arrays, cotangents: Any, sums: Any, dtype: Any = None) -> Results:
    """Compute the formulas of docs/contract.md with the matrix in memory.

    All arithmetic is in `sums`. P, dP and the results are rounded to `dtype`. With `sums` float64 or longdouble the
    result is exact. With float32 and the dtype of the inputs it has the error of standard attention. The dtype "tf32"
    means float32 with the operands of products rounded to TF32.
    """
    dtype = sums if dtype is None else dtype
    q, k, v, c, p, sink, plain, keep, o, logsumexp = _forward(case, arrays, sums, dtype)
    do = _rounded(cotangents[0], sums, dtype).transpose(0, 2, 1, 3)
    products, dlogsumexp = (do * o).sum(-1, keepdims=True), cotangents[1].astype(sums)[..., None]
    d = products if case.sinks else products - dlogsumexp
    ds = p * (keep * _rounded(do @ v.swapaxes(2, 3), sums, dtype) - d)
    if case.sinks:
        ds += plain * dlogsumexp
    gradients = _propagate(case, q, k, c, ds)
    if case.sinks:
        gradients["sinks"] = -(sink * products).sum((0, 2, 3))
    gradients["value"] = _per_kv_head(case, _rounded(keep * p, sums, dtype).swapaxes(2, 3) @ do)
    rounded = {name: _rounded(x, sums, dtype) for name, x in gradients.items()}
    return {"o": o.transpose(0, 2, 1, 3), "logsumexp": logsumexp, **rounded}


def cancellation(case: Case, arrays: Arrays, cotangents: Any, dtype: Any) -> dict[str, float]:
    """Bound the error from cancellation: return the largest entry for each result.

    The error of dS = P (Z dP - D) has two sources: one ulp of the sums that form Z dP and D, and the rounding of the O
    in D. Standard attention may be exact by luck in rows with few keys, because with one key it computes both by the
    same sum.

    The error of a score is one ulp of the sum of its terms' absolute values, since another order of the terms may round
    better. P then changes by P times the sum of the errors of its score and of the mean score.
    """
    q, k, v, c, p, sink, plain, keep, o, _ = _forward(case, arrays, np.float64, np.float64)
    do = np.asarray(cotangents[0]).astype(np.float64).transpose(0, 2, 1, 3)
    d = (do * o).sum(-1, keepdims=True)
    ds = np.abs(p * (keep * (do @ v.swapaxes(2, 3)) - d))
    q, k, v, do = map(np.abs, (q, k, v, do))
    stored, summed = (float(jnp.finfo(kind).eps) for kind in (dtype, jnp.promote_types(dtype, jnp.float32)))
    s_error = summed * np.abs(_scale(case, np.float64)) * (q @ k.swapaxes(2, 3))
    if case.soft_cap:
        s_error *= 1 - (c / case.soft_cap) ** 2
    mean = (p * s_error).sum(-1, keepdims=True)
    s_error += mean
    p_error = keep * p * s_error
    products, sums = keep * (do @ v.swapaxes(2, 3)), (do * np.abs(o)).sum(-1, keepdims=True)
    d_error = summed * sums + stored / 2 * sums + (ds * s_error).sum(-1, keepdims=True)
    ds_error = p * (summed * products + d_error) + ds * s_error
    ds_error += plain * summed * np.abs(cotangents[1])[..., None]
    results = _propagate(case, q, k, c, ds_error)
    results["o"], results["value"] = p_error @ v, _per_kv_head(case, p_error.swapaxes(2, 3) @ do)
    results["logsumexp"] = (plain * s_error).sum(-1)
    if case.sinks:
        # Rows round independently.
        results["sinks"] = np.sqrt(((sink * (d_error + mean * np.abs(d))) ** 2).sum((0, 2, 3)))
    return {name: np.abs(x).max(initial=0) for name, x in results.items()}

"""Checks of latent attention, compared with standard attention of the latent as key and as value."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import standard
from accuracy import assert_accurate, by_numpy, errors

import jax_flash


def arrays_of(case, dtype):
    """Return the arrays of a case. The value is the start of the key, and all queries are valid."""
    arrays = case.arrays(dtype)
    arrays["value"] = np.ascontiguousarray(arrays["key"][..., : case.E])
    if case.lengths:
        arrays["query_seq_lengths"] = np.full(case.B, case.T, np.int32)
    return arrays


def with_latent(results):
    """Return results with the gradient of the latent, or a bound of its error, instead of those of key and value."""
    given = dict(results)
    key, value = given.pop("key"), given.pop("value")
    if np.ndim(key):
        value = np.pad(value, [(0, 0)] * 3 + [(0, key.shape[-1] - value.shape[-1])])
        return {name: given[name] for name in ("o", "query")} | {"latent": (key + value)[:, :, 0]}
    return {name: given[name] for name in ("o", "query")} | {"latent": key + value}


def check(case, dtype, **options):
    """Check that the errors are at most twice those of standard attention in the same dtype, plus a few ulps."""
    kind, arrays, cotangents = jnp.dtype(dtype), arrays_of(case, dtype), case.cotangents(dtype)
    exact = with_latent(by_numpy(case, arrays, cotangents))
    sums = np.float64 if dtype == "float64" else np.float32
    baseline = errors(with_latent(standard.attention(case, arrays, cotangents, sums, kind)), exact)
    given = {name: arrays[name] for name in ("query_offset", "key_value_seq_lengths") if name in arrays}

    @jax.jit
    def run(query, latent):
        attend = functools.partial(
            jax_flash.mla_attention, value_dim=case.E, scale=case.scale, is_causal=case.causal, **given, **options
        )
        o, pull = jax.vjp(attend, query, latent)
        return {"o": o} | dict(zip(("query", "latent"), pull(jnp.asarray(cotangents[0])), strict=True))

    found = jax.tree.map(np.asarray, run(arrays["query"], arrays["key"][:, :, 0]))
    cancelled = with_latent(standard.cancellation(case, arrays, cotangents, kind))
    assert_accurate(found, exact, baseline, cancelled, kind)


def check_pages(cache, dtype):
    """Check `paged_mla_attention`. Unused pages and rows hold NaN."""
    case, kind, arrays = cache.contiguous, jnp.dtype(dtype), cache.arrays(dtype)
    arrays["value"] = np.ascontiguousarray(arrays["key"][..., : case.E])
    cotangents = case.cotangents(dtype)
    exact, rounded, cancelled = (
        {"o": f(case, arrays, cotangents, *more)["o"]}
        for f, more in (
            (by_numpy, ()),
            (standard.attention, (np.float32, kind)),
            (standard.cancellation, (kind,)),
        )
    )
    given = cache.paged_arguments(arrays)
    latent_pages = given.pop("key_pages")[:, :, 0]
    del given["value_pages"]
    found = jax_flash.paged_mla_attention(**given, latent_pages=latent_pages, value_dim=case.E, scale=case.scale)
    assert_accurate({"o": np.asarray(found)}, exact, errors(rounded, exact), cancelled, kind)

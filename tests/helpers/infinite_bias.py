"""A bias of -inf with a score_mod that maps -inf to finite scores. The oracle uses a mask instead of the bias."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from cases import Case
from programs import Mod, Mods, assert_accurate, captured, exact, run


def bounded(case: Case) -> Mods:
    """Return a bounded score_mod. At a score of -inf the derivative of its captured array is 0 · inf."""
    rates = np.linspace(0.4, 0.8, case.N, dtype=np.float32)
    return (Mod("score_mod", lambda rates: lambda s, b, h, q, k: 3 * jnp.tanh(rates[h] * s), (rates,)),)


def replaced(case: Case) -> Mods:
    """Return a score_mod with derivatives that do not depend on the score."""
    table = np.random.default_rng(3).normal(size=(case.N, case.S)).astype(np.float32)
    return (Mod("score_mod", lambda table: lambda s, b, h, q, k: jnp.where(k % 3 == 0, table[h, k], s), (table,)),)


def capped(case: Case) -> Mods:
    """Return a score_mod with a derivative that depends on the score. It captures no array."""
    return (Mod("score_mod", lambda: lambda s, b, h, q, k: 1.5 * jnp.tanh(s / 1.5)),)


def infinite_entries(case: Case) -> np.ndarray:
    """Mark the entries of the bias that are -inf. In some rows all are."""
    hidden = np.random.default_rng(7).random(case.shape(case.bias)) < 0.3
    if case.bias[2] == "t":
        hidden[:, :, ::5] = True
    return hidden


def check(case: Case, mods: Mods, implementation: str | None, dtype: str, bias_dtype: str = "") -> None:
    """Compare with a mask, including the gradient of the scale. Empty rows have NaN cotangents."""
    scale = np.asarray(case.D**-0.5, "float64" if dtype == "float64" else "float32")
    arrays = case.arrays(dtype) | captured(mods, scale.dtype.name)
    do, dlogsumexp = case.cotangents(dtype)
    hidden = infinite_entries(case)
    masked = dataclasses.replace(case, mask=case.bias)
    expected = exact(masked, lambda: mods, arrays | {"mask": ~hidden}, (do, dlogsumexp))

    empty = np.broadcast_to(hidden.all(-1), dlogsumexp.shape)
    do[empty.swapaxes(1, 2)], dlogsumexp[empty] = np.nan, np.nan
    bias = np.where(hidden, -np.inf, arrays["bias"].astype(np.float64)).astype(bias_dtype or dtype)
    results = run(case, lambda: mods, arrays | {"bias": bias, "scale": scale}, (do, dlogsumexp), implementation)
    products = arrays["query"].astype(np.float64) * expected["query"] / scale
    error = 4 * float(jnp.finfo(dtype).eps) * abs(products).sum()
    np.testing.assert_allclose(results.pop("scale"), products.sum(), rtol=0, atol=error)
    assert_accurate(results, expected, dtype)
    assert not results["bias"][hidden].any()

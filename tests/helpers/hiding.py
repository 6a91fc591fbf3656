"""A bias of -inf beside a score_mod that makes finite scores of -inf. The oracle has a mask in the bias's place."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from cases import Case
from programs import Mod, Mods, assert_accurate, captured, exact, ours


def bounded(case: Case) -> Mods:
    """A captured array's derivative at -inf is 0 · inf."""
    rates = np.linspace(0.4, 0.8, case.N, dtype=np.float32)
    return (Mod("score_mod", lambda rates: lambda s, b, h, q, k: 3 * jnp.tanh(rates[h] * s), (rates,)),)


def replaced(case: Case) -> Mods:
    """Derivatives that do not depend on the score."""
    table = np.random.default_rng(3).normal(size=(case.N, case.S)).astype(np.float32)
    return (Mod("score_mod", lambda table: lambda s, b, h, q, k: jnp.where(k % 3 == 0, table[h, k], s), (table,)),)


def capped(case: Case) -> Mods:
    """A derivative that depends on the score, and no captured array."""
    return (Mod("score_mod", lambda: lambda s, b, h, q, k: 1.5 * jnp.tanh(s / 1.5)),)


def hides(case: Case) -> np.ndarray:
    """Where the bias is -inf. Some rows have no other bias."""
    hidden = np.random.default_rng(7).random(case.shape(case.bias)) < 0.3
    if case.bias[2] == "t":
        hidden[:, :, ::5] = True
    return hidden


def check(case: Case, mods: Mods, implementation: str | None, dtype: str, bias_dtype: str = "") -> None:
    """Compare the results, the gradient of the scale included, with those of a mask. Empty rows have NaN cotangents."""
    scale = np.asarray(case.D**-0.5, "float64" if dtype == "float64" else "float32")
    arrays = case.arrays(dtype) | captured(mods, scale.dtype.name)
    do, dlogsumexp = case.cotangents(dtype)
    hidden = hides(case)
    masked = dataclasses.replace(case, mask=case.bias)
    expected = exact(masked, lambda: mods, arrays | {"mask": ~hidden}, (do, dlogsumexp))

    empty = np.broadcast_to(hidden.all(-1), dlogsumexp.shape)
    do[empty.swapaxes(1, 2)], dlogsumexp[empty] = np.nan, np.nan
    bias = np.where(hidden, -np.inf, arrays["bias"].astype(np.float64)).astype(bias_dtype or dtype)
    results = ours(case, lambda: mods, arrays | {"bias": bias, "scale": scale}, (do, dlogsumexp), implementation)
    products = arrays["query"].astype(np.float64) * expected["query"] / scale
    error = 4 * float(jnp.finfo(dtype).eps) * abs(products).sum()
    np.testing.assert_allclose(results.pop("scale"), products.sum(), rtol=0, atol=error)
    assert_accurate(results, expected, dtype)
    assert not results["bias"][hidden].any()

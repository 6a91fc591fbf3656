"""Score programs from the literature, and an oracle that materialises the matrix in float64.

A program is a `Mod`: the arrays that it captures, and a function of these arrays. Sizes come from a `Case`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from cases import DIFFERENTIATED, Arrays, Case

import jax_flash


class Mod(NamedTuple):
    kind: str  # "score_mod" or "mask_mod"
    make: Callable[..., Callable[..., jax.Array]]  # from its arrays to the function
    arrays: tuple[np.ndarray, ...] = ()


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def _integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


# --- scores -----------------------------------------------------------------------------------------------------------


def alibi(case: Case) -> Mod:
    """ALiBi: a penalty proportional to the distance, with a slope for each head."""
    slopes = np.float32(2) ** (-8 * np.arange(1, case.N + 1, dtype=np.float32) / case.N)
    return Mod("score_mod", lambda slopes: lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k), (slopes,))


def ramps(case: Case) -> Mod:
    """Affine functions of query and key, written in several ways, and an expression that only resembles one."""

    def make(slopes):
        def score_mod(s, b, h, q, k):
            slope, distance = 0.02 * slopes[h], (k - q).astype(s.dtype)
            s = s + (slope * (k - q) + distance * 0.02) - (0.02 - -distance) * 0.1
            return s - jnp.abs(k - q - 20) * slope - (distance - 0.01 * (q + k))

        return score_mod

    return Mod("score_mod", make, (_normal(26, case.N),))


def one_way_ramps(case: Case) -> Mod:
    """Functions of the query alone, of the key alone, and of both with a bend."""

    def make(slopes):
        def score_mod(s, b, h, q, k):
            s = s + (slopes[h] - k.astype(s.dtype)) * 0.03 - 0.02 * slopes[h] * (q + q)
            return s - jnp.maximum(q - k, 3) * 0.01 + 0.01 * (k.astype(s.dtype) + q.astype(s.dtype))

        return score_mod

    return Mod("score_mod", make, (_normal(27, case.N),))


def soft_cap(case: Case) -> Mod:
    """A soft cap. The cap is a captured scalar."""
    return Mod("score_mod", lambda cap: lambda s, b, h, q, k: cap * jnp.tanh(s / cap), (np.asarray(1.5, np.float32),))


def relative_table(case: Case) -> Mod:
    """A bias for each head and relative position."""
    table = _normal(1, case.N, case.T + case.S - 1)
    return Mod("score_mod", lambda table: lambda s, b, h, q, k: s + table[h, q - k + case.S - 1], (table,))


def _t5(case: Case, causal: bool) -> Mod:
    exact, buckets, farthest = 4, 8, 21.0  # for one direction; no bucket ends at a whole distance

    def bucket(s, distance):
        far = jnp.log(jnp.maximum(distance, 1).astype(s.dtype) / exact) / np.log(farthest / exact)
        far = exact + (far * (buckets - exact) + 1e-3).astype(jnp.int32)
        return jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))

    def make(table):
        def score_mod(s, b, h, q, k):
            if causal:
                return s + table[bucket(s, jnp.maximum(q - k, 0)), h]
            return s + table[bucket(s, jnp.abs(q - k)) + jnp.where(k > q, buckets, 0), h]

        return score_mod

    return Mod("score_mod", make, (_normal(2, buckets if causal else 2 * buckets, case.N),))


def t5(case: Case) -> Mod:
    """Buckets of logarithmically growing distances, separately for each direction."""
    return _t5(case, causal=False)


def t5_causal(case: Case) -> Mod:
    return _t5(case, causal=True)


def sandwich(case: Case) -> Mod:
    """The dot product of sinusoidal positions, as a function of their distance."""
    rates = np.float32(100.0) ** (-np.arange(6, dtype=np.float32) / 6)

    def make(rates):
        return lambda s, b, h, q, k: s + 0.5 / (h + 1.0) * jnp.cos((q - k).astype(s.dtype) * rates).sum()

    return Mod("score_mod", make, (rates,))


def graphormer(case: Case) -> Mod:
    """Graph biases from tables: one for the distance of two nodes, one for the edges on the path."""
    distances, edges = _integers(3, 0, 6, case.B, case.T, case.S), _integers(4, 0, 5, case.T, case.S, 2)

    def make(distances, edges, spatial, weights):
        def score_mod(s, b, h, q, k):
            way = weights[edges[q, k, 0], h] + 0.5 * weights[edges[q, k, 1], h]
            return s + spatial[distances[b, q, k], h] + way

        return score_mod

    return Mod("score_mod", make, (distances, edges, _normal(5, 6, case.N), _normal(6, 5, case.N)))


def log_gelu(case: Case) -> Mod:
    return Mod(
        "score_mod",
        lambda shift: lambda s, b, h, q, k: jnp.log(jax.nn.gelu(s) + shift[h]),
        (1 + _normal(7, case.N) ** 2,),
    )


def low_rank(case: Case) -> Mod:
    """A bias that is the product of two low-rank matrices."""
    left, right = _normal(8, case.N, case.T, 3), _normal(9, case.N, case.S, 3)
    return Mod(
        "score_mod", lambda left, right: lambda s, b, h, q, k: s + jnp.dot(left[h, q], right[h, k]), (left, right)
    )


def sums(case: Case) -> Mod:
    """Captured arrays indexed by head, by row, by key and by distance, and one with an unstructured gradient."""

    def make(rates, left, right, buckets, pairs):
        def score_mod(s, b, h, q, k):
            s = s + rates[h] * (k % 3 - 1) + left[b, q] * right[h, k]
            return s + buckets[jnp.minimum(jnp.abs(q - k) >> 3, 5)] + pairs[q % 3, k % 3]

        return score_mod

    shapes = ((case.N,), (case.B, case.T), (case.N, case.S), (6,), (3, 3))
    return Mod("score_mod", make, tuple(_normal(30 + i, *shape) for i, shape in enumerate(shapes)))


def mla_rope(case: Case) -> Mod:
    """Multi-head latent attention: positions enter by a second product, with keys shared by all heads."""
    queries, keys = _normal(10, case.B, case.T, case.N, 4), _normal(11, case.B, case.S, 4)

    def make(queries, keys):
        return lambda s, b, h, q, k: s + 0.3 * jnp.dot(queries[b, q, h], keys[b, k])

    return Mod("score_mod", make, (queries, keys))


# --- masks ------------------------------------------------------------------------------------------------------------


def causal(case: Case) -> Mod:
    return Mod("mask_mod", lambda: lambda b, h, q, k: q >= k)


def sliding_window(case: Case) -> Mod:
    return Mod("mask_mod", lambda width: lambda b, h, q, k: (q >= k) & (q - k <= width), (np.asarray(5, np.int32),))


def dilated_window(case: Case) -> Mod:
    return Mod("mask_mod", lambda: lambda b, h, q, k: (jnp.abs(q - k) <= 9) & ((q - k) % 3 == 0))


def prefix_lm(case: Case) -> Mod:
    """A prefix of each example is visible to all queries."""
    return Mod(
        "mask_mod", lambda prefix: lambda b, h, q, k: (k < prefix[b]) | (q >= k), (_integers(12, 0, case.S, case.B),)
    )


def documents(case: Case) -> Mod:
    """Packed sequences, given by segment ids of queries and of keys."""
    ids = [np.sort(_integers(seed, 0, 4, case.B, size)) for seed, size in ((13, case.T), (14, case.S))]
    return Mod("mask_mod", lambda queries, keys: lambda b, h, q, k: queries[b, q] == keys[b, k], tuple(ids))


def documents_by_offsets(case: Case) -> Mod:
    """Packed sequences, each with its own causal mask."""
    offsets = np.array([0, case.T // 4, case.T // 3, case.T], np.int32)
    ids = np.repeat(np.arange(3, dtype=np.int32), np.diff(offsets))

    def make(ids, offsets):
        def mask_mod(b, h, q, k):
            start, end = offsets[ids[q]], offsets[ids[q] + 1]
            return (start <= k) & (k < end) & (q - start >= k - start)

        return mask_mod

    return Mod("mask_mod", make, (ids, offsets))


def natten(case: Case) -> Mod:
    """Neighbourhood attention in 2D. Windows at the edges are shifted inwards."""
    height, width, reach = case.T // 8, 8, 1

    def near(x, y, size):
        return jnp.abs(jnp.clip(x, reach, size - 1 - reach) - y) <= reach

    def mask_mod(b, h, q, k):
        return near(q // width, k // width, height) & near(q % width, k % width, width)

    return Mod("mask_mod", lambda: mask_mod)


def natten_morton(case: Case) -> Mod:
    """Neighbours in 3D with tokens in Morton order, which interleaves the bits of the coordinates."""

    def coordinates(place):
        def gather(first):
            bits = [(place >> (first + 3 * i)) & 1 for i in range(2)]
            return bits[0] | (bits[1] << 1)

        return [gather(axis) for axis in range(3)]

    def mask_mod(b, h, q, k):
        return functools.reduce(
            jnp.logical_and, [jnp.abs(x - y) <= 1 for x, y in zip(coordinates(q), coordinates(k), strict=True)]
        )

    return Mod("mask_mod", lambda: mask_mod)


def sliding_tile(case: Case) -> Mod:
    """2D tiles of 2 by 2 tokens. A query sees its own tile and the adjacent ones."""

    def mask_mod(b, h, q, k):
        def tile(place):
            return (place // 8) // 2, (place % 8) // 2

        return functools.reduce(jnp.logical_and, [jnp.abs(x - y) <= 1 for x, y in zip(tile(q), tile(k), strict=True)])

    return Mod("mask_mod", lambda: mask_mod)


def block_diffusion(case: Case) -> Mod:
    """Noisy tokens followed by the same clean tokens.

    A noisy block sees itself and earlier clean blocks. Clean blocks are causal.
    """
    length, block = case.T // 2, 4

    def mask_mod(b, h, q, k):
        clean_q, clean_k = q >= length, k >= length
        q_block, k_block = (jnp.where(clean, x - length, x) // block for clean, x in ((clean_q, q), (clean_k, k)))
        diagonal = (q_block == k_block) & (clean_q == clean_k)
        return diagonal | (clean_k & ~clean_q & (q_block > k_block)) | (clean_q & clean_k & (q_block >= k_block))

    return Mod("mask_mod", lambda: mask_mod)


def shared_prefix(case: Case) -> Mod:
    """Several answers to one question. Each answer sees the question and itself."""
    prefix = case.T // 3
    ids = np.where(np.arange(case.T) < prefix, -1, np.arange(case.T) % 97 // 7).astype(np.int32)
    return Mod("mask_mod", lambda ids: lambda b, h, q, k: (q >= k) & ((k < prefix) | (ids[q] == ids[k])), (ids,))


def flamingo(case: Case) -> Mod:
    """Text sees the patches of the last preceding image. Text before the first image sees none."""
    image = np.sort(_integers(15, -1, 3, case.B, case.T))
    return Mod("mask_mod", lambda image: lambda b, h, q, k: image[b, q] == k // (case.S // 3), (image,))


def kinds_of_heads(case: Case) -> Mod:
    """A different kind of mask for each head."""
    kinds = (np.arange(case.N) % 3).astype(np.int32)

    def make(kinds):
        def mask_mod(b, h, q, k):
            return jnp.stack([q >= k, jnp.abs(q - k) < 4, (q - k) % 4 == 0])[kinds[h]]

        return mask_mod

    return Mod("mask_mod", make, (kinds,))


# --- programs that use all arguments, for cases of any size -----------------------------------------------------------


def score_and_mask(case: Case) -> tuple[Mod, Mod]:
    """A score_mod and a mask_mod that depend on each of their arguments, and on arrays of several dtypes."""

    def score(table, rates, shifts):
        def score_mod(s, b, h, q, k):
            return s * rates[b] + table[h, jnp.clip(q - k, -8, 8) + 8] + 0.25 * jnp.sin(s) * shifts[k % 5]

        return score_mod

    def mask(marks, allowed):
        return lambda b, h, q, k: ((q + k + b) % 4 != marks[h]) | allowed[k]

    arrays = _normal(20, case.N, 17), 1 + 0.1 * _normal(21, case.B), _integers(22, -2, 3, 5).astype(np.int8)
    marks = (_integers(23, 0, 4, case.N), _normal(24, case.S) > 1)
    return Mod("score_mod", score, arrays), Mod("mask_mod", mask, marks)


def masked_by_score(case: Case) -> tuple[Mod]:
    """A score of -inf masks its entry. Some rows have no other scores."""
    rate = (np.asarray(0.5, np.float32),)
    return (Mod("score_mod", lambda rate: lambda s, b, h, q, k: jnp.where(q % 4 > k % 3, s * rate, -jnp.inf), rate),)


def undefined_where_masked(case: Case, distance: Callable[[jax.Array], jax.Array] = lambda x: x) -> tuple[Mod]:
    """A score and a derivative that are NaN or infinite for entries that a causal mask hides.

    With `distance=jnp.abs` visible entries are unchanged, and all entries are finite.
    """

    def make(rate):
        def score_mod(s, b, h, q, k):
            x = distance(q - k).astype(s.dtype)
            return jnp.sin(s * jnp.sqrt(x)) - rate[h] * jnp.log(x + 1)

        return score_mod

    return (Mod("score_mod", make, (_normal(25, case.N),)),)


def wavy(case: Case) -> tuple[Mod]:
    """The derivative of this score_mod changes its sign."""
    return (Mod("score_mod", lambda: lambda s, b, h, q, k: jnp.sin(3 * s) * (1.0 + k % 2)),)


def flags(case: Case) -> tuple[Mod, Mod]:
    """Captured bools that are loaded, negated and compared."""
    rng = np.random.default_rng(11)
    query_flags, key_flags = rng.random(case.T) < 0.5, rng.random(case.S) < 0.7

    def doubled(key_flags):
        return lambda s, b, h, q, k: jnp.where(~key_flags[k], s, 2 * s)

    def equal(query_flags, key_flags):
        return lambda b, h, q, k: (query_flags[q] == (k % 3 > 0)) | ~(key_flags[k] ^ (k > q))

    return Mod("score_mod", doubled, (key_flags,)), Mod("mask_mod", equal, (query_flags, key_flags))


SCORES = [
    *(alibi, ramps, one_way_ramps, soft_cap, relative_table, t5, t5_causal, sandwich, graphormer, log_gelu, low_rank),
    *(sums, mla_rope),
]
MASKS = [
    *(causal, sliding_window, dilated_window, prefix_lm, documents, documents_by_offsets, natten, natten_morton),
    *(sliding_tile, block_diffusion, shared_prefix, flamingo, kinds_of_heads),
]


# --- running them -----------------------------------------------------------------------------------------------------

Mods = tuple[Mod, ...]
Gradients = dict[str, Any]


def captured(mods: Mods, dtype: str = "float32") -> dict[str, Any]:
    """Return the captured arrays by name, such as "score_mod 0", with floats in this dtype."""
    arrays = {f"{mod.kind} {i}": x for mod in mods for i, x in enumerate(mod.arrays)}
    return {name: x.astype(dtype) if x.dtype.kind == "f" else x for name, x in arrays.items()}


def constant(mods: Mods) -> Mods:
    """Return the same mods with constants for captured arrays, which have no gradients."""
    return tuple(Mod(mod.kind, functools.partial(mod.make, *map(jnp.asarray, mod.arrays))) for mod in mods)


def functions(mods: Mods, arrays: Gradients) -> dict[str, Any]:
    """Return the mods as options of a call."""
    return {mod.kind: mod.make(*(arrays[f"{mod.kind} {i}"] for i in range(len(mod.arrays)))) for mod in mods}


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Separate the arrays into those with a gradient and the others."""
    differentiated = {
        name: x
        for name, x in arrays.items()
        if name in (*DIFFERENTIATED, "scale") or (" " in name and jnp.issubdtype(x.dtype, jnp.floating))
    }
    return differentiated, {name: x for name, x in arrays.items() if name not in differentiated}


def _with_gradients(attention: Any, arrays: Arrays, cotangents: Any) -> Gradients:
    differentiated, others = _split(arrays)
    (o, lse), pull = jax.vjp(lambda differentiated: attention(differentiated | others), differentiated)
    (gradients,) = pull((cotangents[0].astype(o.dtype), cotangents[1].astype(lse.dtype)))
    return {"o": o, "logsumexp": lse} | gradients


@functools.cache
def _compiled(case: Case, make: Any, implementation: str | None) -> Any:
    mods = make()

    def attention(arrays):
        given = {name: x for name, x in arrays.items() if " " not in name}
        options = case.options | given | functions(mods, arrays)
        o, statistics = jax_flash.attention_with_statistics(**options, implementation=implementation)
        return o, statistics.logsumexp

    return jax.jit(functools.partial(_with_gradients, attention))


@functools.cache
def _exact(case: Case, make: Any) -> Any:
    mods = make()

    def attention(arrays, allowed, keep):
        q, k, v = (arrays[name].transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
        k, v = (jnp.repeat(x, case.N // case.K, 1) for x in (k, v))
        s = (case.D**-0.5 if case.scale is None else case.scale) * (q @ k.swapaxes(2, 3))
        if case.soft_cap:
            s = case.soft_cap * jnp.tanh(s / case.soft_cap)
        s = s + arrays["bias"] if case.bias else s
        offset = arrays.get("query_offset", jnp.zeros(case.B, jnp.int32))
        indices = (
            jnp.arange(case.B, dtype=jnp.int32),
            jnp.arange(case.N, dtype=jnp.int32),
            offset[:, None] + jnp.arange(case.T, dtype=jnp.int32),
            jnp.arange(case.S, dtype=jnp.int32),
        )
        mods_by_kind = functions(mods, arrays)
        if "score_mod" in mods_by_kind:
            s = over_entries(mods_by_kind["score_mod"], s)(s, *indices)
        if "mask_mod" in mods_by_kind:
            allowed = allowed & over_entries(mods_by_kind["mask_mod"])(*indices)
        s = jnp.where(allowed, s, -jnp.inf)
        m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
        shift = jnp.where(m == -jnp.inf, 0, m)
        p = jnp.exp(s - shift)
        l = p.sum(-1, keepdims=True)
        divisor = jnp.where(l == 0, 1, l)
        sink = jnp.exp(arrays["sinks"][:, None, None] - shift) if case.sinks else 0
        o = (keep * p / (divisor + sink)) @ v
        return o.transpose(0, 2, 1, 3), jnp.where(l == 0, -jnp.inf, m + jnp.log(divisor))[..., 0]

    def results(arrays, allowed, keep, cotangents):
        return _with_gradients(lambda arrays: attention(arrays, allowed, keep), arrays, cotangents)

    return jax.jit(results)


def over_entries(function: Any, *scores: Any) -> Any:
    """Apply a function of one entry to all entries.

    Scores, if any, are [B, N, T, S]. The indices are [B], [N], [B, T] and [S].
    """
    score = (0,) * len(scores)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, None)):
        function = jax.vmap(function, (*score, *axes))
    return function


def _refusal(case: Case, make: Any, arrays: Arrays) -> str:
    """Return why the test device's kernels do not support a call, forward or backward; empty if they do."""
    device = jax.config.jax_default_device
    platform = "cuda" if device is not None and device.platform == "gpu" else "cpu"
    given = {name: x for name, x in arrays.items() if " " not in name}
    mods = functions(make(), {name: jnp.asarray(x) for name, x in arrays.items() if " " in name})
    problem = jax_flash.Problem.of(**case.options | given, **mods)
    choice = jax_flash.choose_implementation(problem.differentiated(problem.differentiable), platform)
    return choice.reason if choice.implementation != "flash" else ""


def run(case: Case, make: Any, arrays: Arrays, cotangents: Any, implementation: str | None) -> Gradients:
    """Return O, the logsumexp, and by name the gradients of all float arrays.

    Args:
      make: returns the mods. Pass the same function object for the same mods: it is the key of the compiled function.
    """
    with jax.enable_x64(arrays["query"].dtype == np.float64):
        if implementation == "flash" and (reason := _refusal(case, make, arrays)):
            pytest.skip(reason)
        return jax.tree.map(np.asarray, _compiled(case, make, implementation)(arrays, cotangents))


def exact(case: Case, make: Any, arrays: Arrays, cotangents: Any) -> Gradients:
    """Return the same results in float64 on the CPU, from the materialised matrix and JAX's derivatives."""

    def upcast(x):
        return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    allowed, keep = standard.allowed(case, arrays), standard.z(case, arrays)
    used = {name: x for name, x in arrays.items() if name not in ("block_mask", "mask", "dropout_key")}
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, _exact(case, make)(*jax.tree.map(upcast, (used, allowed, keep, cotangents))))


TOLERANCES = {"tf32": 2.0**-9, "float32": 1e-5, "float64": 1e-13, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def assert_accurate(results: Gradients, expected: Gradients, dtype: str) -> None:
    """Compare relative to the largest entry of each result. Infinite entries must be equal."""
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        finite, found = np.isfinite(x), np.asarray(results[name], np.float64)
        assert found.shape == x.shape, name
        np.testing.assert_array_equal(found[~finite], x[~finite], err_msg=name)
        error, largest = np.abs(found[finite] - x[finite]).max(initial=0), np.abs(x[finite]).max(initial=0)
        assert error <= TOLERANCES[dtype] * max(largest, 1e-3), f"{name}: {error:.3g} of {largest:.3g}"


def check(case: Case, make: Any, implementation: str | None, dtype: str = "float32", tolerance_dtype: str = "") -> None:
    """Compare the results with the exact ones.

    Args:
      dtype: the dtype of the inputs; "tf32" means float32 at a GPU's default precision.
      tolerance_dtype: the dtype of the tolerance; by default `dtype`.
    """
    given = "float32" if dtype == "tf32" else dtype
    arrays, cotangents = case.arrays(given), case.cotangents(given)
    arrays |= captured(make(), "float64" if dtype == "float64" else "float32")
    with jax.default_matmul_precision("default") if dtype == "tf32" else contextlib.nullcontext():
        results = run(case, make, arrays, cotangents, implementation)
    assert_accurate(results, exact(case, make, arrays, cotangents), tolerance_dtype or dtype)

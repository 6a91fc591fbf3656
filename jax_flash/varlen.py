"""Packed sequences of any lengths, one after the other in one array, with the places where they begin."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_flash import arguments, attention, checks, windows
from jax_flash.arguments import Implementation
from jax_flash.explicit import placed
from jax_flash.problem import Operands, Problem
from jax_flash.programs import features, program
from jax_flash.windows import Window


class VarlenOptions(TypedDict, total=False):
    """The keyword arguments of `varlen_attention`."""

    is_causal: bool
    local_window_size: Window | None
    scale: float | ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    score_mod: Callable[..., jax.Array] | None
    mask_mod: Callable[..., jax.Array] | None
    dropout_rate: float
    dropout_key: jax.Array | None
    dropout_head_ids: ArrayLike | None
    precision: lax.PrecisionLike
    deterministic: bool
    implementation: Implementation | None


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> jax.Array: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[VarlenOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@arguments.lists_options(VarlenOptions)
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[VarlenOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`dot_product_attention` of B sequences that are packed one after the other, each with its own queries and keys.

    Sequence b has the queries cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1], and the keys likewise. Other lengths never
    recompile anything, and tiles that no sequence has a part of cost nothing. A tile of queries that is of several
    sequences goes over the keys of all of them: for few queries of each and many keys, `dot_product_attention` on a
    batch is faster.

    Letters: Tq and Tk tokens of all sequences, N query heads, K key/value heads (N a multiple of K), D query/key head
    dim, E value head dim.

    Args:
      query: [Tq, N, D]; float32, float64, bfloat16 or float16.
      key: [Tk, K, D], same dtype.
      value: [Tk, K, E], same dtype.
      cu_seqlens_q: integer [B + 1], the lengths of the queries summed up: 0 first, never falling, Tq at most. Sequences
        may be empty.
      cu_seqlens_k: likewise of the keys, for as many sequences; None: as the queries.
      is_causal, local_window_size: as in `dot_product_attention`, in each sequence by itself. The last query is in the
        place of the last key: one query sees all keys of a long sequence.
      score_mod, mask_mod: as there, with the number of the sequence for `batch`, and with the places of the query and
        the key in their sequence, where a query's is that of the key that it is in the place of.
      return_residual: also return the logsumexp of every row, [Tq, N].
      scale, logits_soft_cap, sinks, precision, deterministic, implementation: as there.
      dropout_rate, dropout_key, dropout_head_ids: as there. Dropout's rows and keys are those of the arrays.

    Returns:
      [Tq, N, E] in the dtype of the query; with `return_residual` a pair of it and the logsumexp. Queries beyond the
      last sequence, and those with nothing to attend to, are 0.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention`. (The numbers in `cu_seqlens` are looked
      at if they are NumPy's or Python's. JAX's that fall, or are beyond the arrays, count as the largest before them,
      and the end of the arrays, and the first as 0.)

    Tokens beyond the last sequence, and queries with nothing to attend to, are padding as in `dot_product_attention`:
    they may hold anything, NaN and inf included, and affect nothing else. NaN or inf in any other token may reach the
    sequences that share a tile with it.
    """
    return_residual = checks.flag("return_residual", return_residual)
    problem, operands = problem_and_operands(query, key, value, cu_seqlens_q, cu_seqlens_k, options)
    o, *statistics = attention.attend(problem, None, operands, options.get("implementation"))
    if return_residual:
        return o[0], attention.by_rows(*(x[0] for x in statistics))
    return o[0]


arguments.lists_options(VarlenOptions)(vars(Problem)["of_varlen"].__func__)


def problem_and_operands(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
    options: Mapping[str, Any],
) -> tuple[Problem, Operands]:
    """What a call of `varlen_attention` with these arguments asks for, and its arrays, checked: one batch entry."""
    given = arguments.complete(options, VarlenOptions)
    query, key, value = map(checks.floats, ("query", "key", "value"), (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} must have 3 dims, [tokens, heads, head dim], not shape {x.shape}")
    if key.shape != (*value.shape[:2], query.shape[2]):
        raise ValueError(
            "query [Tq, N, D], key [Tk, K, D] and value [Tk, K, E] do not fit together: "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    checks.sizes_known(query=query.shape, key=key.shape, value=value.shape)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    sizes = query.shape[0], key.shape[0]
    begins_q = _checked("cu_seqlens_q", cu_seqlens_q, sizes[0])
    begins_k = _checked("cu_seqlens_k", cu_seqlens_k, sizes[1])
    if begins_q.shape != begins_k.shape:
        raise ValueError(f"cu_seqlens_q is of {len(begins_q) - 1} sequences, cu_seqlens_k of {len(begins_k) - 1}")
    # All devices have both, wherever the lengths are.
    rows, keys, key_end = placed(functools.partial(_packed, sizes=sizes), PartitionSpec(), begins_q, begins_k)
    left, right = windows.checked(given.pop("local_window_size"))
    if checks.flag("is_causal", given.pop("is_causal")):
        right = 0
    if (bounds := _window_of(given["mask_mod"], len(begins_q) - 1, query.shape[1], sizes[1])) is not None:
        left, right = map(windows.narrower, (left, right), bounds)
        given["mask_mod"] = None
    for name in ("score_mod", "mask_mod"):
        if callable(given[name]):
            given[name] = _within_sequences(given[name], rows)
    problem, operands = arguments.problem_and_operands(query, key, value, None, None, given)
    first, last = windows.reach(left, right)
    positions = {
        "kv_lengths": key_end,
        "keys_of_rows": windows.ranges(rows.opposite, first, last, rows.begin, rows.end)[None],
        "rows_of_keys": windows.ranges(keys.opposite, -last, -first, keys.begin, keys.end)[None],
    }
    return dataclasses.replace(problem, ranges=True, kv_lengths=True), operands.replaced(positions)


class _Packed(NamedTuple):
    """Of every token of one side, queries or keys: where it is, and where the other side of its sequence is."""

    sequence: jax.Array  # the number of the token's sequence; beyond the last sequence one more
    opposite: jax.Array  # the place that the token would have on the other side, from the end of its sequence
    begin: jax.Array  # the place of the first token of its sequence on the other side
    end: jax.Array  # the place after the last one


def _checked(name: str, cu_seqlens: ArrayLike, size: int) -> jax.Array:
    """As int32 [B + 1], checked as far as it is known."""
    given = checks.integers(name, cu_seqlens)
    if given.ndim != 1 or given.shape == (0,):
        raise ValueError(f"{name} must be [B + 1] for B sequences, not shape {given.shape}")
    checks.sizes_known(**{name: given.shape})
    if isinstance(given, np.ndarray):
        if given[0] != 0 or (given[1:] < given[:-1]).any() or given[-1] > size:
            raise ValueError(f"{name} must begin with 0, never fall, and be at most {size}, not {given.tolist()}")
    return checks.saturated(given)


@functools.partial(jax.jit, static_argnames="sizes")
def _packed(begins_q: jax.Array, begins_k: jax.Array, sizes: tuple[int, int]) -> tuple[_Packed, _Packed, jax.Array]:
    """Return the queries, the keys, and the end of the last sequence's keys, [1]."""
    q, k = (
        jnp.concatenate([jnp.zeros(1, jnp.int32), lax.cummax(x[1:].clip(0, size))])
        for x, size in zip((begins_q, begins_k), sizes, strict=True)
    )
    return _side_packed(q, k, sizes[0]), _side_packed(k, q, sizes[1]), k[-1:]


def _side_packed(own: jax.Array, other: jax.Array, size: int) -> _Packed:
    place = jnp.arange(size, dtype=jnp.int32)
    sequence = jnp.searchsorted(own[1:], place, side="right", method="scan_unrolled").astype(jnp.int32)
    after = jnp.minimum(sequence + 1, len(own) - 1)  # what is beyond all has nothing on the other side
    return _Packed(sequence, place + other[after] - own[after], other[sequence], other[after])


def _window_of(mask_mod: Any, batch: int, heads: int, keys: int) -> tuple[int, int] | None:
    """Returns the window that a mask_mod is in each sequence, or None. `_within_sequences` would hide that."""
    if not callable(mask_mod):
        return None
    traced, _ = program.trace("mask_mod", mask_mod, "float32", program.Sizes(batch, heads, None, keys), 0)
    return features.window_of(traced)


def _within_sequences(mod: Callable[..., Any], rows: _Packed) -> Callable[..., Any]:
    """A mod of rows and keys of the arrays, from one that counts in sequences."""
    if not rows.sequence.size:  # then nothing is looked up, but the function is traced all the same
        rows = jax.tree.map(lambda x: jnp.zeros(1, x.dtype), rows)
    places = rows.opposite - rows.begin

    @functools.wraps(mod, updated=())  # so that errors are about its arguments
    def of_arrays(*given: jax.Array) -> Any:
        *score, _, head, query, key = given
        return mod(*score, rows.sequence[query], head, places[query], key - rows.begin[query])

    return of_arrays

"""`varlen_attention`: attention over sequences of different lengths that are packed in one array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_flash import arguments, attention, checks, windows
from jax_flash.call import Call, Implementation, explains_names
from jax_flash.explicit import placed
from jax_flash.layouts import Layout, SequenceLayout
from jax_flash.operands import Operands
from jax_flash.problem import Problem
from jax_flash.programs import features, program
from jax_flash.windows import Window


class VarlenOptions(TypedDict, total=False):
    """The options of `varlen_attention`, for its overloads and for `Problem.of_varlen`."""

    is_causal: bool
    local_window_size: Window | None
    scale: float | ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    score_mod: Callable[..., jax.Array] | None
    mask_mod: Callable[..., jax.Array] | None
    sequence_axis: str | tuple[str, ...] | None
    sequence_layout: SequenceLayout | None
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
@explains_names
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    local_window_size: Window | None = None,
    scale: float | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_layout: SequenceLayout | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_head_ids: ArrayLike | None = None,
    precision: lax.PrecisionLike = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute attention for B sequences of different lengths that are packed one after the other in one array.

    Sequence b has queries cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] <= j <
    cu_seqlens_k[b + 1]. A query sees only keys of the same sequence. New lengths need no compilation, and the kernels
    skip tiles that no sequence uses.

    The kernels compute the queries in tiles. For each tile they read the keys of all sequences in the tile. If
    sequences have few queries and many keys, a batched `dot_product_attention` is faster.

    Letters: Tq and Tk tokens of all sequences, N query heads, K key/value heads (K divides N), D query/key head dim, E
    value head dim.

    Args:
      query: array [Tq, N, D]; float32, float64, bfloat16 or float16.
      key: array [Tk, K, D] in the same dtype.
      value: array [Tk, K, E] in the same dtype.
      cu_seqlens_q: integer array [B + 1], the cumulative query lengths. It starts with 0, never decreases, and ends at
        Tq or less. Sequences may be empty.
      cu_seqlens_k: integer array [B + 1], the cumulative key lengths. Default: cu_seqlens_q.
      is_causal, local_window_size: as in `dot_product_attention`, for each sequence separately and bottom-right
        aligned: the last query of a sequence is aligned with its last key. (In `dot_product_attention`, the first query
        is aligned with the first key.)
      score_mod, mask_mod: as in `dot_product_attention`. `batch` is the index of the sequence. `key` is the position in
        the sequence, and `query` is the position of the query plus the number of keys minus the number of queries.
      sequence_axis, sequence_layout: as in `dot_product_attention`. Tq and Tk count the tokens of this device, and
        cu_seqlens_q and cu_seqlens_k describe the whole sequence. `jax_flash.balance` divides packed documents.
      return_residual: whether to return the logsumexp of every row as well.
      scale, logits_soft_cap, sinks, precision, deterministic, implementation: as in `dot_product_attention`.
      dropout_rate, dropout_key, dropout_head_ids: as in `dot_product_attention`. The dropout mask is indexed by the
        positions in the packed arrays.

    Returns:
      Array [Tq, N, E] in the dtype of the query. With `return_residual`, a pair of this array and the logsumexp
      [Tq, N]. Queries beyond the last sequence and queries that see no key give 0.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `dot_product_attention`, and if cu_seqlens is not as described.
        If cu_seqlens is a JAX array, its values are not checked. Instead, the first value counts as 0, a value below an
        earlier value counts as the earlier value, and a value beyond the array is clamped.

    Padding: tokens beyond the last sequence and queries that see no key are padding, as in `dot_product_attention`.
    They may hold any value, including NaN, and do not affect other tokens. NaN or inf in a token of a sequence
    may reach the other sequences in the same tile.
    """
    return_residual = checks.flag("return_residual", return_residual)
    call = Call(
        is_causal=is_causal,
        local_window_size=local_window_size,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        mask_mod=mask_mod,
        sequence_axis=sequence_axis,
        sequence_layout=sequence_layout,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dropout_head_ids=dropout_head_ids,
        precision=precision,
        deterministic=deterministic,
        implementation=implementation,
    )
    problem, operands = problem_and_operands(query, key, value, cu_seqlens_q, cu_seqlens_k, call)
    o, *statistics = attention.attend(problem, call.division, operands, implementation)
    if return_residual:
        return o[0], attention.by_rows(*(x[0] for x in statistics))
    return o[0]


@arguments.creates_problems("of_varlen", VarlenOptions)
def problem_and_operands(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
    call: Call,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `varlen_attention`. Return its problem and arrays with one batch entry."""
    query, key, value = map(checks.floats, ("query", "key", "value"), (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} must have shape [tokens, heads, head dim], not {x.shape}")
    if key.shape != (*value.shape[:2], query.shape[2]):
        raise ValueError(
            "query [Tq, N, D], key [Tk, K, D] and value [Tk, K, E] do not fit together: their shapes are "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    checks.sizes_known(query=query.shape, key=key.shape, value=value.shape)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    devices = 1 if call.division is None else call.division.devices
    sizes = devices * query.shape[0], devices * key.shape[0]
    begins_q = _checked("cu_seqlens_q", cu_seqlens_q, sizes[0])
    begins_k = _checked("cu_seqlens_k", cu_seqlens_k, sizes[1])
    if begins_q.shape != begins_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have equally many sequences, not "
            f"{len(begins_q) - 1} and {len(begins_k) - 1}"
        )
    # Each device has both in full, regardless of the sharding of the lengths.
    rows, keys, key_end = placed(functools.partial(_packed, sizes=sizes), PartitionSpec(), begins_q, begins_k)
    left, right = call.window
    if call.is_causal:
        right = 0
    mask_mod = call.mask_mod
    if (bounds := _window_of(mask_mod, len(begins_q) - 1, query.shape[1], sizes[1])) is not None:
        left, right = map(windows.narrower, (left, right), bounds)
        mask_mod = None
    of_arrays = dataclasses.replace(
        call,
        is_causal=False,
        local_window_size=None,
        score_mod=_within_sequences(call.score_mod, rows),
        mask_mod=_within_sequences(mask_mod, rows),
    )
    problem, operands = arguments.problem_and_operands(query, key, value, None, None, of_arrays)
    first, last = windows.reach(left, right)
    if call.division is not None:  # each device has the ranges of its own tokens
        rows, keys = (
            jax.tree.map(lambda x, places=places: x[places], side)
            for side, places in ((rows, _places(call, sizes[0])), (keys, _places(call, sizes[1])))
        )
    positions = {
        "key_value_seq_lengths": key_end,
        "keys_of_rows": windows.ranges(rows.opposite, first, last, rows.begin, rows.end)[None],
        "rows_of_keys": windows.ranges(keys.opposite, -last, -first, keys.begin, keys.end)[None],
    }
    mask = dataclasses.replace(problem.mask, ranges=True, key_value_seq_lengths=True)
    return dataclasses.replace(problem, mask=mask), operands.replaced(positions)


class _Packed(NamedTuple):
    """For each token of one side (queries or keys): its sequence, and the place of the sequence on the other side."""

    sequence: jax.Array  # index of the token's sequence; one more for tokens beyond the last sequence
    opposite: jax.Array  # the position on the other side that the token is aligned with
    begin: jax.Array  # the position of the first token of its sequence on the other side
    end: jax.Array  # the position after the last token of its sequence on the other side


def _places(call: Call, length: int) -> jax.Array:
    """Return the positions of this device's tokens in a sequence of this length."""
    division, layout = call.division, call.sequence_layout
    assert division is not None
    chunks = jnp.asarray(layout.chunks, jnp.int32) if isinstance(layout, Layout) else None
    return division.positions(length, chunks)


def _checked(name: str, cu_seqlens: ArrayLike, size: int) -> jax.Array:
    """Return cu_seqlens as int32 [B + 1]. Check the values if they are concrete."""
    given = checks.integers(name, cu_seqlens)
    if given.ndim != 1 or given.shape == (0,):
        raise ValueError(f"{name} must have shape [B + 1] for B sequences, not {given.shape}")
    checks.sizes_known(**{name: given.shape})
    if isinstance(given, np.ndarray):
        if given[0] != 0 or (given[1:] < given[:-1]).any() or given[-1] > size:
            raise ValueError(f"{name} must begin with 0, never decrease, and be at most {size}, not {given.tolist()}")
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
    after = jnp.minimum(sequence + 1, len(own) - 1)  # tokens beyond the last sequence get an empty range
    return _Packed(sequence, place + other[after] - own[after], other[sequence], other[after])


def _window_of(mask_mod: Any, batch: int, heads: int, keys: int) -> tuple[int, int] | None:
    """Return the local window that a mask_mod equals, or None. `_within_sequences` would hide it."""
    if not callable(mask_mod):
        return None
    traced, _ = program.trace("mask_mod", mask_mod, "float32", program.Sizes(batch, heads, None, keys), 0)
    return features.window_of(traced)


def _within_sequences(mod: Any, rows: _Packed) -> Any:
    """Return a function of array positions for a score_mod or mask_mod of positions in sequences."""
    if not callable(mod):
        return mod
    if not rows.sequence.size:  # nothing is evaluated then, but the function is traced
        rows = jax.tree.map(lambda x: jnp.zeros(1, x.dtype), rows)
    places = rows.opposite - rows.begin

    @functools.wraps(mod, updated=())  # errors then name its arguments
    def of_arrays(*given: jax.Array) -> Any:
        *score, _, head, query, key = given
        return mod(*score, rows.sequence[query], head, places[query], key - rows.begin[query])

    return of_arrays

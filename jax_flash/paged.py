"""Attention over a paged cache of keys and values, which sequences of different lengths share (PagedAttention)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import _native, arguments, attention, checks
from jax_flash.call import Call, Implementation, explains_names
from jax_flash.explicit import placed
from jax_flash.operands import Operands
from jax_flash.problem import Problem
from jax_flash.windows import Window

STEP, LONGEST = _native.PAGE_STEP, 1024  # a page has a multiple of STEP keys, and at most LONGEST


class PagedOptions(TypedDict, total=False):
    """The options of `paged_attention`, for its overloads and for `Problem.of_paged`."""

    local_window_size: Window | None
    scale: float | ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    score_mod: Callable[..., jax.Array] | None
    mask_mod: Callable[..., jax.Array] | None
    precision: lax.PrecisionLike
    implementation: Implementation | None


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> jax.Array: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[PagedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@explains_names
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    local_window_size: Window | None = None,
    scale: float | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
    precision: lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute causal attention of the last T tokens of each sequence to a paged cache (arXiv 2309.06180).

    Key j of sequence b is row j % page of page `page_table[b, j // page]`. Sequences can grow without reserved memory
    and can share pages. The kernels read the pages without a copy; implementations "xla" and "reference" copy them.
    Unused pages, rows beyond a sequence's length, and queries before the first token may hold any value, including NaN.

    Letters: B sequences, T queries per sequence, N query heads, K key/value heads (K divides N), D query/key head dim,
    E value head dim, M pages per sequence at most.

    Args:
      query: array [B, T, N, D], the queries of the last T tokens; float32, float64, bfloat16 or float16.
      key_pages: array [pages, page, K, D] in the same dtype. `page` is a multiple of 8 from 8 to 1024.
      value_pages: array [pages, page, K, E] in the same dtype.
      page_table: integer array [B, M], the page numbers of each sequence in order. Entries beyond a sequence's length
        are ignored. An out-of-range page number is an error if page_table and lengths are NumPy arrays or Python
        numbers. In JAX arrays it is clamped.
      lengths: integer array [B], the tokens of each sequence including the T new ones, at most M * page. If a sequence
        is shorter than T, its first queries lie before the first token and see no key.
      local_window_size: w or (left, right), each an int or an integer scalar, which may be traced. A query sees itself
        and the `left` keys before it.
      score_mod, mask_mod: as in `dot_product_attention`. The query and key indices are positions in the sequence.
      return_residual: whether to return the logsumexp of every row as well.
      scale, logits_soft_cap, sinks, precision, implementation: as in `dot_product_attention`.

    Returns:
      Array [B, T, N, E] in the dtype of the query. With `return_residual`, a pair of this array and the logsumexp
      [B, T, N].

    Raises:
      TypeError, ValueError: as in `dot_product_attention`, and if the pages, the table and the lengths do not match.
      NotImplementedError: if shapes are symbolic, or if the call is differentiated. Use implementation "xla" or
        "reference" for gradients.
    """
    return_residual = checks.flag("return_residual", return_residual)
    call = Call(
        local_window_size=local_window_size,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        mask_mod=mask_mod,
        precision=precision,
        implementation=implementation,
    )
    problem, operands = problem_and_operands(query, key_pages, value_pages, page_table, lengths, call)
    o, *statistics = attention.attend(problem, None, operands, implementation)
    if return_residual:
        return o, attention.by_rows(*statistics)
    return o


@arguments.creates_problems("of_paged", PagedOptions)
def problem_and_operands(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    call: Call,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `paged_attention`, and return its problem and arrays."""
    query = checks.floats("query", query)
    keys, values = checks.floats("key_pages", key_pages), checks.floats("value_pages", value_pages)
    if not query.ndim == keys.ndim == values.ndim == 4 or keys.shape != (*values.shape[:3], query.shape[3]):
        raise ValueError(
            "query [B, T, N, D], key_pages [pages, page, K, D] and value_pages [pages, page, K, E] do not fit "
            f"together: their shapes are {query.shape}, {keys.shape}, {values.shape}"
        )
    table = checks.integers("page_table", page_table)
    checks.sizes_known(query=query.shape, key_pages=keys.shape, value_pages=values.shape, page_table=table.shape)
    B, T = query.shape[:2]
    table, lengths = _table_and_lengths(table, lengths, B, *keys.shape[:2])
    call = dataclasses.replace(call, key_value_seq_lengths=lengths)
    if T > 1 or any(x is not None for x in (call.local_window_size, call.score_mod, call.mask_mod)):
        # Without these, the last token sees all of its sequence.
        call = dataclasses.replace(call, is_causal=True, query_offset=lengths - T)
    return arguments.problem_and_operands(query, keys, values, None, None, call, page_table=table)


def append_to_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Write the keys and values of the last T tokens of each sequence to a paged cache.

    Call it before `paged_attention`. Under `jit` with `donate_argnames=("key_pages", "value_pages")` it writes in
    place. The letters are those in `paged_attention`.

    Args:
      key_pages: array [pages, page, K, D].
      value_pages: array [pages, page, K, E].
      key: array [B, T, K, D]. It is cast to the dtype of key_pages.
      value: array [B, T, K, E]. It is cast to the dtype of value_pages.
      page_table: integer array [B, M], the page numbers of each sequence. Two sequences must not write to one page.
      lengths: integer array [B], the tokens of each sequence including the T new ones. If a sequence is shorter than T,
        only its last tokens are written; 0 writes nothing. Page numbers out of range and lengths beyond the table are
        an error if both arguments are NumPy arrays or Python numbers. In JAX arrays such tokens are not written.

    Returns:
      The updated key_pages and value_pages.

    Raises:
      TypeError, ValueError: as in `paged_attention`.
    """
    keys, values = checks.floats("key_pages", key_pages), checks.floats("value_pages", value_pages)
    new_keys, new_values = checks.floats("key", key), checks.floats("value", value)
    if (
        not keys.ndim == values.ndim == new_keys.ndim == new_values.ndim == 4
        or keys.shape[:2] != values.shape[:2]
        or new_keys.shape[:2] != new_values.shape[:2]
        or (keys.shape[2:], values.shape[2:]) != (new_keys.shape[2:], new_values.shape[2:])
    ):
        raise ValueError(
            "key_pages [pages, page, K, D] and value_pages [pages, page, K, E] take key [B, T, K, D] and value "
            f"[B, T, K, E], but their shapes are {keys.shape}, {values.shape}, {new_keys.shape}, {new_values.shape}"
        )
    updated = written((keys, values), (new_keys, new_values), page_table, lengths)
    return updated[0], updated[1]


def written(
    pools: tuple[jax.Array, ...], new: tuple[jax.Array, ...], page_table: ArrayLike, lengths: ArrayLike
) -> tuple[jax.Array, ...]:
    """Write the last T tokens of each sequence, arrays [B, T, ...], to pools of pages [pages, page, ...]."""
    table = checks.integers("page_table", page_table)
    table, ends = _table_and_lengths(table, lengths, len(new[0]), *pools[0].shape[:2])
    pools, new, table, ends = jax.tree.map(jnp.asarray, (pools, new, table, ends))
    places = tuple(jax.typeof(pages).sharding.spec for pages in pools)  # the pages stay where they are
    return placed(_written, places, pools, new, table, ends)


def _written(
    pools: tuple[jax.Array, ...], new: tuple[jax.Array, ...], table: jax.Array, ends: jax.Array
) -> tuple[jax.Array, ...]:
    (count, page), T, M = pools[0].shape[:2], new[0].shape[1], table.shape[1]
    if M == 0:
        return pools
    place = ends[:, None] - T + jnp.arange(T)
    number = jnp.take_along_axis(table, place // page, axis=1, mode="clip")
    there = (place >= 0) & (place < M * page) & (number >= 0)
    number = jnp.where(there, number, count)  # what is not there is dropped
    return tuple(
        pages.at[number, place % page].set(tokens.astype(pages.dtype), mode="drop")
        for pages, tokens in zip(pools, new, strict=True)
    )


def checked_page(page: int) -> int:
    """Return the number of keys in a page. Raise ValueError if it is not allowed."""
    if page % STEP or not STEP <= page <= LONGEST:
        raise ValueError(f"the page size must be a multiple of {STEP} keys from {STEP} to {LONGEST}, not {page}")
    return page


def _table_and_lengths(table: Any, lengths: Any, B: int, count: int, page: int) -> tuple[Any, Any]:
    """Return both as int32, with the checks that are possible. The table has integers."""
    checked_page(page)
    if count == 0:
        raise ValueError("a cache must have at least one page, not 0")
    if table.ndim != 2 or len(table) != B:
        raise ValueError(f"page_table must have shape [B, M] with B = {B}, not {table.shape}")
    lengths = checks.shaped("lengths", checks.integers("lengths", lengths), (B,))
    _check_numbers(table, lengths, count, page)
    return checks.saturated(table), checks.saturated(lengths)


def _check_numbers(table: Any, lengths: Any, count: int, page: int) -> None:
    """Check concrete lengths against the table, and the page numbers in use against the number of pages."""
    if not isinstance(lengths, np.ndarray):
        return
    most = table.shape[1] * page
    if lengths.size and (lengths.min() < 0 or lengths.max() > most):
        raise ValueError(
            f"lengths must be from 0 to {most}, the tokens in {table.shape[1]} pages of {page}, not {lengths.tolist()}"
        )
    if isinstance(table, np.ndarray):
        used = table[np.arange(table.shape[1]) < -(-lengths[:, None] // page)]
        if used.size and (used.min() < 0 or used.max() >= count):
            raise ValueError(
                f"page_table must have page numbers from 0 to {count - 1}, but has {used.min()} to {used.max()}"
            )

"""Attention over a cache of keys and values in pages, which sequences of any lengths share (PagedAttention)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import arguments, attention, checks
from jax_flash.arguments import Implementation
from jax_flash.explicit import placed
from jax_flash.problem import Operands, Problem

STEP, LONGEST = 8, 1024  # a page has a multiple of STEP keys, and at most LONGEST


class PagedOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention`."""

    local_window_size: int | tuple[int, int] | None
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
@arguments.lists_options(PagedOptions)
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: bool = False,
    **options: Unpack[PagedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of the last queries of sequences, whose keys and values are in pages (arXiv 2309.06180).

    Key j of sequence b is row j % page of page `page_table[b, j // page]`. So sequences that grow need no memory that
    they have no tokens for, and may share pages. Pages of no sequence, rows beyond a sequence's length, and queries
    before the first token may hold anything, NaN too. Nothing is copied, but by `implementation` "xla" and "reference".

    Letters: B sequences, T queries of each, N query heads, K key/value heads (N a multiple of K), D query/key head
    dim, E value head dim, M pages that a sequence may have.

    Args:
      query: [B, T, N, D]: those of the last T tokens of each sequence; float32, float64, bfloat16 or float16.
      key_pages: [pages, page, K, D], same dtype; pages of 8 to 1024 keys, a multiple of 8.
      value_pages: [pages, page, K, E], same dtype.
      page_table: integer [B, M]: the numbers of each sequence's pages, in its order. Those beyond its length are not
        looked at. Numbers that are not those of a page are an error where NumPy has them and the lengths; those of
        JAX's arrays, which are not read, count as the nearest that is.
      lengths: integer [B]: tokens of each sequence, with the T of the queries; M * page at most. A query before the
        first token, where there are fewer than T, has nothing to attend to.
      local_window_size: w or (left, right): a query sees the left keys before it, and itself.
      score_mod, mask_mod: as in `dot_product_attention`; query and key are places in the sequence.
      return_residual: also return the logsumexp of every row, [B, T, N].
      scale, logits_soft_cap, sinks, precision, implementation: as there.

    Returns:
      [B, T, N, E] in the dtype of the query; with `return_residual` a pair of it and the logsumexp.

    Raises:
      TypeError, ValueError: as `dot_product_attention`, and where pages, table and lengths do not fit together.
      NotImplementedError: when it is differentiated, unless in plain JAX ("xla", "reference"); symbolic shapes.
    """
    return_residual = checks.flag("return_residual", return_residual)
    problem, operands = problem_and_operands(query, key_pages, value_pages, page_table, lengths, options)
    o, *statistics = attention.attend(problem, None, operands, options.get("implementation"))
    if return_residual:
        return o, attention.by_rows(*statistics)
    return o


arguments.lists_options(PagedOptions)(vars(Problem)["of_paged"].__func__)


def problem_and_operands(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    options: Mapping[str, Any],
) -> tuple[Problem, Operands]:
    """What a call of `paged_attention` with these arguments asks for, and its arrays, checked."""
    given = arguments.complete(options, PagedOptions)
    query = checks.floats("query", query)
    keys, values = checks.floats("key_pages", key_pages), checks.floats("value_pages", value_pages)
    if not query.ndim == keys.ndim == values.ndim == 4 or keys.shape != (*values.shape[:3], query.shape[3]):
        raise ValueError(
            "query [B, T, N, D], key_pages [pages, page, K, D] and value_pages [pages, page, K, E] do not fit "
            f"together: {query.shape}, {keys.shape}, {values.shape}"
        )
    table = checks.integers("page_table", page_table)
    checks.sizes_known(query=query.shape, key_pages=keys.shape, value_pages=values.shape, page_table=table.shape)
    B, T = query.shape[:2]
    table, lengths = _table_and_lengths(table, lengths, B, *keys.shape[:2])
    given["key_value_seq_lengths"] = lengths
    if T > 1 or any(given[name] is not None for name in ("local_window_size", "score_mod", "mask_mod")):
        given |= {"is_causal": True, "query_offset": lengths - T}  # the last token sees all of its sequence anyway
    return arguments.problem_and_operands(query, keys, values, None, None, given, page_table=table)


def append_to_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """The pages with the keys and values of the last T tokens of each sequence, which `paged_attention` then sees.

    Under `jit` with `donate_argnames=("key_pages", "value_pages")` they are written in place. Letters and arrays are
    those of `paged_attention`.

    Args:
      key_pages: [pages, page, K, D]; value_pages: [pages, page, K, E].
      key: [B, T, K, D]; value: [B, T, K, E], which become of the pages' dtypes.
      page_table: integer [B, M]. A page that is written to is that of one sequence only.
      lengths: integer [B]: tokens of each sequence, with these T. Where there are fewer, the first of the T are not of
        the sequence and are left out: with 0 nothing is written. So is what has no page, where JAX's arrays have
        numbers that are not those of a page, or lengths beyond the table; where NumPy has them they are an error.

    Returns:
      key_pages and value_pages.

    Raises:
      TypeError, ValueError: as `paged_attention`.
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
            f"[B, T, K, E], not shapes {keys.shape}, {values.shape}, {new_keys.shape}, {new_values.shape}"
        )
    table = checks.integers("page_table", page_table)
    table, ends = _table_and_lengths(table, lengths, len(new_keys), *keys.shape[:2])
    arrays = tuple(map(jnp.asarray, (keys, values, new_keys, new_values, table, ends)))
    places = tuple(jax.typeof(pages).sharding.spec for pages in arrays[:2])  # the pages stay where they are
    return placed(_written, places, *arrays)


def _written(
    keys: jax.Array, values: jax.Array, new_keys: jax.Array, new_values: jax.Array, table: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (count, page), T, M = keys.shape[:2], new_keys.shape[1], table.shape[1]
    if M == 0:
        return keys, values
    place = ends[:, None] - T + jnp.arange(T)
    number = jnp.take_along_axis(table, place // page, axis=1, mode="clip")
    there = (place >= 0) & (place < M * page) & (number >= 0)
    number = jnp.where(there, number, count)  # what is not there is dropped
    keys, values = (
        pages.at[number, place % page].set(new.astype(pages.dtype), mode="drop")
        for pages, new in ((keys, new_keys), (values, new_values))
    )
    return keys, values


def checked_page(page: int) -> int:
    """How many keys a page has, if a page may have so many."""
    if page % STEP or not STEP <= page <= LONGEST:
        raise ValueError(f"pages must have a multiple of {STEP} keys from {STEP} to {LONGEST}, not {page}")
    return page


def _table_and_lengths(table: Any, lengths: Any, B: int, count: int, page: int) -> tuple[Any, Any]:
    """Both as int32, checked as far as they are known. The table is of integers."""
    checked_page(page)
    if count == 0:
        raise ValueError("there must be at least one page")
    if table.ndim != 2 or len(table) != B:
        raise ValueError(f"page_table must be [B, M] with B = {B}, not shape {table.shape}")
    lengths = checks.shaped("lengths", checks.integers("lengths", lengths), (B,))
    _check_numbers(table, lengths, count, page)
    return checks.saturated(table), checks.saturated(lengths)


def _check_numbers(table: Any, lengths: Any, count: int, page: int) -> None:
    """Of what is known: the numbers that are looked at are those of pages, and the table has enough of them."""
    if not isinstance(lengths, np.ndarray):
        return
    most = table.shape[1] * page
    if lengths.size and (lengths.min() < 0 or lengths.max() > most):
        raise ValueError(f"lengths must be from 0 to {most}, {table.shape[1]} pages of {page}, not {lengths.tolist()}")
    if isinstance(table, np.ndarray):
        used = table[np.arange(table.shape[1]) < -(-lengths[:, None] // page)]
        if used.size and (used.min() < 0 or used.max() >= count):
            raise ValueError(
                f"page_table must have numbers of {count} pages, but there are {used.min()} to {used.max()}"
            )

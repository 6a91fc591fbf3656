"""Local windows: how far from its own position a query may attend, as ints or as traced integers.

An int is part of the `Problem`. A traced integer becomes ranges (`docs/contract.md`): two numbers for each query
and each key. Features that cannot be combined with ranges need a `mask_mod` instead.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from jax_flash import checks
from jax_flash.masks import Mask, WindowSize
from jax_flash.operands import Operands
from jax_flash.problem import Problem

Size = int | jax.Array  # of one side, as an int or an integer scalar
Window = Size | tuple[Size, Size]

FARTHEST = 2**31 - 1  # a larger window hides nothing more
HALF = 2**30  # more than the tokens of any array


class Bounds(NamedTuple):
    """Query i sees keys i - left to i + right. A side is an int, -1 for no bound, or a traced int32, at least 0."""

    left: Size
    right: Size

    @property
    def is_traced(self) -> bool:
        """Whether a side is traced."""
        return not all(isinstance(x, int) for x in self)

    @property
    def traced(self) -> Bounds:
        """The bounds of the traced sides alone; the other sides have no bound."""
        return Bounds(*(-1 if isinstance(x, int) else x for x in self))

    @property
    def static(self) -> WindowSize:
        """The bounds of the sides that are ints; the traced sides have no bound."""
        return WindowSize(*(x if isinstance(x, int) else -1 for x in self))


def checked(size: Any) -> Bounds:
    """Return the bounds that a `local_window_size` stands for."""
    if size is None:
        return Bounds(-1, -1)
    if not isinstance(size, (tuple, list)):
        bound = _checked_side(size, "local_window_size")
        return Bounds(bound, bound)
    if len(size) != 2:
        raise TypeError(f"local_window_size must be an int or a pair (left, right) of ints, not {len(size)} elements")
    return Bounds(*(_checked_side(x, f"local_window_size[{i}]") for i, x in enumerate(size)))


def _checked_side(x: Any, name: str) -> Size:
    """Return one side of a window. Other libraries write None or -1 for a side without a bound."""
    unbounded = (
        "pass a number as large as the longest sequence for a side without a bound, or leave it out for no window"
    )
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be an int, not {x.dtype}{list(x.shape)}: cast it to int32")
        if x.shape:
            raise ValueError(
                f"{name} must be an int or an integer scalar, not {x.dtype}{list(x.shape)}: pass a pair (left, right) "
                "of scalars for both sides, and use jax.vmap or a mask_mod for several windows"
            )
    if isinstance(x, jax.core.Tracer):
        return x.clip(0, min(FARTHEST, int(jnp.iinfo(x.dtype).max))).astype(jnp.int32)
    try:
        if isinstance(x, bool):
            raise TypeError
        bound = operator.index(x)
    except TypeError:
        hint = f": {unbounded}" if x is None else ""
        raise TypeError(f"{name} must be an int, not {checks.described(x)}{hint}") from None
    if bound < 0:
        raise ValueError(f"{name} must not be negative, but is {checks.described(bound)}: {unbounded}")
    return bound if bound < 2**63 else -1  # beyond 64 bits it is as good as none


@overload
def narrower(first: int, second: int) -> int: ...
@overload
def narrower(first: Size, second: Size) -> Size: ...
def narrower(first: Size, second: Size) -> Size:
    """Return the bound that hides more, of two on the same side of a window."""
    for bound, other in ((first, second), (second, first)):
        if isinstance(bound, int) and bound < 0:
            return other
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    return jnp.minimum(_array(first), _array(second))


def reach(left: Size, right: Size, offset: jax.Array | int = 0) -> tuple[jax.Array, jax.Array]:
    """Return first and last: query i sees the keys i + first to i + last.

    Args:
      left, right: bounds, -1 for none.
      offset: int32, the position of query 0 along the keys. No sum overflows, however large the offset is.

    Returns:
      int32, in the shape of the offset, from -`HALF` to `HALF`.
    """
    offset = jnp.asarray(offset, jnp.int32)
    first, last = jnp.full_like(offset, -HALF), jnp.full_like(offset, HALF)
    if not isinstance(left, int) or left >= 0:
        first = (jnp.maximum(offset, _array(left) - FARTHEST) - _array(left)).clip(-HALF, HALF)
    if not isinstance(right, int) or right >= 0:
        last = (jnp.minimum(offset, FARTHEST - _array(right)) + _array(right)).clip(-HALF, HALF)
    return first, last


@jax.jit
def ranges(place: jax.Array, first: jax.Array, last: jax.Array, begin: Any, end: Any) -> jax.Array:
    """Return which tokens of the other side (keys or queries) each token sees.

    Args:
      place: int32 [...], positions of the tokens, from -`HALF` to `HALF`.
      first, last: the result of `reach`, broadcastable to place. For keys, pass -last and -first.
      begin, end: int32, broadcastable to place, at least 0. A token sees nothing before begin, or from end on.

    Returns:
      int32 [..., 2]: each token sees the positions from the first number up to, but without, the second.
    """
    return jnp.stack([(place + first).clip(begin, end), (place + last + 1).clip(begin, end)], -1)


def as_ranges(problem: Problem, operands: Operands, traced: Bounds) -> tuple[Problem, Operands]:
    """Return the problem and the operands with ranges in place of the traced window and of all positional masks."""
    left, right = map(narrower, problem.mask.reach, traced)

    arrays = operands.arrays()
    places = (jnp.arange(size, dtype=jnp.int32) for size in problem.lengths)
    arrays |= ranges_at(Bounds(left, right), problem.lengths, arrays, *places)
    arrays.pop("query_seq_lengths", None)
    if not problem.programs:
        arrays.pop("query_offset", None)
    mask = Mask(
        key_value_seq_lengths=True,
        query_offset="query_offset" in arrays,
        ranges=True,
        mask_mod=problem.mask.mask_mod,
    )
    return dataclasses.replace(problem, mask=mask), Operands.of(arrays)


def ranges_at(
    bounds: Bounds, lengths: tuple[int, int], arrays: Mapping[str, jax.Array], rows: jax.Array, keys: jax.Array
) -> dict[str, jax.Array]:
    """Return the operands of ranges for queries and keys at some positions.

    Args:
      bounds: the window, in which a causal mask counts as right = 0.
      lengths: T and S.
      arrays: the operands by name, with any leading dims. Of these, the lengths and the offset of the queries matter.
      rows, keys: int32, increasing positions of the queries and the keys.

    Returns:
      `keys_of_rows` and `rows_of_keys`, and `key_value_seq_lengths`, all in positions.
    """
    lead = arrays["query"].shape[:-3]
    names = "query_seq_lengths", "key_value_seq_lengths"
    q_end, kv_end = (
        arrays[name].clip(0, size) if name in arrays else jnp.full(lead, size, jnp.int32)
        for name, size in zip(names, lengths, strict=True)
    )
    first, last = reach(*bounds, arrays.get("query_offset", jnp.zeros(lead, jnp.int32)))
    return {
        "key_value_seq_lengths": kv_end,
        "keys_of_rows": _of_side(rows, q_end, first, last, kv_end),
        "rows_of_keys": _of_side(keys, kv_end, -last, -first, q_end),
    }


def _of_side(
    places: jax.Array, own_end: jax.Array, first: jax.Array, last: jax.Array, other_end: jax.Array
) -> jax.Array:
    """Return the ranges of the queries, or of the keys: [..., places, 2]. Tokens beyond their own end see nothing."""
    own_end, first, last, other_end = (x[..., None] for x in (own_end, first, last, other_end))
    places = jnp.expand_dims(places, range(own_end.ndim - 1))
    pairs = ranges(jnp.minimum(places, own_end - 1), first, last, 0, other_end)
    return jnp.where((places < own_end)[..., None], pairs, pairs[..., 1:])  # empty, and neither number ever falls


def mask_mod(traced: Bounds) -> Callable[..., jax.Array]:
    """Return a mask_mod with the meaning of a traced window. No difference overflows, however large an offset is."""
    left, right = (None if isinstance(x, int) else x for x in traced)

    def within(batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        sides = [] if left is None else [jnp.maximum(query, 0) - key <= left]
        sides += [] if right is None else [key - right <= query]
        return sides[0] if len(sides) == 1 else sides[0] & sides[1]

    return within


def _array(bound: Size) -> jax.Array:
    return jnp.asarray(min(bound, FARTHEST) if isinstance(bound, int) else bound, jnp.int32)

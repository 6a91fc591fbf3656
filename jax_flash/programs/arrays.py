"""Lazy arrays of code values: each array is a function from indices to a value.

Only the elements that a scalar result needs are computed, such as one entry of a captured table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash import _native
from jax_flash.operands import DTYPES
from jax_flash.programs.code import Code, Unsupported, Value

MAX_ELEMENTS = 512  # elements of a computed array: straight-line code computes each of them

Index = tuple[Value, ...]
Place = tuple[Index, Value | None]  # the index of an element, and whether it is in range; None: it always is


class Array:
    """A value of the jaxpr: its type, and the code of an element."""

    def __init__(self, shape: Sequence[int], dtype: Any, element: Callable[[Index], Value]):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._element, self._elements = element, dict[Index, Value]()

    def element(self, *index: Value) -> Value:
        if index not in self._elements:
            self._elements[index] = self._element(index)
        return self._elements[index]


class View(Array):
    """A rearrangement of a captured float array. Derivatives are taken with respect to its elements.

    `place` maps an index to an entry of the captured array, and to a condition (or None). If the condition is false,
    the element is `fill`.
    """

    def __init__(
        self,
        code: Code,
        array: int,
        shape: Sequence[int],
        dtype: Any,
        place: Callable[[Index], Place],
        fill: float | None = None,
    ):
        super().__init__(shape, dtype, self._look_up)
        self.code, self.array, self.place, self.fill = code, array, place, fill

    def _look_up(self, index: Index) -> Value:
        place, inside = self.place(index)
        x = self.code.load("f", self.array, place)
        if inside is None or self.fill is None:
            return x
        return self.code.select(inside, x, self.code.constant("f", self.fill))


def at_same_places(view: View, array: int) -> Array:
    """Return the elements of another captured array that are at the places of a view's elements, or 0."""
    fill = None if view.fill is None else 0.0
    other = View(view.code, array, view.shape, view.dtype, view.place, fill)
    return Array(view.shape, view.dtype, lambda index: other.element(*index))


def aval(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable or a literal of a jaxpr."""
    return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)


def type_of(dtype: Any) -> str:
    """Return the letter of a dtype in code: f, i, u or b."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):  # NumPy does not have extended dtypes, such as PRNG keys
        kind = "f" if np.dtype(dtype).name in DTYPES else np.dtype(dtype).kind
        if kind in "fiub":
            return kind
    raise Unsupported(f"{dtype} values: use bool, integers of at most 32 bits, or floats")


def captured(code: Code, number: int, shape: Sequence[int], dtype: Any) -> Array:
    """Return the array for a captured operand."""
    name = np.dtype(dtype).name
    *others, last = _native.CAPTURED_DTYPES
    if name not in (*others, last):
        raise Unsupported(f"a captured array of {name}: use {', '.join(others)} or {last}")
    most = _native.MAX_CAPTURED_DIMS
    if len(shape) > most or 0 in shape:
        raise Unsupported(f"a captured array of {list(shape)}: use at most {most} dims, none of size 0")
    type = type_of(dtype)
    if type == "f":
        return View(code, number, shape, dtype, lambda index: (index, None))
    return Array(shape, dtype, lambda index: code.load(type, number, index))


def scalar(x: Value, dtype: Any) -> Array:
    return Array((), dtype, lambda _: x)


def positions(code: Code, shape: Sequence[int]) -> list[Index]:
    """Return the indices of all elements of a small array."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise Unsupported(f"an array of {list(shape)}: a computed array may have at most {MAX_ELEMENTS} elements")
    return [tuple(code.constant("i", i) for i in index) for index in itertools.product(*map(range, shape))]

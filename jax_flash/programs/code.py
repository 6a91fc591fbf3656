"""Straight-line code on scalars, which the kernels run for each entry of the score matrix.

The text of a code is its instructions joined by ";". Each instruction is an operation and its fields, joined by ",":
"score;query;key;sub.i,1,2;cast.i.f,3;add.f,0,4;result,5". Fields refer to values by the number of their instruction,
from 0 on. The types of values are f (the accumulation dtype), i (int32), u (uint32) and b (bool). `common/program.h`
reads this text.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_flash import _native

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


class Unsupported(NotImplementedError):
    """An operation that the kernels do not support."""


class Value(NamedTuple):
    """The value of an instruction: its number and its type."""

    number: int
    type: str


class Range(NamedTuple):
    """The range of an integer value: low <= x <= high."""

    low: int
    high: int

    @classmethod
    def of(cls, *values: int) -> Range:
        """Return the smallest range with these values, or all integers if an operation may wrap around."""
        low, high = min(values), max(values)
        return cls(low, high) if INT_MIN <= low and high <= INT_MAX else ANYTHING


ANYTHING = Range(INT_MIN, INT_MAX)
TRUTH = Range(0, 1)

Constant = bool | int | float


def _decided(op: str, x: Range, y: Range) -> bool | None:
    """Return the result of a comparison if it is the same for all values in these ranges, otherwise None."""
    true, false = {
        "eq": (x == y and x.low == x.high, x.high < y.low or y.high < x.low),
        "lt": (x.high < y.low, x.low >= y.high),
        "le": (x.high <= y.low, x.low > y.high),
    }[op]
    return True if true else False if false else None


class Code:
    """A list of instructions without duplicates. Values that follow from ranges of integers become constants.

    Args:
      dtype: dtype of floats (`f`).
      sizes: number of values of each input batch, head, query and key, which start at 0. None means unknown.
    """

    def __init__(self, dtype: str, sizes: Mapping[str, int | None]):
        self.dtype, self._sizes = dtype, sizes
        self._lines: list[tuple[str, ...]] = []
        self._values: dict[tuple[str, ...], Value] = {}
        self._ranges: dict[int, Range] = {}
        self._constants: dict[int, Constant] = {}
        self._kept: list[int] = []  # the instructions that have effects

    # --- leaves ---

    def input(self, name: str) -> Value:
        """Return the input of this name: score, cotangent, tangent, batch, head, query or key."""
        if name in ("score", "cotangent", "tangent"):
            return self._add("f", name)
        size = self._sizes[name]
        return self._add("i", name, known=ANYTHING if size is None else Range(0, max(size - 1, 0)))

    def constant(self, type: str, x: Constant) -> Value:
        x = bool(x) if type == "b" else x
        if type == "i" and not INT_MIN <= x <= INT_MAX:
            raise Unsupported(f"the number {x}, which does not fit in 32 bits")
        text = (float(x).hex() if math.isfinite(x) else str(float(x))) if type == "f" else str(int(x))
        value = self._add(type, f"const.{type}", text, known=Range.of(int(x)) if type in "ib" else ANYTHING)
        self._constants[value.number] = x
        return value

    def load(self, type: str, array: int, indices: Sequence[Value]) -> Value:
        """Return an entry of a captured array. Indices out of range are clamped."""
        return self._add(type, f"load.{type}", str(array), *indices)

    # --- operations ---

    def unary(self, op: str, x: Value) -> Value:
        if op == "not" and x.type == "b" and self.known(x) is not None:
            return self.constant("b", not self.known(x))
        if op == "abs" and x.type == "i" and self._range(x).low > INT_MIN:
            low, high = self._range(x)
            return x if low >= 0 else self._add("i", "abs.i", x, known=Range(0, max(-low, high)))
        if op == "neg" and x.type == "i":
            return self.binary("sub", self.constant("i", 0), x)
        return self._add("b" if op == "finite" else x.type, f"{op}.{x.type}", x)

    def binary(self, op: str, x: Value, y: Value) -> Value:
        if x.type == "i":
            return self._integers(op, x, y)
        if x.type == "b":
            op = {"max": "or", "min": "and", "add": "or", "mul": "and"}.get(op, op)
            for known, other in ((self.known(x), y), (self.known(y), x)):
                if known is not None and op in ("and", "or"):
                    return other if known == (op == "and") else self.constant("b", bool(known))
        if x.type == "f" and op in ("mul", "div") and self.known(y) == 1:
            return x
        if x.type == "f" and op == "mul" and self.known(x) == 1:
            return y
        divisor = self.known(y) if op == "div" and x.type == "f" else None
        if divisor is not None and 2.0**-126 <= abs(divisor) <= 2.0**126:  # like XLA, because a division is slower
            return self.binary("mul", x, self.constant("f", 1 / divisor))
        return self._add(x.type, f"{op}.{x.type}", x, y)

    def compare(self, op: str, x: Value, y: Value) -> Value:
        """Compare two values. `op` is eq, ne, lt, le, gt or ge."""
        if x.type == "b" and op not in ("eq", "ne"):
            x, y = self.cast(x, "i"), self.cast(y, "i")
        if x.type in "ib":
            if op in ("gt", "ge"):
                return self.compare({"gt": "lt", "ge": "le"}[op], y, x)
            decided = _decided("eq" if op == "ne" else op, self._range(x), self._range(y))
            if decided is not None:
                return self.constant("b", decided != (op == "ne"))
        return self._add("b", f"{op}.{x.type}", x, y)

    def select(self, p: Value, x: Value, y: Value) -> Value:
        """Return x where p is true, and y elsewhere."""
        known = self.known(p)
        if known is not None or x == y:
            return y if known is False else x
        (a, b), (c, d) = self._range(x), self._range(y)
        return self._add(x.type, f"select.{x.type}", p, x, y, known=Range.of(a, b, c, d))

    def cast(self, x: Value, type: str) -> Value:
        if x.type == type:
            return x
        known = self.known(x)
        if known is not None and type != "u" and x.type in "ib":
            return self.constant(type, bool(known) if type == "b" else int(known))
        return self._add(type, f"cast.{x.type}.{type}", x, known=TRUTH if x.type == "b" else ANYTHING)

    def rounded(self, x: Value, dtype: str) -> Value:
        """Return a float rounded to another dtype."""
        if x.type != "f" or dtype in (self.dtype, "float64"):
            return x
        known = self.known(x)
        if known is not None:
            return self.constant("f", float(np.asarray(known).astype(jnp.dtype(dtype))))
        return self._add("f", f"round_to.{dtype}", x)

    def wrapped(self, x: Value, bits: int) -> Value:
        """Return an integer truncated to this number of bits."""
        if x.type not in "iu" or bits >= 32:
            return x
        spare = self.constant(x.type, 32 - bits)
        return self.binary("shr", self.binary("shl", x, spare), spare)

    def clamp(self, x: Value, low: int, high: int) -> Value:
        """Clamp an int32 between two numbers."""
        return self.binary("min", self.binary("max", x, self.constant("i", low)), self.constant("i", high))

    def accumulate(self, array: int, indices: Sequence[Value], x: Value) -> None:
        """Add to an entry of the gradient of a captured array."""
        self._kept.append(self._add("", "accumulate", str(array), *indices, x).number)

    # --- constants and ranges ---

    def known(self, x: Value) -> Constant | None:
        """The value, if it is a constant."""
        return self._constants.get(x.number)

    def _range(self, x: Value) -> Range:
        return self._ranges.get(x.number, TRUTH if x.type == "b" else ANYTHING)

    def _integers(self, op: str, x: Value, y: Value) -> Value:
        """Return the value of an int32 operation, simplified by the ranges of x and y."""
        (a, b), (c, d) = self._range(x), self._range(y)
        corners = ((a, c), (a, d), (b, c), (b, d))
        known = ANYTHING
        if op in ("add", "sub", "mul"):
            function: Callable[[int, int], int] = getattr(operator, op)
            known = Range.of(*(function(*corner) for corner in corners))
        elif op in ("min", "max"):
            pick = min if op == "min" else max
            known = Range(pick(a, c), pick(b, d))
            if known == (a, b) and (b <= c if op == "min" else a >= d):
                return x
            if known == (c, d) and (d <= a if op == "min" else c >= b):
                return y
        elif op == "div" and c > 0:
            known = Range.of(*(int(math.copysign(abs(x) // y, x)) for x, y in corners))
        elif op == "rem" and c > 0:
            known = Range(0 if a >= 0 else max(a, 1 - d), 0 if b <= 0 else min(b, d - 1))
            if a >= 0 and b < c:
                return x
        elif op == "and" and min(a, c) >= 0:
            known = Range(0, min(b, d))
        elif op == "shr" and 0 <= c and d < 32:
            known = Range.of(*(x >> y for x, y in corners))
        if known.low == known.high:
            return self.constant("i", known.low)
        identity = {"add": 0, "sub": 0, "or": 0, "xor": 0, "shl": 0, "shr": 0, "mul": 1, "div": 1}.get(op)
        if identity is not None and (c, d) == (identity, identity):
            return x
        if op in ("add", "mul", "or", "xor") and (a, b) == (identity, identity):
            return y
        return self._add("i", f"{op}.i", x, y, known=known)

    # --- the text ---

    def _add(self, type: str, op: str, *fields: Value | str, known: Range | None = None) -> Value:
        line = (op, *(f"%{x.number}" if isinstance(x, Value) else x for x in fields))
        if op == "accumulate" or line not in self._values:
            self._values[line] = Value(len(self._lines), type)
            self._lines.append(line)
            if known is not None:
                self._ranges[len(self._lines) - 1] = known
        return self._values[line]

    def text(self, result: Value) -> str:
        """Return the text of all instructions that the result needs or that have effects."""
        needed: set[int] = set()
        pending = [result.number, *self._kept]
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                pending += [int(field[1:]) for field in self._lines[number] if field.startswith("%")]
        numbers = {number: i for i, number in enumerate(sorted(needed))}

        def written(field: str) -> str:
            return str(numbers[int(field[1:])]) if field.startswith("%") else field

        if len(needed) >= _native.MAX_INSTRUCTIONS:
            raise Unsupported(f"more than {_native.MAX_INSTRUCTIONS} instructions")
        lines = [",".join(map(written, self._lines[number])) for number in sorted(needed)]
        return ";".join([*lines, f"result,{numbers[result.number]}"])

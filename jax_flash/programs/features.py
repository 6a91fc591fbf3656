"""Detection of score programs that equal a feature of the kernels: a soft cap, a bias, a causal mask, or a window.

The kernels compute such a feature faster than a program, with the same values and derivatives. A function that does
more stays a program, because few kernels support a feature and a program together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash.programs.program import INDICES, Program, Sizes

Expression = tuple[Any, ...]  # an operation and its fields, which are expressions or texts of the code
SIDES = "left", "right"
MAX_DISTANCE = 2**30  # the sum of a larger number and an index could wrap around


def feature_of(
    program: Program, arrays: Sequence[jax.Array], dtype: str, sizes: Sizes
) -> tuple[float, jax.Array | None]:
    """Return the soft cap, or 0, and the bias [B|1, N|1, T, S], or None, that a program of this dtype equals.

    A program equals a bias if it adds an element of a captured array. The indices of the element are the query and the
    key, and optionally the batch entry and the head.
    """
    if program.refusal or program.has_rules:  # then the code does not determine values and derivatives
        return 0.0, None
    match _expression(program.text):
        case ("tanh.f", ("score",)):
            return 1.0, None
        case ("mul.f", ("const.f", cap), ("tanh.f", ("mul.f", ("const.f", slope), ("score",)))):
            c = float.fromhex(cap)
            if c > 0 and abs(c * float.fromhex(slope) - 1) <= jnp.finfo(dtype).eps:
                return c, None
        case ("add.f", ("load.f", array, *places), ("score",)):
            return 0.0, _bias(arrays[int(array) - program.first], places, sizes)
    return 0.0, None


def _bias(x: jax.Array, places: list[Expression], sizes: Sizes) -> jax.Array | None:
    """Return a captured array that is read at these indices as a bias, or None if it is not one."""
    size = sizes._asdict()
    names = [place[0] for place in places if place[0] != "const.i"]
    if None in sizes:  # the query is not the row, or a size is symbolic
        return None
    required = {name for name in ("query", "key") if size[name] != 1}  # an index with one value is a number in the code
    if len({*names}) < len(names) or not required <= {*names} <= {*INDICES}:
        return None
    x = x[tuple(int(at[1]) if at[0] == "const.i" else slice(size[at[0]]) for at in places)]
    x = lax.transpose(x, [names.index(name) for name in INDICES if name in names])
    return lax.expand_dims(x, [i for i, name in enumerate(INDICES) if name not in names])


def window_of(program: Program) -> tuple[int, int] | None:
    """Return the window (left, right) that a mask_mod equals, with -1 for no bound, or None.

    Such a mask_mod bounds query - key by numbers. A causal mask has right = 0.
    """
    bounds = None if program.refusal else _bounds(_expression(program.text))
    if bounds is None or any(distance < 0 for _, distance in bounds):
        return None
    left, right = (min((distance for side, distance in bounds if side == wanted), default=-1) for wanted in SIDES)
    return left, right


def _bounds(mask: Expression) -> list[tuple[str, int]] | None:
    """Return the side and the largest distance of keys for each comparison; None if one has another form."""
    match mask:
        case ("and.b", first, second):
            one, other = _bounds(first), _bounds(second)
            return None if one is None or other is None else one + other
        case ("not.b", ("lt.i" | "le.i" as op, first, second)):
            return _bounds(("le.i" if op == "lt.i" else "lt.i", second, first))
        case ("lt.i" | "le.i" as op, ("abs.i", x), most):
            return _bounds(("and.b", (op, x, most), (op, ("sub.i", ("const.i", "0"), x), most)))
        case ("lt.i" | "le.i" as op, less, more):
            difference = _linear(("sub.i", more, less))
            if difference is not None:
                query, key, constant = difference
                distance = constant - (op == "lt.i")
                if (query, key) in ((1, -1), (-1, 1)):
                    return [("right" if query == 1 else "left", distance)]
    return None


def _linear(x: Expression) -> tuple[int, int, int] | None:
    """Return (a, b, c) if x is a · query + b · key + c, or None if it is not, or if it could wrap around."""
    found = None
    match x:
        case ("query",):
            found = 1, 0, 0
        case ("key",):
            found = 0, 1, 0
        case ("const.i", number):
            found = 0, 0, int(number)
        case ("add.i" | "sub.i" as op, first, second):
            left, right = _linear(first), _linear(second)
            if left is not None and right is not None:
                a, b, c = (x + y if op == "add.i" else x - y for x, y in zip(left, right, strict=True))
                found = a, b, c
    return found if found and abs(found[2]) < MAX_DISTANCE else None


@functools.lru_cache(maxsize=256)
def _expression(code: str) -> Expression:
    """Return the result of a code as an expression. Operands of sums and products are sorted by operation name."""
    values: list[Expression] = []
    for line in code.split(";"):
        op, *fields = line.split(",")
        if op == "result":
            return values[int(fields[0])]
        first = 1 if op.startswith(("const.", "load.")) else 0  # the first field that is the number of a value
        operands = [values[int(x)] for x in fields[first:]]
        if op in ("add.f", "mul.f"):
            operands.sort(key=lambda x: x[0])
        values.append((op, *fields[:first], *operands))
    return ()

"""Jaxprs as keys of a cache. Outside jax.jit a function is traced in each call, mostly with the same result."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var


@dataclasses.dataclass(frozen=True)
class Structure:
    """A jaxpr that compares equal if only the variables differ. (Equal printed texts do not suffice.)"""

    parts: Any
    jaxpr: Jaxpr = dataclasses.field(compare=False)

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> Structure:
        return cls(_parts(jaxpr), jaxpr)


def without_constants(closed: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr of a closed one, without the values of its constants.

    Since jax 0.12 a jaxpr holds its constants. They may be tracers, so a cached jaxpr must not have them.
    """
    with_constants: Any = getattr(closed.jaxpr, "with_consts", None)
    return with_constants([None] * len(closed.consts)) if with_constants else closed.jaxpr


def _parts(jaxpr: Jaxpr) -> Any:
    """Return the contents of a jaxpr as a hashable value, with numbers instead of variables."""
    numbers: dict[Var, int] = {}

    def part(x: Any) -> Any:
        if isinstance(x, Var):
            return Var, numbers.setdefault(x, len(numbers)), x.aval
        if isinstance(x, Literal):
            return Literal, part(np.asarray(x.val)), x.aval
        if isinstance(x, ClosedJaxpr):  # before Jaxpr: since jax 0.12 the two are one class
            return _parts(x.jaxpr), part(x.consts)
        if isinstance(x, Jaxpr):
            return _parts(x)
        if isinstance(x, dict):
            return part(tuple(x.items()))
        if isinstance(x, (tuple, list)):
            return tuple(map(part, x))
        if isinstance(x, float) or hasattr(x, "__array__"):
            x = np.asarray(x)
            return x.dtype, x.shape, x.tobytes()  # 0 is equal to -0, and NaN not to itself
        return type(x), x

    equations = [(eqn.primitive, part(eqn.invars), part(eqn.outvars), part(eqn.params)) for eqn in jaxpr.eqns]
    return part(jaxpr.constvars), part(jaxpr.invars), tuple(equations), part(jaxpr.outvars)

"""Lowering of a jaxpr on scalars and captured arrays to straight-line code. Each of its values becomes an `Array`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import summarize

from jax_flash.programs.arrays import Array, Index, Place, View, aval, type_of
from jax_flash.programs.code import Code, Unsupported, Value
from jax_flash.programs.operations import ANY_WIDTH, ARRAYS, ELEMENTWISE, INDEXING, fill_value, operation


class Lowering:
    """Lowers jaxprs into one code.

    `leaves` are views of captured float arrays, in the order of their first use. A view becomes a leaf when an
    operation that is not indexing reads it. `programs/program.py` differentiates with respect to the leaves.
    """

    def __init__(self, code: Code):
        self.code = code
        self.leaves: list[View] = []
        self._call: JaxprEqn | None = None  # the outermost call that is being lowered: it has the user's line

    def run(self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(x: Any) -> Array:
            return self._literal(x) if isinstance(x, Literal) else values[x]

        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [read(x) for x in eqn.invars])
            values |= dict(zip(eqn.outvars, results, strict=True))
            for x in results:
                if not x.shape and not isinstance(x, View):
                    with contextlib.suppress(Unsupported):  # the error is raised again if the element is needed
                        x.element()  # now, because evaluating a long chain later would recurse too deeply
        return [read(x) for x in jaxpr.outvars]

    def use(self, x: Array) -> Array:
        """Record that a view is used as an array, and return the array."""
        if not isinstance(x, View):
            return x
        if not any(x is leaf for leaf in self.leaves):
            self.leaves.append(x)
        return Array(x.shape, x.dtype, lambda index: x.element(*index))

    def constants(self, consts: Sequence[Any]) -> list[Array]:
        return [self._constant_array(np.asarray(x)) for x in consts]

    def _literal(self, x: Literal) -> Array:
        return self._constant_array(np.asarray(x.val, aval(x).dtype))

    def _constant_array(self, x: np.ndarray) -> Array:
        type = type_of(x.dtype)

        def element(index: Index) -> Value:
            places: list[Any] = [self.code.known(i) for i in index]
            if None in places:
                raise Unsupported("an index into a constant array: capture the array instead")
            return self.code.constant(type, x.item(*places))

        return Array(x.shape, x.dtype, element)

    def _apply(self, eqn: JaxprEqn, inputs: list[Array]) -> list[Array]:
        name = operation(eqn)
        inner = None if name in ELEMENTWISE else inlined(eqn)
        on_view = keeps_views(eqn) and isinstance(inputs[0], View)
        if not (on_view or (inner and is_transparent(eqn))):
            inputs = [self.use(x) for x in inputs]
        if inner:
            outermost, self._call = self._call, self._call or eqn
            results = self.run(inner[0], self.constants(inner[1]), inputs)
            self._call = outermost
            return results
        with _located(eqn, self._call):
            if not on_view:
                self._check_width(eqn)
            if on_view or (name in INDEXING and name not in ELEMENTWISE):
                return [self._reindexed(eqn, i, inputs) for i in range(len(eqn.outvars))]
            if name in ELEMENTWISE:
                return [self._elementwise(eqn, inputs)]
            if name in ARRAYS:
                return [ARRAYS[name](self.code, eqn, inputs, aval(eqn.outvars[0]))]
            raise Unsupported("the kernels do not support this operation")

    def _reindexed(self, eqn: JaxprEqn, i: int, inputs: list[Array]) -> Array:
        """Return result i of an equation that only rearranges the elements of its first operand."""
        x, *others = inputs
        out, code = aval(eqn.outvars[i]), self.code
        where = INDEXING[eqn.primitive.name](code, eqn, i, x.shape, others)
        fill = fill_value(eqn, x.dtype)
        if isinstance(x, View):
            if fill is not None and x.fill is not None:
                raise Unsupported("a gather with a fill value from the result of another such gather")

            def place(index: Index) -> Place:
                index, inside = where(index)
                index, inside_before = x.place(index)
                return index, inside_before if inside is None else inside

            return View(code, x.array, out.shape, out.dtype, place, x.fill if fill is None else fill)

        def element(index: Index) -> Value:
            index, inside = where(index)
            found = x.element(*index)
            return found if inside is None else code.select(inside, found, code.constant(found.type, fill))

        return Array(out.shape, out.dtype, element)

    def _elementwise(self, eqn: JaxprEqn, inputs: list[Array]) -> Array:
        out = aval(eqn.outvars[0])
        function = ELEMENTWISE[operation(eqn)]
        call, zero = self._call, self.code.constant("i", 0)

        def element(index: Index) -> Value:
            # Scalars are broadcast. So are dims of size 1, in `polynomial`.
            places = ((zero if n == 1 else i for i, n in zip(index, x.shape, strict=False)) for x in inputs)
            elements = [x.element(*place) for x, place in zip(inputs, places, strict=True)]
            with _located(eqn, call):
                return self.code.rounded(function(self.code, eqn, *elements), out.dtype.name)

        return Array(out.shape, out.dtype, element)

    def _check_width(self, eqn: JaxprEqn) -> None:
        """Refuse integers and floats of unsupported widths.

        Python numbers are allowed: under x64 they are weakly typed and have 64 bits, but the kernels compute them in
        int32 or in the dtype of the scores.
        """
        for x in (*eqn.invars, *eqn.outvars):
            type, dtype, weak = type_of(aval(x).dtype), aval(x).dtype, getattr(x.aval, "weak_type", False)
            if type in "iu" and dtype.itemsize < 4 and eqn.primitive.name not in ANY_WIDTH:
                raise Unsupported(f"{dtype.name} arithmetic: convert to int32")
            if type in "iu" and dtype.itemsize > 4 and not weak:
                raise Unsupported(f"{dtype.name} values: use integers of at most 32 bits")
            if dtype.name == "float64" != self.code.dtype and not weak:
                raise Unsupported("float64 values with float32 scores: use float32")


@contextlib.contextmanager
def _located(eqn: JaxprEqn, call: JaxprEqn | None) -> Iterator[None]:
    """Add the user's line to an `Unsupported` error. Inside a JAX function, this is the line of its first use."""
    try:
        yield
    except Unsupported as e:
        raise Unsupported(f"{eqn.primitive.name} at {summarize((call or eqn).source_info)}: {e}") from None


def inlined(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the jaxpr and the constants that an equation calls, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if eqn.primitive.name in CALLS and name in eqn.params:
            inner = eqn.params[name]
            return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    return None


def keeps_views(eqn: JaxprEqn) -> bool:
    """Return whether an equation only moves elements of its first operand, or converts them to a larger float dtype."""
    if eqn.primitive.name == "convert_element_type":
        new, old = eqn.params["new_dtype"], aval(eqn.invars[0]).dtype
        with jax.numpy_dtype_promotion("standard"):  # the user may have set "strict"
            return jnp.issubdtype(new, jnp.floating) and jnp.promote_types(new, old) == new
    return eqn.primitive.name in INDEXING


def is_transparent(eqn: JaxprEqn) -> bool:
    """Return whether a call has the derivatives of the function that it calls, and no custom rule."""
    return not eqn.primitive.name.startswith("custom_")


CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")

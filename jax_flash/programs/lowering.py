"""From a jaxpr on scalars and captured arrays to straight-line code.

Every value of the jaxpr becomes a function from indices to a value of the code (`Array`), so that only those elements
of an array are computed that a scalar result needs: of a captured table the one that is looked up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import summarize

from jax_flash.programs.code import Code, Value

MOST_ELEMENTS = 512  # of an array that is computed element by element: code is straight-line

Index = tuple[Value, ...]
Place = tuple[Index, Value | None]  # where an element is, and whether it is there


class Unsupported(NotImplementedError):
    """What code has no instructions for."""


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
    """Elements of a captured float array in other places: what derivatives with respect to it are of.

    `place` says which of its entries an element is, and whether it is one (else it is `fill`), if that is in question.
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
        x = self.code.load("f", self.array, list(place))
        if inside is None or self.fill is None:
            return x
        return self.code.select(inside, x, self.code.constant("f", self.fill))


def type_of(dtype: Any) -> str:
    """The letter of a dtype's values in code."""
    kind = np.dtype(dtype).kind if not jnp.issubdtype(dtype, jnp.floating) else "f"
    if kind not in "fiub" or (kind in "iu" and np.dtype(dtype).itemsize > 4):
        raise Unsupported(f"{np.dtype(dtype).name} values; there are bool, integers up to 32 bits and floats")
    return kind


def captured(code: Code, number: int, shape: Sequence[int], dtype: Any) -> Array:
    """A captured array."""
    if jnp.issubdtype(dtype, jnp.floating):
        return View(code, number, shape, dtype, lambda index: (index, None))
    return Array(shape, dtype, lambda index: code.load(type_of(dtype), number, list(index)))


def scalar(x: Value, dtype: Any) -> Array:
    return Array((), dtype, lambda _: x)


def positions(code: Code, shape: Sequence[int]) -> list[Index]:
    """The indices of all elements of a small array."""
    if math.prod(shape) > MOST_ELEMENTS:
        raise Unsupported(f"an array of {list(shape)}: at most {MOST_ELEMENTS} elements are computed one by one")
    return [tuple(code.constant("i", i) for i in index) for index in itertools.product(*map(range, shape))]


class Lowering:
    """Lowers jaxprs into one code.

    `leaves` are the views of captured float arrays that are used otherwise than by looking at their elements in other
    places: what `programs/program.py` differentiates with respect to. In the order in which it finds them.
    """

    def __init__(self, code: Code, accumulation_dtype: str):
        self.code, self.accumulation_dtype = code, accumulation_dtype
        self.leaves: list[View] = []

    def run(self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(x: Any) -> Array:
            return self._literal(x) if isinstance(x, Literal) else values[x]

        for eqn in jaxpr.eqns:
            values |= dict(zip(eqn.outvars, self._apply(eqn, [read(x) for x in eqn.invars]), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def use(self, x: Array) -> Array:
        """Notes that a view is needed as an array of its own, and gives the array."""
        if not isinstance(x, View):
            return x
        if not any(x is leaf for leaf in self.leaves):
            self.leaves.append(x)
        return Array(x.shape, x.dtype, lambda index: x.element(*index))

    def constants(self, consts: Sequence[Any]) -> list[Array]:
        return [self._constant_array(np.asarray(x)) for x in consts]

    def _literal(self, x: Literal) -> Array:
        return self._constant_array(np.asarray(x.val, x.aval.dtype))

    def _constant_array(self, x: np.ndarray) -> Array:
        type = type_of(x.dtype)

        def element(index: Index) -> Value:
            known = [self.code.known(i) for i in index]
            if any(i is None for i in known):
                raise Unsupported("a constant array that is not captured")
            return self.code.constant(type, x[tuple(known)].item())

        return Array(x.shape, x.dtype, element)

    def _apply(self, eqn: JaxprEqn, inputs: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        inner = inlined(eqn)
        looks = keeps_views(eqn) and isinstance(inputs[0], View)
        if not (looks or (inner and is_transparent(eqn))):
            inputs = [self.use(x) for x in inputs]
        if inner:
            return self.run(inner[0], self.constants(inner[1]), inputs)
        try:
            if looks or (name in RELABELLED and name not in ELEMENTWISE):
                return [self._relabelled(eqn, i, inputs) for i in range(len(eqn.outvars))]
            if name in ELEMENTWISE:
                return [self._elementwise(eqn, inputs)]
            if name in ARRAYS:
                return [ARRAYS[name](self, eqn, inputs, eqn.outvars[0].aval)]
            raise Unsupported("there are no instructions for it")
        except Unsupported as e:
            raise Unsupported(f"{name} at {summarize(eqn.source_info)}: {e}") from None

    def _relabelled(self, eqn: JaxprEqn, i: int, inputs: list[Array]) -> Array:
        """Result i of what only looks at the elements of its first operand in other places."""
        x, *others = inputs
        out, code = eqn.outvars[i].aval, self.code
        where = RELABELLED[eqn.primitive.name](code, eqn, i, x.shape, others)
        fill = fill_value(eqn, x.dtype)
        if isinstance(x, View):
            if fill is not None and x.fill is not None:
                raise Unsupported("a look-up with a fill value in the result of another")

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
        out = eqn.outvars[0].aval
        function = ELEMENTWISE[eqn.primitive.name]
        arithmetic = eqn.primitive.name not in ANY_WIDTH
        for dtype in [x.dtype for x in inputs] + [out.dtype]:
            if arithmetic and dtype.kind in "iu" and dtype.itemsize < 4:
                raise Unsupported(f"{dtype.name} arithmetic; convert to int32")
            if type_of(dtype) == "f" and dtype == np.float64 != np.dtype(self.accumulation_dtype):
                raise Unsupported("float64 values, where the scores are float32")

        def element(index: Index) -> Value:
            elements = [x.element(*(index if x.shape else ())) for x in inputs]
            return self.rounded(function(self.code, eqn, *elements), out.dtype)

        return Array(out.shape, out.dtype, element)

    def rounded(self, x: Value, dtype: Any) -> Value:
        """What has been computed in the accumulation dtype, in a smaller one."""
        if x.type != "f" or np.dtype(dtype) == np.dtype(self.accumulation_dtype) or self.code.known(x) is not None:
            return x
        return self.code.round_to(np.dtype(dtype).name, x)


def inlined(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The jaxpr and the constants of an equation that calls one."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if eqn.primitive.name in CALLS and name in eqn.params:
            inner = eqn.params[name]
            return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    return None


def keeps_views(eqn: JaxprEqn) -> bool:
    """Whether the results are elements of the first operand in other places, or in a larger dtype."""
    if eqn.primitive.name == "convert_element_type":
        new, old = eqn.params["new_dtype"], eqn.invars[0].aval.dtype
        return jnp.issubdtype(new, jnp.floating) and jnp.promote_types(new, old) == new
    return eqn.primitive.name in RELABELLED


def is_transparent(eqn: JaxprEqn) -> bool:
    """Whether derivatives of a call are those of what it calls."""
    return not eqn.primitive.name.startswith("custom_")


CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")

# --- elementwise ------------------------------------------------------------------------------------------------------


def _unary(op: str) -> Callable[..., Value]:
    return lambda code, eqn, x: code.unary(op, x)


def _binary(op: str) -> Callable[..., Value]:
    return lambda code, eqn, x, y: code.binary(op, x, y)


def _compare(op: str) -> Callable[..., Value]:
    return lambda code, eqn, x, y: code.compare(op, x, y)


def _integer_pow(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    power, result, base = abs(eqn.params["y"]), None, x
    while power:
        if power & 1:
            result = base if result is None else code.binary("mul", result, base)
        power >>= 1
        base = code.binary("mul", base, base) if power else base
    one = code.constant(x.type, 1)
    result = one if result is None else result
    return code.binary("div", one, result) if eqn.params["y"] < 0 else result


def _pow(code: Code, eqn: JaxprEqn, x: Value, y: Value) -> Value:
    if x.type != "f":
        raise Unsupported("a power of integers")
    return code.binary("pow", x, code.cast(y, "f"))


def _select_n(code: Code, eqn: JaxprEqn, which: Value, *cases: Value) -> Value:
    if which.type == "b":
        return code.select(which, cases[1], cases[0]) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        result = code.select(code.compare("eq", which, code.constant("i", i)), case, result)
    return result


def _clamp(code: Code, eqn: JaxprEqn, low: Value, x: Value, high: Value) -> Value:
    return code.binary("min", code.binary("max", x, low), high)


def _convert(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    new, old = np.dtype(eqn.params["new_dtype"]), np.dtype(eqn.invars[0].aval.dtype)
    if new.kind in "iu" and new.itemsize < 4 and not (old.kind in "iub" and old.itemsize <= new.itemsize):
        raise Unsupported(f"conversion from {old.name} to {new.name}")
    return code.cast(x, type_of(new))


def _round(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.unary("round" if int(eqn.params["rounding_method"]) == 0 else "rint", x)


def _shift_right_logical(code: Code, eqn: JaxprEqn, x: Value, y: Value) -> Value:
    if x.type == "u":
        return code.binary("shr", x, y)
    return code.cast(code.binary("shr", code.cast(x, "u"), code.cast(y, "u")), "i")


def _not(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.unary("not", x)


def _erfc(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("sub", code.constant("f", 1.0), code.unary("erf", x))


def _tan(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("div", code.unary("sin", x), code.unary("cos", x))


def _same(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return x


def _reduce_precision(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    for dtype in ("bfloat16", "float16", "float32"):
        info = jnp.finfo(dtype)
        if (info.nexp, info.nmant) == (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]):
            return code.round_to(dtype, x)
    raise Unsupported("a precision that is no dtype's")


def _square(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("mul", x, x)


ELEMENTWISE: dict[str, Callable[..., Value]] = {
    **{name: _binary(name) for name in ("add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor", "atan2")},
    **{name: _unary(name) for name in ("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log1p", "expm1")},
    **{name: _unary(name) for name in ("tanh", "logistic", "erf", "sin", "cos", "sqrt", "rsqrt", "clz")},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add_any": _binary("add"),
    "shift_left": _binary("shl"),
    "shift_right_arithmetic": _binary("shr"),
    "shift_right_logical": _shift_right_logical,
    "population_count": _unary("popcount"),
    "is_finite": _unary("finite"),
    "integer_pow": _integer_pow,
    "square": _square,
    "pow": _pow,
    "select_n": _select_n,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "round": _round,
    "not": _not,
    "erfc": _erfc,
    "tan": _tan,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "name": _same,
    "optimization_barrier": _same,
    "reduce_precision": _reduce_precision,
}
# Those that are right for integers of fewer than 32 bits too.
ANY_WIDTH = ("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type", "copy", "max", "min", "clamp")

# --- elements in other places -----------------------------------------------------------------------------------------
# Each gives a function from an index of result i to one of x, and, if some are outside of x, whether this one is not.

Where = Callable[[Index], tuple[Index, Value | None]]


def _unmoved(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    return lambda index: (index, None)


def _squeeze(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    removed = eqn.params["dimensions"]

    def where(index: Index) -> tuple[Index, None]:
        rest = iter(index)
        return tuple(code.constant("i", 0) if d in removed else next(rest) for d in range(len(shape))), None

    return where


def _reshape(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    new = eqn.outvars[0].aval.shape
    kept = [size for size in new if size != 1] == [size for size in shape if size != 1]

    def where(index: Index) -> tuple[Index, None]:
        if kept:  # only dims of size 1 come or go
            rest = iter(x for x, size in zip(index, new, strict=True) if size != 1)
            return tuple(code.constant("i", 0) if size == 1 else next(rest) for size in shape), None
        place = code.constant("i", 0)
        for x, size in zip(index, new, strict=True):
            place = code.binary("add", code.binary("mul", place, code.constant("i", size)), x)
        result = []
        for size in reversed(shape):
            result.append(code.binary("rem", place, code.constant("i", size)))
            place = code.binary("div", place, code.constant("i", size))
        return tuple(reversed(result)), None

    return where


def _broadcast_in_dim(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    dims = eqn.params["broadcast_dimensions"]
    return lambda index: (
        tuple(code.constant("i", 0) if size == 1 else index[d] for size, d in zip(shape, dims, strict=True)),
        None,
    )


def _transpose(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    places = np.argsort(eqn.params["permutation"])
    return lambda index: (tuple(index[place] for place in places), None)


def _rev(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    def back(d: int, x: Value) -> Value:
        return code.binary("sub", code.constant("i", shape[d] - 1), x) if d in eqn.params["dimensions"] else x

    return lambda index: (tuple(back(d, x) for d, x in enumerate(index)), None)


def _slice(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)

    def at(x: Value, start: int, stride: int) -> Value:
        return code.binary("add", code.binary("mul", x, code.constant("i", stride)), code.constant("i", start))

    return lambda index: (tuple(map(at, index, starts, strides)), None)


def _split(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    axis, start = eqn.params["axis"], code.constant("i", sum(eqn.params["sizes"][:i]))
    return lambda index: (tuple(code.binary("add", x, start) if d == axis else x for d, x in enumerate(index)), None)


def _start(code: Code, start: Value, size: int, taken: int) -> Value:
    """Where a slice of `taken` entries starts, as JAX moves it inside."""
    return code.clamp(code.cast(start, "i"), 0, size - taken)


def _dynamic_slice(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    taken = eqn.params["slice_sizes"]

    def where(index: Index) -> tuple[Index, None]:
        starts = [_start(code, x.element(), *sizes) for x, *sizes in zip(others, shape, taken, strict=False)]
        return tuple(code.binary("add", start, x) for start, x in zip(starts, index, strict=True)), None

    return where


def _gather(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    numbers, taken = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes"))
    (indices,) = others
    fills = fill_value(eqn, np.dtype(np.float32)) is not None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}

    def where(index: Index) -> tuple[Index, Value | None]:
        batch = tuple(x for d, x in enumerate(index) if d not in numbers.offset_dims)
        offsets = iter(index[d] for d in numbers.offset_dims)
        result = [code.constant("i", 0) if d in gone else next(offsets) for d in range(len(shape))]
        for d, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            result[d] = batch[b]
        inside = None
        for k, d in enumerate(numbers.start_index_map):
            start = code.cast(indices.element(*batch, code.constant("i", k)), "i")
            if fills:
                not_before = code.compare("le", code.constant("i", 0), start)
                not_after = code.compare("le", start, code.constant("i", shape[d] - taken[d]))
                both = code.binary("and", not_before, not_after)
                inside = both if inside is None else code.binary("and", inside, both)
            result[d] = code.binary("add", _start(code, start, shape[d], taken[d]), result[d])
        return tuple(result), None if inside is None or code.known(inside) else inside

    return where


def fill_value(eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """What a gather gives for what is outside; None where it does not ask."""
    if eqn.params.get("mode") != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return None
    given = eqn.params.get("fill_value")
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.floating):
        return math.nan
    return {"b": True, "i": np.iinfo(dtype).min if dtype.kind == "i" else 0, "u": 2**32 - 1}[dtype.kind]


RELABELLED = {
    "convert_element_type": _unmoved,
    "squeeze": _squeeze,
    "expand_dims": _reshape,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}

# --- arrays -----------------------------------------------------------------------------------------------------------


def _dot_general(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = inputs
    code = lowering.code
    terms = positions(code, [left.shape[d] for d in left_sum])
    free = len(left.shape) - len(left_sum) - len(left_batch)

    def place(shape: tuple[int, ...], batch_dims, sum_dims, batch: Index, term: Index, rest: Index) -> Index:
        known = dict(zip((*batch_dims, *sum_dims), (*batch, *term), strict=True))
        others = iter(rest)
        return tuple(known[d] if d in known else next(others) for d in range(len(shape)))

    def element(index: Index) -> Value:
        batch, rest = index[: len(left_batch)], index[len(left_batch) :]
        products = [
            code.binary(
                "mul",
                left.element(*place(left.shape, left_batch, left_sum, batch, term, rest[:free])),
                right.element(*place(right.shape, right_batch, right_sum, batch, term, rest[free:])),
            )
            for term in terms
        ]
        zero = code.constant(type_of(out.dtype), 0)
        return lowering.rounded(functools.reduce(functools.partial(code.binary, "add"), products or [zero]), out.dtype)

    return Array(out.shape, out.dtype, element)


def _reduce(op: str, empty: Callable[[np.dtype], Any]) -> Callable[..., Array]:
    def rule(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
        (x,), axes, code = inputs, eqn.params["axes"], lowering.code
        terms = positions(code, [x.shape[d] for d in axes])

        def element(index: Index) -> Value:
            def at(term: Index) -> Value:
                summed, rest = dict(zip(axes, term, strict=True)), iter(index)
                return x.element(*(summed[d] if d in summed else next(rest) for d in range(len(x.shape))))

            elements = list(map(at, terms)) or [code.constant(type_of(x.dtype), empty(x.dtype))]
            return lowering.rounded(functools.reduce(functools.partial(code.binary, op), elements), out.dtype)

        return Array(out.shape, out.dtype, element)

    return rule


def _extreme(largest: bool) -> Callable[[np.dtype], Any]:
    def value(dtype: np.dtype) -> Any:
        if jnp.issubdtype(dtype, jnp.floating):
            return math.inf if largest else -math.inf
        if dtype == bool:
            return largest
        return np.iinfo(dtype).max if largest else np.iinfo(dtype).min

    return value


def _iota(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    d = eqn.params["dimension"]
    return Array(out.shape, out.dtype, lambda index: lowering.code.cast(index[d], type_of(out.dtype)))


def _concatenate(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    d, code = eqn.params["dimension"], lowering.code
    ends = list(itertools.accumulate(x.shape[d] for x in inputs))

    def element(index: Index) -> Value:
        def of(x: Array, end: int) -> Value:
            start = code.constant("i", end - x.shape[d])
            inside = code.clamp(code.binary("sub", index[d], start), 0, x.shape[d] - 1)
            return x.element(*index[:d], inside, *index[d + 1 :])

        parts = [(x, end) for x, end in zip(inputs, ends, strict=True) if x.shape[d]]
        at = code.known(index[d])
        if at is not None:
            return of(*next((x, end) for x, end in parts if at < end))
        result = of(*parts[-1])
        for x, end in reversed(parts[:-1]):
            result = code.select(code.compare("lt", index[d], code.constant("i", end)), of(x, end), result)
        return result

    return Array(out.shape, out.dtype, element)


def _pad(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    x, padding = inputs
    code, widths = lowering.code, eqn.params["padding_config"]

    def element(index: Index) -> Value:
        result, inside = [], code.constant("b", True)
        for at, (low, _, between), size in zip(index, widths, x.shape, strict=True):
            at, step = code.binary("sub", at, code.constant("i", low)), code.constant("i", between + 1)
            place = code.binary("div", at, step)
            whole = code.compare("eq", code.binary("rem", at, step), code.constant("i", 0))
            not_before = code.compare("le", code.constant("i", 0), at)
            not_after = code.compare("lt", place, code.constant("i", size))
            for test in (whole, not_before, not_after):
                inside = code.binary("and", inside, test)
            result.append(code.clamp(place, 0, max(size - 1, 0)))
        if code.known(inside) is False or 0 in x.shape:
            return padding.element()
        return code.select(inside, x.element(*result), padding.element())

    return Array(out.shape, out.dtype, element)


def _dynamic_update_slice(lowering: Lowering, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    x, update, *starts = inputs
    code = lowering.code

    def element(index: Index) -> Value:
        places, inside = [], code.constant("b", True)
        for at, start, size, taken in zip(index, starts, x.shape, update.shape, strict=True):
            place = code.binary("sub", at, _start(code, start.element(), size, taken))
            not_before = code.compare("le", code.constant("i", 0), place)
            not_after = code.compare("lt", place, code.constant("i", taken))
            inside = code.binary("and", inside, code.binary("and", not_before, not_after))
            places.append(code.clamp(place, 0, max(taken - 1, 0)))
        if code.known(inside) is False or 0 in update.shape:
            return x.element(*index)
        return code.select(inside, update.element(*places), x.element(*index))

    return Array(out.shape, out.dtype, element)


ARRAYS = {
    "dot_general": _dot_general,
    "reduce_sum": _reduce("add", lambda dtype: 0),
    "reduce_prod": _reduce("mul", lambda dtype: 1),
    "reduce_max": _reduce("max", _extreme(False)),
    "reduce_min": _reduce("min", _extreme(True)),
    "reduce_and": _reduce("and", lambda dtype: True if dtype == bool else -1),
    "reduce_or": _reduce("or", lambda dtype: 0),
    "iota": _iota,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic_update_slice": _dynamic_update_slice,
}

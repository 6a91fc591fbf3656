"""The translation of JAX primitives to instructions on array elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jax_flash.programs.arrays import Array, Index, Place, aval, positions, type_of
from jax_flash.programs.code import INT_MAX, INT_MIN, Code, Unsupported, Value

# --- elementwise ------------------------------------------------------------------------------------------------------


def _unary(op: str) -> Callable[..., Value]:
    return lambda code, eqn, x: code.unary(op, x)


def _binary(op: str) -> Callable[..., Value]:
    return lambda code, eqn, x, y: code.binary(op, x, y)


def _wrapping(op: str) -> Callable[..., Value]:
    """Wrap around in the result's dtype. JAX adds the size to an index below 0, and an index may have 8 or 16 bits."""
    return lambda code, eqn, x, y: code.wrapped(code.binary(op, x, y), 8 * aval(eqn.outvars[0]).dtype.itemsize)


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
        raise Unsupported("a power of integers: convert the base to float")
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
    new, old = np.dtype(eqn.params["new_dtype"]), np.dtype(aval(eqn.invars[0]).dtype)
    if new.kind in "iu" and new.itemsize < 4 and not np.can_cast(old, new):
        raise Unsupported(f"conversion from {old.name} to {new.name}: convert to int32")
    return code.cast(x, type_of(new))


def _round(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.unary("round" if int(eqn.params["rounding_method"]) == 0 else "rint", x)


def _shift_right(type: str) -> Callable[..., Value]:
    """Shift an integer to the right as if it had this type: arithmetic for i, logical for u."""
    return lambda code, eqn, x, y: code.cast(code.binary("shr", code.cast(x, type), code.cast(y, type)), x.type)


def _not(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.unary("not", x)


def _tan(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("div", code.unary("sin", x), code.unary("cos", x))


def _same(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return x


def _reduce_precision(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    for dtype in ("bfloat16", "float16", "float32"):
        info = jnp.finfo(dtype)
        if (info.nexp, info.nmant) == (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]):
            return code.rounded(x, dtype)
    raise Unsupported("a rounding to a precision that no dtype has")


def _square(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("mul", x, x)


def _one_minus_square(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("sub", code.constant(x.type, 1), code.binary("mul", x, x))


def _log2(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.binary("div", code.unary("log", x), code.constant("f", math.log(2)))


def _polynomial(code: Code, eqn: JaxprEqn, x: Value, *coefficients: Value) -> Value:
    """Evaluate a polynomial by Horner's rule. The coefficients start at the lowest degree."""
    result = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = code.binary("add", code.binary("mul", result, x), coefficient)
    return result


def _exp_neg_sq(code: Code, eqn: JaxprEqn, x: Value) -> Value:
    return code.unary("exp", code.unary("neg", code.binary("mul", x, x)))


ELEMENTWISE: dict[str, Callable[..., Value]] = {
    **{name: _wrapping(name) for name in ("add", "sub", "mul")},
    **{name: _binary(name) for name in ("div", "rem", "max", "min", "and", "or", "xor", "atan2")},
    **{name: _unary(name) for name in ("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log1p", "expm1")},
    **{name: _unary(name) for name in ("tanh", "logistic", "erf", "erfc", "sin", "cos", "sqrt", "rsqrt", "clz")},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add_any": _binary("add"),
    "shift_left": _binary("shl"),
    "shift_right_arithmetic": _shift_right("i"),
    "shift_right_logical": _shift_right("u"),
    "population_count": _unary("popcount"),
    "is_finite": _unary("finite"),
    "integer_pow": _integer_pow,
    "square": _square,
    "one_minus_square": _one_minus_square,  # in the derivative of tanh, since jax 0.11
    "log2": _log2,  # since jax 0.12
    "polynomial": _polynomial,  # since jax 0.12
    "exp_neg_sq": _exp_neg_sq,  # JAX's function in the derivatives of erf and erfc, since jax 0.12
    "pow": _pow,
    "select_n": _select_n,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "round": _round,
    "not": _not,
    "tan": _tan,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "name": _same,
    "optimization_barrier": _same,
    "reduce_precision": _reduce_precision,
}


def operation(eqn: JaxprEqn) -> str:
    """Return the name of an equation in the tables below.

    This is the name of the primitive, or of a JAX function that works on the bits of floats, because there are no
    instructions for these bits.
    """
    if eqn.primitive.name == "custom_jvp_call":
        name, _, place = eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info.partition(" at ")
        if name in ELEMENTWISE and "/jax/_src/" in place:
            return name
    return eqn.primitive.name


# --- indexing ---------------------------------------------------------------------------------------------------------
# Each function returns a map from an index of result i to an index of the operand, and a condition: whether the latter
# is in range. The condition is None if all are.

Where = Callable[[Index], Place]


def _unmoved(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    return lambda index: (index, None)


def _squeeze(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    removed = eqn.params["dimensions"]

    def where(index: Index) -> Place:
        rest = iter(index)
        return tuple(code.constant("i", 0) if d in removed else next(rest) for d in range(len(shape))), None

    return where


def _reshape(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    new = aval(eqn.outvars[0]).shape
    kept = [size for size in new if size != 1] == [size for size in shape if size != 1]

    def where(index: Index) -> Place:
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


def _unstack(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    axis = eqn.params["axis"]
    return lambda index: ((*index[:axis], code.constant("i", i), *index[axis:]), None)


def _tile(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    sizes = [code.constant("i", size) for size in shape]
    return lambda index: (tuple(code.binary("rem", x, size) for x, size in zip(index, sizes, strict=True)), None)


def _signed(code: Code, start: Value) -> Value:
    """Convert an index to int32. An index that does not fit becomes one that is out of range, too."""
    if start.type == "u":
        start = code.binary("min", start, code.constant("u", INT_MAX))
    return code.cast(start, "i")


def _start(code: Code, start: Value, size: int, taken: int) -> Value:
    """Return the start of a slice of `taken` entries, clamped as JAX does, so that the slice is in range."""
    return code.clamp(_signed(code, start), 0, size - taken)


def _dynamic_slice(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    taken = eqn.params["slice_sizes"]

    def where(index: Index) -> Place:
        starts = [_start(code, x.element(), *sizes) for x, *sizes in zip(others, shape, taken, strict=False)]
        return tuple(code.binary("add", start, x) for start, x in zip(starts, index, strict=True)), None

    return where


def _gather(code: Code, eqn: JaxprEqn, i: int, shape: tuple[int, ...], others: list[Array]) -> Where:
    numbers, taken = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes"))
    (indices,) = others
    fills = fill_value(eqn, np.dtype(np.float32)) is not None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}

    def where(index: Index) -> Place:
        batch = tuple(x for d, x in enumerate(index) if d not in numbers.offset_dims)
        offsets = iter(index[d] for d in numbers.offset_dims)
        result = [code.constant("i", 0) if d in gone else next(offsets) for d in range(len(shape))]
        for d, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            result[d] = batch[b]
        inside = None
        for k, d in enumerate(numbers.start_index_map):
            start = _signed(code, indices.element(*batch, code.constant("i", k)))
            if fills:
                not_before = code.compare("le", code.constant("i", 0), start)
                not_after = code.compare("le", start, code.constant("i", shape[d] - taken[d]))
                both = code.binary("and", not_before, not_after)
                inside = both if inside is None else code.binary("and", inside, both)
            result[d] = code.binary("add", _start(code, start, shape[d], taken[d]), result[d])
        return tuple(result), None if inside is None or code.known(inside) else inside

    return where


def fill_value(eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Return the value of a gather for indices out of range, or None if it clamps them."""
    if eqn.params.get("mode") != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return None
    given = eqn.params.get("fill_value")
    if given is not None:
        with np.errstate(all="ignore"):  # 1e5 is infinite in float16, and -1 is 255 in uint8
            return np.asarray(given).astype(dtype).item()
    if jnp.issubdtype(dtype, jnp.floating):
        return math.nan
    return {
        "b": True,
        "i": np.iinfo(dtype).min if dtype.kind == "i" else 0,
        "u": np.iinfo(dtype).max if dtype.kind == "u" else 0,
    }[dtype.kind]


# Primitives that change only the placement on devices, in jax.shard_map and under a mesh.
PLACEMENTS = ("pvary", "pcast", "reshard")
INDEXING = {
    **dict.fromkeys(PLACEMENTS, _unmoved),
    "convert_element_type": _unmoved,
    "squeeze": _squeeze,
    "expand_dims": _reshape,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}

# --- arrays -----------------------------------------------------------------------------------------------------------


def _dot_general(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = inputs
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
        return code.rounded(functools.reduce(functools.partial(code.binary, "add"), products or [zero]), out.dtype.name)

    return Array(out.shape, out.dtype, element)


def _reduce(op: str, empty: Callable[[Any], Any]) -> Callable[..., Array]:
    def rule(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
        (x,), axes = inputs, eqn.params["axes"]
        terms = positions(code, [x.shape[d] for d in axes])

        def element(index: Index) -> Value:
            def at(term: Index) -> Value:
                summed, rest = dict(zip(axes, term, strict=True)), iter(index)
                return x.element(*(summed[d] if d in summed else next(rest) for d in range(len(x.shape))))

            elements = list(map(at, terms)) or [code.constant(type_of(x.dtype), empty(x.dtype))]
            return code.rounded(functools.reduce(functools.partial(code.binary, op), elements), out.dtype.name)

        return Array(out.shape, out.dtype, element)

    return rule


def _extreme(largest: bool) -> Callable[[Any], Any]:
    def value(dtype: np.dtype) -> Any:
        if jnp.issubdtype(dtype, jnp.floating):
            return math.inf if largest else -math.inf
        if dtype.kind == "b":
            return largest
        return np.iinfo(dtype).max if largest else np.iinfo(dtype).min

    return value


def _iota(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    d = eqn.params["dimension"]
    return Array(
        out.shape, out.dtype, lambda index: code.rounded(code.cast(index[d], type_of(out.dtype)), out.dtype.name)
    )


def _concatenate(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    d = eqn.params["dimension"]
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


def _stack(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    axis = eqn.params["axis"]

    def element(index: Index) -> Value:
        at, rest = index[axis], (*index[:axis], *index[axis + 1 :])
        known = code.known(at)
        if known is not None:
            return inputs[int(known)].element(*rest)
        result = inputs[-1].element(*rest)
        for i, x in reversed(list(enumerate(inputs[:-1]))):
            result = code.select(code.compare("eq", at, code.constant("i", i)), x.element(*rest), result)
        return result

    return Array(out.shape, out.dtype, element)


def _pad(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    x, padding = inputs
    widths = eqn.params["padding_config"]

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


def _dynamic_update_slice(code: Code, eqn: JaxprEqn, inputs: list[Array], out: Any) -> Array:
    x, update, *starts = inputs

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
    "reduce_and": _reduce("and", lambda dtype: {"b": True, "i": -1}.get(dtype.kind, INT_MAX - INT_MIN)),
    "reduce_or": _reduce("or", lambda dtype: 0),
    "reduce_xor": _reduce("xor", lambda dtype: 0),
    "iota": _iota,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _pad,
    "dynamic_update_slice": _dynamic_update_slice,
}

# The primitives that are correct for integers of fewer than 32 bits as well.
ANY_WIDTH = {
    *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type", "copy", "max", "min", "clamp"),
    *("add", "sub", "mul", "and", "or", "xor", "reduce_max", "reduce_min", "reduce_or", "reduce_xor"),
    *("iota", "concatenate", "stack", "pad", "dynamic_update_slice"),
    *INDEXING,
}

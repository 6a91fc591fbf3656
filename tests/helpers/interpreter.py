"""Interprets the text of score programs with NumPy. `jax_flash/programs/code.py` and `common/ops.h` define the format.

Floats are float64. Each value is an array with one element per entry of the scores, so one run covers all entries.
"""

import math

import jax.numpy as jnp
import numpy as np

TYPES = {"f": np.float64, "i": np.int32, "u": np.uint32, "b": np.bool_}


def run(text, inputs, arrays=()):
    """Return the result, and by number the gradient of each captured array that the program accumulates.

    Args:
      inputs: arrays of one shape by name: score, cotangent, batch, head, query, key.
      arrays: the captured arrays.
    """
    values, gradients = [], {}
    shape = inputs["query"].shape
    with np.errstate(all="ignore"):
        for line in text.split(";"):
            name, *fields = line.split(",")
            op, *types = name.split(".")
            if op in inputs:
                values.append(inputs[op].astype(TYPES["f" if op in ("score", "cotangent") else "i"]))
            elif op == "const":
                x = (float.fromhex if types == ["f"] else int)(fields[0])
                values.append(np.full(shape, x, TYPES[types[0]]))
            elif op in ("load", "accumulate"):
                number, *operands = map(int, fields)
                places = [values[i] for i in operands[: arrays[number].ndim]]
                assert all(x.dtype == np.int32 for x in places)
                at = tuple(np.clip(x, 0, size - 1) for x, size in zip(places, arrays[number].shape, strict=True))
                if op == "load":
                    values.append(np.broadcast_to(arrays[number][at].astype(TYPES[types[0]]), shape))
                else:
                    gradients.setdefault(number, np.zeros(arrays[number].shape))
                    np.add.at(gradients[number], at or ..., values[operands[-1]] if at else values[operands[-1]].sum())
                    values.append(None)
            elif op == "result":
                return values[int(fields[0])], gradients
            else:
                values.append(_operation(op, types, [values[int(i)] for i in fields]))
    raise AssertionError("no result")


def _operation(op, types, operands):
    if op == "round_to":
        return operands[0].astype(jnp.dtype(types[0])).astype(np.float64)
    expected = {"select": ["b", types[0], types[0]], "cast": types[:1]}.get(op, types * len(operands))
    assert [x.dtype for x in operands] == [TYPES[x] for x in expected], (op, types)
    if op == "select":
        return np.where(*operands)
    if op == "cast":
        return _cast(operands[0], *types)
    function = (FLOATS if types == ["f"] else INTEGERS).get(op) or COMMON[op]
    result = function(*operands)
    truth = op in COMPARISONS or op == "finite" or types == ["b"]
    assert result.dtype == (np.bool_ if truth else TYPES[types[0]]), (op, types, result.dtype)
    return result


def _cast(x, old, new):
    if new == "b":
        return x != 0
    if old == "f":  # saturates; NaN becomes 0
        info = np.iinfo(TYPES[new])
        return np.clip(np.nan_to_num(np.trunc(x), posinf=info.max, neginf=info.min), info.min, info.max).astype(
            TYPES[new]
        )
    return x.astype(TYPES[new])


def _half_away(x):
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), x - (x - whole))


def _quotient(x, y):
    """Divide towards zero. Division by 0 sets all bits."""
    wide, by = x.astype(np.int64), y.astype(np.int64)
    result = np.abs(wide) // np.where(by == 0, 1, np.abs(by)) * np.sign(wide) * np.sign(by)
    return np.where(by == 0, -1, result).astype(x.dtype)


def _shifted(function):
    def shift(x, y):
        by = y.astype(np.int64) & 0xFFFFFFFF  # a negative count is a large unsigned one
        last = function(function(x, np.asarray(31, x.dtype)), np.asarray(1, x.dtype))
        return np.where(by < 32, function(x, np.minimum(by, 31).astype(x.dtype)), last)

    return shift


def _bits(x):
    return np.vectorize(lambda i: bin(int(i) & 0xFFFFFFFF)[2:], otypes=[object])(x)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
COMMON = COMPARISONS | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert,
}  # fmt: skip
INTEGERS = {
    "div": _quotient,
    "rem": lambda x, y: x - y * _quotient(x, y),
    "shl": _shifted(np.left_shift),
    "shr": _shifted(np.right_shift),
    "popcount": lambda x: np.vectorize(lambda bits: bits.count("1"))(_bits(x)).astype(x.dtype),
    "clz": lambda x: np.vectorize(lambda bits: 32 - len(bits.lstrip("0")))(_bits(x)).astype(x.dtype),
}
FLOATS = {
    "div": np.divide, "rem": np.fmod, "pow": np.power, "atan2": np.arctan2, "exp": np.exp, "exp2": np.exp2,
    "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "sqrt": np.sqrt, "floor": np.floor, "ceil": np.ceil, "rint": np.rint, "finite": np.isfinite, "round": _half_away,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
}  # fmt: skip

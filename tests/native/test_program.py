"""Every instruction of score programs in the CPU kernels, compared with NumPy and Python's integers."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from assembly import Assembly, call, captured, with_ids

from jax_flash.masks import Mask
from jax_flash.problem import Problem
from jax_flash.scores import Score


def half_away(x):
    return np.copysign(np.where(np.abs(x) - np.floor(np.abs(x)) >= 0.5, np.ceil(np.abs(x)), np.floor(np.abs(x))), x)


FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "atan2": np.arctan2,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),  # SciPy's is less accurate for small results
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": half_away,
    "rint": np.rint,
}


def quotient(x, y):
    if y == 0:
        return -1
    q = abs(x) // abs(y)
    return q if (x < 0) == (y < 0) else -q


INTEGER = {  # on Python's integers; the test wraps the results
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": quotient,
    "rem": lambda x, y: x - y * quotient(x, y) if y else x,
    "min": min,
    "max": max,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y if 0 <= y < 32 else 0,
    "shr": lambda x, y: x >> (y if 0 <= y < 32 else 63),
    "neg": lambda x: -x,
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "not": lambda x: ~x,
    "popcount": lambda x: (x & 0xFFFFFFFF).bit_count(),
    "clz": lambda x: 32 - (x & 0xFFFFFFFF).bit_length(),
}
UNARY = ("neg", "abs", "sign", "not", "popcount", "clz")
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
BOOL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "eq": np.equal, "ne": np.not_equal}
SATURATE = {"i": (-(2**31), 2**31 - 1), "u": (0, 2**32 - 1)}

FLOATS = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 1.0, -1.0, 3.7, -3.7, 1e-6, -1e-6, 0.3, -0.7, 20.0, -20.0,
          87.0, -87.0, 88.6, 120.25, -100.0, 8388609.0, 4194305.5, 2147483520.0, 2147483648.0, -2147483648.0, 3e9, 5e9,
          -3e9, 1e30, -1e30, 65519.0, 65520.0, 1.00390625, 1.01171875, 1.0048828125, 1.00048828125, 6e-5, 1e-7, np.inf,
          -np.inf, np.nan]  # fmt: skip
INTEGERS = [0, 1, -1, 2, -2, 3, 5, 7, -7, 31, 32, 33, -31, 100, 65535, 65536, 46341, 2**30, 2**31 - 1, -(2**31),
            -(2**31) + 1, 0x55555555, -123456789]  # fmt: skip
# How an operand varies: along rows only, along columns only, or over all entries. The test compares the diagonal.
LAYOUTS = {"row": ("query",), "column": ("key",), "entry": ("query", "key")}


class Sheet:
    """Collects values of one program and reads them from m. Head n returns value n; diagonal entry x has operand x."""

    def __init__(self, operands: dict[str, np.ndarray], layout: str):
        self.asm, self.values = Assembly(), []
        self.arrays = [np.diag(x) if layout == "entry" else x for x in operands.values()]
        self.size = len(self.arrays[0])
        self.head = self.asm("head")
        indices = [self.asm(name) for name in LAYOUTS[layout]]
        self.loaded = [self.asm(f"load.{x.dtype.kind}", i, *indices) for i, x in enumerate(self.arrays)]

    def add(self, value: int) -> None:
        """Add a value of type f."""
        self.values.append(value)

    def add_integer(self, value: int, kind: str) -> None:
        """Add an integer as two halves, which float32 represents."""
        sixteen, low = self.asm(f"const.{kind}", 16), self.asm(f"const.{kind}", 65535)
        self.add(self.asm(f"cast.{kind}.f", self.asm(f"and.{kind}", value, low)))
        self.add(self.asm(f"cast.{kind}.f", self.asm(f"and.{kind}", self.asm(f"shr.{kind}", value, sixteen), low)))

    def run(self, dtype: str) -> np.ndarray:
        result = self.values[0]
        for n, value in enumerate(self.values[1:], 1):
            is_n = self.asm("eq.i", self.head, self.asm("const.i", n))
            result = self.asm("select.f", is_n, value, result)
        mask = Assembly()
        mask("query"), mask("key"), mask("eq.i", 0, 1)
        n, heads = self.size, len(self.values)
        described = Problem(
            batch=1, q_len=n, kv_len=n, q_heads=heads, kv_heads=1, qk_dim=4, v_dim=4, dtype=dtype,
            captured=tuple(map(captured, self.arrays)),
            score=Score(score_mod=self.asm.result(result)), mask=Mask(mask_mod=mask.result(2)),
        )  # fmt: skip
        operands = {name: np.zeros((1, n, h, 4), dtype) for name, h in (("query", heads), ("key", 1), ("value", 1))}
        operands["scale"] = np.ones((), dtype)
        return call(described, with_ids(described, operands), self.arrays)[2][0]


def pairs(values: list[Any], dtype: str) -> dict[str, np.ndarray]:
    x, y = np.meshgrid(np.array(values, dtype), np.array(values, dtype))
    return {"x": x.ravel(), "y": y.ravel()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float_instructions(dtype, layout):
    rng = np.random.default_rng(0)
    some = np.concatenate([rng.normal(size=150) * 3, np.exp(rng.normal(size=150) * 4)]).astype(dtype)
    given = {"x": np.concatenate([FLOATS, some, FLOATS[::-1]]).astype(dtype)}
    given["y"] = np.roll(given["x"], 5)
    sheet = Sheet(given, layout)
    x, y = (v.astype(np.longdouble) for v in given.values())
    expected = {}
    with np.errstate(all="ignore"):
        for op, function in FLOAT.items():
            count = 2 if op in ("add", "sub", "mul", "div", "rem", "min", "max", "pow", "atan2") else 1
            sheet.add(sheet.asm(f"{op}.f", *sheet.loaded[:count]))
            in_dtype = op in ("erf", "erfc", "logistic", "rem")
            arguments = [v.astype(np.float64) if in_dtype else v for v in (x, y)[:count]]
            expected[op] = function(*arguments)
    got = sheet.run(dtype)
    info = np.finfo(dtype)
    for (op, exact), values in zip(expected.items(), got, strict=True):
        with np.errstate(over="ignore"):
            exact = np.asarray(exact).astype(np.float64)
        exact = np.where(np.abs(exact) > info.max, np.copysign(np.inf, exact), exact)
        exact = np.where(np.abs(exact) < info.tiny, 0, exact)  # XLA's threads flush subnormal numbers to zero
        np.testing.assert_allclose(values, exact, rtol=4 * info.eps, atol=info.tiny, err_msg=op)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_instructions_of_floats(dtype, layout):
    """Comparisons, casts and rounding are exact."""
    given = pairs(FLOATS if layout != "entry" else [*FLOATS[::3], np.nan], dtype)
    sheet = Sheet(given, layout)
    asm, (a, b), (x, y) = sheet.asm, sheet.loaded, given.values()
    expected = []

    def check(op, value, exact):
        expected.append((op, exact))
        sheet.add(value)

    for op, function in COMPARE.items():
        check(op, asm("cast.b.f", asm(f"{op}.f", a, b)), function(x, y))
    check("finite", asm("cast.b.f", asm("finite.f", a)), np.isfinite(x))
    check("cast.f.b", asm("cast.b.f", asm("cast.f.b", a)), x != 0)
    check("select", asm("select.f", asm("lt.f", a, b), a, b), np.where(x < y, x, y))
    for name in ("bfloat16", "float16", "float32"):
        with np.errstate(over="ignore"):
            check(name, asm(f"round_to.{name}", a), x.astype(jnp.dtype(name)).astype(dtype))
    for kind, (least, most) in SATURATE.items():
        exact = [0 if np.isnan(v) else int(min(max(v, least), most)) for v in x.tolist()]
        sheet.add_integer(asm(f"cast.f.{kind}", a), kind)
        expected += [
            (f"cast.f.{kind}", [v & 65535 for v in exact]),
            (f"cast.f.{kind}", [v >> 16 & 65535 for v in exact]),
        ]
    for (op, exact), values in zip(expected, sheet.run(dtype), strict=True):
        exact = np.asarray(exact, np.float64)
        exact = np.where(np.abs(exact) < np.finfo(dtype).tiny, 0, exact)
        np.testing.assert_array_equal(values, exact, op)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", "iu")
def test_integer_instructions(kind, dtype, layout):
    wrap = (lambda v: (v + 2**31) % 2**32 - 2**31) if kind == "i" else (lambda v: v % 2**32)
    some = INTEGERS if layout != "entry" else INTEGERS[::2]
    given = pairs([wrap(v) for v in some], "int32" if kind == "i" else "uint32")
    sheet = Sheet(given, layout)
    asm, (a, b), expected = sheet.asm, sheet.loaded, []
    numbers = list(zip(given["x"].tolist(), given["y"].tolist(), strict=True))
    for op, function in INTEGER.items():
        count = 1 if op in UNARY else 2
        sheet.add_integer(asm(f"{op}.{kind}", *(a, b)[:count]), kind)
        exact = [wrap(function(*xy[:count])) for xy in numbers]
        expected += [(op, [v & 65535 for v in exact]), (op, [v >> 16 & 65535 for v in exact])]
    for op, compare in COMPARE.items():
        sheet.add(asm("cast.b.f", asm(f"{op}.{kind}", a, b)))
        expected.append((op, compare(given["x"], given["y"])))
    sheet.add(asm("cast.b.f", asm(f"cast.{kind}.b", a)))
    expected.append(("cast.b", given["x"] != 0))
    other = "u" if kind == "i" else "i"
    sheet.add_integer(asm(f"cast.{kind}.{other}", a), other)
    expected += [("cast", given["x"] & 65535), ("cast", given["x"] >> 16 & 65535)]
    sheet.add(asm(f"cast.{kind}.f", a))
    expected.append(("cast.f", given["x"].astype(dtype)))
    sheet.add_integer(asm(f"select.{kind}", asm(f"lt.{kind}", a, b), a, b), kind)
    least = np.where(given["x"] < given["y"], given["x"], given["y"])
    expected += [("select", least & 65535), ("select", least >> 16 & 65535)]
    for (op, exact), values in zip(expected, sheet.run(dtype), strict=True):
        np.testing.assert_array_equal(values, np.asarray(exact, np.float64), op)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bool_instructions(dtype, layout):
    given = pairs([False, True], "bool") | {"z": np.array([False, True, True, False])}
    given = {name: np.tile(x, 9) for name, x in given.items()}
    sheet = Sheet(given, layout)
    asm, (a, b, c), expected = sheet.asm, sheet.loaded, []
    x, y, z = given.values()
    for op, function in BOOL.items():
        sheet.add(asm("cast.b.f", asm(f"{op}.b", a, b)))
        expected.append((op, function(x, y)))
    sheet.add(asm("cast.b.f", asm("not.b", a)))
    sheet.add(asm("cast.b.f", asm("select.b", a, b, c)))
    sheet.add(asm("cast.i.f", asm("cast.b.i", a)))
    sheet.add(asm("cast.u.f", asm("cast.b.u", asm("const.b", 1))))
    expected += [("not", ~x), ("select", np.where(x, y, z)), ("cast", x), ("cast", np.ones(len(x)))]
    for (op, exact), values in zip(expected, sheet.run(dtype), strict=True):
        np.testing.assert_array_equal(values, np.asarray(exact, np.float64), op)

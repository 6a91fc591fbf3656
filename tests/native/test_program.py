"""Score programs in the CPU kernels: every instruction, and attention with them, forward and backward.

The custom calls are made directly, with programs that are written here.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import standard
from block_masks import sparse
from cases import Case, problem

from jax_flash.problem import Captured, Problem, Program


class Assembly(list):
    """Writes a program: each instruction is known by its number."""

    def __call__(self, op: str, *fields: Any) -> int:
        self.append(",".join(map(str, (op, *fields))))
        return len(self) - 1

    def result(self, value: int) -> Program:
        return Program(";".join([*self, f"result,{value}"]))


def captured(x: np.ndarray, batch: bool = False, gradient: bool = False) -> Captured:
    return Captured(x.dtype.name, batch, x.shape[batch:], gradient)


def call(described: Problem, operands: Any, arrays: Any, cotangents: Any = None) -> list[np.ndarray]:
    """(o, l, m), or with (o, l, m, do, dlogsumexp) the gradients: dq, dk, dv, dbias, and of captured arrays."""
    B, T, S, N, K = described.batch, described.q_len, described.kv_len, described.q_heads, described.kv_heads
    D, E, accumulated = described.qk_dim, described.v_dim, described.accumulation_dtype
    flat = [x.reshape(x.shape[0] if a.batch else 1, -1) for a, x in zip(described.captured, arrays, strict=True)]
    if cotangents is None:
        described = dataclasses.replace(
            described, score_grad=None, captured=tuple(a._replace(gradient=False) for a in described.captured)
        )
        types = [((B, T, N, E), described.dtype), ((B, N, T), accumulated), ((B, N, T), accumulated)]
    else:
        types = [((B, T, N, D), described.dtype), ((B, S, K, D), described.dtype), ((B, S, K, E), described.dtype)]
        types = [t for t, there in zip(types, (described.dq, described.dk, described.dv), strict=True) if there]
        if described.dbias:
            types.append((operands["bias"].shape, accumulated))
        types += [(x.shape, accumulated) for a, x in zip(described.captured, flat, strict=True) if a.gradient]
    name = "jax_flash_forward" if cotangents is None else "jax_flash_backward"
    with jax.enable_x64(True):
        function = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(*t) for t in types])
        given = [*operands.values(), *flat, *(() if cotangents is None else cotangents)]
        return [np.asarray(x) for x in jax.jit(lambda *given: function(*given, problem=described.encode()))(*given)]


def with_ids(described: Problem, operands: dict[str, Any]) -> dict[str, Any]:
    ids = {"program_batch": np.arange(described.batch, dtype=np.int32)}
    return operands | ids | {"program_head": np.arange(described.q_heads, dtype=np.int32)}


# --- instructions -----------------------------------------------------------------------------------------------------


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


INTEGER = {  # of Python's integers, wrapped afterwards
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
# How an operand comes: the same in a row, in a column, or for each entry. The diagonal is looked at.
PLACES = {"row": ("query",), "column": ("key",), "entry": ("query", "key")}


class Sheet:
    """Programs whose values are read off m: value n, entry x is what score_mod gives head n at the diagonal's x."""

    def __init__(self, operands: dict[str, np.ndarray], place: str):
        self.asm, self.values = Assembly(), []
        self.arrays = [np.diag(x) if place == "entry" else x for x in operands.values()]
        self.size = len(self.arrays[0])
        self.head = self.asm("head")
        indices = [self.asm(name) for name in PLACES[place]]
        types = {"f": "f", "i": "i", "u": "u", "b": "b"}
        self.loaded = [self.asm(f"load.{types[x.dtype.kind]}", i, *indices) for i, x in enumerate(self.arrays)]

    def add(self, value: int) -> None:
        """A value of type f."""
        self.values.append(value)

    def add_integer(self, value: int, kind: str) -> None:
        """In two halves, which f32 holds."""
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
            captured=tuple(map(captured, self.arrays)), score_mod=self.asm.result(result), mask_mod=mask.result(2),
        )  # fmt: skip
        operands = {name: np.zeros((1, n, h, 4), dtype) for name, h in (("query", heads), ("key", 1), ("value", 1))}
        operands["scale"] = np.ones((), dtype)
        return call(described, with_ids(described, operands), self.arrays)[2][0]


def pairs(values: list[Any], dtype: str) -> dict[str, np.ndarray]:
    x, y = np.meshgrid(np.array(values, dtype), np.array(values, dtype))
    return {"x": x.ravel(), "y": y.ravel()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float_instructions(dtype, place):
    rng = np.random.default_rng(0)
    some = np.concatenate([rng.normal(size=150) * 3, np.exp(rng.normal(size=150) * 4)]).astype(dtype)
    given = {"x": np.concatenate([FLOATS, some, FLOATS[::-1]]).astype(dtype)}
    given["y"] = np.roll(given["x"], 5)
    sheet = Sheet(given, place)
    x, y = (v.astype(np.longdouble) for v in given.values())
    expected = {}
    with np.errstate(all="ignore"):
        for op, function in FLOAT.items():
            count = 2 if op in ("add", "sub", "mul", "div", "rem", "min", "max", "pow", "atan2") else 1
            sheet.add(sheet.asm(f"{op}.f", *sheet.loaded[:count]))
            in_dtype = op in ("erf", "logistic", "rem")
            arguments = [v.astype(np.float64) if in_dtype else v for v in (x, y)[:count]]
            expected[op] = function(*arguments)
    got = sheet.run(dtype)
    info = np.finfo(dtype)
    for (op, exact), values in zip(expected.items(), got, strict=True):
        exact = np.asarray(exact).astype(np.float64)
        exact = np.where(np.abs(exact) > info.max, np.copysign(np.inf, exact), exact)
        exact = np.where(np.abs(exact) < info.tiny, 0, exact)  # XLA's threads have no subnormal numbers
        tolerance = 4 * info.eps
        large = (np.abs(exact) > info.max * 0.999) & ~np.isnan(exact)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(exact), op)
        fine = ~large
        np.testing.assert_allclose(values[fine], exact[fine], rtol=tolerance, atol=info.tiny, err_msg=op)
        infinite = np.isinf(exact)
        np.testing.assert_array_equal(values[infinite], exact[infinite], op)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_instructions_of_floats(dtype, place):
    """Comparisons, casts, rounding: exact."""
    given = pairs(FLOATS if place != "entry" else [*FLOATS[::3], np.nan], dtype)
    sheet = Sheet(given, place)
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", "iu")
def test_integer_instructions(kind, dtype, place):
    wrap = (lambda v: (v + 2**31) % 2**32 - 2**31) if kind == "i" else (lambda v: v % 2**32)
    some = INTEGERS if place != "entry" else INTEGERS[::2]
    given = pairs([wrap(v) for v in some], "int32" if kind == "i" else "uint32")
    sheet = Sheet(given, place)
    asm, (a, b), expected = sheet.asm, sheet.loaded, []
    numbers = list(zip(given["x"].tolist(), given["y"].tolist(), strict=True))
    for op, function in INTEGER.items():
        count = function.__code__.co_argcount if hasattr(function, "__code__") else 1 if op == "abs" else 2
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bool_instructions(dtype, place):
    given = pairs([False, True], "bool") | {"z": np.array([False, True, True, False])}
    given = {name: np.tile(x, 9) for name, x in given.items()}
    sheet = Sheet(given, place)
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


# --- attention --------------------------------------------------------------------------------------------------------


class Mods(NamedTuple):
    """score_mod as programs and as a function of JAX arrays, with what it captures."""

    score: Program
    grad: Program
    function: Any  # f(s, b, h, q, k, *arrays)
    arrays: tuple[np.ndarray, ...]
    batch: tuple[bool, ...]

    def captured(self, gradient: bool) -> tuple[Captured, ...]:
        return tuple(captured(x, b, gradient) for x, b in zip(self.arrays, self.batch, strict=True))


def mods(case: Case, dtype: str) -> Mods:
    """(3 tanh(slope[h] s) + table[h, k - q + 5] + bias[b][h, q, k] + u[b][q] - v[k]) all."""
    rng = np.random.default_rng(5)
    B, N, T, S = case.B, case.N, case.T, case.S
    shapes = {"slope": (N,), "table": (N, 63), "bias": (B, N, T, S), "u": (B, T), "v": (S,), "all": ()}
    arrays = tuple(rng.normal(size=shape).astype(dtype) for shape in shapes.values())

    def function(s, b, h, q, k, slope, table, bias, u, v, scale):
        s = 3 * jnp.tanh(s * slope[h]) + table[h, jnp.clip(k - q + 5, 0, 62)]
        T, S = bias.shape[2:]
        q, k = jnp.clip(q, 0, T - 1), jnp.clip(k, 0, S - 1)
        return (s + bias[b, h, q, k] + u[b, q] - v[k]) * scale

    def forward(asm):
        s, h, q, k = (asm(name) for name in ("score", "head", "query", "key"))
        at = asm("add.i", asm("sub.i", k, q), asm("const.i", 5))
        slope, table, all_ = asm("load.f", 0, h), asm("load.f", 1, h, at), asm("load.f", 5)
        three = asm("const.f", (3.0).hex())
        t = asm("tanh.f", asm("mul.f", s, slope))
        total = asm("add.f", asm("mul.f", three, t), table)
        total = asm("add.f", total, asm("load.f", 2, h, q, k))
        total = asm("sub.f", asm("add.f", total, asm("load.f", 3, q)), asm("load.f", 4, k))
        return s, h, q, k, at, slope, three, t, total, all_

    asm = Assembly()
    *_, total, all_ = forward(asm)
    score = asm.result(asm("mul.f", total, all_))
    asm = Assembly()
    s, h, q, k, at, slope, three, t, total, all_ = forward(asm)
    cotangent = asm("cotangent")
    asm("accumulate", 5, asm("mul.f", cotangent, total))
    scaled = asm("mul.f", cotangent, all_)
    asm("accumulate", 4, k, asm("neg.f", scaled))
    asm("accumulate", 3, q, scaled)
    asm("accumulate", 2, h, q, k, scaled)
    asm("accumulate", 1, h, at, scaled)
    one = asm("const.f", (1.0).hex())
    inner = asm("mul.f", asm("mul.f", scaled, three), asm("sub.f", one, asm("mul.f", t, t)))
    asm("accumulate", 0, h, asm("mul.f", inner, s))
    grad = asm.result(asm("mul.f", inner, slope))
    return Mods(score, grad, function, arrays, (False, False, True, True, False, False))


def mask_mod() -> tuple[Program, Any]:
    """Blocks of 40 that see themselves and what is before, but for every seventh key of odd heads."""
    asm = Assembly()
    h, q, k = (asm(name) for name in ("head", "query", "key"))
    forty, seven, one, zero = (asm("const.i", x) for x in (40, 7, 1, 0))
    before = asm("ge.i", asm("div.i", q, forty), asm("div.i", k, forty))
    odd = asm("eq.i", asm("and.i", h, one), one)
    dropped = asm("and.b", odd, asm("eq.i", asm("rem.i", k, seven), zero))
    program = asm.result(asm("and.b", before, asm("not.b", dropped)))
    return program, lambda b, h, q, k: (q // 40 >= k // 40) & ~((h % 2 == 1) & (k % 7 == 0))


def attention(case: Case, mod: Mods, allowed: np.ndarray, z: np.ndarray, offset: Any, inputs: Any, given: Any) -> Any:
    """o [B, T, N, E] and the logsumexp in plain JAX; no row without keys."""
    query, key, value, *bias = inputs
    key, value = (jnp.repeat(x, case.N // case.K, 2) for x in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) * case.D**-0.5
    if case.soft_cap:
        scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
    if bias:
        scores = scores + bias[0]
    b, h, i, j = np.ogrid[: case.B, : case.N, : case.T, : case.S]
    scores = mod.function(scores, b, h, i + offset[:, None, None, None], j, *given)
    empty = ~allowed.any(-1, keepdims=True)
    scores = jnp.where(allowed, scores, jnp.where(empty, 0.0, -jnp.inf))
    p = jnp.where(empty, 0, jax.nn.softmax(scores, -1))
    return jnp.einsum("bnts,bsne->btne", p * z, value), jnp.where(empty[..., 0], 0, jax.nn.logsumexp(scores, -1))


CASES = [
    Case(),
    Case(T=130, S=300, K=1),
    Case(T=1, S=300),
    Case(T=60, S=290, causal=True, offset=True),
    Case(window=(20, 9), lengths=True),
    Case(dropout=0.3, segments=True),
    Case(bias="1nts", K=4, logsumexp=False),
    Case(bias="b1t1", soft_cap=1.5, mask="b1ts"),
    Case(B=1, N=1, K=1, bias="111s", T=100),
    sparse(),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, dtype, masked):
    arrays = case.arrays(dtype)
    with jax.enable_x64(True):
        described, operands = problem(case, arrays)
        given = {name: np.asarray(x) for name, x in operands.arrays().items()}
    mod, (mask, visible) = mods(case, dtype), mask_mod()
    described = dataclasses.replace(
        described, captured=mod.captured(True), score_mod=mod.score, score_grad=mod.grad,
        mask_mod=mask if masked else None,
    )  # fmt: skip
    given = with_ids(described, given)
    offset = arrays.get("query_offset", np.zeros(case.B, np.int32))
    b, h, i, j = np.ogrid[: case.B, : case.N, : case.T, : case.S]
    allowed = standard.allowed(case, arrays)
    if masked:
        allowed = allowed & visible(b, h, i + offset[:, None, None, None], j)
    do, dlogsumexp = case.cotangents(dtype)
    with jax.enable_x64(True):
        inputs = [arrays[name].astype(np.float64) for name in ("query", "key", "value", "bias") if name in arrays]
        captures = [x.astype(np.float64) for x in mod.arrays]
        z = standard.z(case, arrays)
        (o, lse), pull = jax.vjp(
            lambda inputs, captures: attention(case, mod, allowed, z, offset, inputs, captures), inputs, captures
        )
        grads, captured_grads = pull((do.astype(np.float64), dlogsumexp.astype(np.float64)))
    expected = [np.asarray(x) for x in (*grads, *captured_grads)]

    got_o, l, m = call(described, given, mod.arrays)
    tolerance = 1e-12 if dtype == "float64" else 5e-5
    np.testing.assert_allclose(got_o, o, rtol=0, atol=tolerance * np.abs(o).max())
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.where(l > 0, m + np.log(l), 0), lse, rtol=0, atol=tolerance * np.abs(lse).max())
    got = call(described, given, mod.arrays, (got_o, l, m, do, dlogsumexp))
    assert len(got) == len(expected)
    for k, (x, exact) in enumerate(zip(got, expected, strict=True)):
        limit = tolerance * max(np.abs(exact).max(), 1)  # some vanish
        np.testing.assert_allclose(x.reshape(exact.shape), exact, rtol=0, atol=limit, err_msg=str(k))
    again = call(described, given, mod.arrays, (got_o, l, m, do, dlogsumexp))
    assert all(np.array_equal(x, y) for x, y in zip(got, again, strict=True))


def two_passes(
    described: Problem, operands: Any, arrays: Any, do: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results of the forward, and of the backward without a cotangent of the logsumexp."""
    described = dataclasses.replace(described, dlogsumexp=False)
    results = call(described, operands, arrays)
    return results, call(described, operands, arrays, (*results, do))


def made(case: Case, dtype: str = "float32", **programs: Any) -> tuple[Problem, dict[str, Any], np.ndarray]:
    arrays = case.arrays(dtype)
    with jax.enable_x64(True):
        described, operands = problem(case, arrays)
        given = {name: np.asarray(x) for name, x in operands.arrays().items()}
    described = dataclasses.replace(described, **programs)
    return (
        described,
        with_ids(described, given) if described.score_mod or described.mask_mod else given,
        case.cotangents(dtype)[0],
    )


IDENTITY = {"score_mod": Program("score;result,0"), "score_grad": Program("cotangent;result,0")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_identity_changes_nothing(dtype):
    """Nor does a mask_mod that says what causal says."""
    case = Case(T=100, S=300, causal=True, offset=True, bias="1nts")
    without = two_passes(*made(case, dtype)[:2], (), made(case, dtype)[2])
    for changes in (IDENTITY, IDENTITY | {"causal": False, "mask_mod": Program("query;key;ge.i,0,1;result,2")}):
        described, operands, do = made(case, dtype, **changes)
        for x, y in zip(sum(without, []), sum(two_passes(described, operands, (), do), []), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hidden", ["nan", "inf", "-inf"])
def test_hidden_entries_do_not_matter(hidden):
    """Neither what score_mod gives there, nor its derivative."""
    case = Case(T=50, S=70)
    asm = Assembly()
    s, q, k, value = asm("score"), asm("query"), asm("key"), asm("const.f", hidden)
    score = asm.result(asm("select.f", asm("ge.i", q, k), s, value))
    asm = Assembly()
    q, k, cotangent = asm("query"), asm("key"), asm("cotangent")
    nan = asm("mul.f", cotangent, asm("const.f", "nan"))
    asm("accumulate", 0, k, nan), asm("accumulate", 1, asm("select.f", asm("ge.i", q, k), cotangent, nan))
    grad = asm.result(asm("select.f", asm("ge.i", q, k), cotangent, nan))
    mask = Program("query;key;ge.i,0,1;result,2")
    arrays = (np.zeros(1, np.float32), np.zeros((), np.float32))
    described, operands, do = made(
        case, score_mod=score, score_grad=grad, mask_mod=mask, captured=tuple(captured(x, False, True) for x in arrays)
    )
    results, (*gradients, other, total) = two_passes(described, operands, arrays, do)
    exact, expected = two_passes(*made(dataclasses.replace(case, causal=True))[:2], (), do)
    for x, y in zip([*results, *gradients], [*exact, *expected], strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isnan(other).all()  # of entries that are seen
    assert np.isfinite(total).all()


def test_score_of_minus_infinity_hides():
    """A row of nothing else is 0; NaN at an entry that is seen makes its row NaN."""
    case = Case(B=1, T=40, S=50, N=1, K=1)
    asm = Assembly()
    s, q, zero = asm("score"), asm("query"), asm("const.i", 0)
    value = asm("select.f", asm("eq.i", q, zero), asm("const.f", "-inf"), asm("const.f", "nan"))
    one = asm("const.i", 1)
    score = asm.result(asm("select.f", asm("le.i", q, one), value, s))
    described, operands, do = made(case, score_mod=score, score_grad=IDENTITY["score_grad"])
    (o, l, m), _ = two_passes(described, operands, (), do)
    assert not o[0, 0].any() and l[0, 0, 0] == 0 and m[0, 0, 0] == -np.inf
    assert np.isnan(o[0, 1]).all() and np.isnan(l[0, 0, 1])
    exact = two_passes(*made(case)[:2], (), do)[0][0]
    np.testing.assert_array_equal(o[0, 2:], exact[0, 2:])


@pytest.mark.parametrize("ids", [np.arange(4), np.array([0, 1, 0, 1]), np.array([3, 2, 1, 0]), np.array([0, 9, 9, -5])])
def test_ids_of_a_call(ids):
    """Heads that share an id, or whose ids the array has not, add to the same entries."""
    case = Case(B=3, T=70, S=600, N=4, K=4)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 70, 600)).astype(np.float32)
    asm = Assembly()
    at = [asm(name) for name in ("head", "query", "key")]
    score = asm.result(asm("add.f", asm("score"), asm("load.f", 0, *at)))
    asm = Assembly()
    at, cotangent = [asm(name) for name in ("head", "query", "key")], asm("cotangent")
    asm("accumulate", 0, *at, cotangent)
    described, operands, do = made(
        case, score_mod=score, score_grad=asm.result(cotangent), captured=(captured(x, False, True),)
    )
    operands["program_head"] = ids.astype(np.int32)
    results, gradients = two_passes(described, operands, (x,), do)
    clamped = np.clip(ids, 0, 3)
    biased, given, _ = made(dataclasses.replace(case, bias="1nts"))
    given["bias"] = x[clamped][None]
    exact, expected = two_passes(biased, given, (), do)
    by_head = np.zeros_like(x)
    np.add.at(by_head, clamped, expected.pop()[0])
    for a, b in zip([*results, *gradients], [*exact, *expected, by_head.reshape(1, -1)], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("asked", [(), ("dv",), ("dq",), ("dq", "dk", "dv")], ids=str)
def test_gradients_asked_for(asked):
    """A gradient of a captured array does not need others; one that would need too many copies has none."""
    case = Case(B=3, T=40, S=300)
    x = np.ones((3_000_000,), np.float32)
    score = Program("score;query;load.f,0,1;mul.f,0,2;result,3")
    grad = Program("score;query;load.f,0,1;cotangent;mul.f,3,0;accumulate,0,1,4;mul.f,3,2;result,6")
    described, operands, do = made(case, score_mod=score, score_grad=grad, captured=(captured(x, False, True),))
    (*_,), every = two_passes(described, operands, (x,), do)
    some = {name: name in asked for name in ("dq", "dk", "dv")}
    _, got = two_passes(dataclasses.replace(described, **some), operands, (x,), do)
    kept = [y for name, y in zip(("dq", "dk", "dv"), every[:3], strict=True) if name in asked]
    for a, b in zip(got, [*kept, every[3]], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert not got[-1][0, case.T :].any()


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"S": 0}, {"N": 0, "K": 0}], ids=str)
def test_nothing_to_compute(sizes):
    described, operands, do = made(
        dataclasses.replace(Case(), **sizes), captured=(Captured("float32", False, (5,), True),),
        score_mod=Program("score;result,0"), score_grad=Program("key;cotangent;accumulate,0,0,1;result,1"),
        mask_mod=Program("const.b,1;result,0"),
    )  # fmt: skip
    results, gradients = two_passes(described, operands, (np.ones(5, np.float32),), do)
    assert not any(x.any() for x in [results[0], *gradients])


def test_backward_needs_the_gradient_of_score_mod():
    described, operands, do = made(Case(), score_mod=IDENTITY["score_mod"])
    with pytest.raises(Exception, match="jax_flash_backward: score_mod without score_grad"):
        two_passes(described, operands, (), do)


@pytest.mark.parametrize(
    ("array", "wrong"),
    [(np.ones((1, 4), np.float32), r"operand captured\[0\] is f32\[1, 4\], the problem says f32\[1, 5\]"),
     (np.ones((1, 5), np.int16), r"operand captured\[0\] is s16\[1, 5\]")],
)  # fmt: skip
def test_buffer_of_a_captured_array(array, wrong):
    described, operands, _ = made(Case(), score_mod=IDENTITY["score_mod"], captured=(Captured("float32", False, (5,)),))
    with pytest.raises(Exception, match=wrong):
        call(described, operands, (array,))

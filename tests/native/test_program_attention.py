"""Attention with score programs in the CPU kernels: forward, backward and gradients of captured arrays."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import standard
from assembly import Assembly, call, captured, with_ids
from block_masks import sparse
from cases import Case, problem
from plans import changed

from jax_flash.problem import Problem
from jax_flash.programs.program import Captured, Program


class Mods(NamedTuple):
    """`score_mod` as programs, and the arrays that it captures."""

    score: Program
    grad: Program
    arrays: tuple[np.ndarray, ...]
    batch: tuple[bool, ...]

    def captured(self, gradient: bool) -> tuple[Captured, ...]:
        return tuple(captured(x, b, gradient) for x, b in zip(self.arrays, self.batch, strict=True))


def score_mod(s, b, h, q, k, slope, table, bias, u, v, scale):
    s = 3 * jnp.tanh(s * slope[h]) + table[h, jnp.clip(k - q + 5, 0, 62)]
    T, S = bias.shape[2:]
    q, k = jnp.clip(q, 0, T - 1), jnp.clip(k, 0, S - 1)
    return (s + bias[b, h, q, k] + u[b, q] - v[k]) * scale


def mods(case: Case, dtype: str) -> Mods:
    """Return `score_mod` as programs."""
    rng = np.random.default_rng(5)
    B, N, T, S = case.B, case.N, case.T, case.S
    shapes = {"slope": (N,), "table": (N, 63), "bias": (B, N, T, S), "u": (B, T), "v": (S,), "all": ()}
    arrays = tuple(rng.normal(size=shape).astype(dtype) for shape in shapes.values())

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
    return Mods(score, grad, arrays, (False, False, True, True, False, False))


def mask_mod() -> tuple[Program, Any]:
    """Return a block-causal mask with blocks of 40. In odd heads it also masks every seventh key."""
    asm = Assembly()
    h, q, k = (asm(name) for name in ("head", "query", "key"))
    forty, seven, one, zero = (asm("const.i", x) for x in (40, 7, 1, 0))
    before = asm("ge.i", asm("div.i", q, forty), asm("div.i", k, forty))
    odd = asm("eq.i", asm("and.i", h, one), one)
    dropped = asm("and.b", odd, asm("eq.i", asm("rem.i", k, seven), zero))
    program = asm.result(asm("and.b", before, asm("not.b", dropped)))
    return program, lambda b, h, q, k: (q // 40 >= k // 40) & ~((h % 2 == 1) & (k % 7 == 0))


def attention(case: Case, allowed: np.ndarray, z: np.ndarray, offset: Any, inputs: Any, given: Any) -> Any:
    """Return o [B, T, N, E] and the logsumexp in plain JAX. Empty rows give 0."""
    query, key, value, *bias = inputs
    key, value = (jnp.repeat(x, case.N // case.K, 2) for x in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) * case.D**-0.5
    if case.soft_cap:
        scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
    if bias:
        scores = scores + bias[0]
    b, h, i, j = np.ogrid[: case.B, : case.N, : case.T, : case.S]
    scores = score_mod(scores, b, h, i + offset[:, None, None, None], j, *given)
    empty = ~allowed.any(-1, keepdims=True)
    scores = jnp.where(allowed, scores, jnp.where(empty, 0.0, -jnp.inf))
    p = jnp.where(empty, 0, jax.nn.softmax(scores, -1))
    return jnp.einsum("bnts,bsne->btne", p * z, value), jnp.where(empty[..., 0], 0, jax.nn.logsumexp(scores, -1))


@functools.partial(jax.jit, static_argnames="case")
def exact_results(case: Case, allowed: Any, z: Any, offset: Any, inputs: Any, given: Any, cotangents: Any) -> Any:
    """Return o, the logsumexp, and the gradients of the inputs and of the captured arrays."""
    results, pull = jax.vjp(functools.partial(attention, case, allowed, z, offset), inputs, given)
    gradients, captured_gradients = pull(cotangents)
    return *results, [*gradients, *captured_gradients]


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
    described = changed(
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
        cotangents = do.astype(np.float64), dlogsumexp.astype(np.float64)
        o, lse, expected = exact_results(case, allowed, z, offset, inputs, captures, cotangents)

    got_o, l, m = call(described, given, mod.arrays)
    tolerance = 1e-12 if dtype == "float64" else 5e-5
    np.testing.assert_allclose(got_o, o, rtol=0, atol=tolerance * np.abs(o).max())
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.where(l > 0, m + np.log(l), 0), lse, rtol=0, atol=tolerance * np.abs(lse).max())
    got = call(described, given, mod.arrays, (got_o, l, m, do, dlogsumexp))
    assert len(got) == len(expected)
    for k, (x, exact) in enumerate(zip(got, expected, strict=True)):
        limit = tolerance * max(np.abs(exact).max(), 1)  # some results are 0
        np.testing.assert_allclose(x.reshape(exact.shape), exact, rtol=0, atol=limit, err_msg=str(k))
    again = call(described, given, mod.arrays, (got_o, l, m, do, dlogsumexp))
    assert all(np.array_equal(x, y) for x, y in zip(got, again, strict=True))


def two_passes(
    described: Problem, operands: Any, arrays: Any, do: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the results of the forward, and of the backward without a cotangent of the logsumexp."""
    described = dataclasses.replace(described, dlogsumexp=False)
    results = call(described, operands, arrays)
    return results, call(described, operands, arrays, (*results, do))


def build(case: Case, dtype: str = "float32", **programs: Any) -> tuple[Problem, dict[str, Any], np.ndarray]:
    arrays = case.arrays(dtype)
    with jax.enable_x64(True):
        described, operands = problem(case, arrays)
        given = {name: np.asarray(x) for name, x in operands.arrays().items()}
    described = changed(described, **programs)
    return (
        described,
        with_ids(described, given) if described.programs else given,
        case.cotangents(dtype)[0],
    )


IDENTITY = {"score_mod": Program("score;result,0"), "score_grad": Program("cotangent;result,0")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_identity_programs(dtype):
    """A score_mod that returns its score, and a mask_mod that repeats the causal mask, change no bit."""
    case = Case(T=100, S=300, causal=True, offset=True, bias="1nts")
    without = two_passes(*build(case, dtype)[:2], (), build(case, dtype)[2])
    for changes in (IDENTITY, IDENTITY | {"is_causal": False, "mask_mod": Program("query;key;ge.i,0,1;result,2")}):
        described, operands, do = build(case, dtype, **changes)
        for x, y in zip(sum(without, []), sum(two_passes(described, operands, (), do), []), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hidden", ["nan", "inf", "-inf"])
def test_masked_entries_have_no_effect(hidden):
    """Neither the values of score_mod nor its derivatives at masked entries reach the results."""
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
    described, operands, do = build(
        case, score_mod=score, score_grad=grad, mask_mod=mask, captured=tuple(captured(x, False, True) for x in arrays)
    )
    results, (*gradients, other, total) = two_passes(described, operands, arrays, do)
    exact, expected = two_passes(*build(dataclasses.replace(case, causal=True))[:2], (), do)
    for x, y in zip([*results, *gradients], [*exact, *expected], strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isnan(other).all()  # visible entries also add NaN to this array
    assert np.isfinite(total).all()


def test_score_of_minus_infinity():
    """A row with only -inf gives 0. NaN at a visible entry makes its row NaN."""
    case = Case(B=1, T=40, S=50, N=1, K=1)
    asm = Assembly()
    s, q, zero = asm("score"), asm("query"), asm("const.i", 0)
    value = asm("select.f", asm("eq.i", q, zero), asm("const.f", "-inf"), asm("const.f", "nan"))
    one = asm("const.i", 1)
    score = asm.result(asm("select.f", asm("le.i", q, one), value, s))
    described, operands, do = build(case, score_mod=score, score_grad=IDENTITY["score_grad"])
    (o, l, m), _ = two_passes(described, operands, (), do)
    assert not o[0, 0].any() and l[0, 0, 0] == 0 and m[0, 0, 0] == -np.inf
    assert np.isnan(o[0, 1]).all() and np.isnan(l[0, 0, 1])
    exact = two_passes(*build(case)[:2], (), do)[0][0]
    np.testing.assert_array_equal(o[0, 2:], exact[0, 2:])


@pytest.mark.parametrize("ids", [np.arange(4), np.array([0, 1, 0, 1]), np.array([3, 2, 1, 0]), np.array([0, 9, 9, -5])])
def test_program_ids(ids):
    """Heads that share an id add to the same entries of a gradient. Out-of-range ids are clamped."""
    case = Case(B=3, T=70, S=600, N=4, K=4)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 70, 600)).astype(np.float32)
    asm = Assembly()
    at = [asm(name) for name in ("head", "query", "key")]
    score = asm.result(asm("add.f", asm("score"), asm("load.f", 0, *at)))
    asm = Assembly()
    at, cotangent = [asm(name) for name in ("head", "query", "key")], asm("cotangent")
    asm("accumulate", 0, *at, cotangent)
    described, operands, do = build(
        case, score_mod=score, score_grad=asm.result(cotangent), captured=(captured(x, False, True),)
    )
    operands["program_head"] = ids.astype(np.int32)
    results, gradients = two_passes(described, operands, (x,), do)
    clamped = np.clip(ids, 0, 3)
    biased, given, _ = build(dataclasses.replace(case, bias="1nts"))
    given["bias"] = x[clamped][None]
    exact, expected = two_passes(biased, given, (), do)
    by_head = np.zeros_like(x)
    np.add.at(by_head, clamped, expected.pop()[0])
    for a, b in zip([*results, *gradients], [*exact, *expected, by_head.reshape(1, -1)], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_relative_tables(dtype, step):
    """Load tables of every dtype in both directions. One table has fewer entries than there are distances."""
    case = Case(B=1, T=37, S=301, N=2, K=1)
    distances, rng = case.T + case.S - 1, np.random.default_rng(0)
    floats = [rng.normal(size=(case.N, size)).astype(dtype) for size in (distances, distances // 2)]
    wholes = [rng.integers(0, 2, (case.N, distances)).astype(x) for x in ("int8", "uint16", "bool")]
    arrays = (*floats, *wholes)

    def begin():
        """Begin a program. Return the head and the index into the tables as values."""
        asm = Assembly()
        head, query, key = (asm(name) for name in ("head", "query", "key"))
        distance = asm("sub.i", key, query) if step > 0 else asm("sub.i", query, key)
        return asm, head, asm("add.i", distance, asm("const.i", case.T - 1 if step > 0 else case.S - 1))

    asm, *at = begin()
    total = asm("score")
    for i, dtype_letter in enumerate("ffiub"):
        value = asm(f"load.{dtype_letter}", i, *at)
        total = asm("add.f", total, value if dtype_letter == "f" else asm(f"cast.{dtype_letter}.f", value))
    score = asm.result(total)
    asm, *at = begin()
    cotangent = asm("cotangent")
    asm("accumulate", 0, *at, cotangent), asm("accumulate", 1, *at, cotangent)
    described, operands, do = build(
        case, dtype, score_mod=score, score_grad=asm.result(cotangent),
        captured=tuple(captured(x, False, x.dtype == dtype) for x in arrays),
    )  # fmt: skip
    results, gradients = two_passes(described, operands, arrays, do)

    query, key = np.ogrid[: case.T, : case.S]
    index = key - query + case.T - 1 if step > 0 else query - key + case.S - 1
    indices = [np.minimum(index, x.shape[1] - 1) for x in arrays]
    biased, given, _ = build(dataclasses.replace(case, bias="1nts"), dtype)
    given["bias"] = sum(x[None, :, at].astype(dtype) for x, at in zip(arrays, indices, strict=True))
    exact, (*expected, dbias) = two_passes(biased, given, (), do)
    for x, at in zip(floats, indices, strict=False):
        sums = np.zeros_like(x)
        np.add.at(sums, (slice(None), at), dbias.reshape(case.N, case.T, case.S))
        expected.append(sums.reshape(1, -1))
    tolerance = 5e-6 if dtype == "float32" else 1e-13
    for a, b in zip([*results, *gradients], [*exact, *expected], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("requested", [(), ("dv",), ("dq",), ("dq", "dk", "dv")], ids=str)
def test_requested_gradients(requested):
    """The gradient of a captured array does not need others. This array is too large for one copy per thread."""
    case = Case(B=3, T=40, S=300)
    x = np.ones((3_000_000,), np.float32)
    score = Program("score;query;load.f,0,1;mul.f,0,2;result,3")
    grad = Program("score;query;load.f,0,1;cotangent;mul.f,3,0;accumulate,0,1,4;mul.f,3,2;result,6")
    described, operands, do = build(case, score_mod=score, score_grad=grad, captured=(captured(x, False, True),))
    (*_,), every = two_passes(described, operands, (x,), do)
    _, got = two_passes(dataclasses.replace(described, requested=requested), operands, (x,), do)
    kept = [y for name, y in zip(("dq", "dk", "dv"), every[:3], strict=True) if name in requested]
    for a, b in zip(got, [*kept, every[3]], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert not got[-1][0, case.T :].any()


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"S": 0}, {"N": 0, "K": 0}], ids=str)
def test_empty_arrays(sizes):
    described, operands, do = build(
        dataclasses.replace(Case(), **sizes), captured=(Captured("float32", False, (5,), True),),
        score_mod=Program("score;result,0"), score_grad=Program("key;cotangent;accumulate,0,0,1;result,1"),
        mask_mod=Program("const.b,1;result,0"),
    )  # fmt: skip
    results, gradients = two_passes(described, operands, (np.ones(5, np.float32),), do)
    assert not any(x.any() for x in [results[0], *gradients])


def test_backward_needs_the_gradient_of_score_mod():
    described, operands, do = build(Case(), score_mod=IDENTITY["score_mod"])
    with pytest.raises(Exception, match="jax_flash_backward: score_mod without score_grad"):
        two_passes(described, operands, (), do)


@pytest.mark.parametrize(
    ("array", "wrong"),
    [(np.ones((1, 4), np.float32), r"operand captured\[0\] is f32\[1, 4\], the problem says f32\[1, 5\]"),
     (np.ones((1, 5), np.int16), r"operand captured\[0\] is s16\[1, 5\]")],
)  # fmt: skip
def test_invalid_captured_array(array, wrong):
    described, operands, _ = build(
        Case(), score_mod=IDENTITY["score_mod"], captured=(Captured("float32", False, (5,)),)
    )
    with pytest.raises(Exception, match=wrong):
        call(described, operands, (array,))

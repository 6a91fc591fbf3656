"""The compiled module's parser of score programs: what it accepts, and its error messages."""

import random

import pytest
from assembly import OPS
from plans import changed

from jax_flash import _native
from jax_flash.problem import Problem
from jax_flash.programs.program import Captured, Program

PROBLEM = Problem(batch=2, q_len=7, kv_len=9, q_heads=4, kv_heads=2, qk_dim=8, v_dim=8, dtype="float32")
ARRAYS = (
    Captured("float32", False, (4, 63), True),
    Captured("int32", True, ()),
    Captured("uint8", False, (2,)),
    Captured("bool", False, (9, 9)),
    Captured("float16", True, (3,)),
    Captured("float32", False, (0,), True),
)
SCORE, MASK, GRAD = "score_mod", "mask_mod", "score_grad"
INPUTS = "score;query;key;const.u,3;const.b,1"  # one of each type: values 0 (f), 1 and 2 (i), 3 (u), 4 (b)
VALUE = {"f": 0, "i": 1, "u": 3, "b": 4}


def problem(kind=SCORE, text="score;result,0", captured=ARRAYS):
    programs = {kind: Program(text)}
    if kind == GRAD:
        programs[SCORE] = Program("score;result,0")
    return changed(PROBLEM, captured=captured, **programs)


def parse_error(kind, text, captured=ARRAYS):
    """Return the error message for a program; "" if it is valid."""
    try:
        refusal = _native.cuda_refusal(problem(kind, text, captured).encode())
    except ValueError as error:
        return str(error).removeprefix("problem: ")
    assert refusal == ""
    return ""


@pytest.mark.parametrize("op", OPS)
def test_instruction(op):
    operands, value = OPS[op]
    fields = ",".join(str(VALUE[t]) for t in operands)
    end = "result,5" if value == "f" else f"{'cast.b.f' if value == 'b' else f'cast.{value}.f'},5;result,6"
    assert parse_error(SCORE, f"{INPUTS};{op},{fields};{end}") == ""
    assert "too many fields" in parse_error(SCORE, f"{INPUTS};{op},{fields},0;{end}")
    assert "too few fields" in parse_error(
        SCORE, f"{INPUTS};{op}{',' + fields.rpartition(',')[0] if ',' in fields else ''};{end}"
    )
    other = VALUE["f" if operands[-1] == "i" else "i"]
    wrong = [*fields.split(",")[:-1], str(other)]
    assert f"value {other} has another type" in parse_error(SCORE, f"{INPUTS};{op},{','.join(wrong)};{end}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SCORE, "score;result,0"),
        (SCORE, "const.f,-0x1.8000000000000p+3;result,0"),
        *((SCORE, f"const.f,{x};result,0") for x in ("inf", "-inf", "nan", "0x0.0p+0", "-0x0.0p+0")),
        *((MASK, f"const.i,{x};query;lt.i,1,0;result,2") for x in (-(2**31), 2**31 - 1)),
        (MASK, f"const.u,{2**32 - 1};cast.u.b,0;result,1"),
        (MASK, "batch;head;query;key;ge.i,2,3;result,4"),
        (MASK, "query;key;load.b,3,0,1;result,2"),
        (MASK, "load.i,1;key;lt.i,1,0;result,2"),
        (MASK, "key;load.u,2,0;cast.u.b,1;result,2"),
        (SCORE, "head;key;load.f,0,0,1;result,2"),
        (SCORE, "key;load.f,4,0;result,1"),
        (GRAD, "cotangent;head;key;accumulate,0,1,2,0;result,0"),
        (GRAD, "score;cotangent;mul.f,0,1;result,2"),
    ],
)
def test_program(kind, text):
    assert parse_error(kind, text) == ""


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        (SCORE, "", "score_mod: instruction 0, '': there is no such instruction"),
        (SCORE, "score", "score_mod: it has no result"),
        (SCORE, "score;", "instruction 1, '': there is no such"),
        (SCORE, "score;result,0;", "something follows its result"),
        (SCORE, "score;result,0;result,0", "something follows its result"),
        (SCORE, "score;result", "too few fields"),
        (SCORE, "score;result,0,0", "too many fields"),
        (SCORE, "score;score;result,0", "it is there twice"),
        (SCORE, "score,0;result,0", "too many fields"),
        (SCORE, "score;neg.f,1;result,0", "there is no value 1 before it"),
        (SCORE, "score;neg.f,-1;result,0", "there is no value -1"),
        (SCORE, "score;neg.f,99999999999999999999;result,0", "there is no value 9999"),
        (SCORE, "score;neg.f,0x0;result,0", "there is no value 0x0"),
        (SCORE, "score;neg.f,;result,0", "there is no value  before"),
        (SCORE, "score;neg,0;result,0", "no such instruction"),
        (SCORE, "score;cast.f.f,0;result,0", "no such instruction"),
        (SCORE, "key;result,0", "value 0 has another type"),
        (SCORE, "cotangent;result,0", "this program has no cotangent"),
        (MASK, "score;result,0", "mask_mod: instruction 0, 'score': this program has no score"),
        (MASK, "key;result,0", "value 0 has another type"),
        (SCORE, "score;accumulate,0,0;result,0", "this program has no accumulate"),
        (SCORE, "const.f;result,0", "no constant of its type"),
        *((SCORE, f"const.f,{x};result,0", "no constant of its type") for x in ("", "INF", "infinity", "0x", "1_0")),
        *((MASK, f"const.i,{x};result,0", "no constant of its type") for x in ("", 2**31, -(2**31) - 1, "1.0", 2**70)),
        *((MASK, f"const.u,{x};result,0", "no constant of its type") for x in (-1, 2**32)),
        *((MASK, f"const.b,{x};result,0", "no constant of its type") for x in (-1, 2, "true")),
        (SCORE, "load.f;result,0", "there is no such array"),
        *((SCORE, f"load.f,{x};result,0", "there is no such array") for x in (-1, 6, "", 2**66)),
        (SCORE, "key;load.f,0,0;result,1", "too few fields"),
        (SCORE, "key;load.f,0,0,0,0;result,1", "too many fields"),
        (SCORE, "score;load.f,4,0;result,1", "value 0 has another type"),
        (SCORE, "key;load.f,1;result,1", "the array is of another kind"),
        (MASK, "key;load.i,2,0;result,1", "the array is of another kind"),
        (SCORE, "key;load.f,5,0;result,1", "the array is empty"),
        (GRAD, "cotangent;key;accumulate,5,1,0;result,0", "the array is empty"),
        (GRAD, "cotangent;key;accumulate,4,1,0;result,0", "the array is of another kind"),
        (GRAD, "cotangent;accumulate,0,0;result,0", "value 0 has another type"),
        (GRAD, "cotangent;key;accumulate,0,1,1;result,0", "too few fields"),
        (GRAD, "cotangent;key;accumulate,0,1,1,0;neg.f,2;result,0", "value 2 has another type"),
    ],
)
def test_wrong_program(kind, text, wrong):
    assert wrong in parse_error(kind, text)


def test_maximum_instructions():
    assert parse_error(SCORE, ";".join(["score", *["neg.f,0"] * 4094, "result,0"])) == ""
    assert "more than 4096" in parse_error(SCORE, ";".join(["score", *["neg.f,0"] * 4095, "result,0"]))


def test_score_grad_without_score_mod():
    text = changed(PROBLEM, score_grad=Program("cotangent;result,0")).encode()
    with pytest.raises(ValueError, match="^problem: score_grad without score_mod"):
        _native.cuda_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "float32",
        "float32:1:4",
        "float31:1:4:0",
        "float32:c:4:0",
        "float32:1:4:2",
        "float32:1:4:0:0",
        "float32:1:x:0",
        "float32:1:4x:0",
        "float32:1:1x1x1x1x1x1x1x1x1:0",
        "float32:1:4:0,",
        "float32::4:0",
        "float32:1:a:0",
    ],
)
def test_unreadable_captured_arrays(text):
    with pytest.raises(ValueError, match="^problem: cannot read captured="):
        _native.cuda_refusal(PROBLEM.encode().replace("captured=none", f"captured={text}"))


@pytest.mark.parametrize(
    ("captured", "wrong"),
    [
        ([Captured("float32", False, (-1,))], "a size below 0"),
        ([Captured("float32", False, (2**40, 2**40))], "more than 2.52 elements"),
        ([Captured("float32", True, (2**52,))], "more than 2.52 elements"),
        ([Captured("float32", False, (0, 2**62, 2**62))], "more than 2.52 elements"),
        ([Captured("int8", False, (), True)], "has no gradient"),
        ([Captured("int8", False, ())] * 33, "more than 32 captured arrays"),
    ],
)
def test_invalid_captured_arrays(captured, wrong):
    with pytest.raises(ValueError, match=f"^problem: .*{wrong}"):
        _native.cuda_refusal(changed(PROBLEM, captured=tuple(captured)).encode())
    assert _native.cuda_refusal(changed(PROBLEM, captured=ARRAYS * 5).encode()) == ""


DISTANCE = "query;key;sub.i,1,0;cast.i.f,2"


@pytest.mark.parametrize(
    ("text", "ramps"),
    [
        (f"{DISTANCE};result,3", ["RampOf(v2, -1, 1, at)"]),
        ("key;cast.i.f,0;result,1", ["RampOf(v0, 0, 1, at)"]),
        ("query;add.i,0,0;const.i,7;sub.i,2,1;cast.i.f,3;result,4", ["RampOf(v3, -2, 0, at)"]),
        (f"{DISTANCE};head;load.f,0,4,4;mul.f,5,3;neg.f,6;add.f,7,3;sub.f,5,8;result,9",
         ["RampOf(v2, -1, 1, at)", "mul_f(v5, v3)", "neg_f(v6)", "add_f(v7, v3)", "sub_f(v5, v8)"]),
        (f"{DISTANCE};add.i,0,1;cast.i.f,4;sub.f,3,5;result,6", ["RampOf(v2, -1, 1, at)", "RampOf(v4, 1, 1, at)"]),
        (f"{DISTANCE};mul.f,3,3;result,4", ["RampOf(v2, -1, 1, at)"]),
        ("head;cast.i.f,0;result,1", []),  # constant over the entries
        ("head;key;add.i,0,1;cast.i.f,2;result,3", []),  # it may wrap around
        ("query;key;min.i,0,1;cast.i.f,2;result,3", []),
        (";".join([DISTANCE, *["neg.f,3"] * 28, "result,31"]), []),  # long programs become functions
    ],
)  # fmt: skip
def test_ramps(text, ramps):
    """Affine values stay ramps. Other instructions evaluate them at the entry."""
    source = _native.cuda_programs(problem(SCORE, text).encode())
    assert [line.split(" = ")[1].rstrip(";") for line in source.splitlines() if "const Ramp" in line] == ramps
    assert source.count(".Here()") == (2 if "mul.f,3,3" in text or "sub.f,3,5" in text else bool(ramps))


def test_ramps_of_absolute_distances():
    text = problem(SCORE, "query;key;sub.i,0,1;abs.i,2;cast.i.f,3;result,4").encode()
    assert "abs_f(RampOf(v2, 1, -1, at).Here())" in _native.cuda_programs(text)


@pytest.mark.parametrize(
    ("sizes", "exact"),
    [({}, True), ({"kv_len": 2**24 - 5000}, True), ({"q_len": 2**24}, False), ({"query_offset": True}, False)],
)
def test_ramps_are_exact(sizes, exact):
    """A ramp is in float, so it is used only if float represents all its integers."""
    text = changed(problem(SCORE, f"{DISTANCE};result,3"), **sizes).encode()
    assert ("Ramp" in _native.cuda_programs(text)) == exact


@pytest.mark.parametrize(
    ("text", "along"),
    [
        ("cotangent;head;const.i,3;accumulate,0,1,2,0;result,0", ["Nothing"]),
        ("cotangent;head;query;accumulate,0,1,2,0;result,0", ["Rows"]),
        ("cotangent;batch;key;load.u,2,2;cast.u.i,3;accumulate,0,1,4,0;result,0", ["Keys"]),
        ("cotangent;query;key;sub.i,1,2;head;accumulate,0,4,3,0;result,0", ["Diagonals"]),
        ("cotangent;query;key;sub.i,2,1;abs.i,3;const.i,1;shr.i,4,5;accumulate,0,5,6,0;result,0", ["Diagonals"]),
        (
            "cotangent;query;key;add.i,1,2;sub.i,3,2;head;accumulate,0,5,4,0;accumulate,0,5,2,0;result,0",
            ["Rows", "Keys"],
        ),
        ("cotangent;query;key;accumulate,0,1,2,0;result,0", []),
        ("cotangent;query;key;add.i,1,2;head;accumulate,0,4,3,0;result,0", []),
        ("cotangent;query;key;sub.i,1,2;accumulate,0,2,3,0;result,0", []),
        ("cotangent;cast.f.i,0;head;accumulate,0,2,1,0;result,0", []),
    ],
)
def test_sums(text, along):
    """Entries that add to the same element of a gradient are summed first, with and without a query offset."""
    for query_offset in (False, True):
        source = _native.cuda_programs(changed(problem(GRAD, text), query_offset=query_offset).encode())
        for i, axis in enumerate(along):
            assert f"kSumOver<{i}> = SumKind::k{axis};" in source and f"add(Sum<{i}>(), cotangent, " in source
        assert source.count("kSumOver") == len(along)
        assert source.count("add(Unsummed(), cotangent, ") == text.count("accumulate") - len(along)


def test_corrupted_programs():
    """Any damage gives a valid problem or an error message, never a crash."""
    rng = random.Random(0)
    grad = "score;cotangent;head;key;load.f,0,2,3;mul.f,1,4;accumulate,0,2,3,5;const.f,0x1.8p+3;mul.f,7,5;result,8"
    whole = problem(GRAD, grad)
    whole = changed(whole, mask_mod=Program("query;key;load.b,3,0,1;result,2")).encode()
    refused = 0
    for _ in range(3000):
        text = list(whole)
        start = whole.index("captured=")
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(start, len(text))
            text[at] = rng.choice(["", ",", ";", ":", ".", "-", "x", "0", "9", "\0", "é", text[at] * 2])
        try:
            _native.cuda_refusal("".join(text))
        except ValueError as error:
            assert str(error).startswith("problem: ")
            refused += 1
    assert refused > 2000

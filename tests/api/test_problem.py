"""`Problem.of`: the problem of a call, from arguments or from their shapes and dtypes."""

import dataclasses
import inspect
import re

import cases
import forwarded_options
import jax
import numpy as np
import pytest
import standard

import jax_flash
from jax_flash import BlockMask, Problem, attention, paged, varlen
from jax_flash.block_sparse import Shape
from jax_flash.masks import Mask

Q = jax.ShapeDtypeStruct((2, 64, 4, 16), "float32")
BLOCKS = BlockMask.from_mask(np.tri(37, 45, dtype=bool), q_block=16, kv_block=32)


def described(x):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)


@pytest.mark.parametrize(
    ("options", "causal", "left", "right"),
    [
        ({"local_window_size": (10, 0)}, True, 10, -1),
        ({"local_window_size": (63, 0)}, True, -1, -1),  # 64 queries: the last query sees the first key
        ({"local_window_size": (62, 5)}, False, 62, 5),
        ({"local_window_size": 95}, False, -1, -1),  # 96 keys: the first query sees the last key
        ({"local_window_size": (5, 94)}, False, 5, 94),
        ({"local_window_size": (5, 3), "is_causal": True}, True, 5, -1),
        ({"local_window_size": 10**6, "query_offset": np.int32([3, 90])}, False, 10**6, 10**6),
        ({"local_window_size": (10**6, 0), "query_offset": np.int32([3, 90])}, True, 10**6, -1),
    ],
    ids=str,
)
def test_ineffective_bounds_are_dropped(options, causal, left, right):
    q, k = (jax.ShapeDtypeStruct((2, length, 1, 8), "float32") for length in (64, 96))
    mask = Problem.of(q, k, k, **options).mask
    assert (mask.is_causal, *mask.local_window_size) == (causal, left, right)


@pytest.mark.parametrize("case", [*(x for x in cases.FEATURES if not x.traced), cases.Case(block_mask=BLOCKS)], ids=str)
def test_arrays_and_shapes_give_the_same_problem(case):
    arrays = case.arrays()
    expected, _ = cases.problem(case, arrays)
    expected = dataclasses.replace(expected, dlogsumexp=False, requested=())
    expected = dataclasses.replace(expected, mask=expected.mask.simplified(expected.lengths))
    assert Problem.of(**arrays, **case.options) == expected
    shapes = {name: described(x) for name, x in arrays.items() if name != "dropout_key"}
    assert Problem.of(**shapes, **case.options) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    """Includes float64, even if JAX has it disabled, because nothing is computed."""
    query = jax.ShapeDtypeStruct(Q.shape, dtype)
    assert Problem.of(query, query, query, bias=jax.ShapeDtypeStruct((64, 64), "float32")).dtype == dtype


def test_equals_problem_of_the_call():
    options = {"is_causal": True, "dropout_rate": 0.1, "precision": "highest", "logits_soft_cap": 3.0}
    call = jax.jit(lambda q, key: jax_flash.dot_product_attention(q, q, q, dropout_key=key, **options))
    key = jax.eval_shape(jax.random.key, 0)
    (text,) = set(re.findall(r"version=\d+ [^\"]*", call.lower(Q, key).as_text()))
    assert Problem.of(Q, Q, Q, **options).encode() == text


def test_of_packs():
    query, cu_seqlens = jax.ShapeDtypeStruct((100, 4, 16), "float32"), jax.ShapeDtypeStruct((4,), "int32")
    given, options = (query, query, query, cu_seqlens), {"is_causal": True, "dropout_rate": 0.1}
    call = jax.jit(lambda key, *given: jax_flash.varlen_attention(*given, dropout_key=key, **options))
    text = call.lower(jax.eval_shape(jax.random.key, 0), *given).as_text()
    problem = Problem.of_varlen(*given, **options)
    assert problem.mask == Mask(ranges=True, key_value_seq_lengths=True) and problem.encode() in text
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0"):
        Problem.of_varlen(query, query, query, np.array([1, 100]))


def test_of_pages():
    query, pages = jax.ShapeDtypeStruct((2, 1, 4, 16), "bfloat16"), jax.ShapeDtypeStruct((9, 16, 2, 16), "bfloat16")
    given = (query, pages, pages, jax.ShapeDtypeStruct((2, 4), "int32"), jax.ShapeDtypeStruct((2,), "int32"))
    call = jax.jit(lambda *given: jax_flash.paged_attention(*given, logits_soft_cap=3.0))
    problem = Problem.of_paged(*given, logits_soft_cap=3.0)
    assert problem.page == 16 and problem.encode() in call.lower(*given).as_text()
    with pytest.raises(ValueError, match="paged attention is for inference and has no backward"):
        jax_flash.explain(problem, backward=True, arch="sm_90a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_rate'"):
        Problem.of_paged(*given, dropout_rate=0.1)


def test_dropout_rate_1_is_no_dropout():
    assert Problem.of(Q, Q, Q, dropout_rate=1) == Problem.of(Q, Q, Q)


@pytest.mark.parametrize(
    ("method", "function"),
    [
        (Problem.of, jax_flash.dot_product_attention),
        (Problem.of_varlen, jax_flash.varlen_attention),
        (Problem.of_paged, jax_flash.paged_attention),
    ],
)
def test_options_match_the_call(method, function):
    """The error for an unknown name lists the options."""
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "return_residual"]
    with pytest.raises(TypeError, match=f"(?m)the arguments are {', '.join(options)}$"):
        method(Q, Q, Q, Q, Q, nothing=1)


@pytest.mark.parametrize(
    ("module", "function", "inputs"),
    [
        (attention, jax_flash.dot_product_attention, 3),
        (attention, jax_flash.attention_with_statistics, 3),
        (varlen, jax_flash.varlen_attention, 4),
        (paged, jax_flash.paged_attention, 5),
    ],
)
def test_each_option_reaches_the_call(monkeypatch, module, function, inputs):
    forwarded_options.check(monkeypatch, module, "Call", function, *[Q] * inputs)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ((None, "cuda"), TypeError, "problem must be a jax_flash.Problem, not None"),
        ((Problem.of(Q, Q, Q), None), TypeError, "platform must be a str, .* not None"),
        ((Problem.of(Q, Q, Q), "gpu"), ValueError, 'platform must be "cuda" or "rocm" for a GPU, not "gpu"'),
    ],
)
def test_invalid_arguments_of_choose_implementation(call, error, message):
    with pytest.raises(error, match=message):
        jax_flash.choose_implementation(*call)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": jax.ShapeDtypeStruct((2, 64, 3, 16), "float32")}, ValueError, "key"),
        ({"value": jax.ShapeDtypeStruct(Q.shape, "float16")}, TypeError, "value has dtype float16"),
        ({"mask": jax.ShapeDtypeStruct((64, 64), "float32")}, TypeError, "mask must be boolean"),
        ({"query_segment_ids": jax.ShapeDtypeStruct((2, 64), "int32")}, ValueError, "key_value_segment_ids"),
        ({"logits_soft_cap": -1}, ValueError, "logits_soft_cap"),
        ({"implementation": "cudnn"}, ValueError, "cudnn"),
        ({"causal": True}, TypeError, "unexpected keyword argument 'causal'"),
        ({"return_residual": True}, TypeError, "return_residual is not an option of a problem"),
        ({"block_mask": BLOCKS}, ValueError, "block_mask must have .* entries, not 37 x 45"),
        ({"block_mask": Shape(64, 64)}, TypeError, "block_mask must be a jax_flash.BlockMask"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Problem.of(**{"query": Q, "key": Q, "value": Q} | arguments)


def moved_bytes(function, *arrays):
    """Return the bytes of the operands and results of each custom call in a function, by name."""
    found = {}

    def walk(x):
        for equation in getattr(x, "eqns", ()):
            name = equation.primitive.name
            if name in ("jax_flash_forward", "jax_flash_backward"):
                avals = [x.aval for x in (*equation.invars, *equation.outvars)]
                found[name] = sum(x.size * x.dtype.itemsize for x in avals)
            inside = equation.params["branches"][:1] if name == "cond" else list(equation.params.values())
            jax.tree.map(walk, inside, is_leaf=lambda x: hasattr(x, "eqns"))

    walk(jax.make_jaxpr(function)(*arrays).jaxpr)
    return found


@pytest.mark.parametrize(
    "case",
    [
        cases.Case(E=24, K=1, logsumexp=False),
        cases.Case(causal=True, bias="b1t1", mask="1n1s", lengths=True, offset=True, dropout=0.2, sinks=2.0),
        cases.Case(segments=True, block_mask=BLOCKS),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_match_the_calls(case, dtype):
    arrays, cotangents = case.arrays(dtype), case.cotangents(dtype)

    def attention(arrays):
        o, statistics = jax_flash.attention_with_statistics(**arrays, **case.options)
        return o, statistics.logsumexp

    found = moved_bytes(
        lambda *given: cases.with_gradients(attention, *given, logsumexp=case.logsumexp), arrays, cotangents
    )
    problem = Problem.of(**arrays, **case.options)
    assert problem.bytes() == found["jax_flash_forward"]
    differentiated = problem.differentiated(problem.differentiable, dlogsumexp=case.logsumexp)
    assert differentiated.bytes(backward=True) == found["jax_flash_backward"]


def test_bytes_of_packs_pages_and_captured_arrays():
    x, lengths = jax.ShapeDtypeStruct((100, 4, 16), "float16"), jax.ShapeDtypeStruct((4,), "int32")
    found = moved_bytes(lambda *given: jax_flash.varlen_attention(*given), x, x, x, lengths)
    assert Problem.of_varlen(x, x, x, lengths).bytes() == found["jax_flash_forward"]

    pages, table = jax.ShapeDtypeStruct((9, 16, 2, 16), "float32"), jax.ShapeDtypeStruct((2, 3), "int32")
    given = Q, pages, pages, table, jax.ShapeDtypeStruct((2,), "int32")
    found = moved_bytes(lambda *given: jax_flash.paged_attention(*given), *given)
    assert Problem.of_paged(*given).bytes() == found["jax_flash_forward"]

    slopes = jax.numpy.ones((4, 7))
    options = {"score_mod": lambda s, b, h, i, j: s * slopes[h, i % 7]}
    found = moved_bytes(lambda q: jax_flash.dot_product_attention(q, q, q, **options), Q)
    assert Problem.of(Q, Q, Q, **options).bytes() == found["jax_flash_forward"]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"local_window_size": (5, 9)}, {"local_window_size": (2**62, 0)}],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(37, 45), (45, 37)])
def test_flops_count_visible_entries(options, sizes):
    T, S = sizes
    case = cases.Case(T=T, S=S, E=24, causal="is_causal" in options, window=options.get("local_window_size"))
    visible = standard.allowed(case, {})[0, 0].sum()
    problem = Problem.of(**{name: described(x) for name, x in case.arrays().items()}, **options)
    assert problem.flops() == 2 * visible * (16 + 24) * case.B * case.N
    assert problem.flops(backward=True) == 2 * visible * (3 * 16 + 2 * 24) * case.B * case.N


@pytest.mark.parametrize(
    ("tangents", "by_d", "by_e"),
    [
        ("query key value", 3, 2),
        ("query", 2, 1),
        ("scale", 2, 1),
        ("scale query key", 3, 1),
        ("value", 1, 1),
        ("bias", 1, 1),
    ],
)
def test_flops_of_tangents(tangents, by_d, by_e):
    value = jax.ShapeDtypeStruct((*Q.shape[:3], 24), Q.dtype)
    bias = jax.ShapeDtypeStruct((1, 1, Q.shape[1], Q.shape[1]), "float32")
    problem = Problem.of(Q, Q, value, bias)
    each = problem.flops() // (16 + 24)
    assert problem.flops(tangents=tangents.split()) == each * (by_d * 16 + by_e * 24)
    with pytest.raises(ValueError, match="leave out backward=True"):
        problem.flops(backward=True, tangents=tangents.split())


def test_flops_of_dynamic_masks():
    offset = jax.ShapeDtypeStruct((2,), "int32")
    bound = Problem.of(Q, Q, Q, is_causal=True, query_offset=offset)
    dense, causal = Problem.of(Q, Q, Q), Problem.of(Q, Q, Q, is_causal=True)
    assert bound.flops() == dense.flops() > causal.flops()
    window = {"is_causal": True, "local_window_size": (jax.ShapeDtypeStruct((), "int32"), 0)}
    assert Problem.of(Q, Q, Q, **window).flops() == dense.flops()  # the window becomes ranges
    mask = jax.ShapeDtypeStruct((Q.shape[1], Q.shape[1]), "bool")
    assert Problem.of(Q, Q, Q, None, mask, **window).flops() == causal.flops()  # the window becomes a mask_mod
    with pytest.raises(TypeError, match="backward must be True or False, not 1"):
        bound.bytes(backward=1)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 4, 16"), "float32")
    for cost in ("flops", "bytes"):
        with pytest.raises(ValueError, match=f"{cost} needs .* concrete sizes, but these are symbolic: batch b"):
            getattr(Problem.of(symbolic, symbolic, symbolic), cost)()


def test_repr_omits_defaults():
    sizes = "batch=2, q_len=64, kv_len=64, q_heads=4, kv_heads=4, qk_dim=16, v_dim=16"
    assert repr(Problem.of(Q, Q, Q, is_causal=True)) == f"Problem({sizes}, dtype='float32', mask=Mask(is_causal=True))"

"""`jax_flash.explain`: its description of the plan."""

import pathlib
import re

import pytest
from plans import BASE, BIASED, FULL_EXTENT, GRADIENTS, fields, kernels, portable_scratch, problem, scratch

import jax_flash
from jax_flash import _native
from jax_flash.description import Extent
from jax_flash.programs.program import Captured, Program


def explained(backward=False, arch="sm_90a", **changes) -> jax_flash.Explanation:
    return jax_flash.explain(problem(**changes), backward, arch)


def test_explanation_matches_plan():
    plain = explained(is_causal=True)
    (kernel,) = plain.kernels
    tiles = [fields(is_causal=True)[name] for name in ("rows", "cols", "groups", "stages")]
    assert kernel == ("jax_flash_forward", "hopper", *tiles)
    assert (plain.backward, plain.arch, plain.multiprocessors, plain.scratch_bytes) == (False, "sm_90a", 132, 0)
    assert plain[5:] == ((), {}, "", "", False)  # no reasons, programs, source, division or tangent
    assert explained(is_causal=True, batch=133).scratch_bytes == 256  # a counter, as there are more tiles than CTAs
    (kernel,) = explained(arch="sm_80").kernels
    assert kernel.family == "ampere"
    backward = explained(True, dtype="float32")
    assert [x.name for x in backward.kernels] == [x for _, x in kernels("sm_90a", True, dtype="float32", **GRADIENTS)]
    assert backward.scratch_bytes == scratch("sm_90a", True, dtype="float32", **GRADIENTS)
    assert len(explained(True, requested=("dk",)).kernels) == 2  # prepare and main: only the requested gradients


@pytest.mark.parametrize(
    ("changes", "backward", "reason"),
    [
        ({"logits_soft_cap": 0.005, "qk_dim": 256}, True, "of 64 x 64 do not support logits_soft_cap below 0.01$"),
        ({"dtype": "float32", "full_precision": True}, False, "do not support full float32 precision$"),
        ({"dtype": "float32", "qk_dim": 256}, False, "no tiles for head dims 256 and 64"),
        ({"dtype": "float32", "qk_dim": 128, "logits_soft_cap": 2.0, **BIASED}, True, "logits_soft_cap and bias$"),
        (
            {"block_mask": FULL_EXTENT, "q_block": 16, "kv_block": 48, "row_list_size": 4, "column_list_size": 4},
            False,
            "16 x 48$",
        ),
        ({"q_len": 1, "kv_len": 4096}, False, "few queries see many keys"),
        ({"deterministic": True, "segment_ids": True}, True, "a separate kernel for Ampere and later sums dQ"),
        ({"qk_dim": 512, "drop_threshold": 3277}, False, "its tiles of 128 x 64 do not support dropout$"),
        ({"qk_dim": 512, "drop_threshold": 3277}, True, "its tiles of 64 x 64 do not support dropout$"),
        ({"qk_dim": 512}, True, "head dims above 256: a separate kernel sums dQ in a fixed order"),
        ({"qk_dim": 576}, True, "the Hopper backward is not used: it has no tiles for head dims 576 and 64"),
        ({"v_dim": 520}, False, "do not support a value head dim above 512$"),
        ({"qk_dim": 512, "dtype": "float32"}, False, "it has no tiles for head dims 512 and 64"),
    ],
)
def test_reasons(changes, backward, reason):
    explanation = explained(backward, **changes)
    assert re.search(reason, explanation.reasons[0])
    assert f"because {explanation.reasons[0]}" in str(explanation)
    assert "ampere" in {kernel.family for kernel in explanation.kernels}


@pytest.mark.parametrize("backward", [False, True])
def test_precision_does_not_change_kernels_of_16_bits(backward):
    changes = GRADIENTS if backward else {}
    assert explained(backward, full_precision=True, **changes) == explained(backward, **changes)


@pytest.mark.parametrize("features", [{}, {"array": FULL_EXTENT, "drop_threshold": 99}, BIASED], ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_small_caps_of_narrow_heads(dim, features):
    explanation = explained(True, qk_dim=dim, v_dim=dim, logits_soft_cap=0.005, **features)
    assert {kernel.family for kernel in explanation.kernels if "mask" not in kernel.name} == {"hopper"}


def test_deterministic_additions_to_dq():
    explanation = explained(True, deterministic=True)
    assert explanation.reasons == ("deterministic: blocks add to dQ in a fixed order",)
    assert {kernel.family for kernel in explanation.kernels} == {"hopper"}


# Instructions have numbers from 0, and refer to earlier ones. load.f,0,1,2 reads array 0 at indices from 1 and 2.
TABLE = Captured("float32", batch=False, shape=(8, 1024), gradient=True)
PLUS_TABLE = {
    "captured": (TABLE,),
    "score_mod": Program("score;head;key;load.f,0,1,2;add.f,0,3;result,4"),
    "score_grad": Program("cotangent;head;key;accumulate,0,1,2,0;result,0"),
}
TIMES_TABLE = {
    "captured": (TABLE,),
    "score_mod": Program("score;head;key;load.f,0,1,2;mul.f,0,3;result,4"),
    "score_grad": Program("score;cotangent;head;key;mul.f,0,1;accumulate,0,2,3,4;load.f,0,2,3;mul.f,1,6;result,7"),
}
CAPPED = {
    "score_mod": Program("score;tanh.f,0;result,1"),
    "score_grad": Program("score;tanh.f,0;mul.f,1,1;cotangent;mul.f,3,2;sub.f,3,4;result,5"),
}


def test_scratch_of_a_tangent():
    """A tangent needs the scratch of its own kernel, not the forward's, also if only captured arrays have tangents."""
    array = TABLE._replace(gradient=False)
    forward = {"q_len": 1, "kv_len": 4096, "score_mod": TIMES_TABLE["score_mod"], "captured": (array,)}
    along = {"captured": (array, array), "score_tangent": Program("score;head;key;load.f,1,1,2;mul.f,0,3;result,4")}
    assert portable_scratch(**forward) > 0
    assert portable_scratch(**forward | along) == portable_scratch(**forward, moving=("value",)) == 0


PLUS_TABLE_CAPPED = {
    "captured": (TABLE,),
    "score_mod": Program("score;tanh.f,0;head;key;load.f,0,2,3;add.f,1,4;result,5"),
    "score_grad": Program(
        "score;tanh.f,0;mul.f,1,1;cotangent;mul.f,3,2;sub.f,3,4;head;key;accumulate,0,6,7,3;result,5"
    ),
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (PLUS_TABLE, ""),
        (PLUS_TABLE | {"qk_dim": 256, "array": FULL_EXTENT}, ""),
        (PLUS_TABLE | {"bias": Extent(True, True, False, True), "bias_dtype": "float32"}, ""),
        (TIMES_TABLE, "gradients of captured arrays that depend on the score$"),
        (CAPPED, ""),
        (CAPPED | {"qk_dim": 128}, ""),
        (CAPPED | {"qk_dim": 256}, ""),
        (CAPPED | {"qk_dim": 128, "drop_threshold": 99}, ""),
        (
            CAPPED | {"qk_dim": 192, "drop_threshold": 99},
            "derivative depends on the score, or dropout with such a score_mod$",
        ),
        (
            CAPPED | {"logits_soft_cap": 2.0},
            "logits_soft_cap or float16 with a score_mod whose derivative depends on the score$",
        ),
        (PLUS_TABLE_CAPPED, ""),
        (
            PLUS_TABLE_CAPPED | {"qk_dim": 128},
            "head dims above 96 with gradients of captured arrays and a score_mod .* on the score$",
        ),
        (CAPPED | {"dtype": "float32"}, "support a score_mod whose derivative depends on the score$"),
        (
            CAPPED | {"dtype": "float16"},
            "logits_soft_cap or float16 with a score_mod whose derivative depends on the score$",
        ),
    ],
)
def test_reasons_of_a_score_mod(changes, reason):
    """Hopper's backward supports a score_mod if its tiles leave room. The compiler may still run out of registers."""
    explanation = explained(True, **GRADIENTS | changes)
    (main,) = (kernel for kernel in explanation.kernels if kernel.name == "jax_flash_backward")
    assert main.family == ("ampere" if reason else "hopper")
    assert re.search(reason, explanation.reasons[0]) if reason else not explanation.reasons


@pytest.mark.parametrize(
    ("changes", "family", "reason"),
    [
        ({}, "hopper", "^a separate pass sums the gradient of the bias"),
        (
            {"bias": Extent(True, True, False, True)},
            "ampere",
            "do not support a bias that is broadcast over rows or columns$",
        ),
        ({"dtype": "float32"}, "ampere", "not used for it: it does not support float32$"),
        ({"qk_dim": 256}, "ampere", "no tiles for head dims 256 and 64$"),
    ],
)
def test_reasons_of_a_gradient_of_a_bias(changes, family, reason):
    explanation = explained(True, requested=("dbias",), **BIASED | changes)
    assert re.search(reason, explanation.reasons[-1])
    assert {kernel.family for kernel in explanation.kernels if "bias" in kernel.name} == {family}


def test_reason_names_environment_variable(monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm80")
    assert "JAX_FLASH_CUDA_KERNELS=sm80" in explained().reasons[0]
    assert explained(arch="sm_100").reasons == ()


def test_explain_compiled(monkeypatch):
    """`compiled` reaches the compiled module. test_compiled_plan.py tests its effect."""
    flags = []
    for name in ("cuda_plan", "cuda_explain"):
        function = getattr(_native, name)
        monkeypatch.setattr(_native, name, lambda *call, of=function: flags.append(call[-1]) or of(*call[:-1]))
    for compiled in (False, True):
        jax_flash.explain(BASE, compiled=compiled)
    assert flags == [False, False, True, True]


@pytest.mark.parametrize(
    ("changes", "tangents", "family"),
    [
        ({"dtype": "bfloat16"}, ("query", "key", "value"), "hopper"),
        ({"dtype": "bfloat16", "bias": Extent(True, True, True, True), "bias_dtype": "float32"}, ("bias",), "ampere"),
        ({"dtype": "float32"}, ("scale",), "ampere"),
    ],
)
def test_explain_tangent(changes, tangents, family):
    explanation = jax_flash.explain(problem(**changes), arch="sm_90a", tangents=tangents)
    assert [(x.name, x.family) for x in explanation.kernels] == [("jax_flash_tangent", family)]
    assert str(explanation).startswith("tangent on sm_90a")


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"dtype": "bfloat16"}, {"tangents": ("scale",)}, ValueError, "in plain JAX, .*: a differentiated scale"),
        ({}, {"tangents": ("mask",)}, ValueError, "must be some of query, key, value, bias, sinks, scale, not 'mask'"),
        ({}, {"tangents": ("sinks",)}, ValueError, "the problem has no sinks"),
        ({}, {"tangents": "query"}, TypeError, "must be a sequence of names"),
        ({}, {"tangents": ("query",), "backward": True}, ValueError, "leave out backward=True"),
    ],
)
def test_invalid_tangents_of_explain(changes, options, error, message):
    with pytest.raises(error, match=message):
        jax_flash.explain(problem(**changes), **options)


def test_explain_uses_the_first_gpu(monkeypatch):
    monkeypatch.setattr(_native, "cuda_devices", lambda: [(9, 0, 78), (8, 0, 108)])
    assert jax_flash.explain(BASE)[:3] == (False, "sm_90a", 78)
    monkeypatch.setattr(_native, "cuda_devices", lambda: [])
    assert jax_flash.explain(BASE)[:3] == (False, "sm_90a", 132)
    assert explained(arch="sm_80").multiprocessors == 108


def test_scratch_matches_documentation():
    page = pathlib.Path(__file__).parents[2] / "docs" / "io-complexity.md"
    text = " ".join(page.read_text().split())
    paper = {"batch": 64, "q_heads": 16, "kv_heads": 16, "q_len": 1024, "kv_len": 1024, **GRADIENTS}
    alone, causal = (explained(True, **paper, is_causal=causal).scratch_bytes for causal in (False, True))
    heads = [bytes // (4 * 1024 * (64 + 2)) for bytes in (alone, causal)]  # dQ, L and D of each head
    assert f"needs {alone / 1e6:.1f} MB on an H200" in text
    assert f"dQ, L and D for the {heads[0]} of 1024 heads" in text
    assert f"({causal / 1e6:.1f} MB for {heads[1]} heads if causal)" in text
    assert f"hold all heads: {explained(True, 'sm_80', **paper).scratch_bytes / 1e6:.1f} MB" in text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ((BASE.encode(),), TypeError, "must be a jax_flash.Problem"),
        ((problem(dtype="float64"),), ValueError, "float64"),
        ((BASE, False, "sm_75"), ValueError, "sm_75: the kernels need"),
        ((BASE, "True"), TypeError, "backward must be True or False"),
        ((BASE, False, 90), TypeError, "arch must be a str, not 90"),
        ((BASE, False, "sm_80", 1), TypeError, "compiled must be True or False"),
        *(
            ((BASE, False, arch), ValueError, f'arch must be "sm_80", "sm_90a", …, not {arch!r}')
            for arch in ("hopper", "", "x_80", "sm_90junk", "sm_1000", "sm_99999999999")
        ),
    ],
)
def test_invalid_arguments_of_explain(call, error, message):
    with pytest.raises(error, match=message):
        jax_flash.explain(*call)

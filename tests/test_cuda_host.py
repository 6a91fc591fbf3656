"""The CUDA backend where there is no GPU: what is refused, planned, compiled and cached, and what errors say."""

import ctypes
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import pytest
from cases import EXPORT_CHECKS

import jax_flash
from jax_flash import _native
from jax_flash.problem import Extent, Problem

BASE = Problem(2, 512, 512, 8, 4, 64, 64, "bfloat16")
GRADIENTS = {"dq": True, "dk": True, "dv": True}
THREE_MASKS = {"causal": True, "q_lengths": True, "query_offset": True}  # no backward is one kernel beside so many
EVERY = Extent(True, True, True, True)
BIASED = {"bias_dtype": "float32", "bias": EVERY}


def problem(**changes) -> Problem:
    return dataclasses.replace(BASE, **changes)


def kernels(arch="sm_90a", backward=False, **changes) -> list[tuple[str, str]]:
    """(file, kernel) of the launches."""
    return [launch[:2] for launch in _native.cuda_plan(problem(**changes).encode(), backward, arch)]


def fields(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> dict[str, int]:
    """What the last launch is compiled for."""
    return _native.cuda_plan(problem(**changes).encode(), backward, arch, multiprocessors)[-1][2]


def scratch(arch="sm_90a", backward=False, multiprocessors=0, **changes) -> int:
    """Bytes."""
    return _native.cuda_explain(problem(**changes).encode(), backward, arch, multiprocessors)[1]


def everywhere(backward=False, **changes) -> int:
    """Bytes of scratch that do for any GPU."""
    return _native.cuda_scratch_bytes(problem(**changes).encode(), backward, True)


def finds(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"qk_dim": 100}, "head dim 100"),
        ({"v_dim": 12}, "head dim 12"),
        ({"qk_dim": 0}, "head dim 0"),
        ({"v_dim": 264}, "head dim 264"),
        ({"kv_len": 2**31}, "length"),
        ({"batch": 2**20, "q_len": 2**20}, "too large"),
    ],
)
def test_refused(changes, reason):
    refused = problem(**changes)
    assert reason in _native.cuda_refusal(refused.encode())
    assert everywhere(True, **changes) == 0
    with pytest.raises(ValueError, match=reason):
        _native.cuda_plan(refused.encode(), False, "sm_90a")
    choice = jax_flash.choose_implementation(refused, "cuda")
    assert choice.implementation == "xla" and reason in choice.reason


@pytest.mark.parametrize("dim", [8, 40, 128, 200, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_not_refused(dim, dtype):
    accepted = problem(qk_dim=dim, v_dim=dim, dtype=dtype)
    assert _native.cuda_refusal(accepted.encode()) == ""
    assert jax_flash.choose_implementation(accepted, "cuda").implementation == "flash"


def test_old_gpus_are_refused():
    with pytest.raises(ValueError, match="sm_75.*8.0"):
        kernels("sm_75")


# --- the plan ---


@pytest.mark.parametrize(
    ("arch", "dtype", "family"),
    [
        ("sm_80", "bfloat16", "sm80"),
        ("sm_89", "float16", "sm80"),
        ("sm_90a", "bfloat16", "sm90"),
        ("sm_90a", "float16", "sm90"),
        ("sm_80", "float32", "sm80"),
        ("sm_100", "bfloat16", "sm80"),
        ("sm_121", "float32", "sm80"),
    ],
)
def test_kernel_families(arch, dtype, family):
    assert kernels(arch, dtype=dtype) == [(f"forward_{family}.cuh", "jax_flash_forward")]
    assert kernels(arch, True, dtype=dtype, **GRADIENTS, **THREE_MASKS) == [
        (f"backward_{family}.cuh", "jax_flash_backward_prepare"),
        (f"backward_{family}.cuh", "jax_flash_backward"),
        (f"backward_{family}.cuh", "jax_flash_backward_finish"),
    ]


LISTS = {"block_mask": EVERY, "q_block": 128, "kv_block": 128, "row_list": 6, "column_list": 6}  # of 4 blocks at most
NOT_ALONGSIDE = [
    {"batch": 8, "kv_heads": 4},
    {"batch": 64, "kv_len": 256},
    {"batch": 64, "q_len": 2048},
    {"dtype": "float32"},
    {"qk_dim": 136},
    {"soft_cap": 2.0},
    {"mask": EVERY},
    {"bias_dtype": "float32", "bias": EVERY},
    {"causal": True, "segments": True, "kv_lengths": True},
    {"window_left": 100, "q_lengths": True, "query_offset": True},
    {"drop_threshold": 9, "causal": True, "q_lengths": True},
    {"drop_threshold": 9, "causal": True, "dlogsumexp": True},
    {**LISTS, "kv_heads": 4},
    {**LISTS, "batch": 64, "row_list": 5},
    {**LISTS, "column_list": 19},
    *({**LISTS, name: True} for name in ("causal", "segments", "q_lengths", "kv_lengths")),
    {**LISTS, "window_left": 100},
    {**LISTS, "drop_threshold": 9, "qk_dim": 128},
]


def test_backward_alongside():
    """On Hopper one kernel can be all of a backward."""
    own = {"kv_heads": 8, **GRADIENTS}
    listed = ({**LISTS, "batch": 64}, {**LISTS, "row_list": 3, "column_list": 18, "drop_threshold": 9})
    two = ({"causal": True, "segments": True}, {"drop_threshold": 9, "causal": True})
    for common in ({}, {"causal": True}, {"v_dim": 128}, {"segments": True}, {"drop_threshold": 9}, *two, *listed):
        assert kernels("sm_90a", True, **own, **common)[-1:] == [("hopper/backward.cuh", "jax_flash_backward")]
        assert fields("sm_90a", True, **own, **common)["alongside"] == 1
    for changes in NOT_ALONGSIDE:
        last = [kernel for _, kernel in kernels("sm_90a", True, **own | changes)][-3:]
        assert last == ["jax_flash_backward_prepare", "jax_flash_backward", "jax_flash_backward_finish"]


@pytest.mark.parametrize(
    ("changes", "sum_kv", "together"),
    [
        ({"kv_heads": 4}, True, False),
        ({"kv_heads": 1, "causal": True}, True, False),
        ({"kv_heads": 1, "drop_threshold": 9}, False, False),
        ({"kv_heads": 1, "drop_threshold": 9, "causal": True}, False, True),
        ({"kv_heads": 1, "drop_threshold": 9, "qk_dim": 96, "causal": True}, True, False),
        ({"batch": 8, "kv_heads": 4, "causal": True}, True, False),
        ({"batch": 64, "kv_heads": 4, "causal": True}, False, False),
        ({"batch": 64, "kv_heads": 1}, False, False),
        ({"batch": 64, "kv_heads": 1, "causal": True}, False, True),
        ({"batch": 64, "kv_heads": 1, "causal": True, "qk_dim": 256}, False, True),
        ({"batch": 64, "kv_heads": 1, "causal": True, "dtype": "float32"}, False, True),
        ({"batch": 64, "kv_heads": 8, "causal": True}, False, False),
    ],
    ids=str,
)
def test_heads_that_share_keys(changes, sum_kv, together):
    """Hopper's backward takes them one by one where their tiles are few; else causal ones of large groups together."""
    last = fields("sm_90a", True, **GRADIENTS | changes)
    assert (last["sum_kv"], last["together"]) == (sum_kv, together)
    launches = [kernel for _, kernel in kernels("sm_90a", True, **GRADIENTS | changes)]
    assert ("jax_flash_backward_finish_keys" in launches) == sum_kv


def test_float32_on_hopper():
    """Its own kernels do TF32, up to head dim 128; in the backward not a soft cap."""
    (hopper,), (ampere,) = kernels(dtype="float32", full_precision=False), kernels("sm_80", dtype="float32")
    assert hopper == ("hopper/forward.cuh", "jax_flash_forward")
    for changes in ({"full_precision": True}, {"v_dim": 136}):
        assert kernels(dtype="float32", **changes) == [ampere]
    for changes, backward in (({}, 90), ({"full_precision": True}, 80), ({"qk_dim": 136}, 80), ({"soft_cap": 1.0}, 80)):
        names = [name for name, _ in kernels("sm_90a", True, dtype="float32", **GRADIENTS, **changes)]
        assert set(names) == {f"backward_sm{backward}.cuh"}


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, 90),
        ({"qk_dim": 96, "v_dim": 96}, 90),
        ({"qk_dim": 104}, 80),
        ({"mask": EVERY}, 80),
    ],
)
def test_bias_in_the_tf32_backward(changes, family):
    """Up to head dim 96 and without a mask, where registers suffice."""
    biased = {"bias_dtype": "float32", "bias": EVERY}
    launches = kernels("sm_90a", True, dtype="float32", **biased, **GRADIENTS, **changes)
    assert {file for file, _ in launches} == {f"backward_sm{family}.cuh"}


def test_a_family_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm80")
    assert kernels() == [("ampere/forward.cuh", "jax_flash_forward")]
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm70")
    with pytest.raises(ValueError, match="JAX_FLASH_CUDA_KERNELS=sm70"):
        kernels()


def test_segments_come_first():
    for backward, last in ((False, "jax_flash_forward"), (True, "jax_flash_backward_finish")):
        launches = kernels(backward=backward, segments=True, **(GRADIENTS | THREE_MASKS if backward else {}))
        assert launches[0] == ("scheduler/segments.cuh", "jax_flash_segments")
        assert launches[-1][1] == last


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_few_queries_divide_the_keys(arch):
    decoding = {"q_len": 1, "kv_len": 4096, "q_heads": 8, "kv_heads": 2}
    file = "ampere/forward_split.cuh"
    assert kernels(arch, **decoding) == [(file, "jax_flash_forward"), (file, "jax_flash_forward_merge")]
    assert fields(arch, **decoding)["packed"] == 4  # the heads of a group are rows of one tile
    assert fields(arch)["packed"] == fields(arch, q_len=1)["packed"] == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_one_part_of_the_keys_is_not_merged(arch):
    """With the tiles of the parts. The heads of a group share a tile there, which only the parts' kernel can."""
    decoding = {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 8, "kv_heads": 8}
    assert kernels(arch, **decoding) == [("ampere/forward.cuh", "jax_flash_forward")]
    assert scratch(arch, **decoding) == 0
    fewer = fields(arch, **decoding | {"batch": 4})
    assert fewer["packed"] == 1
    assert fields(arch, **decoding) == fewer | {"packed": 0}
    assert len(kernels(arch, **decoding | {"batch": 256, "kv_heads": 2})) == 2


def test_block_masks_leave_the_keys_whole():
    blocks = {"block_mask": Extent(False, True, True, True), "q_block": 16, "kv_block": 64, "row_list": 66}
    decoding = {"q_len": 1, "kv_len": 4096, "column_list": 3, **blocks}
    assert kernels(**decoding) == [("ampere/forward.cuh", "jax_flash_forward")]
    assert scratch(**decoding) == everywhere(**decoding) == 0
    assert scratch(**LISTS) == everywhere(**LISTS) == 256  # for a count of Hopper's
    assert scratch("sm_80", **LISTS) == 0


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "parts"),
    [
        (1, 4, 131072, 264 // 4),
        (8, 4, 131072, 528 // 32),
        (1, 1, 131072, 256),  # as many as the merge has threads
        (200, 4, 4096, 1),
        (1, 4, 1024, 8),
        (1, 4, 512, 0),
    ],
)
def test_parts_of_the_keys_need_memory(batch, kv_heads, kv_len, parts):
    decoding = problem(batch=batch, q_len=1, kv_len=kv_len, kv_heads=kv_heads, v_dim=128)
    rounding = 512
    expected = parts * batch * decoding.q_heads * (128 + 2) * 4
    assert expected <= _native.cuda_explain(decoding.encode(), False, "sm_90a")[1] <= expected + rounding


def test_only_the_gradients_asked_for():
    assert fields(backward=True, dk=True)["dq"] == 0
    assert fields(backward=True, dk=True)["dk"] == 1
    assert fields(backward=True, dk=True)["dv"] == 0
    assert "jax_flash_backward_finish" not in [kernel for _, kernel in kernels(backward=True, dk=True)]


def test_deterministic_gradients_take_no_sum_by_many_blocks():
    launches = _native.cuda_plan(problem(deterministic=True, **GRADIENTS).encode(), True, "sm_90a")
    assert [kernel for _, kernel, _ in launches] == [
        "jax_flash_backward_prepare",
        "jax_flash_backward",
        "jax_flash_backward_query",
    ]
    assert launches[1][2]["dq"] == 0
    assert kernels(backward=True, deterministic=True, dq=True) == [
        ("ampere/backward_query.cuh", "jax_flash_backward_query")
    ]


@pytest.mark.parametrize("extent", ["bnts", "1nts", "b11s", "11ts", "1111"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gradient_of_a_bias(arch, extent):
    bias = Extent(*(letter != "1" for letter in extent))
    biased = {"bias_dtype": "float32", "bias": bias, "dbias": True}
    launches = kernels(arch, True, **biased, **GRADIENTS)
    family = "sm90" if arch == "sm_90a" else "sm80"
    assert launches[0] == (f"backward_{family}.cuh", "jax_flash_backward_prepare")
    assert ("ampere/backward_bias.cuh", "jax_flash_backward_bias") in launches[1:]
    alone = [kernel for _, kernel in kernels(arch, True, **biased)]
    assert alone[:2] == ["jax_flash_backward_prepare", "jax_flash_backward_bias"]


@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len"])
def test_nothing_to_compute(empty):
    for backward in (False, True):
        assert kernels(backward=backward, segments=True, **{empty: 0}, **GRADIENTS) == []
        assert everywhere(backward, segments=True, **{empty: 0}, **GRADIENTS) == 0


def test_fields_say_what_the_problem_uses():
    features = {
        "causal": {"causal": 1},
        "window_left": {"window": 1},
        "q_lengths": {"q_lengths": 1},
        "kv_lengths": {"kv_lengths": 1},
        "query_offset": {"query_offset": 1},
        "soft_cap": {"soft_cap": 1},
        "drop_threshold": {"dropout": 1},
    }
    plain = fields()
    for field, expected in features.items():
        changed = fields(**{field: 1})
        tiles = {"rows", "cols", "groups", "stages"}
        assert {k: v for k, v in changed.items() if plain[k] != v and k not in tiles} == expected, field
    assert fields(full_precision=True)["full_precision"] == 0  # a matter of float32
    assert fields(dtype="float32", full_precision=True)["full_precision"] == 1
    # The deterministic backward asks nothing else of the forward.
    assert fields(deterministic=True) == plain


def test_scratch_is_linear_in_the_length():
    def backward(length, arch="sm_90a", **changes):
        return scratch(arch, True, q_len=length, kv_len=length, **changes)

    assert scratch() == everywhere() == 0
    rows = 2 * 8 * 4096
    for arch in ("sm_80", "sm_90a"):
        alone = GRADIENTS | {"deterministic": True}
        assert backward(4096, arch, **alone) == 4 * rows * 2  # two numbers a row
        assert backward(4096, arch, **alone, segments=True) * 2 == backward(8192, arch, **alone, segments=True)
    assert backward(4096, "sm_80", **GRADIENTS) == 4 * rows * (64 + 2)  # and one dQ in float32
    biased = {"bias_dtype": "float32", "bias": EVERY, "deterministic": True}
    assert backward(4096, **GRADIENTS, **biased) == 4 * rows * 3
    assert backward(4096, "sm_80", **GRADIENTS, **biased) == 4 * rows * 2


@pytest.mark.parametrize(
    ("changes", "multiprocessors", "heads"),
    [
        ({}, 132, 9 * 4),  # 132 of the 144 tiles of keys of 9 heads at a time
        ({}, 100, 7 * 4),
        ({"causal": True}, 132, 9 * 6),
        ({"causal": True}, 33, 3 * 6),
        ({"batch": 1}, 132, 16),
    ],
)
def test_hoppers_backward_has_scratch_for_few_heads(changes, multiprocessors, heads):
    """Which it uses in turn, where it is one kernel."""
    paper = {"batch": 64, "q_heads": 16, "kv_heads": 16, "q_len": 2048, "kv_len": 2048, **GRADIENTS}
    all_heads = 16 * (paper | changes)["batch"]
    counters = -(-4 * (2 + 2 * all_heads) // 256) * 256
    expected = counters + 4 * heads * 2048 * (64 + 2)
    assert scratch("sm_90a", True, multiprocessors, **paper | changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 32, "kv_heads": 8},
        {"batch": 32, "kv_heads": 8, "causal": True, "segments": True},
        {"kv_heads": 1},
        {"kv_heads": 4, "batch": 8, "causal": True},
        {"block_mask": EVERY, "q_block": 128, "kv_block": 128, "row_list": 6, "column_list": 6},
        {"bias_dtype": "float32", "bias": Extent(False, False, True, True), "dbias": True},
        {"q_len": 1, "kv_len": 65536},
        {"q_len": 64, "kv_len": 4096},
        {"dtype": "float32", "full_precision": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_scratch_of_a_program_that_runs_anywhere(changes, backward):
    """It is the most that any GPU needs."""
    changes = {**GRADIENTS, **changes} if backward else {k: x for k, x in changes.items() if k != "dbias"}
    gpus = [(arch, n) for arch in ("sm_80", "sm_89", "sm_90a", "sm_100") for n in (1, 20, 108, 132, 148, 192, 500)]
    most = everywhere(backward, **changes)
    assert max(scratch(arch, backward, n, **changes) for arch, n in gpus) <= most
    assert most in {scratch(arch, backward, n, **changes) for arch in ("sm_80", "sm_90a") for n in range(1, 193)}


# --- what is said of the plan ---


def explained(backward=False, arch="sm_90a", **changes) -> jax_flash.Explanation:
    return jax_flash.explain(problem(**changes), backward, arch)


def test_an_explanation_is_the_plan():
    plain = explained(causal=True)
    (kernel,) = plain.kernels
    tiles = [fields(causal=True)[name] for name in ("rows", "cols", "groups", "stages")]
    assert kernel == ("jax_flash_forward", "hopper", *tiles)
    assert plain[:3] == (False, "sm_90a", 132) and plain[4:] == (0, ())
    (kernel,) = explained(arch="sm_80").kernels
    assert kernel.family == "ampere"
    backward = explained(True, dtype="float32")
    assert [x.name for x in backward.kernels] == [x for _, x in kernels("sm_90a", True, dtype="float32", **GRADIENTS)]
    assert backward.scratch_bytes == scratch("sm_90a", True, dtype="float32", **GRADIENTS)
    assert len(explained(True, dk=True).kernels) == 2  # prepare and main: the gradients that the problem asks for


@pytest.mark.parametrize(
    ("changes", "backward", "reason"),
    [
        ({"soft_cap": 2.0, "qk_dim": 256}, True, r"backward is not taken: its tiles of 64 x 64 do not do a soft cap$"),
        ({"dtype": "float32", "full_precision": True}, False, "forward is not taken: .* do not do full precision$"),
        ({"dtype": "float32", "qk_dim": 256}, False, "no tiles for head dims 256 and 64"),
        ({"dtype": "float32", "qk_dim": 128, "soft_cap": 2.0, **BIASED}, True, "a soft cap and a bias$"),
        ({"block_mask": EVERY, "q_block": 16, "kv_block": 48, "row_list": 4, "column_list": 4}, False, "16 x 48$"),
        ({"q_len": 1, "kv_len": 4096}, False, "few queries see many keys"),
        ({"deterministic": True}, True, "dQ is a kernel's of its own"),
        ({"dbias": True, **BIASED}, True, "a pass of its own"),
    ],
)
def test_reasons(changes, backward, reason):
    explanation = explained(backward, **changes)
    assert re.search(reason, explanation.reasons[0])
    assert f"because {explanation.reasons[0]}" in str(explanation)
    assert "ampere" in {kernel.family for kernel in explanation.kernels}


def test_reasons_of_who_asked_for_it(monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm80")
    assert "JAX_FLASH_CUDA_KERNELS=sm80" in explained().reasons[0]
    assert explained(arch="sm_100").reasons == ()


def test_an_explanation_of_the_gpu_that_is_here(monkeypatch):
    monkeypatch.setattr(_native, "cuda_devices", lambda: [(9, 0, 78), (8, 0, 108)])
    assert jax_flash.explain(BASE)[:3] == (False, "sm_90a", 78)
    monkeypatch.setattr(_native, "cuda_devices", lambda: [])
    assert jax_flash.explain(BASE)[:3] == (False, "sm_90a", 132)
    assert explained(arch="sm_80").multiprocessors == 108


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ((BASE.encode(),), TypeError, "must be a jax_flash.Problem"),
        ((problem(dtype="float64"),), ValueError, "float64"),
        ((BASE, False, "sm_75"), ValueError, "sm_75: the kernels need"),
        ((BASE, False, "hopper"), ValueError, "hopper: the kernels need"),
    ],
)
def test_what_cannot_be_explained(call, error, message):
    with pytest.raises(error, match=message):
        jax_flash.explain(*call)


def test_plans_count_the_multiprocessors_of_the_gpu():
    few = {"batch": 1, "q_len": 1024, "kv_len": 1024}  # 32 tiles of 256 rows, 43 of 192
    tiles = [fields("sm_90a", multiprocessors=n, **few)["rows"] for n in (20, 132)]
    assert tiles[0] > tiles[1]
    keys = {"kv_heads": 4, "batch": 8, **GRADIENTS}  # 128 tiles of them
    assert [fields("sm_90a", True, n, **keys)["sum_kv"] for n in (132, 192)] == [0, 1]
    decoding = {"q_len": 1, "kv_len": 2**17}
    assert scratch("sm_90a", False, 64, **decoding) * 2 == scratch("sm_90a", False, 128, **decoding)


# --- compiling ---


def test_compiles_what_the_plan_says(nvrtc):
    ((file, kernel, unit),) = _native.cuda_plan(BASE.encode(), False, "sm_90a")
    cubin, log, seconds, shared_bytes = _native.cuda_compile(file, unit, "sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert kernel in log and "registers" in log
    assert 0 < seconds
    assert 50_000 < shared_bytes <= 227 * 1024


def test_a_source_that_does_not_compile_says_so(nvrtc):
    with pytest.raises(RuntimeError, match=r"could not compile hopper/forward.cuh for sm_90a:\n.*assertion failed"):
        _native.cuda_compile("hopper/forward.cuh", fields() | {"rows": 65}, "sm_90a")


def test_a_kernel_has_all_fields_and_no_others():
    for changed, message in (({}, "without the field dtype"), (fields() | {"colour": 3}, "does not have")):
        with pytest.raises(ValueError, match=message):
            _native.cuda_compile("hopper/forward.cuh", changed, "sm_90a")


def test_options_from_the_environment(nvrtc, monkeypatch):
    def cubin(options):
        monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", options)
        return _native.cuda_compile("scheduler/segments.cuh", unit, "sm_80")[0]

    file, _, unit = _native.cuda_plan(problem(segments=True).encode(), False, "sm_80")[0]
    assert file == "scheduler/segments.cuh"
    assert b".debug_line" not in cubin("  ")
    assert b".debug_line" in cubin("  -lineinfo -DNOBODY=1")
    with pytest.raises(RuntimeError, match=r"could not compile scheduler/segments.cuh for sm_80:\n.*--nonsense"):
        cubin("--nonsense")


def test_architectures(nvrtc):
    assert _native.cuda_arch(8, 0) == "sm_80"
    assert _native.cuda_arch(8, 9) == "sm_89"
    assert _native.cuda_arch(9, 0) == "sm_90a"
    with pytest.raises(ValueError, match="capability 7.5: the kernels need 8.0"):
        _native.cuda_arch(7, 5)
    with pytest.raises(ValueError, match=r"does not compile for .* 99.0.*newer"):
        _native.cuda_arch(99, 0)


# --- the cache directory ---

CACHE = """
import sys
from jax_flash import _native
_native.cuda_cache(sys.argv[1], False, sys.argv[2])
"""


def start(directory: object, text: str = BASE.encode(), arch: str = "sm_80", umask: int = -1) -> subprocess.Popen:
    environment = os.environ | {"JAX_FLASH_CACHE_DIR": str(directory), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, "-c", CACHE, text, arch], env=environment, umask=umask)


def fill(directory: object, *args: str) -> dict[pathlib.Path, tuple[int, int]]:
    """Compiles in a new process; which files are there then, when written and how large."""
    assert start(directory, *args).wait() == 0
    files = pathlib.Path(directory).glob("*") if directory else ()
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_a_second_process_finds_the_cubin(nvrtc, tmp_path):
    first = fill(tmp_path / "new" / "folder")
    assert len(first) == 1
    assert fill(tmp_path / "new" / "folder") == first


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_an_entry_if_the_umask_lets_them(nvrtc, tmp_path, umask, mode):
    assert start(tmp_path, umask=umask).wait() == 0
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [mode]


@pytest.mark.parametrize(
    "damage",
    [lambda entry: b"", lambda entry: entry[:-1], lambda entry: entry[:-9] + b"?" + entry[-8:], lambda entry: b"\n\n"],
    ids=["empty", "truncated", "another byte", "no header"],
)
def test_a_damaged_entry_is_compiled_again(nvrtc, tmp_path, damage):
    ((path, _),) = fill(tmp_path).items()
    entry = path.read_bytes()
    path.write_bytes(damage(entry))
    fill(tmp_path)
    assert path.read_bytes()[:200] == entry[:200]
    assert path.stat().st_size == len(entry)


def test_an_entry_of_another_key_is_none(nvrtc, tmp_path):
    """As if their hashes were equal."""
    ((path, _),) = fill(tmp_path).items()
    (other,) = set(fill(tmp_path, problem(causal=True).encode())) - {path}
    entry = path.read_bytes()
    path.write_bytes(other.read_bytes())
    fill(tmp_path)
    assert path.read_bytes()[:200] == entry[:200]


def test_what_a_cubin_depends_on_is_in_its_key(nvrtc, monkeypatch, tmp_path):
    changes = [(), (problem(causal=True).encode(),), (BASE.encode(), "sm_89"), (problem(qk_dim=72).encode(),)]
    assert [len(fill(tmp_path, *args)) for args in changes] == [1, 2, 3, 4]
    monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", "-lineinfo")
    assert len(fill(tmp_path)) == 5
    monkeypatch.undo()
    # ... and what it does not depend on is not
    assert len(fill(tmp_path, problem(batch=3, q_heads=16, drop_threshold=0).encode())) == 5
    (path, *_) = tmp_path.iterdir()
    header = path.read_bytes().partition(b"\n\n")[0].decode()
    _, major, minor = nvrtc
    assert f"nvrtc {major}.{minor}\n" in header and "ampere/forward.cuh -arch=sm_8" in header and "sources " in header


@pytest.mark.parametrize("directory", ["", "/dev/null/cache"], ids=["none", "unwritable"])
def test_without_a_directory_kernels_compile(nvrtc, directory):
    assert fill(directory) == {}


def test_many_processes_at_once(nvrtc, tmp_path):
    processes = [start(tmp_path) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]  # and no temporary file
    assert len(fill(tmp_path)) == 1


def test_the_directory_by_default_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.cuda_cache_directory() == str(tmp_path / "jax_flash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert _native.cuda_cache_directory() == "/home/ada/.cache/jax_flash"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "/var/kernels")
    assert _native.cuda_cache_directory() == "/var/kernels"


# --- libraries ---


def test_importing_loads_nothing_of_cuda():
    script = """
import jax_flash, jax_flash.nnx
assert not [line for line in open("/proc/self/maps") if "libcuda" in line or "nvrtc" in line]
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.skipif(finds("libnvrtc.so.13") or finds("libnvrtc.so.12"), reason="the system has an NVRTC")
def test_an_nvrtc_that_is_not_there_is_asked_for():
    script = """
import jax_flash.cuda
from jax_flash import _native
def find_nvrtc():
    raise RuntimeError("the folders A and B")
jax_flash.cuda.find_nvrtc = find_nvrtc
try:
    _native.cuda_cache(__import__("sys").argv[1], False, "sm_80")
except RuntimeError as error:
    print(error)
"""
    run = [sys.executable, "-c", script, BASE.encode()]
    message = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
    for part in ("libnvrtc.so.13", "the folders A and B", 'pip install "jax[cuda13]"'):
        assert part in message


def test_an_nvrtc_that_is_too_old_for_hopper_says_so(tmp_path):
    functions = "CreateProgram CompileProgram GetProgramLogSize GetProgramLog GetCUBINSize GetCUBIN DestroyProgram"
    source = "int nvrtcVersion(int* major, int* minor) { *major = 12, *minor = 8; return 0; }"
    for name in ("GetNumSupportedArchs", "GetSupportedArchs", *functions.split()):
        source += f"\nint nvrtc{name}() {{ return 0; }}"
    (tmp_path / "nvrtc.c").write_text(source)
    library = tmp_path / "libnvrtc.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "nvrtc.c"], check=True)
    script = """
import sys
import jax_flash.cuda
from jax_flash import _native
jax_flash.cuda.find_nvrtc = lambda: sys.argv[1]
file, _, unit = _native.cuda_plan(sys.argv[2], False, "sm_90a")[0]
try:
    _native.cuda_compile(file, unit, "sm_90a")
except RuntimeError as error:
    print(error)
"""
    run = [sys.executable, "-c", script, str(library), BASE.encode()]
    message = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
    for part in (f"NVRTC 12.8 ({library})", "12.9 or later", "nvidia-cuda-nvrtc-cu12", "JAX_FLASH_CUDA_KERNELS=sm80"):
        assert part in message


@pytest.mark.skipif(finds("libcuda.so.1"), reason="there is a driver")
def test_a_driver_that_is_not_there_is_asked_for():
    """The handlers for CUDA, under another name on the CPU."""
    handlers = _native.registrations()["CUDA"]["jax_flash_forward"]
    jax.ffi.register_ffi_target("jax_flash_forward_without_driver", handlers, platform="cpu")
    q, kv = jnp.zeros((2, 512, 8, 64), jnp.bfloat16), jnp.zeros((2, 512, 4, 64), jnp.bfloat16)
    statistics = jax.ShapeDtypeStruct((2, 8, 512), jnp.float32)
    call = jax.ffi.ffi_call("jax_flash_forward_without_driver", [q, statistics, statistics])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jax_flash_forward: .*driver.*libcuda\.so\.1"):
        call(q, kv, kv, problem=BASE.encode())


# --- lowering ---


def lowered(dtype=jnp.bfloat16, dim=64, **options) -> str:
    """The program of a forward and a backward for CUDA."""
    q = jax.ShapeDtypeStruct((2, 128, 4, dim), dtype)

    def loss(q, k, v):
        return jax_flash.dot_product_attention(q, k, v, **options).astype(jnp.float32).sum()

    return jax.export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=EXPORT_CHECKS,
    )(q, q, q).mlir_module()


@pytest.mark.parametrize("precision", ["highest", "float32", "F32_F32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9"])
def test_precisions_beyond_tf32(precision):
    with jax.default_matmul_precision(precision):
        assert lowered(jnp.float32).count("full_precision=1") == 2


@pytest.mark.parametrize("precision", [None, "default", "high", "tensorfloat32", "TF32_TF32_F32", "BF16_BF16_F32"])
def test_precisions_that_tf32_meets(precision):
    with jax.default_matmul_precision(precision):
        assert "full_precision=1" not in lowered(jnp.float32)


@pytest.mark.parametrize(
    ("precision", "full"),
    [
        ("highest", True),
        (jax.lax.Precision.HIGHEST, True),
        (("default", "highest"), True),
        (("default", "high"), False),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, True),
        ("BF16_BF16_F32_X6", True),
        ("TF32_TF32_F32", False),
    ],
    ids=str,
)
def test_precision_of_a_call(precision, full):
    assert lowered(jnp.float32, precision=precision).count("full_precision=1") == 2 * full


@pytest.mark.parametrize("implementation", [None, "flash"])
def test_lowers_to_the_custom_calls(implementation):
    text = lowered(implementation=implementation)
    assert "@jax_flash_forward" in text and "@jax_flash_backward" in text
    assert "xui8>" in text  # the backward's scratch


@pytest.mark.parametrize("case", [{"dim": 20}, {"dtype": jnp.float64}], ids=str)
def test_lowers_to_plain_jax_where_it_is_refused(case, x64):
    assert "@jax_flash_" not in lowered(**case)
    assert "@jax_flash_forward" in lowered(**case, implementation="flash")  # and XLA will say why not


def test_deterministic_is_part_of_the_problem():
    assert "deterministic=0" in lowered()
    assert "deterministic=1" in lowered(deterministic=True)


def test_scratch_is_for_the_gpus_that_are_here_unless_a_program_is_exported(monkeypatch):
    anywhere = []
    monkeypatch.setattr(_native, "cuda_scratch_bytes", lambda problem, backward, x: anywhere.append(x) or 256)
    assert "xui8>" in lowered()
    assert anywhere == [True, True]
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    attend = jax.jit(jax_flash.dot_product_attention).trace(q, q, q)
    assert "xui8>" in attend.lower(lowering_platforms=("cuda",)).as_text()
    assert anywhere == [True, True, False]

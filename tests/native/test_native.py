"""Inputs that the compiled module refuses: invalid texts of a problem, and buffers that Python never passes."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from plans import changed

from jax_flash import _native
from jax_flash.description import Extent
from jax_flash.masks import Mask, WindowSize
from jax_flash.operands import Operands
from jax_flash.problem import Problem
from jax_flash.scores import Score

PROBLEM = Problem(batch=1, q_len=7, kv_len=9, q_heads=4, kv_heads=2, qk_dim=8, v_dim=8, dtype="float32")
FULL_EXTENT = Extent(True, True, True, True)
PARTS = {"mask": Mask, "score": Score}
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" mask.is_causal=0", " mask.is_causal", "'mask.is_causal' is not name=value"),
        (" mask.is_causal=0", " mask.is_causal=yes", "cannot read mask.is_causal=yes"),
        (" mask.is_causal=0", " mask.is_causal=0 mask.is_causal=0", "mask.is_causal appears twice"),
        (" mask.is_causal=0", "", "mask.is_causal is missing"),
        (" mask.is_causal=0", " mask.is_causal=0 mask.is_casual=0", "unknown field 'mask.is_casual'"),
        (" batch=1", " batch=1x", "cannot read batch=1x"),
        (" batch=1", " batch=99999999999999999999", "cannot read batch"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=nan", "cannot read score.logits_soft_cap=nan"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=0,0", "cannot read score.logits_soft_cap=0,0"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=\t1", "cannot read score.logits_soft_cap=\t1"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=0x1p3", "cannot read score.logits_soft_cap=0x1p3"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=1\0junk", "cannot read score.logits_soft_cap=1"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=1e", "cannot read score.logits_soft_cap=1e"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=", "cannot read score.logits_soft_cap="),
        (" requested=none", " requested=none ", "'' is not name=value"),
        (" mask.is_causal=0", "  mask.is_causal=0", "'' is not name=value"),
        (" dtype=float32", " dtype=float31", "cannot read dtype=float31"),
        (" mask.array=none", " mask.array=bnt", "cannot read mask.array=bnt"),
        (" mask.array=none", " mask.array=bnt2", "cannot read mask.array=bnt2"),
        ("version=", "version=0 version=", "version 0, but"),
        ("version=", "version=x", "but this build reads version"),
        (" batch=1", " batch=-1", "batch is too small"),
        (" kv_heads=2", " kv_heads=3", "kv_heads does not divide q_heads"),
        (" kv_heads=2", " kv_heads=0", "kv_heads does not divide q_heads"),
        (" dtype=float32", " dtype=none", "dtype is none"),
        (" score.bias=none", " score.bias=11ts", "bias and bias_dtype disagree"),
        (" requested=none", " requested=dq,", "cannot read requested=dq,"),
        (" requested=none", " requested=dq,dq", "cannot read requested=dq,dq"),
        (" requested=none", " requested=dbias", "dbias without bias"),
        (" moving=none", " moving=dq", "cannot read moving=dq"),
        (" moving=none", " moving=query,sinks", "sinks_tangent without sinks"),
        (" sinks=none", " sinks=1nt1", "sinks does not have the dims BN11"),
        (" score.logits_soft_cap=0.0", " score.logits_soft_cap=-1.0", "score.logits_soft_cap is too small"),
        (" mask.local_window_size=-1,-1", " mask.local_window_size=-2,-1", "mask.local_window_size is too small"),
        (" mask.local_window_size=-1,-1", " mask.local_window_size=-1", "cannot read mask.local_window_size=-1"),
        (" mask.q_block=0", " mask.q_block=16", "a block size"),
        (" mask.block_mask=none", " mask.block_mask=11ts", "a block size"),
        (" mask.row_list_size=0", " mask.row_list_size=-1", "mask.row_list_size is too small"),
        (" batch=1", f" batch={2**62}", "an array has more than"),
        (" q_len=7", f" q_len={2**63 - 1}", "an array has more than"),
        (" kv_len=9", f" kv_len={2**51}", "an array has more than"),
        (" v_dim=8", f" v_dim={2**50}", "an array has more than"),
        (" drop_threshold=0", " drop_threshold=32641", "drop_threshold is not in"),
    ],
)
def test_problem(old, new, message):
    text = PROBLEM.encode()
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=f"^problem: .*{message}"):
        _native.cuda_refusal(text.replace(old, new))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_block": 2**31}, "more than 31 bits"),
        ({"kv_block": 2**63 - 16}, "more than 31 bits"),
        ({"element_masks": 2**31}, "more than 31 bits"),
        ({"row_list_size": 2**62}, "more than 31 bits"),
        ({"element_masks": 2**31 - 1, "q_block": 2**30}, "an array has more than .*: element_masks"),
        ({"q_len": 2**44, "column_list_size": 2**31 - 1, "kv_len": 2**40}, "an array has more than .*: blocks"),
    ],
    ids=str,
)
def test_sizes_of_a_block_mask(changes, message):
    sizes = {"block_mask": FULL_EXTENT, "q_block": 16, "kv_block": 16, "row_list_size": 3, "column_list_size": 3}
    for passes in (sizes, sizes | {"q_block": 2**31 - 16}):
        assert not _native.cuda_refusal(changed(PROBLEM, **passes).encode()).startswith("problem")
    with pytest.raises(ValueError, match=f"^problem: .*{message}"):
        _native.cuda_refusal(changed(PROBLEM, **sizes | changes).encode())


def test_fields_match_python():
    """Names, order and types are the same as in `Problem`, `Mask` and `Score`."""
    declared = [("may_empty_rows", "bool")]  # computed
    declared += [(field.name, field.type) for field in dataclasses.fields(Problem) if field.name not in PARTS]
    declared += [
        (f"{name}.{field.name}", field.type) for name, kind in PARTS.items() for field in dataclasses.fields(kind)
    ]
    assert _native.problem_fields() == declared


def test_version():
    text = PROBLEM.encode()
    version, _, fields = text.partition(" ")
    with pytest.raises(ValueError, match="version appears twice"):
        _native.cuda_refusal(f"{version} {text}")
    with pytest.raises(ValueError, match="version is missing"):
        _native.cuda_refusal(fields)


@pytest.mark.parametrize(
    ("shapes", "results", "message"),
    [
        ([(1, 7, 4, 8), (1, 9, 2, 8)], 3, "operand value is missing"),
        ([(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)], 3, "operand scale is missing"),
        ([(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8), (), (1,)], 3, "too many operands: 5"),
        ([(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 9)], 3, r"operand value is .*9\], the problem says .*8\]"),
        ([(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8), ()], 2, "result m is missing"),
        ([(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8), ()], 4, "too many results: 4"),
    ],
)
def test_buffers(shapes, results, message):
    statistics = jax.ShapeDtypeStruct((1, 4, 7), jnp.float32)
    types = [jax.ShapeDtypeStruct((1, 7, 4, 8), jnp.float32), *[statistics] * (results - 1)]
    call = jax.ffi.ffi_call("jax_flash_forward", types)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(call(*map(jnp.ones, shapes), problem=PROBLEM.encode()))


def test_dtype_of_a_buffer():
    call = jax.ffi.ffi_call("jax_flash_forward", [jax.ShapeDtypeStruct((1, 7, 4, 8), jnp.float32)])
    query, key = jnp.ones((1, 7, 4, 8)), jnp.ones((1, 9, 2, 8))
    with pytest.raises(Exception, match="operand key is bf16.*, the problem says f32"):
        jax.block_until_ready(call(query, key.astype("bfloat16"), key, problem=PROBLEM.encode()))


def test_problem_of_a_call():
    call = jax.ffi.ffi_call("jax_flash_forward", [jax.ShapeDtypeStruct((1, 7, 4, 8), jnp.float32)])
    with pytest.raises(Exception, match="problem: version is missing"):
        jax.block_until_ready(call(problem=""))


@pytest.mark.parametrize(("isa", "message"), [("mmx", "JAX_FLASH_CPU_ISA=mmx is not available"), ("", "")])
def test_unavailable_instruction_set(isa, message):
    """An empty string means unset."""
    script = "import jax.numpy as jnp, jax_flash; x = jnp.ones((1, 4, 1, 8)); jax_flash.dot_product_attention(x, x, x)"
    environment = os.environ | {"JAX_FLASH_CPU_ISA": isa, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == bool(message)
    assert message in done.stderr


def test_operands_match_python():
    """Names and order are the same as in `Operands`."""
    assert [name for name, *_ in _native.operands()] == [name for name in Operands._fields if name != "captured"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 0}, "pages without keys"),
        ({"page": 12}, "kv_len is not a multiple of page"),
        ({"kv_len": 40}, "kv_len is not a multiple of page"),
        ({"requested": ("dq",)}, "pages have no gradients"),
        ({"segment_ids": True}, "pages are not supported with"),
        ({"array": FULL_EXTENT}, "pages are not supported with"),
        ({"drop_threshold": 1}, "pages are not supported with"),
    ],
    ids=str,
)
def test_pages(changes, message):
    sizes = {"kv_len": 48, "page": 16, "pages": 5}
    assert not _native.cuda_refusal(changed(PROBLEM, **sizes).encode())
    assert "x pages" in _native.cuda_refusal(changed(PROBLEM, **sizes | {"pages": 2**30}).encode())
    with pytest.raises(ValueError, match=f"^problem: {message}"):
        _native.cuda_refusal(changed(PROBLEM, **sizes | changes).encode())


@pytest.mark.parametrize("other", ["is_causal", "local_window_size", "query_seq_lengths"])
def test_ranges_with_other_masks_are_refused(other):
    value = {"local_window_size": WindowSize(5)}.get(other, True)
    with pytest.raises(ValueError, match="^problem: ranges are not supported with "):
        _native.cuda_refusal(changed(PROBLEM, ranges=True, key_value_seq_lengths=True, **{other: value}).encode())


def test_ranges_need_key_value_seq_lengths():
    with pytest.raises(ValueError, match="^problem: ranges without key_value_seq_lengths"):
        _native.cuda_refusal(changed(PROBLEM, ranges=True).encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_block": 8}, "a block size"),
        ({"row_list_size": 1}, "a list of the block mask is too small"),
        ({"column_list_size": 1}, "a list of the block mask is too small"),
        ({"element_masks": -1}, "mask.element_masks is too small"),
        ({"drop_threshold": -1}, "drop_threshold is too small"),
        ({"local_window_size": WindowSize(right=-2)}, "mask.local_window_size is too small"),
    ],
    ids=str,
)
def test_minimum_sizes(changes, message):
    sizes = {"block_mask": FULL_EXTENT, "q_block": 16, "kv_block": 16, "row_list_size": 2, "column_list_size": 2}
    assert not _native.cuda_refusal(changed(PROBLEM, **sizes).encode()).startswith("problem")
    with pytest.raises(ValueError, match=f"^problem: {message}"):
        _native.cuda_refusal(changed(PROBLEM, **sizes | changes).encode())

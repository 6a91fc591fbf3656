"""The CUDA backend without a GPU: refusals, plans and lowering."""

import functools
import threading
import warnings

import jax
import jax.export
import jax.numpy as jnp
import pytest
from cases import EXPORT_CHECKS
from plans import FULL_EXTENT, GRADIENTS, THREE_MASKS, fields, kernels, portable_scratch, problem, scratch

import jax_flash
from jax_flash import _native, compilation
from jax_flash.description import Extent
from jax_flash.masks import WindowSize
from jax_flash.programs.program import Program

# --- refusals ---

ONE = Extent(False, False, True, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"qk_dim": 100}, "head dim 100"),
        ({"v_dim": 12}, "head dim 12"),
        ({"qk_dim": 0}, "head dim 0"),
        ({"v_dim": 584}, "head dim 584: the CUDA kernels support multiples of 8 up to 576"),
        (
            {"dtype": "float32", "v_dim": 264, "bias": ONE, "bias_dtype": "float32", "requested": ("dbias",)},
            "float32 with head dims above 256: the CUDA kernels have no gradient of a bias",
        ),
        ({"v_dim": 264, "moving": ("query",)}, "head dims above 256: the CUDA kernels have no tangent"),
        ({"kv_len": 2**31}, "length"),
        ({"batch": 1, "q_len": 2**31 - 4096}, "length 2147479552: the CUDA kernels support at most 2147479551"),
        ({"batch": 2**20, "q_len": 2**20}, "too large"),
    ],
)
def test_refused(changes, reason):
    refused = problem(**changes)
    assert reason in _native.cuda_refusal(refused.encode())
    assert portable_scratch(True, **changes) == 0
    with pytest.raises(ValueError, match=reason):
        _native.cuda_plan(refused.encode(), False, "sm_90a")
    choice = jax_flash.choose_implementation(refused, "cuda")
    assert choice.implementation == "xla" and reason in choice.reason


def test_tangent_of_a_scale():
    """The tangent of the query, and the output, then have float32, which the kernels do not support for 16 bits."""
    for dtype, refused in (("bfloat16", True), ("float16", True), ("float32", False)):
        moving = problem(dtype=dtype, unrounded=True, moving=("query",))
        reason = _native.cuda_refusal(moving.encode())
        assert ("a differentiated scale" in reason) == bool(reason) == refused
        if not refused:
            assert _native.cuda_plan(moving.encode(), False, "sm_90a")


@pytest.mark.parametrize("dim", [8, 40, 128, 200, 256, 264, 576])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_not_refused(dim, dtype):
    accepted = problem(qk_dim=dim, v_dim=dim, dtype=dtype)
    assert _native.cuda_refusal(accepted.encode()) == ""
    assert jax_flash.choose_implementation(accepted, "cuda").implementation == "flash"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads(arch, deterministic):
    """dK, dV and dQ of head dims above 256 have CTAs of their own, and nothing is summed in memory."""
    wide = {"qk_dim": 576, "v_dim": 512, "deterministic": deterministic}
    family = "hopper" if arch == "sm_90a" else "ampere"
    assert kernels(arch, **wide) == [(f"{family}/wide_forward.cuh", "jax_flash_forward")]
    main, query = "ampere/wide_backward.cuh", "ampere/wide_backward_query.cuh"
    prepare, dq = "jax_flash_backward_prepare", (query, "jax_flash_backward_query")
    assert kernels(arch, True, **wide, **GRADIENTS) == [(main, prepare), (main, "jax_flash_backward"), dq]
    assert kernels(arch, True, **wide, requested=("dv",)) == [(main, prepare), (main, "jax_flash_backward")]
    assert kernels(arch, True, **wide, requested=("dq",)) == [("ampere/backward_prepare.cuh", prepare), dq]
    biased = {"bias": ONE, "bias_dtype": "bfloat16"}
    launches = kernels(arch, True, **wide, **biased, requested=("dq", "dbias"))
    assert launches[:2] == [("ampere/backward_prepare.cuh", prepare), dq]
    assert launches[2] == ("ampere/backward_bias.cuh", "jax_flash_backward_bias")
    assert scratch(arch, True, **wide, **GRADIENTS) == 2 * 4 * (2 * 8 * 512)  # L and D of every row


def test_wide_heads_on_hopper():
    """Up to head dim 512, each gradient has a kernel. They use the L and D of the kernel for Ampere."""
    wide = {"qk_dim": 512, "v_dim": 264}
    prepare = ("ampere/backward_prepare.cuh", "jax_flash_backward_prepare")
    main = "hopper/wide_backward.cuh"
    key, value = (main, "jax_flash_backward_key"), (main, "jax_flash_backward_value")
    query = ("hopper/wide_backward_query.cuh", "jax_flash_backward_query")
    assert kernels("sm_90a", True, **wide, **GRADIENTS) == [prepare, key, value, query]
    assert kernels("sm_90a", True, **wide, requested=("dv",)) == [prepare, value]
    assert kernels("sm_90a", True, **wide, requested=("dq", "dk")) == [prepare, key, query]
    assert scratch("sm_90a", True, **wide, **GRADIENTS) == 2 * 4 * (2 * 8 * 512)  # L and D of every row


@pytest.mark.parametrize(("dims", "reads"), [((576, 512), 1), ((256, 64), 0)])
def test_latent(dims, reads):
    """Kernels for head dims above 256 read the value from the latent. Others have the value as an operand."""
    latent = {"qk_dim": dims[0], "v_dim": dims[1], "kv_heads": 1, "latent": True}
    assert _native.cuda_reads_latent(problem(**latent).encode()) == reads
    assert fields("sm_80", **latent)["latent"] == reads


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "hopper"),
        ({"page": 64, "pages": 100, "key_value_seq_lengths": True}, "hopper"),
        ({"page": 32, "pages": 100}, "ampere"),  # tiles of 64 keys would cross pages
        ({"drop_threshold": 9}, "ampere"),
        ({"dtype": "float32"}, "ampere"),
        ({"v_dim": 576}, "ampere"),  # 9 boxes have no halves
    ],
)
def test_split_latent(changes, family):
    """Hopper has a split-KV forward of latents. Ampere's kernel merges the parts."""
    latent = {"qk_dim": 576, "v_dim": 512, "q_heads": 16, "kv_heads": 1, "latent": True, "q_len": 1, "kv_len": 4096}
    file = "wide_forward.cuh" if family == "hopper" else "wide_forward_split.cuh"
    merge = "ampere/forward_merge.cuh" if family == "hopper" else "ampere/wide_forward_split.cuh"
    found = kernels("sm_90a", **latent | changes)
    assert found == [(f"{family}/{file}", "jax_flash_forward"), (merge, "jax_flash_forward_merge")]


def test_grid_limit():
    many = {"batch": 2**27, "q_heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 16, "qk_dim": 256, "v_dim": 256}
    assert _native.cuda_refusal(problem(**many).encode()) == ""
    assert kernels("sm_80", **many)
    with pytest.raises(ValueError, match=r"jax_flash_backward_prepare would have 2147483648 blocks: .* too large"):
        kernels("sm_80", True, **many, **GRADIENTS)


def test_old_gpus_are_refused():
    with pytest.raises(ValueError, match="sm_75.*8.0"):
        kernels("sm_75")


# --- the plan ---


@pytest.mark.parametrize(
    ("arch", "dtype", "family"),
    [
        ("sm_80", "bfloat16", "ampere"),
        ("sm_89", "float16", "ampere"),
        ("sm_90a", "bfloat16", "hopper"),
        ("sm_90a", "float16", "hopper"),
        ("sm_80", "float32", "ampere"),
        ("sm_100", "bfloat16", "ampere"),
        ("sm_121", "float32", "ampere"),
    ],
)
def test_kernel_families(arch, dtype, family):
    assert kernels(arch, dtype=dtype) == [(f"{family}/forward.cuh", "jax_flash_forward")]
    assert kernels(arch, True, dtype=dtype, **GRADIENTS, **THREE_MASKS) == [
        (f"{family}/backward.cuh", "jax_flash_backward_prepare"),
        (f"{family}/backward.cuh", "jax_flash_backward"),
        (f"{family}/backward.cuh", "jax_flash_backward_finish"),
    ]


LISTS = {
    "block_mask": FULL_EXTENT,
    "q_block": 128,
    "kv_block": 128,
    "row_list_size": 6,
    "column_list_size": 6,
}  # up to 4 blocks
SEPARATE_KERNELS = [
    {"batch": 8, "kv_heads": 4},
    {"batch": 64, "kv_len": 256},
    {"batch": 64, "q_len": 2048},
    {"dtype": "float32"},
    {"qk_dim": 136},
    {"logits_soft_cap": 2.0},
    {"bias_dtype": "float32", "bias": FULL_EXTENT},
    {"is_causal": True, "segment_ids": True, "key_value_seq_lengths": True},
    {"local_window_size": WindowSize(100), "query_seq_lengths": True, "query_offset": True},
    {"drop_threshold": 9, "is_causal": True, "query_seq_lengths": True},
    {"drop_threshold": 9, "is_causal": True, "dlogsumexp": True},
    {**LISTS, "kv_heads": 4},
    {**LISTS, "batch": 64, "row_list_size": 5},
    {**LISTS, "column_list_size": 19},
    *({**LISTS, name: True} for name in ("is_causal", "segment_ids", "query_seq_lengths", "key_value_seq_lengths")),
    {**LISTS, "local_window_size": WindowSize(100)},
    {**LISTS, "drop_threshold": 9, "qk_dim": 128},
]


def test_single_kernel_backward():
    """On Hopper one kernel can compute the whole backward."""
    own = {"kv_heads": 8, **GRADIENTS}
    listed = (
        {"array": FULL_EXTENT},
        {**LISTS, "batch": 64},
        {**LISTS, "row_list_size": 3, "column_list_size": 18, "drop_threshold": 9},
    )
    two = ({"is_causal": True, "segment_ids": True}, {"drop_threshold": 9, "is_causal": True})
    for common in (
        {},
        {"is_causal": True},
        {"v_dim": 128},
        {"segment_ids": True},
        {"drop_threshold": 9},
        *two,
        *listed,
    ):
        assert kernels("sm_90a", True, **own, **common)[-1:] == [("hopper/backward.cuh", "jax_flash_backward")]
        assert fields("sm_90a", True, **own, **common)["fused_rows"] == 1
    for changes in SEPARATE_KERNELS:
        last = [kernel for _, kernel in kernels("sm_90a", True, **own | changes)][-3:]
        assert last == ["jax_flash_backward_prepare", "jax_flash_backward", "jax_flash_backward_finish"]


LONG = {"batch": 64, "q_len": 2**16, "kv_len": 2**16}


@pytest.mark.parametrize(
    ("changes", "sum_kv", "interleaved_heads"),
    [
        ({"kv_heads": 4}, True, False),
        ({"kv_heads": 1, "is_causal": True}, True, False),
        ({"kv_heads": 1, "drop_threshold": 9}, False, False),
        ({"kv_heads": 1, "drop_threshold": 9, "is_causal": True}, False, True),
        ({"kv_heads": 1, "drop_threshold": 9, "qk_dim": 96, "is_causal": True}, True, False),
        ({"batch": 8, "kv_heads": 4, "is_causal": True}, True, False),
        ({"batch": 64, "kv_heads": 4, "is_causal": True}, False, False),
        ({"batch": 64, "kv_heads": 1}, False, False),
        ({"batch": 64, "kv_heads": 1, "is_causal": True}, False, True),
        ({"batch": 64, "kv_heads": 1, "is_causal": True, "qk_dim": 256}, False, True),
        ({"batch": 64, "kv_heads": 1, "is_causal": True, "dtype": "float32"}, False, True),
        ({"batch": 64, "kv_heads": 8, "is_causal": True}, False, False),
        ({**LONG, "kv_heads": 2}, True, False),
        ({**LONG, "kv_heads": 1, "is_causal": True}, True, False),
        ({**LONG, "kv_heads": 2, "local_window_size": WindowSize(100)}, False, False),
        ({**LONG, "kv_heads": 2, "kv_len": 2**17}, False, False),
        ({**LONG, "kv_heads": 2, "q_len": 2**15, "kv_len": 2**15}, False, False),
        ({**LONG, "kv_heads": 2, "q_len": 2**15, "kv_len": 2**15, "qk_dim": 128, "v_dim": 128}, True, False),
        ({**LONG, "kv_heads": 4}, False, False),
    ],
    ids=str,
)
def test_grouped_heads(changes, sum_kv, interleaved_heads):
    """Hopper's backward has three loops for heads that share keys.

    It adds up dK and dV of separate heads (`sum_kv`) if the tiles of keys are few, or if many heads and rows use the
    same keys. Otherwise it processes causal heads of large groups together.
    """
    last = fields("sm_90a", True, **GRADIENTS | changes)
    assert (last["sum_kv"], last["interleaved_heads"]) == (sum_kv, interleaved_heads)
    launches = [kernel for _, kernel in kernels("sm_90a", True, **GRADIENTS | changes)]
    assert ("jax_flash_backward_finish_keys" in launches) == sum_kv


@pytest.mark.parametrize(
    ("block", "dim", "lengths"), [((192, 96), 80, (1920, 1920)), ((192, 112), 64, (1920, 2016))], ids=str
)
@pytest.mark.parametrize("batch", [1, 64])
def test_tiles_must_divide_blocks(block, dim, lengths, batch):
    """The plan uses the only tiles that divide the blocks, even if it prefers others for few tiles."""
    blocks = {
        "block_mask": FULL_EXTENT,
        "q_block": block[0],
        "kv_block": block[1],
        "row_list_size": 22,
        "column_list_size": 12,
    }
    changes = {**blocks, "batch": batch, "qk_dim": dim, "v_dim": dim, "q_len": lengths[0], "kv_len": lengths[1]}
    assert {file for file, _ in kernels(**changes)} == {"hopper/forward.cuh"}
    assert (fields(**changes)["rows"], fields(**changes)["cols"]) == block
    (reason,) = jax_flash.explain(problem(**changes, drop_threshold=9), arch="sm_90a").reasons
    assert reason.endswith(f"its tiles of {block[0]} x {block[1]} do not support dropout")


def test_float32_on_hopper():
    """Hopper's kernels compute in TF32 up to head dim 128. Their backward does not support a soft cap."""
    (hopper,), (ampere,) = kernels(dtype="float32", full_precision=False), kernels("sm_80", dtype="float32")
    assert hopper == ("hopper/forward.cuh", "jax_flash_forward")
    for changes in ({"full_precision": True}, {"v_dim": 136}):
        assert kernels(dtype="float32", **changes) == [ampere]
    beyond = ({"full_precision": True}, {"qk_dim": 136}, {"logits_soft_cap": 1.0})
    for changes, family in (({}, "hopper"), *((x, "ampere") for x in beyond)):
        names = [name for name, _ in kernels("sm_90a", True, dtype="float32", **GRADIENTS, **changes)]
        assert set(names) == {f"{family}/backward.cuh"}


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "hopper"),
        ({"qk_dim": 96, "v_dim": 96}, "hopper"),
        ({"qk_dim": 104}, "ampere"),
        ({"array": FULL_EXTENT}, "ampere"),
    ],
)
def test_bias_in_the_tf32_backward(changes, family):
    """Up to head dim 96 and without a mask, the registers suffice."""
    biased = {"bias_dtype": "float32", "bias": FULL_EXTENT}
    launches = kernels("sm_90a", True, dtype="float32", **biased, **GRADIENTS, **changes)
    files = {file for file, _ in launches} - {"scheduler/mask_blocks.cuh"}
    assert files == {f"{family}/backward.cuh"}


def test_kernel_family_from_environment(monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm80")
    assert kernels() == [("ampere/forward.cuh", "jax_flash_forward")]
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm70")
    with pytest.raises(ValueError, match="JAX_FLASH_CUDA_KERNELS=sm70"):
        kernels()
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "")
    assert kernels() == [("hopper/forward.cuh", "jax_flash_forward")]


def test_segments_kernel_runs_first():
    for backward, last in ((False, "jax_flash_forward"), (True, "jax_flash_backward_finish")):
        launches = kernels(backward=backward, segment_ids=True, **(GRADIENTS | THREE_MASKS if backward else {}))
        assert launches[0] == ("scheduler/segments.cuh", "jax_flash_segments")
        assert launches[-1][1] == last


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_split_kv_for_few_queries(arch):
    decoding = {"q_len": 1, "kv_len": 4096, "q_heads": 8, "kv_heads": 2}
    file = "ampere/forward_split.cuh"
    assert kernels(arch, **decoding) == [(file, "jax_flash_forward"), (file, "jax_flash_forward_merge")]
    assert fields(arch, **decoding)["packed"] == 4  # the heads of a group are rows of the same tile
    assert fields(arch)["packed"] == fields(arch, q_len=1)["packed"] == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_single_split_is_not_merged(arch):
    """It uses the tiles of split-KV, but only the split-KV kernel packs the heads of a group into a tile."""
    decoding = {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 8, "kv_heads": 8}
    assert kernels(arch, **decoding) == [("ampere/forward.cuh", "jax_flash_forward")]
    assert scratch(arch, **decoding) == 0
    fewer = fields(arch, **decoding | {"batch": 4})
    assert fewer["packed"] == 1
    assert fields(arch, **decoding) == fewer | {"packed": 0, "merged_rows": 0}
    assert len(kernels(arch, **decoding | {"batch": 256, "kv_heads": 2})) == 2


def test_block_masks_prevent_split_kv():
    blocks = {"block_mask": Extent(False, True, True, True), "q_block": 16, "kv_block": 64, "row_list_size": 66}
    decoding = {"q_len": 1, "kv_len": 4096, "column_list_size": 3, **blocks}
    assert kernels(**decoding) == [("ampere/forward.cuh", "jax_flash_forward")]
    assert scratch(**decoding) == portable_scratch(**decoding) == 0
    assert scratch(**LISTS) == portable_scratch(**LISTS) == 256  # Hopper's tile counter
    assert scratch("sm_80", **LISTS) == 0


def test_paged_prefill_needs_no_scratch():
    """Hopper's causal kernels use a tile counter, but pages use Ampere's kernels."""
    prefill = {"batch": 40, "is_causal": True, "key_value_seq_lengths": True, "query_offset": True}
    assert scratch(**prefill) == 256
    assert scratch(**prefill, page=16, pages=100) == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("program", "heads"), [("query;key;ge.i,0,1;result,2", 1), ("head;key;ge.i,0,1;result,2", 8)])
def test_mask_mod_is_not_materialised(program, heads, arch, backward):
    """Each block of 128 x 128 takes a number and an entry in each list, for each head that the mask distinguishes."""
    N, gradients = 16384, GRADIENTS if backward else {}
    masked = {"batch": 1, "q_len": N, "kv_len": N, "mask_mod": Program(program), **gradients}
    plain = scratch(arch, backward, **masked | {"mask_mod": None})
    most = 12 * heads * (N // 128) ** 2 + heads * 6 * 4 * N // 128 + 2048  # also the lists' headers, and rounding
    most += 8 * N // 8  # one bit for each possibly empty row of 8 heads
    assert plain <= scratch(arch, backward, **masked) <= plain + most
    given = {"block_mask": FULL_EXTENT, "q_block": 128, "kv_block": 128, "row_list_size": 4, "column_list_size": 4}
    for bits in ({"array": Extent(False, False, True, True)}, given):  # another mask array requires the bits
        assert scratch(arch, backward, **masked | bits) >= plain + N**2 // 8


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "splits"),
    [
        (1, 4, 131072, 264 // 4),
        (8, 4, 131072, 528 // 32),
        (1, 1, 131072, 264),
        (200, 4, 4096, 1),
        (1, 4, 1024, 8),
        (1, 4, 512, 0),
        (1000, 4, 511, 0),
        (1000, 4, 512, 1),  # few keys of many heads
    ],
)
def test_split_kv_scratch(batch, kv_heads, kv_len, splits):
    decoding = problem(batch=batch, q_len=1, kv_len=kv_len, kv_heads=kv_heads, v_dim=128)
    rounding = 512
    expected = splits * batch * decoding.q_heads * (128 + 2) * 4
    assert expected <= _native.cuda_explain(decoding.encode(), False, "sm_90a")[1] <= expected + rounding


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "stretches"),
    [
        (64, 8, 8192, 4 * 132 // 8),
        (64, 1, 8192, 4 * 132),
        (1024, 8, 512, 4 * 132 // 8),
        (2, 4, 1024, 2 * 1024 // (4 * 32)),  # at least four tiles of keys each
        (3, 600, 8192, 1),
    ],
)
def test_balanced_split_kv(batch, kv_heads, kv_len, stretches):
    """Each stretch of work except one can add a split to a tile of Q."""
    given = {"batch": batch, "q_heads": 4 * kv_heads, "kv_heads": kv_heads, "kv_len": kv_len, "q_len": 1}
    given |= {"qk_dim": 128, "v_dim": 128, "key_value_seq_lengths": True}
    assert fields("sm_90a", **given)["balanced"] == 1
    assert fields("sm_90a", **given | {"batch": 1})["balanced"] == 0
    assert fields("sm_90a", **given | {"key_value_seq_lengths": False})["balanced"] == 0
    expected = (batch + stretches) * kv_heads * 16 * (128 + 2) * 4
    assert expected <= scratch("sm_90a", **given) <= expected + batch * 8 + 1024


def test_split_kv_uses_one_wave():
    """A block takes 55 KiB plus CUDA's reserve of 1 KiB, of 227, 163 and 99 KiB of shared memory."""
    for arch, multiprocessors, fit in (("sm_90a", 132, 4), ("sm_80", 108, 2), ("sm_89", 132, 1)):
        given = {"batch": 64, "q_heads": 4, "kv_heads": 4, "kv_len": 8192, "q_len": 1, "key_value_seq_lengths": True}
        expected = (64 + fit * multiprocessors // 4) * 4 * 16 * (128 + 2) * 4
        assert expected <= scratch(arch, **given | {"qk_dim": 128, "v_dim": 128}) <= expected + 2048


def test_requested_gradients():
    assert fields(backward=True, requested=("dk",))["dq"] == 0
    assert fields(backward=True, requested=("dk",))["dk"] == 1
    assert fields(backward=True, requested=("dk",))["dv"] == 0
    assert "jax_flash_backward_finish" not in [kernel for _, kernel in kernels(backward=True, requested=("dk",))]


@pytest.mark.parametrize(
    ("changes", "empty"),
    [
        ({"is_causal": True}, False),
        ({"local_window_size": WindowSize(100, 0)}, False),
        ({"local_window_size": WindowSize(right=3)}, False),
        ({"local_window_size": WindowSize(100), "q_len": 612}, False),
        ({"local_window_size": WindowSize(100), "q_len": 613}, True),  # the last row's window is beyond the keys
        ({"query_offset": True}, False),
        ({"query_offset": True, "is_causal": True}, True),
        ({"key_value_seq_lengths": True}, True),
        ({"segment_ids": True}, True),
        ({"bias_dtype": "float32", "bias": FULL_EXTENT}, True),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_code_for_empty_rows(arch, changes, empty):
    assert fields(arch, True, **changes | GRADIENTS)["empty_rows"] == empty


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({}, "jax_flash_backward_finish"),
        (
            {
                "is_causal": True,
                "local_window_size": WindowSize(300),
                "query_seq_lengths": True,
                "drop_threshold": 3277,
            },
            "jax_flash_backward_finish",
        ),
        ({"qk_dim": 256}, "jax_flash_backward_finish"),
        ({"ranges": True, "key_value_seq_lengths": True}, "jax_flash_backward_finish"),
        ({"segment_ids": True}, "jax_flash_backward_query"),
        ({"logits_soft_cap": 2.0}, "jax_flash_backward_query"),
        ({"local_window_size": WindowSize(300), "query_offset": True}, "jax_flash_backward_query"),
    ],
    ids=str,
)
def test_deterministic_dq(changes, last):
    launches = _native.cuda_plan(problem(deterministic=True, **GRADIENTS, **changes).encode(), True, "sm_90a")
    assert launches[-1][1] == last
    _, _, main = next(launch for launch in launches if launch[1] == "jax_flash_backward")
    assert main["ordered"] == main["dq"] == (last == "jax_flash_backward_finish")


def test_deterministic_dq_alone():
    alone = kernels(backward=True, deterministic=True, requested=("dq",), logits_soft_cap=2.0)
    assert alone == [("ampere/backward_query.cuh", "jax_flash_backward_query")]


@pytest.mark.parametrize("extent", ["bnts", "1nts", "b11s", "11ts", "1111"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gradient_of_a_bias(arch, extent):
    bias = Extent(*(letter != "1" for letter in extent))
    biased = {"bias_dtype": "float32", "bias": bias}
    launches = kernels(arch, True, **biased, requested=("dq", "dk", "dv", "dbias"))
    family = "hopper" if arch == "sm_90a" else "ampere"
    own = "hopper" if arch == "sm_90a" and bias.rows and bias.columns else "ampere"
    prepare = "jax_flash_backward_prepare"
    assert launches[0] == (f"{family}/backward.cuh", prepare)
    assert (f"{own}/backward_bias.cuh", "jax_flash_backward_bias") in launches[1:]
    assert ((f"{own}/backward_bias.cuh", prepare) in launches) == (own != family)  # their row orders differ
    alone = kernels(arch, True, **biased, requested=("dbias",))
    assert alone[:2] == [(f"{own}/backward_bias.cuh", name) for name in (prepare, "jax_flash_backward_bias")]


def test_gradient_of_a_bias_on_hopper():
    """Its kernel supports 16-bit dtypes, head dims up to 128, and blocks of whole tiles. It splits to fill all SMs."""
    biased = {"bias_dtype": "bfloat16", "bias": Extent(False, True, True, True), "requested": ("dbias",)}
    for changes in (
        {},
        {"qk_dim": 128},
        {"kv_len": 513},
        {"logits_soft_cap": 2.0, "drop_threshold": 9},
        {"array": FULL_EXTENT},
    ):
        assert ("hopper/backward_bias.cuh", "jax_flash_backward_bias") in kernels("sm_90a", True, **biased | changes)
    torn = {"block_mask": FULL_EXTENT, "q_block": 64, "kv_block": 128, "row_list_size": 6, "column_list_size": 10}
    for changes in ({"dtype": "float32"}, {"v_dim": 136}, torn):
        assert ("ampere/backward_bias.cuh", "jax_flash_backward_bias") in kernels("sm_90a", True, **biased | changes)
    alphafold = {"batch": 256, "q_len": 256, "kv_len": 256, "qk_dim": 32, "v_dim": 32, **biased}  # 8 heads, 32 tiles
    rows, dbias = 256 * 8 * 256, 8 * 256 * 256
    assert scratch("sm_90a", True, **alphafold) == 4 * (3 * rows + 4 * dbias) + rows // 8  # one bit per empty row
    assert scratch("sm_90a", True, **alphafold | {"batch": 1}) == (4 * 3 * 8 + 1) * 256


@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len"])
def test_empty_arrays(empty):
    for backward in (False, True):
        assert kernels(backward=backward, segment_ids=True, **{empty: 0}, **GRADIENTS) == []
        assert portable_scratch(backward, segment_ids=True, **{empty: 0}, **GRADIENTS) == 0


def test_compile_time_fields():
    features = {
        "is_causal": {"causal": 1},
        "local_window_size": {"window": 1},
        "query_seq_lengths": {"q_lengths": 1},
        "key_value_seq_lengths": {"kv_lengths": 1},
        "query_offset": {"query_offset": 1},
        "logits_soft_cap": {"soft_cap": 1},
        "drop_threshold": {"dropout": 1},
    }
    plain = fields()
    for field, expected in features.items():
        changed = fields(**{field: WindowSize(1) if field == "local_window_size" else 1})
        tiles = {"rows", "cols", "groups", "stages"}
        assert {k: v for k, v in changed.items() if plain[k] != v and k not in tiles} == expected, field
    assert fields(full_precision=True)["full_precision"] == 0  # only float32 depends on it
    assert fields(dtype="float32", full_precision=True)["full_precision"] == 1
    # The deterministic backward needs the same forward.
    assert fields(deterministic=True) == plain


def test_scratch_is_linear_in_length():
    def backward(length, arch="sm_90a", **changes):
        return scratch(arch, True, q_len=length, kv_len=length, **changes)

    assert scratch() == portable_scratch() == 0
    rows = 2 * 8 * 4096
    for arch in ("sm_80", "sm_90a"):
        alone = GRADIENTS | {"deterministic": True, "logits_soft_cap": 2.0}
        assert backward(4096, arch, **alone) == 4 * rows * 2  # two numbers per row
        assert backward(4096, arch, **alone, segment_ids=True) * 2 == backward(8192, arch, **alone, segment_ids=True)
    assert backward(4096, "sm_80", **GRADIENTS) == 4 * rows * (64 + 2)  # and dQ in float32
    biased = {"bias_dtype": "float32", "bias": FULL_EXTENT, "deterministic": True}
    assert backward(4096, **GRADIENTS, **biased) == 4 * rows * 3 + rows // 8  # and one bit per row
    assert backward(4096, "sm_80", **GRADIENTS, **biased) == 4 * rows * 2


@pytest.mark.parametrize(
    ("changes", "multiprocessors", "heads"),
    [
        ({}, 132, 9 * 4),  # 9 heads have 144 tiles of keys for 132 SMs
        ({}, 100, 7 * 4),
        ({"is_causal": True}, 132, 9 * 6),
        ({"is_causal": True}, 33, 3 * 6),
        ({"batch": 1}, 132, 16),
    ],
)
def test_hopper_backward_reuses_scratch(changes, multiprocessors, heads):
    """A single-kernel backward holds scratch for only some of the heads."""
    paper = {"batch": 64, "q_heads": 16, "kv_heads": 16, "q_len": 2048, "kv_len": 2048, **GRADIENTS}
    all_heads = 16 * (paper | changes)["batch"]
    counters = -(-4 * (2 + 2 * all_heads) // 256) * 256
    expected = counters + 4 * heads * 2048 * (64 + 2)
    assert scratch("sm_90a", True, multiprocessors, **paper | changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 32, "kv_heads": 8},
        {"batch": 32, "kv_heads": 8, "is_causal": True, "segment_ids": True},
        {"kv_heads": 1},
        {"kv_heads": 4, "batch": 8, "is_causal": True},
        {"block_mask": FULL_EXTENT, "q_block": 128, "kv_block": 128, "row_list_size": 6, "column_list_size": 6},
        {"bias_dtype": "float32", "bias": Extent(False, False, True, True), "requested": ("dq", "dk", "dv", "dbias")},
        {"q_len": 1, "kv_len": 65536},
        {"q_len": 64, "kv_len": 4096},
        {"batch": 1, "q_heads": 128, "kv_heads": 1, "q_len": 1, "kv_len": 4096, "qk_dim": 576, "v_dim": 512},
        {"dtype": "float32", "full_precision": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_portable_scratch(changes, backward):
    """It equals the maximum over all GPUs."""
    changes = {**GRADIENTS, **changes} if backward else {k: x for k, x in changes.items() if k != "requested"}
    gpus = [(arch, n) for arch in ("sm_80", "sm_89", "sm_90a", "sm_100") for n in (1, 20, 108, 132, 148, 192, 500)]
    most = portable_scratch(backward, **changes)
    assert max(scratch(arch, backward, n, **changes) for arch, n in gpus) <= most
    archs = ("sm_80", "sm_89", "sm_90a")
    assert most in {scratch(arch, backward, n, **changes) for arch in archs for n in range(1, 193)}


def test_plan_depends_on_multiprocessors():
    few = {"batch": 1, "q_len": 1024, "kv_len": 1024}  # 32 tiles of 256 rows, 43 of 192
    tiles = [fields("sm_90a", multiprocessors=n, **few)["rows"] for n in (20, 132)]
    assert tiles[0] > tiles[1]
    keys = {"kv_heads": 4, "batch": 8, **GRADIENTS}  # 128 tiles of keys
    assert [fields("sm_90a", True, n, **keys)["sum_kv"] for n in (132, 192)] == [0, 1]
    decoding = {"q_len": 1, "kv_len": 2**17}
    assert scratch("sm_90a", False, 64, **decoding) * 2 == scratch("sm_90a", False, 128, **decoding)


# --- lowering ---


def lowered(dtype=jnp.bfloat16, dim=64, **options) -> str:
    """Lower a forward and a backward for CUDA. Return the module's text."""
    q = jax.ShapeDtypeStruct((2, 128, 4, dim), dtype)

    def loss(q, k, v):
        return jax_flash.dot_product_attention(q, k, v, **options).astype(jnp.float32).sum()

    return jax.export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=EXPORT_CHECKS,
    )(q, q, q).mlir_module()


@pytest.mark.parametrize("precision", ["highest", "float32", "F32_F32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9"])
def test_precisions_above_tf32(precision):
    with jax.default_matmul_precision(precision):
        assert lowered(jnp.float32).count("full_precision=1") == 2


@pytest.mark.parametrize("precision", [None, "default", "high", "tensorfloat32", "TF32_TF32_F32", "BF16_BF16_F32"])
def test_precisions_that_allow_tf32(precision):
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
def test_refused_calls_lower_to_plain_jax(case, x64):
    assert "@jax_flash_" not in lowered(**case)
    assert "@jax_flash_forward" in lowered(**case, implementation="flash")  # the handler reports the error


def test_warning_if_only_a_gradient_is_plain_jax():
    """In float32, kernels for wide heads compute the gradients of Q, K and V with a bias, but not the bias's."""

    def loss(q, bias):
        return jax_flash.dot_product_attention(q, q, q, bias=bias).sum()

    def lower(wrt):
        gradient = jax.jit(jax.grad(loss, wrt)).trace(jnp.ones((1, 16, 1, 512)), jnp.ones((16, 16)))
        return gradient.lower(lowering_platforms=("cuda",)).as_text()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "@jax_flash_backward" in lower(0)
    message = "the gradient of attention is computed in plain JAX, which is slower: float32 with head dims above 256"
    with pytest.warns(UserWarning, match=message):
        text = lower(1)
    assert "@jax_flash_forward" in text and "@jax_flash_backward" not in text


def test_deterministic_is_part_of_the_problem():
    assert "deterministic=0" in lowered()
    assert "deterministic=1" in lowered(deterministic=True)


def test_exported_programs_use_portable_scratch(monkeypatch):
    anywhere = []
    monkeypatch.setattr(_native, "cuda_scratch_bytes", lambda problem, backward, x: anywhere.append(x) or 256)
    assert "xui8>" in lowered()
    assert anywhere == [True, True]
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    attend = jax.jit(jax_flash.dot_product_attention).trace(q, q, q)
    assert "xui8>" in attend.lower(lowering_platforms=("cuda",)).as_text()
    assert anywhere == [True, True, False]


def test_lowering_starts_compilation(monkeypatch):
    """Each pass compiles once for each architecture of the GPUs. Errors are left to the handler."""
    compiled = []

    def compile(problem, backward, arch):
        compiled.append((backward, arch))
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(_native, "cuda_devices", lambda: [(9, 0, 132), (9, 0, 78), (8, 0, 108)])
    monkeypatch.setattr(_native, "cuda_cache", compile)
    compilation.start.cache_clear()

    def loss(q):
        attend = functools.partial(jax_flash.dot_product_attention, implementation="flash")
        return (attend(q, q, q) + attend(q, q, q)).sum()

    jax.jit(jax.grad(loss)).trace(jnp.ones((1, 48, 2, 64))).lower(lowering_platforms=("cuda",))
    for thread in threading.enumerate():
        if thread.name == "jax_flash compiler":
            thread.join()
    assert sorted(compiled) == [(backward, arch) for backward in (False, True) for arch in ("sm_80", "sm_90a")]
    assert compilation.start.cache_info().misses == 2


@pytest.mark.parametrize(
    "failing",
    [
        lambda patch: patch(_native, "cuda_devices", lambda: [(7, 5, 40), (8, 0, 108)]),  # one is too old
        lambda patch: patch(_native, "cuda_arch", raises(RuntimeError("NVRTC was not found"))),
        lambda patch: patch(threading.Thread, "start", raises(RuntimeError("can't start new thread"))),
    ],
    ids=["old GPU", "no NVRTC", "no thread"],
)
def test_early_compilation_errors_do_not_reach_lowering(monkeypatch, failing):
    monkeypatch.setattr(_native, "cuda_devices", lambda: [(9, 0, 132)])
    monkeypatch.setattr(_native, "cuda_cache", lambda *call: True)
    failing(monkeypatch.setattr)
    compilation.start.cache_clear()
    free = compilation._free._value
    compilation.start("problem", False)
    for thread in threading.enumerate():
        if thread.name == "jax_flash compiler":
            thread.join()
    assert compilation._free._value == free


def raises(error):
    def function(*args, **options):
        raise error

    return function


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("batch", "q_heads"), [(2, 128), (67, 128), (64, 16)])
def test_scratch_of_split_latents(batch, q_heads, lengths):
    """The results of all parts of the keys have at most 64 MiB, also on a GPU with one SM, or of any size."""
    latent = {"qk_dim": 576, "v_dim": 512, "q_heads": q_heads, "kv_heads": 1, "latent": True, "q_len": 1}
    latent |= {"batch": batch, "kv_len": 65536, "key_value_seq_lengths": lengths}
    statistics = 2**20
    assert 0 < scratch("sm_90a", multiprocessors=1, **latent) <= scratch("sm_90a", **latent) < 2**26 + statistics
    assert portable_scratch(**latent) > 0

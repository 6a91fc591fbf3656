"""A few cases of every kernel, and errors that the emulator finds in broken kernels.

`test_emulator.py` runs this file in processes in which the CPU emulates a GPU:
JAX_FLASH_EMULATE=sm_90 pytest tests/native/emulator_checks.py
"""

import ctypes
import dataclasses
import itertools
import os
import pathlib
import re

import emulator
import infinite_bias
import jax
import jax.numpy as jnp
import latents
import numpy as np
import packs
import pages
import parts
import programs
import pytest
import standard
from accuracy import assert_accurate, by_numpy, check, check_tf32, errors
from block_masks import sparse
from cases import DIFFERENTIATED, Case, problem, upcast, with_gradients
from plans import changed

import jax_flash
from jax_flash import BlockMask, _native

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "cuda_src" / "kernels"
SHARED = ("common/dtype.h", "common/host_device.h", "common/ops.h", "cuda_src/contract.h")  # used by the host, too
MULTIPROCESSORS = os.environ.get("JAX_FLASH_EMULATE_MULTIPROCESSORS", "")
hopper = pytest.mark.skipif(os.environ["JAX_FLASH_EMULATE"] != "sm_90", reason="with Hopper's instructions only")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(B=1, T=300, S=400, D=64, E=64, causal=True, offset=True, sinks=2.0), "bfloat16"),
        (Case(B=1, T=300, S=400, N=2, K=2, D=64, E=64, causal=True, dropout=0.2), "bfloat16"),
        (Case(B=1, T=300, S=300, N=2, K=2, D=128, E=104, window=(150, 20), segments=True), "float16"),
        (Case(B=1, T=300, S=400, D=128, E=128, window=(150, 20), segments=True), "float16"),
        (Case(B=1, T=150, S=200, N=2, K=1, D=256, E=256, causal=True, dropout=0.2, sinks=2.0), "bfloat16"),
        (Case(B=1, T=150, S=200, N=2, K=1, D=64, E=64, dropout=0.003), "bfloat16"),
        (Case(B=1, T=300, S=70, N=3, K=3, D=256, E=256), "bfloat16"),
        (Case(B=1, T=300, S=100, N=3, K=1, D=192, E=192), "float16"),
        (Case(T=150, S=4500, N=1, K=1, D=8, E=8, segments="mixed"), "bfloat16"),
        (Case(T=70, S=90, D=72, E=40, bias="1nts", mask="b11s", dropout=0.1), "bfloat16"),
        (Case(T=70, S=90, D=64, E=64, soft_cap=2.0, lengths=True, deterministic=True, sinks=2.0), "bfloat16"),
        (Case(B=1, T=150, S=200, N=2, K=1, D=128, E=128, soft_cap=5.0, causal=True, sinks=2.0), "bfloat16"),
        (Case(T=70, S=90, D=40, E=64, causal=True, bias="bn1s", deterministic=True, sinks=2.0), "float32"),
        (Case(T=3, S=1100, N=8, causal=True, offset=True, lengths=True, dropout=0.2, sinks=2.0), "bfloat16"),
        (Case(B=1, T=16, S=1100, N=3, K=1, D=64, E=40, mask="1n1s", bias="bnts", segments=True), "float32"),
        (Case(B=2, T=150, S=260, N=1, K=1, D=64, E=64, window=(90, 20), traced=True, lengths=True), "bfloat16"),
        # wide heads in slices, and with few queries
        (Case(B=1, T=70, S=80, N=2, K=1, D=264, E=328, causal=True, dropout=0.2, sinks=2.0), "bfloat16"),
        (Case(B=2, T=1, S=600, N=4, K=1, D=576, E=512, causal=True, offset=True, lengths=True), "bfloat16"),
        # sinks in the single-kernel backward, with tiles of a bias, and with lists of blocks
        (Case(B=1, T=300, S=400, N=4, K=2, D=64, E=64, segments=True, sinks=2.0), "bfloat16"),
        (Case(B=1, T=140, S=160, N=2, K=1, D=64, E=64, bias="1nts", mask="b11s", sinks=2.0), "bfloat16"),
        (sparse(128, 128, B=1, T=300, S=300, N=2, K=1, D=64, E=64, heads=2, dropout=0.2, sinks=2.0), "bfloat16"),
    ],
    ids=str,
)
def test_case(case, dtype):
    check(case, dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        (Case(T=150, S=210, N=2, K=1, D=64, E=64, lengths=True), ("query", "key", "value")),
        (sparse(128, 64, B=1, T=150, S=300, N=2, K=1, D=64, E=64), ("query", "key", "value")),
        (Case(B=1, T=150, S=210, N=2, K=1, D=128, E=128, causal=True), ("value",)),
        (Case(B=1, T=70, S=90, N=2, K=1, D=72, E=200), ("query", "key", "value")),  # Ampere's kernel
    ],
    ids=str,
)
def test_tangent(case, inputs):
    """Padding may hold NaN, and so may its tangents."""
    arrays = case.arrays("bfloat16")
    tangents = {name: np.cos(3 * arrays[name].astype(np.float32)).astype(arrays[name].dtype) for name in inputs}

    def tangent(implementation, arrays, tangents):
        def attention(moved):
            return jax_flash.dot_product_attention(**arrays | moved, **case.options, implementation=implementation)

        return np.asarray(jax.jvp(attention, ({name: arrays[name] for name in inputs},), (tangents,))[1], np.float32)

    exact = tangent("reference", upcast(arrays), upcast(tangents))
    if case.lengths:
        padding = np.arange(case.S) >= arrays["key_value_seq_lengths"][:, None]
        for of in (arrays, tangents):
            for name in ("key", "value"):
                of[name] = of[name].copy()
                of[name][padding] = np.nan
    result = tangent("flash", arrays, tangents)
    np.testing.assert_allclose(result, exact, rtol=0, atol=4e-2 * np.abs(exact).max())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(B=1, T=140, S=160, D=64, E=64, bias="1nts", dropout=0.2), "bfloat16"),
        (Case(T=150, S=300, N=2, K=2, D=128, E=128, soft_cap=2.0, mask="b11s", lengths=True), "bfloat16"),
        (Case(T=3, S=1100, N=4, K=2, causal=True, offset=True, bias="1n1s"), "float32"),
        (Case(B=1, T=150, S=140, N=2, K=1, D=64, E=64, sinks=2.0, dropout=0.2), "bfloat16"),
        (Case(T=3, S=1100, N=4, K=2, sinks=2.0, causal=True, offset=True), "float32"),
    ],
    ids=str,
)
def test_score_programs(case, dtype):
    """A score_mod and a mask_mod: with tiles of a bias, with the mask as a block mask, and with split-KV."""
    programs.check(case, lambda: (programs.relative_table(case), programs.kinds_of_heads(case)), "flash", dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype", "program"),
    [
        (Case(B=1, T=160, S=320, N=2, K=1, D=64, E=64, causal=True, dropout=0.2), "bfloat16", programs.alibi),
        (Case(B=1, T=160, S=320, N=1, K=1, D=128, E=128, dropout=0.01), "bfloat16", programs.relative_table),
        (Case(B=1, T=32, S=192, N=1, K=1, D=64, E=40, dropout=0.2), "float32", programs.kinds_of_heads),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_part(case, dtype, program):
    """Compute a part of a sequence that is divided over devices."""
    mod = program(case)
    tolerance = 2e-2 if dtype == "bfloat16" else 5e-5
    parts.check(case, dtype, tolerance, **{mod.kind: mod.make(*map(jnp.asarray, mod.arrays))})


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(B=1, T=320, S=352, N=2, K=1, D=64, E=64, window=(200, 3), segments="mixed", dropout=0.2), "bfloat16"),
        (Case(B=1, T=160, S=192, N=1, K=1, D=64, E=40, window=(90, 20), segments="mixed", dropout=0.2), "float32"),
    ],
    ids=str,
)
def test_chunks(case, dtype):
    """Ranges together with segment ids, and the dropout mask by tables of tiles."""
    parts.check_chunks(case, dtype, 2e-2 if dtype == "bfloat16" else 5e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "case", "dtype"),
    [
        ((100, 0, 200, 3), (100, 0, 200, 3), Case(N=2, K=1, D=64, E=64, causal=True), "bfloat16"),
        ((200, 60, 40), (130, 300, 0), Case(N=1, K=1, D=128, E=128, window=(90, 20), sinks=2.0), "float16"),
        ((70, 130), (140, 70), Case(N=2, K=2, D=64, E=64, causal=True, dropout=0.2, soft_cap=2.0), "bfloat16"),
        ((60, 90), (140, 80), Case(N=2, K=1, D=192, E=128, causal=True), "bfloat16"),
        ((0, 200, 40, 90), (130, 300, 0, 80), Case(N=2, K=1, D=128, E=64, deterministic=True), "bfloat16"),
        # all keys of a tile are hidden from a tile of rows that sees the keys before and after
        ((10, 0, 10, 0), (10, 390, 10, 205), Case(N=1, K=1, D=256, E=256, deterministic=True), "bfloat16"),
        ((1, 1), (100, 400), Case(N=1, K=1, D=64, E=64, causal=True, window=(64, 0), deterministic=True), "bfloat16"),
        ((10, 0), (10, 400), Case(N=1, K=1, D=64, E=64, deterministic=True), "bfloat16"),
        ((70, 90), (140, 80), Case(N=2, K=1, D=64, E=40, causal=True, deterministic=True), "float32"),
        ((1, 1, 0, 2), (700, 20, 30, 350), Case(N=8, K=2, D=64, E=64, causal=True), "bfloat16"),
    ],
    ids=str,
)
def test_pack(q_lengths, k_lengths, case, dtype):
    packs.check(packs.Pack(q_lengths, k_lengths, 5, case), dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("lengths", "page", "case", "dtype"),
    [
        ((1500, 3, 0, 700), 64, Case(T=1, N=8, K=2, D=64, E=64), "bfloat16"),  # split-KV
        ((1100, 40), 16, Case(T=3, N=4, K=2, D=128, E=128, window=(600, 0), sinks=2.0), "float16"),
        ((300, 130), 48, Case(T=100, N=2, K=1, D=64, E=40, soft_cap=2.0), "bfloat16"),
        ((1030, 60), 256, Case(T=2, N=2, K=1, D=256, E=256), "float32"),
        # more sequences than lanes of a warp, some empty, and more queries of a head group than rows of a tile of Q;
        # 4 and 8 rows in a block of the merge, the last one incomplete; many heads with fewer than 1024 keys; more
        # splits of a row than its warps have lanes
        ((0, *(3 * b % 40 for b in range(38)), 1000, 0), 32, Case(T=1, N=26, K=2, D=64, E=64), "bfloat16"),
        ((900, 0, 500), 32, Case(T=15, N=52, K=4, D=128, E=128), "float16"),
        ((*(3 * b % 40 for b in range(9)), 20000), 32, Case(T=2, N=32, K=1, D=8, E=8), "float32"),
    ],
    ids=str,
)
def test_pages(lengths, page, case, dtype):
    pages.check(pages.Cache(lengths, page, case), dtype)


PROGRAMS = [
    (programs.alibi, Case(B=1, T=150, S=140, D=64, E=64), "bfloat16"),
    (programs.alibi, Case(B=1, T=150, S=140, D=64, E=64, causal=True, soft_cap=2.0), "float16"),
    (programs.alibi, Case(T=70, S=150, D=128, E=128, offset=True, lengths=True), "bfloat16"),
    (programs.relative_table, Case(B=1, T=150, S=140, N=2, K=1, D=256, E=256, causal=True), "bfloat16"),
    (programs.alibi, Case(B=1, T=150, S=140, N=2, K=1, D=64, E=40, causal=True), "tf32"),
    (programs.relative_table, Case(T=150, S=140, D=64, E=64, bias="1nts", dropout=0.2), "bfloat16"),
    (programs.relative_table, Case(T=70, S=150, D=128, E=96, mask="b1ts"), "float16"),
    (programs.relative_table, Case(T=70, S=150, D=64, E=64, segments=True), "tf32"),
    (programs.soft_cap, Case(B=1, T=150, S=140, D=64, E=64), "bfloat16"),
    (programs.soft_cap, Case(B=1, T=150, S=140, D=128, E=128, causal=True), "float16"),
    (programs.soft_cap, Case(B=1, T=150, S=140, D=64, E=64, mask="b1ts", dropout=0.2), "bfloat16"),
    (programs.soft_cap, Case(B=1, T=70, S=140, N=2, K=1, D=192, E=128), "bfloat16"),
    (programs.masked_by_score, Case(B=1, T=150, S=140, D=64, E=64), "bfloat16"),
    (programs.masked_by_score, Case(B=1, T=70, S=140, N=2, K=1, D=256, E=256), "bfloat16"),
    (programs.log_gelu, Case(B=1, T=150, S=140, D=64, E=64), "bfloat16"),
    (programs.low_rank, Case(B=1, T=150, S=140, D=64, E=64), "float16"),
    (programs.relative_table, Case(T=70, S=150, N=2, K=1, D=64, E=64, causal=True, offset=True), "bfloat16"),
    (programs.wavy, Case(B=1, T=150, S=140, D=64, E=64, dropout=0.3), "bfloat16"),
    (programs.alibi, Case(B=1, T=150, S=140, D=128, E=128, sinks=2.0, causal=True, soft_cap=2.0), "float16"),
    # tiles of 64 keys with tiles of a bias
    (programs.relative_table, Case(B=1, T=150, S=304, N=2, K=1, D=64, E=64, bias="1nts", dropout=0.2), "bfloat16"),
    (
        programs.masked_by_score,
        sparse(128, 128, B=1, T=300, S=304, D=64, E=64, bias="1nts", window=(150, 20)),
        "bfloat16",
    ),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("program", "case", "dtype", "constant"),
    [(*x, constant) for x, constant in zip(PROGRAMS, itertools.cycle((False, True)), strict=False)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_backward_of_score_programs(program, case, dtype, constant):
    """Derivatives that depend on the score or not, with and without gradients of captured arrays."""
    made = program(case)
    mods = (made,) if isinstance(made, programs.Mod) else made
    if constant:
        mods = programs.constant(mods)
    programs.check(case, lambda: mods, "flash", dtype)


MASKED = [
    (programs.causal, Case(B=1, T=300, S=300, N=2, K=2, D=64, E=64), "bfloat16"),
    (programs.sliding_window, Case(B=1, T=300, S=300, N=2, K=1, D=128, E=128), "float16"),
    (programs.documents, Case(T=300, S=280, N=2, K=1, D=64, E=64, causal=True, dropout=0.2), "bfloat16"),
    (programs.documents, Case(B=1, T=150, S=300, D=128, E=96, lengths=True, offset=True), "bfloat16"),
    (programs.documents, Case(B=1, T=150, S=300, N=2, K=2, D=256, E=256, segments=True), "bfloat16"),
    (programs.prefix_lm, Case(T=150, S=300, N=2, K=1, D=64, E=64, window=(150, 20), soft_cap=2.0), "bfloat16"),
    (programs.prefix_lm, Case(T=70, S=150, D=128, E=128, bias="1nts"), "bfloat16"),
    (programs.natten_morton, Case(B=1, T=300, S=300, N=2, K=1, D=64, E=64), "bfloat16"),  # 53 instructions
    (programs.kinds_of_heads, Case(B=1, T=150, S=300, D=64, E=64, deterministic=True), "bfloat16"),
    (programs.kinds_of_heads, Case(B=1, T=150, S=140, D=64, E=64), "tf32"),
    (programs.shared_prefix, Case(T=150, S=150, N=2, K=1, D=128, E=128), "tf32"),
    (programs.documents, Case(B=2, T=3, S=1100, N=4, K=2, D=64, E=64), "bfloat16"),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("program", "case", "dtype"), MASKED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_mask_programs(program, case, dtype):
    """The kernels evaluate the mask_mod in blocks that are neither empty nor full."""
    mods = (program(case),)
    programs.check(case, lambda: mods, "flash", dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(T=150, S=140, N=2, K=1, D=64, E=64, causal=True), "float16"),
        (Case(T=70, S=150, N=2, K=2, D=128, E=128, window=(60, 20), dropout=0.2), "float16"),
        (Case(T=131, S=77, N=2, K=1, D=64, E=64, segments=True, mask="b1ts"), "float16"),
        (Case(B=1, T=150, S=140, N=2, K=1, D=192, E=192, lengths=True), "float16"),
        (Case(B=1, T=70, S=150, N=2, K=1, D=64, E=64), "tf32"),
    ],
    ids=str,
)
def test_captured_gradients_with_cancellation(case, dtype):
    """The gradients of the captured arrays are sums, and their terms mostly cancel."""
    mods = (programs.sums(case),)
    programs.check(case, lambda: mods, "flash", dtype, tolerance_dtype="bfloat16")


RAMPS = [
    (programs.ramps, Case(B=1, T=150, S=140, N=2, K=1, D=128, E=128, window=(70, 30)), "bfloat16"),
    (programs.ramps, Case(B=1, T=150, S=230, N=2, K=1, D=192, E=192, lengths=True, dropout=0.2), "float16"),
    (programs.one_way_ramps, Case(B=1, T=150, S=140, N=2, K=1, D=64, E=64, causal=True), "bfloat16"),
    (programs.one_way_ramps, Case(B=1, T=150, S=140, N=2, K=1, D=128, E=64, mask="b1ts"), "tf32"),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("program", "case", "dtype"), RAMPS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_ramps(program, case, dtype):
    mods = programs.constant((program(case),))
    programs.check(case, lambda: mods, "flash", dtype)


TESTED_ABOVE = {programs.sums, *(program for program, *_ in PROGRAMS + MASKED + RAMPS)}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "program", [x for x in programs.SCORES + programs.MASKS if x not in TESTED_ABOVE], ids=lambda x: x.__name__
)
def test_other_programs(program):
    """The remaining programs, with the gradients of all captured arrays."""
    case = Case(B=1, T=144, S=144, N=2, K=1, D=64, E=64)
    mods = (program(case),)
    programs.check(case, lambda: mods, "flash", "bfloat16")


@pytest.mark.usefixtures("device")
def test_ramps_far_from_the_diagonal():
    """With a query offset, known only at run time, the kernel converts each entry's distance to float separately."""
    case = Case(B=1, T=70, S=9000, N=1, K=1, D=64, E=64)
    arrays, cotangents = case.arrays("bfloat16"), case.cotangents("bfloat16")
    mods = programs.constant((programs.alibi(case),))
    found = programs.run(case, lambda: mods, arrays, cotangents, "flash")
    by_entry = dataclasses.replace(case, offset=True)
    given = arrays | {"query_offset": np.zeros(1, np.int32)}
    expected = programs.run(by_entry, lambda: mods, given, cotangents, "flash")
    programs.assert_accurate(found, expected, "bfloat16")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("head_dim", "constant"), [(64, False), (64, True), (128, True), (256, True)])
def test_loads_with_a_query_offset(head_dim, constant):
    """Indices are not clamped in tiles whose global query positions are valid key positions.

    Other offsets put the queries before the keys, after the keys, where a sum with the offset wraps around, and where
    the index is negative: `table[-1]` is the last entry.
    """
    case = Case(B=6, T=260, S=500, N=1, K=1, D=head_dim, E=head_dim, offset=True, logsumexp=False)
    table = np.random.default_rng(1).normal(size=2 * case.S - 1).astype(np.float32)
    mod = programs.Mod("score_mod", lambda table: lambda s, b, h, q, k: s + table[q - k + case.S - 1], (table,))
    mods = programs.constant((mod,)) if constant else (mod,)
    arrays, cotangents = case.arrays("bfloat16") | programs.captured(mods), case.cotangents("bfloat16")
    arrays["query_offset"] = np.array([0, 240, -100, 400, -1500, 2**31 - 200], np.int32)
    results = programs.run(case, lambda: mods, arrays, cotangents, "flash")
    programs.assert_accurate(results, programs.exact(case, lambda: mods, arrays, cotangents), "bfloat16")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_undefined_masked_scores(head_dim):
    """Masked entries do not contribute to any gradient, even if their derivatives are not finite."""
    case = Case(B=1, T=150, S=150, N=2, K=1, D=head_dim, E=head_dim, causal=True)
    arrays, cotangents = case.arrays("bfloat16"), case.cotangents("bfloat16")
    found, expected = (programs.constant(programs.undefined_where_masked(case, *of)) for of in ((), (jnp.abs,)))
    results = programs.run(case, lambda: found, arrays, cotangents, "flash")
    programs.assert_accurate(results, programs.exact(case, lambda: expected, arrays, cotangents), "bfloat16")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=40, S=150, N=2, K=2, D=8, E=8),
        Case(B=1, T=3, S=1100, N=2, K=1, D=8, E=8),  # evaluates mask_mod for every entry
    ],
    ids=str,
)
def test_captured_bools(case):
    programs.check(case, lambda: programs.flags(case), "flash")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("T", "S"), [(1100, 200), (200, 1100)])
def test_many_lists(T, S):
    """With nine block rows or columns, sorting their lists has a first, a middle and a last part."""
    check(sparse(128, 128, B=1, T=T, S=S, N=2, K=1, D=8, E=8, heads=2), "bfloat16")


@pytest.mark.usefixtures("device")
def test_largest_blocks():
    """The sum of the block size and the length exceeds 31 bits."""
    block_mask = BlockMask.from_dense(np.array([[False], [True]]), q_len=150, kv_len=4500, kv_block=2**31 - 4224)
    arrays = Case(B=1, T=150, S=4500, N=1, K=1, D=8, E=8).arrays("bfloat16")
    expected, actual = (
        np.asarray(jax_flash.dot_product_attention(**arrays, **options), np.float32)
        for options in ({"implementation": "reference"}, {"implementation": "flash", "block_mask": block_mask})
    )
    np.testing.assert_allclose(actual[:, 128:], expected[:, 128:], rtol=0.02, atol=2e-3)
    assert not actual[:, :128].any()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("T", "S", "N"), [(1, 73 * 64, 1), (1, 17000, 1), (16, 1100, 34)])
def test_many_splits(T, S, N):
    """Numbers of splits at the limits of the merge kernel.

    73 is one more than a block of the merge loads at a time. 264 is more than its lanes. The last case has few splits
    of many rows, two rows per block.
    """
    case = Case(B=1, T=T, S=S, N=N, K=N, D=256, E=256)
    arrays = case.arrays("bfloat16")
    expected, actual = (
        jax_flash.attention_with_statistics(**arrays, implementation=implementation)
        for implementation in ("reference", "flash")
    )
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.01, atol=1e-3)


@pytest.mark.usefixtures("device")
def test_scratch_for_another_gpu(monkeypatch):
    """A program that was compiled for another GPU may pass more scratch than needed, but not less."""
    here = _native.cuda_scratch_bytes
    monkeypatch.setattr(_native, "cuda_scratch_bytes", lambda *call: here(*call) + 4096)
    check(Case(B=1, T=33, S=40, N=2, K=2, D=8, E=8), "bfloat16")
    monkeypatch.setattr(_native, "cuda_scratch_bytes", lambda *call: max(here(*call) - 1, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scratch is u8\[\d+\], but this GPU needs u8\[\d+\] or more"):
        check(Case(B=1, T=34, S=40, N=2, K=2, D=8, E=8), "bfloat16")
    monkeypatch.setattr(_native, "cuda_scratch_bytes", lambda *call: 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scratch is missing, of \d+ bytes"):
        check(Case(B=1, T=35, S=40, N=2, K=2, D=8, E=8), "bfloat16")


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("tiles", "heads", "kv_heads"), [(133, 10, 10), (133, 10, 1), (60, 20, 20), (60, 20, 1)])
def test_more_heads_than_scratch(tiles, heads, kv_heads):
    """The backward reuses the scratch of earlier heads. Most tiles are masked, so some CTAs get far ahead of others."""
    check(Case(B=1, T=8, S=tiles * 128, N=heads, K=kv_heads, D=8, E=8, causal=True), "bfloat16")


@hopper
@pytest.mark.usefixtures("device")
def test_more_heads_than_scratch_with_a_block_mask():
    """Each head has different lists of zero, one and two blocks."""
    blocks = np.random.default_rng(0).random((1, 8, 2, 133)) < 0.1
    block_mask = BlockMask.from_dense(blocks, q_len=130, kv_len=133 * 128)
    check(Case(B=1, T=130, S=133 * 128, N=8, K=8, D=8, E=8, block_mask=block_mask), "bfloat16")


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=260, S=900, N=2, K=1, D=16, E=16),  # two groups, because there are four blocks
        Case(B=2, T=300, S=400, N=1, K=1, D=128, E=72, lengths=True),
        Case(B=2, T=200, S=400, N=2, K=2, D=64, E=64, causal=True, offset=True, dropout=0.2, sinks=2.0),
        Case(B=1, T=300, S=400, N=2, K=1, D=96, E=64, window=(90, 20), lengths=True),
        # rows beyond the lengths, whose range of keys is empty
        Case(B=2, T=300, S=300, N=1, K=1, D=64, E=64, window=(90, 20), traced=True, lengths=True),
        # pairs of CTAs
        Case(B=2, T=200, S=300, N=2, K=1, D=192, E=136, causal=True, lengths=True, sinks=2.0),
    ],
    ids=str,
)
def test_deterministic_dq(case):
    """CTAs wait for their turn to add to dQ."""
    check(dataclasses.replace(case, deterministic=True), "bfloat16")


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=150, S=300, N=3, K=1, D=128, E=88),  # heads one after the other
        Case(B=2, T=70, S=300, N=40, K=20, D=8, E=8),  # reuses scratch
        Case(B=1, T=300, S=400, N=5, K=1, D=64, E=64, causal=True, offset=True, lengths=True),  # joint loop, as below
        Case(B=1, T=300, S=300, N=5, K=1, D=128, E=96, causal=True, window=(150, 20), segments=True),
        Case(B=1, T=150, S=300, N=10, K=2, D=256, E=256, causal=True, lengths=True),
    ],
    ids=str,
)
def test_grouped_heads_in_backward(case):
    check(case, "bfloat16")


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=130, S=200, N=2, K=1, D=64, E=64, causal=True),
        Case(B=1, T=130, S=200, N=2, K=1, D=128, E=128, causal=True),
        Case(B=1, T=130, S=200, N=2, K=1, D=256, E=8, causal=True),  # only some warps own a part of dV
    ],
    ids=str,
)
def test_sm80_tiles_for_hopper(case, monkeypatch):
    """Ampere's kernels have tiles that only fit in Hopper's shared memory."""
    monkeypatch.setenv("JAX_FLASH_CUDA_KERNELS", "sm80")
    check(case, "bfloat16")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=300, S=400, N=5, K=1, D=64, E=64, causal=True, offset=True, sinks=2.0),
        Case(B=1, T=150, S=200, N=2, K=1, D=128, E=128, window=(100, 20), segments=True),
        Case(B=1, T=150, S=200, N=2, K=1, D=128, E=104, causal=True, dropout=0.2),
        Case(T=70, S=90, D=72, E=40, bias="1nts", lengths=True, deterministic=True),
        Case(T=70, S=90, D=8, E=128, mask="b11s", soft_cap=2.0),
        Case(B=1, T=300, S=100, N=3, K=1, D=96, E=128, causal=True),
    ],
    ids=str,
)
def test_tf32(case):
    check_tf32(case)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype", "block"),
    [
        (Case(B=1, T=300, S=280, N=2, K=1, D=64, E=64, causal=True), "bfloat16", (128, 128)),
        (Case(B=1, T=200, S=280, N=2, K=2, D=128, E=104, dropout=0.2), "bfloat16", (128, 128)),
        (Case(B=2, T=300, S=300, N=3, K=3, D=64, E=64), "float16", (128, 256)),  # more tiles than S needs
        (Case(B=1, T=200, S=280, N=2, K=1, D=256, E=256), "bfloat16", (128, 128)),
        (Case(B=1, T=200, S=280, N=2, K=1, D=80, E=80), "bfloat16", (192, 96)),  # tiles for long sequences otherwise
        (Case(B=2, T=100, S=120, N=4, K=2, D=64, E=64, bias="1n1s", deterministic=True), "bfloat16", (16, 64)),
        (Case(B=2, T=100, S=90, N=4, K=2, D=32, E=32, window=(40, 10)), "float32", (48, 32)),
        (Case(B=1, T=300, S=280, N=2, K=1, D=128, E=96, causal=True), "tf32", (128, 64)),
    ],
    ids=str,
)
def test_block_mask(case, dtype, block):
    """Empty, full and partial blocks, different for each batch entry and head."""
    rng = np.random.default_rng(0)
    shape = case.B, case.N, -(-case.T // block[0]), -(-case.S // block[1])
    kinds = rng.integers(0, 3, shape).repeat(block[0], 2).repeat(block[1], 3)[:, :, : case.T, : case.S]
    mask = np.where(kinds == 2, rng.random(kinds.shape) < 0.6, kinds == 1)
    block_mask = BlockMask.from_mask(mask, q_block=block[0], kv_block=block[1])
    elements = "float32" if dtype == "tf32" else dtype
    arrays, cotangents = case.arrays(elements), case.cotangents(elements)

    def results(arrays, **options):
        def attention(arrays):
            o, statistics = jax_flash.attention_with_statistics(**arrays, **case.options, **options)
            return o, statistics.logsumexp

        with jax.default_matmul_precision("default" if dtype == "tf32" else "highest"):
            return jax.jit(lambda *x: with_gradients(attention, *x))(arrays, cotangents)

    exact = results(arrays | {"mask": mask}, implementation="reference")
    for name, x in results(arrays, block_mask=block_mask, implementation="flash").items():
        expected = np.asarray(exact[name], np.float64)
        tolerance = (2e-3 if dtype == "float32" else 4e-2) * np.abs(expected[np.isfinite(expected)]).max()
        np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=0, atol=tolerance, err_msg=name)


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("inputs", [DIFFERENTIATED, ("bias",)], ids=["all", "alone"])
@pytest.mark.parametrize(
    ("case", "bias_dtype"),
    [
        (Case(B=5, T=136, S=264, D=32, E=32, bias="1nts", mask="b11s"), "bfloat16"),  # split over the batch
        (Case(B=2, T=200, S=264, D=128, E=104, bias="11ts", causal=True, offset=True), "bfloat16"),
        (Case(B=2, T=150, S=203, N=2, K=1, D=64, E=64, bias="b1ts", window=(90, 20), segments=True), "float16"),
        (Case(B=2, T=150, S=201, N=2, K=2, D=40, E=96, bias="bnts", lengths=True, dropout=0.2), "float32"),
        (Case(B=2, T=70, S=264, N=2, K=1, D=128, E=128, bias="1nts", soft_cap=2.0), "float32"),  # sm_80's dK and dV
        (sparse(128, 64, B=2, T=300, S=328, N=2, K=1, D=64, E=64, heads=2, bias="1nts", dropout=0.2), "float32"),
    ],
    ids=str,
)
def test_gradient_of_a_bias(case, bias_dtype, inputs):
    """Hopper's bias kernel, after the main backward or alone."""
    dtype = jnp.dtype("bfloat16")
    arrays, cotangents = case.arrays(dtype.name), case.cotangents(dtype.name)
    arrays["bias"] = arrays["bias"].astype(jnp.dtype(bias_dtype))
    launches = _native.cuda_plan(problem(case, arrays)[0].encode(), True, "sm_90a")
    assert "hopper/backward_bias.cuh" in {file for file, _, _ in launches}

    def attention(differentiated):
        o, statistics = jax_flash.attention_with_statistics(
            **arrays | differentiated, **case.options, implementation="flash"
        )
        return o, statistics.logsumexp

    @jax.jit
    def gradients(differentiated, cotangents):
        return jax.vjp(attention, differentiated)[1](cotangents)[0]

    dbias = np.asarray(
        gradients({name: arrays[name] for name in inputs if name in arrays}, cotangents)["bias"].astype(dtype)
    )
    exact = {"bias": by_numpy(case, arrays, cotangents)["bias"]}
    usual = errors(standard.attention(case, arrays, cotangents, np.float32, dtype), exact)
    assert_accurate({"bias": dbias}, exact, usual, {}, dtype)


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "cache",
    [
        pages.Cache((1100, 70), 64, Case(T=3, N=22, K=1, D=264, E=256, scale=0.1)),
        pages.Cache((1000, 3), 128, Case(T=1, N=16, K=1, D=576, E=512, scale=0.1)),
    ],
    ids=str,
)
def test_parts_of_latents(cache, monkeypatch):
    """Clusters share 128 rows, or a CTA has 64. Parts may have no key, and the last keys of a page may be unused."""
    monkeypatch.setenv("JAX_FLASH_EMULATE_SEED", "0")
    latents.check_pages(cache, "bfloat16")


# Several tiles per CTA, and more than one round of the ring buffers. All but the last use kernels of cases above.
SEVERAL_TILES = {
    "causal": (Case(B=1, T=260, S=260, N=3, K=1, D=64, E=64, causal=True, offset=True), "bfloat16"),
    "three kernels": (
        Case(B=1, T=260, S=260, N=3, K=1, D=64, E=64, causal=True, offset=True, lengths=True),
        "bfloat16",
    ),
    "interleaved heads": (
        Case(B=1, T=260, S=260, N=5, K=1, D=64, E=64, causal=True, offset=True, lengths=True),
        "bfloat16",
    ),
    "clusters": (Case(B=1, T=130, S=200, N=3, K=1, D=256, E=256, causal=True, dropout=0.2), "bfloat16"),
    "turns of clusters": (Case(B=1, T=130, S=300, N=2, K=1, D=256, E=256, causal=True, deterministic=True), "bfloat16"),
    "wide heads": (Case(B=1, T=330, S=330, N=2, K=1, D=264, E=264, causal=True), "bfloat16"),
    "wide heads with empty tiles": (Case(B=3, T=260, S=330, N=1, K=1, D=320, E=512, lengths=True), "bfloat16"),
    "O in boxes": (Case(B=1, T=300, S=70, N=3, K=1, D=192, E=192), "float16"),
    "TF32": (Case(B=1, T=130, S=300, N=3, K=1, D=64, E=64, causal=True, offset=True), "tf32"),
    "TF32 of 128 dims": (Case(B=1, T=70, S=300, N=5, K=1, D=128, E=128, window=(250, 200), segments=True), "tf32"),
    "block mask": (sparse(128, 128, B=1, T=300, S=600, N=2, K=1, D=64, E=64, heads=2, dropout=0.2), "bfloat16"),
    "short lists": (sparse(128, 256, B=1, T=300, S=600, N=2, K=2, D=64, E=64, heads=2), "bfloat16"),
    # with special code for the first step: sums of dK and dV, separate kernels, a joint loop over the heads of a group
    "segments": (Case(B=1, T=300, S=400, N=4, K=2, D=64, E=64, segments=True), "bfloat16"),
    "dropout": (Case(B=1, T=300, S=260, N=3, K=1, D=64, E=64, causal=True, lengths=True, dropout=0.2), "bfloat16"),
    "dbias": (Case(B=3, T=260, S=392, N=2, K=1, D=64, E=64, bias="1nts", causal=True), "bfloat16"),
    "dbias of all": (Case(B=2, T=260, S=392, N=3, K=1, D=64, E=64, bias="bnts"), "bfloat16"),
    "dbias of all, 128 dims": (Case(B=2, T=260, S=264, N=3, K=1, D=128, E=128, bias="bnts", causal=True), "bfloat16"),
    "dbias, 128 dims": (Case(B=3, T=260, S=264, N=2, K=1, D=128, E=128, bias="11ts", lengths=True), "bfloat16"),
    "soft cap": (Case(B=1, T=300, S=392, N=10, K=2, D=64, E=64, soft_cap=5.0, spread=4.0, causal=True), "bfloat16"),
    "crowded": (Case(B=1, T=260, S=260, N=5, K=1, D=64, E=64, causal=True, segments=True, dropout=0.2), "bfloat16"),
}


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", SEVERAL_TILES)
def test_random_schedule(name, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_EMULATE_SEED", "0")
    case, dtype = SEVERAL_TILES[name]
    check_tf32(case) if dtype == "tf32" else check(case, dtype)


@hopper
@pytest.mark.usefixtures("device")
@pytest.mark.skipif(not MULTIPROCESSORS, reason="needs JAX_FLASH_EMULATE_MULTIPROCESSORS, which a process reads once")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=600, S=600, N=3, K=1, D=64, E=64, causal=True, window=(100, 0), sinks=2.0),
        Case(B=2, T=300, S=700, N=2, K=2, D=64, E=40, window=(30, 90), offset=True, lengths=True),
        Case(B=2, T=520, S=300, N=2, K=1, D=8, E=8, causal=True, offset=True),
        Case(B=1, T=600, S=600, N=3, K=1, D=64, E=64, causal=True, segments=True, soft_cap=2.0),
        Case(B=2, T=300, S=900, N=2, K=1, D=64, E=64, segments="mixed", window=(400, 30)),
        packs.Pack((0, 100, 3, 1, 350, 90), (40, 100, 0, 600, 20, 70), 5, Case(N=4, K=2, D=64, E=64, causal=True)),
    ],
    ids=str,
)
def test_tiles_of_256_queries(case, monkeypatch):
    """The plan uses tiles of 256 queries if they are enough for all SMs. Their warpgroups have separate key ranges."""
    monkeypatch.setenv("JAX_FLASH_EMULATE_SEED", "0")
    dense = case
    if isinstance(case, packs.Pack):
        dense = dataclasses.replace(case.case, B=1, T=case.dense_case.T, S=case.dense_case.S, causal=False)
    described, _ = problem(dense, dense.arrays("bfloat16"))
    if case is not dense:
        described = changed(described, ranges=True, key_value_seq_lengths=True)
    assert _native.cuda_plan(described.encode(), False, "sm_90a", int(MULTIPROCESSORS))[-1][2]["rows"] == 256
    check(case, "bfloat16") if case is dense else packs.check(case, "bfloat16")


# --- Broken kernels ---


def launch(body: str) -> str:
    """Run `body` in a block of 128 threads with 4 KiB of shared memory. Return the error."""
    source = f"""
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
struct Shared {{ alignas(1024) uint8_t tile[2048]; alignas(16) uint8_t bytes[2032]; uint64_t barrier; }};
extern "C" __global__ void jax_flash_test(const __grid_constant__ uint4 zeros) {{
  using namespace jax_flash;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) MbarrierInit(&shared.barrier, 1);
  __syncthreads();
  {body}
}}
"""
    library = ctypes.CDLL(str(emulator.build()))
    headers = {str(path.relative_to(KERNELS)): path.read_text() for path in KERNELS.glob("ptx/*")}
    headers |= {name: (ROOT / name).read_text() for name in SHARED}
    headers |= {"this_kernel.h": "#define JAX_FLASH_DTYPE 2", "test.cuh": source}

    def strings(texts):
        return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

    program, module, kernel, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), b'#include "test.cuh"', None, len(headers), strings(headers.values()), strings(headers)
    )
    failed = library.nvrtcCompileProgram(program, 1, strings(["-arch=sm_90a"]))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert not library.cuModuleLoadData(ctypes.byref(module), cubin)
    assert not library.cuModuleGetFunction(ctypes.byref(kernel), module, b"jax_flash_test")
    zeros = ctypes.create_string_buffer(16)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(zeros))
    error = ctypes.c_char_p()
    if library.cuLaunchKernel(kernel, 1, 1, 1, 128, 1, 1, 4096, None, arguments, None):
        library.cuGetErrorString(0, ctypes.byref(error))
    return (error.value or b"").decode()


LOAD = """
  if (threadIdx.x == 0) {{
    MbarrierArriveExpectTx(&shared.barrier, {});
    BulkLoad(shared.bytes, &zeros, 16, &shared.barrier);
  }}
"""
WGMMA = """
  for (int i = threadIdx.x; i < 2048; i += 128) shared.tile[i] = 0;
  FenceProxyAsync();
  __syncthreads();
  float C[4] = {};
  const uint64_t a = Descriptor(shared.tile, 0);
  WgmmaFence();
  Wgmma<8>::SS<Major::kMN, Major::kK>(C, a, a, 1);
  WgmmaCommit();
"""
# The last writes are later than all fences.
EARLY_FENCES = """
  for (int i = 0; i < 3; ++i) {
    FenceProxyAsync();
    shared.tile[threadIdx.x] = i;
    SyncWarp();
  }
  __syncthreads();
"""


@hopper
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", ""),
        (LOAD.format(16) + "MbarrierWait(&shared.barrier, 0);", ""),
        (
            LOAD.format(32) + "MbarrierWait(&shared.barrier, 0);",
            "threads 0-127 wait for mbarrier .* 16 bytes are missing",
        ),
        (LOAD.format(16) + "MbarrierArrive(&shared.barrier);", "one arrival too many"),
        (LOAD.format(16), "ended before their copies"),
        ("MbarrierWait((uint64_t*)shared.bytes, 0);", "not initialised"),
        ("if (threadIdx.x > 0) __syncthreads();", "deadlock: .* threads 1-127 wait for barrier 0"),
        ("BarrierSync(1, threadIdx.x < 64 ? 64 : 128);", "barrier 1 of .* threads"),
        ("if (threadIdx.x % 2) SyncWarp(); else SetMaxRegistersDown<24>();", "other lanes of the warp at"),
        ("CpAsync(SharedAddress(shared.bytes) + 8, &zeros, true);", "not a multiple of 16"),
        ("CpAsync(SharedAddress(memory) + 4096, &zeros, true);", "16 bytes at 4096"),
        ("memory[5000 + threadIdx.x] = 0;", r"touched byte 5\d\d\d of the 4096 of shared memory"),
        ("*(int*)0 = 0;", "touched address"),
        ("ClusterRank(); PeerArrive(&shared.barrier, true);", "block 1 of the cluster"),
        ('asm volatile("tcgen05.alloc 32;" ::: "memory");', "no tcgen05.alloc"),
        (WGMMA + "WgmmaWait<0>(); memory[threadIdx.x] = C[0] == 0.0f ? 0 : 1;", ""),
        (WGMMA + "shared.tile[threadIdx.x] = 1; WgmmaWait<0>();", "operand has changed"),
        (WGMMA + "if (C[0] == 0) *(int*)0 = 0;", ""),
        (WGMMA.replace("WgmmaFence();", ""), "without wgmma.fence"),
        (WGMMA.replace("FenceProxyAsync();", ""), "operand at .* without fence.proxy.async"),
        (WGMMA.replace("FenceProxyAsync();", EARLY_FENCES), "operand at .* without fence.proxy.async"),
        (WGMMA.replace("FenceProxyAsync();", EARLY_FENCES + "FenceProxyAsync();"), ""),
        (
            "shared.bytes[0] = 0; BulkReduceAdd(true, (float*)&zeros, (float*)shared.bytes, 16);",
            "without fence.proxy.async",
        ),
    ],
)
def test_broken_kernel(body, error):
    assert re.search(error, launch(body), re.DOTALL) if error else launch(body) == ""


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("make", "case", "dtype", "bias_dtype"),
    [
        # tiles of a bias
        (infinite_bias.replaced, Case(B=1, T=150, S=304, N=2, K=1, D=64, E=64, bias="1nts"), "bfloat16", "float32"),
        (
            infinite_bias.capped,
            Case(B=1, T=150, S=304, N=2, K=1, D=64, E=64, bias="bnts", sinks=2.0, deterministic=True),
            "bfloat16",
            "",
        ),
        # a bias that is loaded per entry
        (
            infinite_bias.bounded,
            Case(T=70, S=91, N=2, D=64, E=64, bias="b1ts", soft_cap=2.0, dropout=0.2),
            "bfloat16",
            "float16",
        ),
        (infinite_bias.replaced, Case(T=3, S=1100, N=4, K=2, D=64, E=64, bias="1n1s"), "float32", ""),  # split-KV
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_infinite_bias(make, case, dtype, bias_dtype):
    """The score_mod maps scores of -inf to finite scores."""
    infinite_bias.check(case, make(case), "flash", dtype, bias_dtype)

"""The CUDA kernels compile for every architecture, do not spill and fit in shared memory. These tests need no GPU."""

import itertools
import json
import time

import pytest

pytest.importorskip("allpairspy")
pytest.importorskip("rich")

import cubins
import kernel_variants

from jax_flash import _native

# Limits of a kernel's compile time, relative to a plain forward: with one feature, and with any.
# With tiles of 128 keys, a thread of Hopper's forward has 64 entries. A score_mod is compiled four times for each: for
# tiles with and without masks, and with and without bounds of indices. One such kernel takes 6 to 10 times as long, and
# 2.5 times without its score_mod. Ampere's backward of wide heads with many features takes up to 7.3 times as long.
LONGEST, LONGEST_OF_MANY = 7, 13


@pytest.mark.slow
def test_every_feature_and_pair_of_features_compiles():
    chosen = kernel_variants.tested()
    assert {variant.arch for variant in chosen} == set(kernel_variants.SHARED_LIMITS)
    reports = list(kernel_variants.tabulated(kernel_variants.compile_all(chosen)))
    faults = [f"{fault}: {report}" for report in reports for fault in kernel_variants.faults(report)]
    assert not faults, "\n".join(faults)
    # The most common features alone are covered without retries: their first tiles do not spill.
    usual = kernel_variants.variants(
        kernel_variants.single_features(kernel_variants.FEATURES, kernel_variants.DIMS[:2])
    )
    assert not set(usual) - {report.variant for report in reports}
    # CPU time depends on the machine's load, too, so compile a plain kernel next to each one that may be too slow.
    (_, plain), *_ = kernel_variants.planned(kernel_variants.singles())
    seconds = {report.variant: report.seconds for report in reports}
    slowest = sorted(seconds, key=seconds.get)[-5:]
    for variant in (x for x in slowest if seconds[x] > 0.7 * LONGEST * seconds[plain]):
        of_plain, took = map(cpu_seconds, (plain, variant))
        assert took < (LONGEST if variant in usual else LONGEST_OF_MANY) * of_plain, variant


def cpu_seconds(variant):
    start = time.thread_time()
    variant.compile()
    return time.thread_time() - start


def test_kernels_of_wide_heads_compile(nvrtc):
    """A quick test for the NVRTC of any environment. They do not spill, and they fit in shared memory."""
    capped = kernel_variants.PLAIN | {"causal": False, "soft_cap": 30.0}
    few_queries = kernel_variants.PLAIN | {"q_len": 1, "gradients": "none"}
    chosen = (("sm_90a", capped), ("sm_90a", few_queries), ("sm_80", capped))
    cases = [kernel_variants.Case(arch, "bfloat16", (512, 512), **x) for arch, x in chosen]
    found = {variant.file: variant for name, variant in kernel_variants.planned(cases) if "tangent" not in name}
    common = {"ampere/wide_forward_split.cuh", "ampere/backward_prepare.cuh"}
    parts = itertools.product(("ampere", "hopper"), ("forward", "backward", "backward_query"))
    assert found.keys() == common | {f"{family}/wide_{part}.cuh" for family, part in parts}
    for variant in found.values():
        for report in kernel_variants.compile_variant(variant):
            assert not kernel_variants.faults(report), report


def test_tiles_of_hopper_backward():
    """The backward has tiles of 64 keys above head dim 128, and of 128 keys otherwise, with any features."""
    names = ("window", "mask", "block_mask", "bias", "soft_cap", "dropout")
    values = itertools.product(*(kernel_variants.FEATURES[name] for name in names))
    seen = set()
    for dims, chosen in itertools.product(kernel_variants.DIMS, values):
        features = kernel_variants.PLAIN | dict(zip(names, chosen, strict=True))
        problem = kernel_variants.problem("bfloat16", dims, **features)
        for file, _, fields in _native.cuda_plan(problem.encode(), True, "sm_90a"):
            if file == "hopper/backward.cuh":
                assert fields["cols"] == (64 if max(dims) > 128 else 128), (dims, chosen)
                seen.add(dims)
    assert seen == {dims for dims in kernel_variants.DIMS if max(dims) <= 256}


def test_light_score_mods_have_larger_tiles():
    """Hopper's forward uses larger tiles if a score_mod leaves enough registers."""

    def keys_of_tile(dims, program, **features):
        given = kernel_variants.PLAIN | {"q_heads": 32, "gradients": "none", "program": program} | features
        problem = kernel_variants.problem("bfloat16", dims, **given)
        launches = _native.cuda_plan(problem.encode(), False, "sm_90a")
        return next(fields["cols"] for file, _, fields in launches if file == "hopper/forward.cuh")

    for dims in ((64, 64), (128, 128)):
        light = keys_of_tile(dims, "table")
        assert light > keys_of_tile(dims, "score")
        assert light > keys_of_tile(dims, "table", dropout=True)
        assert light > keys_of_tile(dims, "table", query_offset=True)


@pytest.mark.slow
def test_cubins_compares_code(nvrtc, monkeypatch, capsys, tmp_path):
    """Names, line numbers and unused constants do not change the hash of the code. Other instructions do."""
    file, header = tmp_path / "before.json", tmp_path / "renamed.h"
    every = str(len(kernel_variants.tested()) // 2)
    assert cubins.main(["save", str(file), "--every", every]) == 0
    before = json.loads(file.read_text())
    assert len(before) > 1
    # This kernel reads the address of a symbol. An additional constant before it moves the symbol.
    reads = next(
        x for x in kernel_variants.tested() if x.file == "hopper/forward.cuh" and ("kv_lengths", 1) in x.fields
    )
    hash_before = cubins.code_hash(reads.compile()[0])
    header.write_text("namespace jax_flash { namespace another { constexpr int kUnused = 7; } }")
    monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", f"-lineinfo -DUNUSED=1 --pre-include={header}")
    assert cubins.main(["compare", str(file)]) == 0
    assert f"{len(before)} of {len(before)} kernel files are equal" in capsys.readouterr().out
    assert cubins.code_hash(reads.compile()[0]) == hash_before
    monkeypatch.setenv("JAX_FLASH_NVRTC_OPTIONS", "--ptxas-options=-O1")
    file.write_text(json.dumps({"sm_90a nothing forward 1 of 1": "0", **before}))
    assert cubins.main(["compare", str(file)]) == 1
    out = capsys.readouterr().out
    assert f"0 of {len(before) + 1} kernel files are equal" in out
    assert out.count("different") == len(before) and out.count("missing") == 1

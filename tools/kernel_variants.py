"""Compile the CUDA kernels that the plan can choose, without a GPU, and report registers, spills, memory and time.

    python tools/kernel_variants.py            # single features, and every pair of all parameters
    python tools/kernel_variants.py --full     # also all pairs for every dtype, head dim and architecture

For each problem, the plan (`cuda_src/plan`) gives the kernels to compile. The table is written to build/kernels.csv.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import dataclasses
import itertools
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from allpairspy import AllPairs

from jax_flash import _native
from jax_flash.description import Extent
from jax_flash.masks import Mask, WindowSize
from jax_flash.problem import Problem
from jax_flash.programs.program import Captured, Program
from jax_flash.scores import Score

# Limits of shared memory per block: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_LIMITS = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100": 227}  # KiB
TABLE = pathlib.Path(__file__).parents[1] / "build" / "kernels.csv"
DTYPES = ("bfloat16", "float16", "float32", "float32 at full precision")
DIMS = ((64, 64), (128, 128), (256, 256), (8, 16), (80, 80), (96, 96), (192, 128), (192, 192), (64, 128))
DIMS += ((512, 512), (576, 64))
UP_TO_128 = tuple(dims for dims in DIMS if max(dims) <= 128)
GRADIENTS = ("all", "deterministic", "key and value", "query")
EVERY_GRADIENT = ("dq", "dk", "dv", "dbias", "dsinks")
REQUESTED = {"all": EVERY_GRADIENT, "deterministic": EVERY_GRADIENT, "key and value": ("dk", "dv"), "query": ("dq",)}
REQUESTED |= {"query and scale": ("dq",), "none": ()}
FEATURES: dict[str, tuple[Any, ...]] = {
    "q_len": (16384, 512),
    "causal": (True, False),
    "window": (False, True),
    "lengths": (False, True),
    "segments": (False, True),
    "ranges": (False, True),  # with key_value_seq_lengths; replaces the masks above and mask arrays
    "query_offset": (False, True),
    "mask": (False, True),
    "block_mask": (None, (128, 128), (64, 64), (16, 48)),
    "page": (0, 8, 1024),  # only for a forward without most other features
    "bias": ("none", "bfloat16", "float32", "float32 of one row"),
    "soft_cap": (0.0, 30.0),
    "sinks": (False, True),
    "dropout": (False, True),
    "program": ("none", "score", "mask"),
    "dlogsumexp": (False, True),
    "gradients": GRADIENTS,
}
ABSENT = (False, None, "none")
# Captured arrays: a table of relative positions, and document ids.
CAPTURED = (Captured("float32", False, (4, 32768)), Captured("int32", False, (16384,)))
# With T and S up to 16384, the index of a relative position is in bounds. SCORE_MOD also has a soft cap.
SCORE_MOD = Program("score;tanh.f,0;head;query;key;sub.i,3,4;const.i,16383;add.i,5,6;load.f,0,2,7;add.f,1,8;result,9")
SCORE_GRAD = "score;tanh.f,0;head;query;key;sub.i,3,4;const.i,16383;add.i,5,6;cotangent;mul.f,1,1;mul.f,9,8;sub.f,8,10;"
TABLE_MOD = Program("score;head;query;key;sub.i,2,3;const.i,16383;add.i,4,5;load.f,0,1,6;add.f,0,7;result,8")
TABLE_GRAD = "head;query;key;sub.i,1,2;const.i,16383;add.i,3,4;cotangent;"
MASK_MOD = Program("query;key;load.i,1,0;load.i,1,1;eq.i,2,3;result,4")
PLAIN = {name: values[0] for name, values in FEATURES.items()}
PLAIN_SCORES = FEATURES | {"program": ("none",)}
# Hopper's backward is a single kernel with at most two of these.
SINGLE_KERNEL_FEATURES = ("causal", "window", "lengths", "segments", "query_offset", "dropout", "dlogsumexp")
FEW_QUERIES = FEATURES | {  # the forward uses split-KV
    "q_len": (1, 16, 32, 64),
    "block_mask": (None,),
    "dlogsumexp": (False,),
    "gradients": ("none",),
}


class Case:
    """The inputs of the plan: an architecture and a problem. `words` describe its features."""

    def __init__(self, arch: str, dtype: str, dims: tuple[int, int], **features: Any):
        self.arch = arch
        self.problem = problem(dtype, dims, **features)
        self.words = [arch, dtype, f"dims={dims}"]
        self.words += [f"{name}={features[name]}" for name in sorted(features) if features[name] not in ABSENT]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel file with its compile-time constants, for one architecture."""

    arch: str
    file: str
    fields: tuple[tuple[str, int], ...]
    programs: str  # CUDA C++
    problem: str = dataclasses.field(compare=False)  # one of the problems that use it
    backward: bool = dataclasses.field(compare=False)

    def compile(self) -> tuple[bytes, str, float, int]:
        """Return cubin, log, seconds and bytes of dynamic shared memory."""
        return _native.cuda_compile(self.file, dict(self.fields), self.arch, self.programs)


@dataclasses.dataclass(frozen=True)
class Report:
    variant: Variant
    kernel: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes, static and dynamic
    serialized: bool  # whether ptxas serializes the wgmmas
    seconds: float  # of CPU time, for the whole file


def problem(dtype: str, dims: tuple[int, int], **features: Any) -> Problem:
    ranges = features["ranges"]
    bias, block, gradients = features["bias"], None if ranges else features["block_mask"], features["gradients"]
    program = features["program"]
    others = ranges or features["mask"] or features["segments"] or features["dropout"] or block or bias != "none"
    page = 0 if others or gradients != "none" else features["page"]
    mod, grad, accumulation, result = {
        "score": (SCORE_MOD, SCORE_GRAD, "accumulate,0,2,7,8;", "result,11"),
        "table": (TABLE_MOD, TABLE_GRAD, "accumulate,0,0,5,6;", "result,6"),
    }.get(program, (None, "", "", ""))
    has_gradient = mod is not None and gradients == "all"
    full = Extent(True, True, True, True)
    absent = ["dbias"] * (bias == "none") + ["dsinks"] * (not features["sinks"])
    return Problem(
        batch=2,
        q_len=features["q_len"],
        kv_len=max(features["q_len"], 1024),
        q_heads=features.get("q_heads", 4),
        kv_heads=features.get("kv_heads", 2),
        qk_dim=dims[0],
        v_dim=dims[1],
        dtype=dtype.split()[0],
        full_precision=dtype.endswith("full precision"),
        mask=Mask(
            is_causal=features["causal"] and not ranges,
            local_window_size=WindowSize(100 if features["window"] and not ranges else -1),
            query_seq_lengths=features["lengths"] and not ranges,
            key_value_seq_lengths=features["lengths"] or ranges,
            ranges=ranges,
            segment_ids=features["segments"] and not ranges,
            query_offset=features["query_offset"],
            array=full if features["mask"] and not ranges else None,
            block_mask=full if block else None,
            q_block=block[0] if block else 0,
            kv_block=block[1] if block else 0,
            element_masks=2 if block else 0,
            row_list_size=4 if block else 0,
            column_list_size=4 if block else 0,
            mask_mod=MASK_MOD if program == "mask" else None,
        ),
        score=Score(
            logits_soft_cap=features["soft_cap"],
            bias=None if bias == "none" else full._replace(rows="one row" not in bias),
            bias_dtype=bias.split()[0],
            score_mod=mod,
            score_grad=mod and Program(grad + accumulation * has_gradient + result),
        ),
        page=page,
        pages=100 if page else 0,
        latent=features.get("latent", False),
        sinks=Extent(False, True, False, False) if features["sinks"] else None,
        captured=() if program == "none" else (CAPTURED[0]._replace(gradient=has_gradient), CAPTURED[1]),
        drop_threshold=3277 * features["dropout"],
        dlogsumexp=features["dlogsumexp"],
        deterministic=gradients == "deterministic",
        unrounded=gradients == "query and scale",
        requested=tuple(name for name in REQUESTED[gradients] if name not in absent),
    )


def pairs(**parameters: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield choices of values that together contain every pair of values of two parameters."""
    for values in AllPairs(list(map(list, parameters.values()))):
        yield dict(zip(parameters, values, strict=True))


def cover() -> Iterator[Case]:
    """Yield cases that together contain every pair of values, for many and for few queries.

    More cases cover features that only Hopper's kernels have.
    """
    for features in (FEATURES, FEW_QUERIES):
        for chosen in pairs(arch=SHARED_LIMITS, dtype=DTYPES, dims=DIMS, **features):
            yield Case(**chosen)
    for chosen in pairs(dims=DIMS, **PLAIN_SCORES | {"bias": ("none",), "mask": (False,), "gradients": ("all",)}):
        yield Case("sm_90a", "bfloat16", **chosen)
    # Hopper's kernels for wide heads.
    names = ("causal", "window", "lengths", "segments", "ranges", "query_offset", "soft_cap", "sinks")
    wide = {name: FEATURES[name] for name in names} | {"dims": ((512, 512), (576, 328))}
    for chosen in pairs(dtype=DTYPES[:2], **wide, gradients=("none", "all")):
        yield Case("sm_90a", **PLAIN | chosen)
    # Hopper's split-KV forward of latents.
    few = {"dims": ((576, 512), (320, 256)), "page": (0, 64), "q_heads": (4, 16), "latent": (True,), "kv_heads": (1,)}
    for chosen in pairs(**few, **{name: wide[name] for name in names if name != "ranges"}):
        yield Case("sm_90a", "bfloat16", **PLAIN | {"q_len": 16, "gradients": "none"} | chosen)
    # The single-kernel backward. If heads share keys, it sums dK and dV.
    common = {"q_len": (4096, 512), "sinks": (False, True), "gradients": ("all", "query")}
    for kv_heads in (4, 1):
        for chosen in pairs(dims=UP_TO_128, two=itertools.combinations(SINGLE_KERNEL_FEATURES, 2), **common):
            two = dict.fromkeys(SINGLE_KERNEL_FEATURES, False) | dict.fromkeys(chosen.pop("two"), True)
            yield Case("sm_90a", "bfloat16", **PLAIN | chosen | two, kv_heads=kv_heads)
    # O and dQ in float32, for the gradient of the scale. With few queries, the merge of the splits writes O.
    some = {name: FEATURES[name] for name in ("causal", "soft_cap", "sinks", "dropout")}
    for chosen in pairs(arch=SHARED_LIMITS, dims=DIMS, q_len=(4096, 512, 16), **some):
        yield Case(dtype="bfloat16", **PLAIN | {"gradients": "query and scale"} | chosen)
    # The same with a block mask.
    listed = {name: FEATURES[name][:1] for name in ("bias", "mask", "soft_cap")}
    listed |= dict.fromkeys(("causal", "window", "lengths", "segments", "query_offset"), (False,))
    listed |= {"block_mask": ((128, 128), (64, 256)), "q_len": (512,), "gradients": ("all",)}
    for chosen in pairs(dims=UP_TO_128, **PLAIN_SCORES | listed):
        yield Case("sm_90a", "bfloat16", **chosen | {"kv_heads": 4})
    # The gradient of a bias that is loaded in tiles or by entry.
    biased = {"bias": ("bfloat16", "float32", "float64"), "gradients": ("all",)}
    for blocks in ({"block_mask": (None, (128, 128), (128, 64)), "mask": (False,)}, {"block_mask": (None,)}):
        for chosen in pairs(dims=UP_TO_128, **PLAIN_SCORES | biased | blocks):
            yield Case("sm_90a", "bfloat16", **chosen)
    for dtype, dims in (("bfloat16", DIMS), ("float32", ((64, 64), (128, 128), (8, 16)))):
        grouped = {"causal": (True,), "block_mask": (None,), "q_len": (4096,)}
        for chosen in pairs(dims=dims, **PLAIN_SCORES | grouped):  # the backward's joint loop over a large head group
            yield Case("sm_90a", dtype, q_heads=80, kv_heads=16, **chosen)
    for chosen in pairs(dims=DIMS, **PLAIN_SCORES | {"dlogsumexp": (False,), "gradients": ("none",)}):
        yield Case("sm_90a", "float32", **chosen)
    scored = {"program": ("score",), "dlogsumexp": (False,), "gradients": ("none",)}
    for chosen in pairs(dtype=("bfloat16", "float32"), dims=DIMS, **FEATURES | scored):
        yield Case("sm_90a", **chosen)
    # The backward with a score_mod: derivatives that depend on the score or not, and gradients of captured arrays.
    scored = {"program": ("score", "table"), "soft_cap": (0.0,), "bias": ("none",), "mask": (False,)}
    scored |= {"block_mask": (None, (128, 128)), "gradients": ("all", "query", "key and value")}
    for chosen in pairs(dtype=("bfloat16", "float32"), dims=DIMS, **FEATURES | scored):
        yield Case("sm_90a", **chosen)
    few = PLAIN_SCORES | {
        "q_len": (4096,),
        "soft_cap": (0.0,),
        "dlogsumexp": (False,),
        "gradients": ("all", "key and value"),
    }
    for blocks in ({"block_mask": (None,)}, dict.fromkeys(("window", "segments", "mask", "dropout"), (False,))):
        for chosen in pairs(dims=((64, 64), (128, 128), (8, 16), (96, 72)), **few | blocks):
            yield Case("sm_90a", "float32", **chosen)


def single_features(features: dict[str, tuple[Any, ...]], dims: Iterable[tuple[int, int]]) -> Iterator[Case]:
    """Yield cases with one feature each."""
    plain = {name: values[0] for name, values in features.items()} | {"causal": False}
    for head_dims, (name, values) in itertools.product(dims, features.items()):
        for value in values:
            yield Case("sm_90a", "bfloat16", head_dims, **plain | {name: value})


def singles() -> Iterator[Case]:
    """Yield the most common cases: single features, some of them also with dropout, where registers are scarcest."""
    for features in (FEATURES, FEW_QUERIES):
        yield from single_features(features, DIMS[:3])
    with_dropout = PLAIN | {"causal": False, "dropout": True}
    for dims, name in itertools.product(DIMS[:2], ("window", "segments", "mask", "block_mask")):
        yield Case("sm_90a", "bfloat16", dims, **with_dropout | {name: FEATURES[name][1]})
    # Other rows of the plan's table of tiles for Hopper's forward.
    for features in (
        {"causal": True, "soft_cap": 30.0},
        {"causal": True, "q_len": 1024, "q_heads": 64, "kv_heads": 64},
        {"bias": "bfloat16", "mask": True},
        {"segments": True, "mask": True},
        {"bias": "bfloat16", "dropout": True},
        {"bias": "bfloat16", "block_mask": (128, 96)},
        {"bias": "bfloat16", "program": "table", "dropout": True},
        {"bias": "bfloat16", "program": "score", "query_offset": True, "segments": True, "soft_cap": 30.0},
        {"bias": "bfloat16", "program": "score", "window": True, "lengths": True},
    ):
        for dims in ((64, 64), (128, 128), (192, 192), (256, 256)):
            yield Case("sm_90a", "bfloat16", dims, **PLAIN | {"causal": False, "gradients": "none"} | features)
    yield Case("sm_90a", "bfloat16", (192, 192), **PLAIN)
    # A soft cap with a bias leaves the backward the fewest registers.
    for bias, name in itertools.product(("bfloat16", "float32"), ("causal", "window", "segments", "mask", "dropout")):
        capped = PLAIN | {"causal": False, "bias": bias, "soft_cap": 30.0}
        yield Case("sm_90a", "bfloat16", (128, 128), **capped | {name: True})
    # The single-kernel backward, also with a block mask.
    for dims, name, value in itertools.product(DIMS[:2], SINGLE_KERNEL_FEATURES, (False, True)):
        yield Case("sm_90a", "bfloat16", dims, **PLAIN | {"causal": False, "kv_heads": 4} | {name: value})
    for dims, dropout in itertools.product(((64, 64), (96, 96), (128, 128)), (False, True)):
        one = {"causal": False, "q_len": 512, "block_mask": (128, 128), "dropout": dropout, "kv_heads": 4}
        yield Case("sm_90a", "bfloat16", dims, **PLAIN | one)
    # TF32, also with a block mask.
    for dims, block, name, value in itertools.product(
        DIMS[:2], (None, (128, 128)), SINGLE_KERNEL_FEATURES, (False, True)
    ):
        yield Case("sm_90a", "float32", dims, **PLAIN | {"causal": False, "block_mask": block} | {name: value})
    # The backward with a score_mod.
    for dims, program, gradients in itertools.product(DIMS[:3], ("score", "table"), ("all", "query")):
        scored = PLAIN | {"causal": False, "program": program, "gradients": gradients}
        for one in ({}, {"causal": True}, {"segments": True}, {"block_mask": (128, 128)}, {"dropout": True}):
            yield Case("sm_90a", "bfloat16", dims, **scored | one)
        yield Case("sm_90a", "bfloat16", dims, **scored | {"bias": "bfloat16"})
        yield Case("sm_90a", "bfloat16", dims, q_heads=80, kv_heads=16, **scored | {"causal": True, "q_len": 4096})
    # The largest tiles on the architecture with the least shared memory.
    for dtype, dims, gradients in itertools.product(DTYPES[1:], DIMS[1:3], GRADIENTS[:2]):
        yield Case("sm_89", dtype, dims, **PLAIN | {"gradients": gradients})


def product() -> Iterator[Case]:
    """Yield every architecture, dtype and pair of head dims, with all pairs of features."""
    features = [*pairs(**FEATURES), *pairs(**FEW_QUERIES)]
    for arch, dtype, dims, chosen in itertools.product(SHARED_LIMITS, DTYPES, DIMS, features):
        yield Case(arch, dtype, dims, **chosen)


def units(problem: str, backward: bool, arch: str, compiled: bool = False) -> list[Variant]:
    """Return the kernel files of a pass, with the preferred tiles, or if `compiled` with those that do not spill."""
    launches = _native.cuda_plan(problem, backward, arch, compiled=compiled)
    programs = _native.cuda_programs(problem)
    files = (Variant(arch, file, tuple(fields.items()), programs, problem, backward) for file, _, fields in launches)
    return list(dict.fromkeys(files))


def planned(cases: Iterable[Case]) -> Iterator[tuple[str, Variant]]:
    """Yield the preferred kernel files of all passes, each with a name such as "sm_90a ... forward 1 of 2"."""
    for case in cases:
        problem = case.problem.encode()
        passes = {"forward": (problem, False), "backward": (problem, True)}
        if not case.problem.page and case.problem.score.score_mod is None:  # its tangent is made from a jaxpr
            problem = dataclasses.replace(case.problem, l_tangent=case.problem.dlogsumexp)
            passes["tangent"] = problem.along(("query", "key", "value")).encode(), False
        for name, (text, backward) in passes.items():
            if _native.cuda_refusal(text):
                continue
            files = units(text, backward, case.arch)
            for i, variant in enumerate(files, 1):
                yield f"{case} {name} {i} of {len(files)}", variant


def variants(cases: Iterable[Case]) -> list[Variant]:
    """Return the distinct preferred kernel files."""
    return list(dict.fromkeys(variant for _, variant in planned(cases)))


def tested() -> list[Variant]:
    """Return single features at the most common head dims, and other files as needed to cover all pairs of values.

    Pairs are counted per kernel, and for Hopper's also per dtype and per loop of the backward over heads. Not every
    pair is combined with every head dim and tile size, which would take too long for CI.
    """
    not_paired = ("qk_dim", "v_dim", "rows", "cols", "groups", "stages", "q_block", "kv_block")
    hopper_keys = ("dtype", "fused_rows", "sum_kv", "interleaved_heads")

    def pairs_of(variant: Variant) -> list[tuple[Any, ...]]:
        fields = dict(variant.fields)
        key = [fields[name] for name in hopper_keys] if fields["family"] == 90 else []
        values = [field for field in variant.fields if field[0] not in not_paired]
        return [(variant.file, *key, *pair) for pair in itertools.combinations((variant.arch, *values), 2)]

    wide_bias = Case("sm_90a", "bfloat16", (128, 128), **PLAIN | {"bias": "float64"})  # has the fewest registers
    kept = [*single_features(FEATURES, DIMS[:2]), wide_bias]
    chosen = variants(itertools.chain(kept, singles(), cover()))
    times = collections.Counter(itertools.chain.from_iterable(map(pairs_of, chosen)))
    for variant in chosen[len(variants(kept)) :]:
        if all(times[pair] > 1 for pair in pairs_of(variant)):
            times.subtract(pairs_of(variant))
            chosen.remove(variant)
    return chosen


def compile_variant(variant: Variant) -> list[Report]:
    """Return a report for each kernel of the file. If it spills, report the files that the plan uses instead."""
    reports = reports_of(variant)
    if spilled(reports) <= _native.TOLERATED_SPILL and not any(report.serialized for report in reports):
        return reports
    call = variant.problem, variant.backward, variant.arch
    tried = units(*call)
    others = [x for x in units(*call, compiled=True) if x not in tried]
    return list(itertools.chain.from_iterable(map(reports_of, others))) or reports


def spilled(reports: list[Report]) -> int:
    """Return the bytes that all kernels of a file spill, which decide whether its tiles are taken."""
    return sum(report.spilled for report in reports)


def reports_of(variant: Variant) -> list[Report]:
    start = time.thread_time()  # the wall time depends on the other threads and processes
    _, log, _, dynamic = variant.compile()
    seconds = time.thread_time() - start
    # Only the main kernels of a file have wgmmas.
    serialized = "wgmma.mma_async instructions are serialized" in log
    reports = []
    for part in log.split("Compiling entry function '")[1:]:
        kernel = part.partition("'")[0]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        static = sum(map(int, re.findall(r"(\d+) bytes smem", part)))
        main = kernel in (
            "jax_flash_forward",
            "jax_flash_backward",
            "jax_flash_backward_query",
            "jax_flash_backward_key",
            "jax_flash_backward_value",
            "jax_flash_backward_bias",
            "jax_flash_tangent",
        )
        shared = static + dynamic * main
        reports.append(Report(variant, kernel, registers, spills, shared, serialized and main, seconds))
    if not reports:
        raise RuntimeError(f"no report of ptxas for {variant}: {log}")
    return reports


def compile_all(chosen: list[Variant]) -> Iterator[list[Report]]:
    """Compile in threads. NVRTC does not hold the GIL."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(compile_variant, chosen)


def faults(report: Report) -> list[str]:
    limit = SHARED_LIMITS[report.variant.arch] * 1024
    found = []
    if report.spilled > _native.TOLERATED_SPILL:
        found.append(f"{report.spilled} bytes spilled")
    if report.shared > limit:
        found.append(f"{report.shared} bytes of shared memory, {limit} are allowed")
    if report.serialized:
        found.append("wgmmas wait for each other")
    return found


def tabulated(compiled: Iterable[list[Report]], path: pathlib.Path = TABLE) -> Iterator[Report]:
    """Write the reports to a table and yield them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["arch", "file", "kernel", "registers", "spilled", "shared", "serialized", "seconds", "fields"])
        for r in itertools.chain.from_iterable(compiled):
            fields = " ".join(f"{name}={x}" for name, x in r.variant.fields if x)
            where = (r.variant.arch, r.variant.file, r.kernel)
            table.writerow([*where, r.registers, r.spilled, r.shared, int(r.serialized), f"{r.seconds:.2f}", fields])
            yield r


def main() -> int:
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=TABLE)
    args = parser.parse_args()
    chosen = variants(itertools.chain(product(), singles(), cover())) if args.full else tested()
    compiled = track(compile_all(chosen), f"Compiling {len(chosen)} files", total=len(chosen))
    bad = sum(bool(faults(report)) for report in tabulated(compiled, args.output))
    print(f"{len(chosen)} files compiled, {bad} kernels with faults; table: {args.output}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

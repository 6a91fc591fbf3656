"""Generate the tables of the docs and the README from the committed results.

    python benchmarks/tables.py            # update all tables
    python benchmarks/tables.py --check    # show which tables do not match the results, and exit with 1 if any

A table is in a Markdown file between `<!-- table: dense -->` and `<!-- end -->`. A declaration or a function of the
table's name makes its text from the rows of files in benchmarks/results/. The text ends with the command, commit, date,
machine and versions recorded in these files. Run this after new measurements.

To add a table, declare it here (`cells.Grid`, `cells.Listing`), or write a function if it has another form. Then put
its two comments into a page. A table without results stays empty.
"""

import argparse
import difflib
import functools
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import paper.claims
import paper.tables  # noqa: F401 (both register tables)
import predict_devices
from cells import (
    FILES,
    TABLES,
    Cases,
    Grid,
    Listing,
    Results,
    Row,
    cases,
    declare,
    named,
    number,
    one,
    product,
    shows,
    table,
    with_count,
)

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- table: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {
    "jax": "jax",
    "nvidia-cudnn-cu13": "cuDNN",
    "nvidia-cuda-nvrtc": "NVRTC",
    "torch": "PyTorch",
    "triton": "Triton",
    "dew-flash-attn-cu13": "dew-flash-attn",
    "flash-attn-4": "FlashAttention-4",
    "jvp_flash_attention": "jvp_flash_attention",
    "fa4-jax": "fa4-jax",
    "pykeops": "KeOps",
}

RIVALS = {"cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4"}


# --- cells ------------------------------------------------------------------------------------------------------------


def speedup(row: Row, other: str) -> float | None:
    """Return the speed relative to another library, for a row of attention.py."""
    return row["tflops"]["jax_flash"] / row["tflops"][other] if other in row["tflops"] else None


def fastest(row: Row) -> str:
    """Return the fastest other library among the measured ones: a key of RIVALS."""
    return max((name for name in RIVALS if name in row["tflops"]), key=row["tflops"].__getitem__)


def rates_and_ratio(row: Row, other: str = "cudnn") -> str:
    """Return the TFLOP/s of jax_flash and of another library, and their ratio."""
    if other not in row["tflops"]:
        return number(row["tflops"]["jax_flash"], 0)
    return f"{row['tflops']['jax_flash']:.0f} / {row['tflops'][other]:.0f} ({speedup(row, other):.2f})"


rates_and_torch, rates_and_xla = (functools.partial(rates_and_ratio, other=other) for other in ("torch", "xla"))


def spread(ratios: Sequence[float]) -> str:
    """Return the geometric mean, the minimum and the maximum."""
    if not ratios:
        return "–"
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def paired(row: Row, above: str, below: str) -> float | None:
    """Return the median over rounds of the ratio of two calls' times in the same round."""
    seconds = row["seconds"]
    if above not in seconds or below not in seconds:
        return None
    return statistics.median(x / y for x, y in zip(seconds[above], seconds[below], strict=True))


# --- the summary ------------------------------------------------------------------------------------------------------


PASSES = ("forward", "backward")
# Cases, the other library, the result files, which ratio of a row to take, and which rows.
SUMMARY: list[tuple[str, str, list[str], str, Row]] = [
    ("d = 64, 128, 256; N = 1024, 4096, 16384; causal and not", "cuDNN", ["attention"], "cudnn", {}),
    ("the same cases", "FlashAttention-3", ["attention"], "fa3", {}),
    ("the same cases", "FlashAttention-4", ["attention"], "fa4", {}),
    ("the same cases", "XLA's attention", ["attention"], "xla", {}),
    ("d = 80, 96, 192; causal", "cuDNN", ["attention_groups"], "cudnn", {"D": (80, 96, 192)}),
    ("32 query heads on 4 key/value heads, 16 on 1; causal", "cuDNN", ["attention_groups"], "cudnn", {"K": (4, 1)}),
    ("a causal window of 1024, N = 16384", "cuDNN", ["attention_masks"], "cudnn", {"window": (1024,)}),
    ("dropout 0.1, N = 4096", "cuDNN, called by PyTorch", ["attention_dropout"], "cudnn", {}),
    ("N = 512, and a batch of one with N = 2048", "cuDNN", ["attention_small"], "cudnn", {}),
    ("decoding, one query", "cuDNN", ["attention_decode"], "cudnn", {"T": (1,)}),
    ("the same decoding cases", "PyTorch", ["attention_decode"], "torch", {"T": (1,)}),
    ("16 queries and a long cache", "cuDNN", ["attention_decode"], "cudnn", {"T": (16,)}),
    ("float32, as TF32", "XLA's attention", ["attention_float32"], "xla", {}),
    (
        "block masks: documents, windows, butterfly",
        "FlexAttention",
        ["block_sparse_gpu", "block_sparse_gpu_4096"],
        "flex_over_ours",
        {},
    ),
    ("score programs", "FlexAttention", ["score_programs_gpu"], "flex", {}),
]


@shows(*dict.fromkeys(file for _, _, files, *_ in SUMMARY for file in files))
def summary(*results: Results) -> str:
    rows_of = {file: found["rows"] for file, found in zip(FILES["summary"], results, strict=True)}

    def ratio(row: Row, kind: str) -> float | None:
        if kind == "flex":
            return flex_over_ours(row)
        return speedup(row, kind) if isinstance(row["tflops"], dict) else row.get(kind)

    def line(case: str, against: str, files: list[str], kind: str, fields: Row) -> list[str]:
        rows = [row for file in files for row in rows_of[file] if all(row[key] in fields[key] for key in fields)]
        found = [[ratio(row, kind) for row in rows if row["pass"] == pass_] for pass_ in PASSES]
        return [case, against, *(spread([x for x in ratios if x is not None]) for ratios in found)]

    return table(["case", "speed-up over", *PASSES], (line(*row) for row in SUMMARY))


def flex_over_ours(row: Row) -> float | None:
    """Return the speed-up over FlexAttention with its fastest backend, for a row of score_programs.py."""
    found = [paired(row, name, "program") for name in row["seconds"] if name.startswith("Flex")]
    return min((x for x in found if x is not None), default=None)


@shows("attention")
def headline(results: Results) -> str:
    def mean(other: str, pass_: str) -> str:
        ratios = [speedup(row, other) for row in results["rows"] if row["pass"] == pass_]
        return f"{statistics.geometric_mean(x for x in ratios if x is not None):.2f}"

    device = results["environment"]["devices"][0].removeprefix("NVIDIA ")
    cudnn = [mean("cudnn", pass_) for pass_ in PASSES]
    names = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "xla": "XLA's attention in `jax.nn`"}
    measured = [name for name in names if any(name in row["tflops"] for row in results["rows"])]
    *others, last = [" and ".join(mean(name, pass_) for pass_ in PASSES) + f" over {names[name]}" for name in measured]
    return (
        f"**{cudnn[0]} times as fast as cuDNN forward, and {cudnn[1]} times backward**, on an {device}, in bfloat16. "
        f"The speed-up, forward and backward, is {', '.join(others)}{', and ' if others else ''}{last}. "
        "These are geometric means over head dims 64, 128 and 256, lengths 1024, 4096 and 16384, causal and not. "
        "XLA's means omit cases in which it runs out of memory."
    )


# --- attention.py -----------------------------------------------------------------------------------------------------


LENGTHS = functools.partial(cases, "N = {}", "T")
DIMS = functools.partial(cases, "d = {}", "D")
PASS = cases("{}", "pass", *PASSES)
CAUSAL: Cases = {"": {"causal": False}, "causal": {"causal": True}}
PASS_CAUSAL = product(PASS, CAUSAL)
MASKS: Cases = {
    "no mask": {"causal": False, "documents": 1},
    "causal": {"causal": True, "window": None},
    "causal window of 1024": {"window": 1024},
    "16 documents of 1024": {"documents": 16},
}


def rate_and_ratio(row: Row) -> str:
    return f"{row['tflops']['jax_flash']:.0f} ({speedup(row, fastest(row)):.2f})"


def rates_and_fastest(row: Row) -> str:
    other = fastest(row)
    return rates_and_ratio(row, other).replace(" (", f" {RIVALS[other]} (")


def lengths_or_ids(row: Row) -> str:
    ours, theirs = (row["tflops"][name] for name in ("cumulative lengths", "segment ids"))
    return f"{ours:.0f} / {theirs:.0f} ({row['ratio']:.2f})"


def kv_heads_label(kv_heads: int) -> str:
    return f"{kv_heads} key/value head{'s' if kv_heads > 1 else ''}"


def heads_and_size(row: Row) -> str:
    dims = f"d = {row['D']}" + (f" for Q and K, {row['E']} for V" if row["D"] != row["E"] else "")
    shared = f", {kv_heads_label(row['K'])}" if row["K"] < row["N"] else ""
    return f"{row['N']} query heads of {dims}{shared}; B = {row['B']}, N = {row['T']}"


def microseconds(row: Row) -> str:
    times = [1e3 * row["milliseconds"][name] for name in ("jax_flash", "cudnn", "torch")]
    read = row["B"] * row["S"] * row["K"] * (row["D"] + row["E"]) * 2  # bytes of K and V
    return f"{times[0]:.0f} / {times[1]:.0f} / {times[2]:.0f} ({read / times[0] / 1e6:.1f} TB/s)"


declare({
    "dense readme": ["attention", Grid("N = 4096", DIMS(64, 128, 256), PASS_CAUSAL, rate_and_ratio, {"T": 4096})],
    "dense": ["attention", *(
        Grid(name, DIMS(64, 128, 256), product(LENGTHS(1024, 4096, 16384), CAUSAL), rates_and_fastest, {"pass": pass_})
        for name, pass_ in {"forward": "forward", "backward": "backward", "forward and backward": "both"}.items()
    )],
    "wide": ["attention_wide", Grid(
        "d = 512, TFLOP/s", product(LENGTHS(4096, 16384), CAUSAL), PASS, lambda row: f"{row['tflops']['jax_flash']:.0f}"
    )],
    "dropout": ["attention_dropout", Grid("dropout 0.1, N = 4096", DIMS(64, 128), PASS_CAUSAL, rates_and_ratio)],
    "ampere": ["attention_sm80", Grid("N = 16384", DIMS(64, 128, 256), PASS_CAUSAL, rates_and_torch)],
    "masks": ["attention_masks", Grid("N = 16384", MASKS, product(DIMS(64, 128), PASS), rates_and_ratio)],
    "windows": ["attention_windows", Grid(
        "64 heads on 8, d = 64, N = 16384, causal",
        product(cases("window of {}", "window", 128, 1024), {"": {"sinks": False}, "sinks": {"sinks": True}}),
        PASS, rates_and_ratio,
    )],
    "packed": ["packed_gpu", Grid(
        "65536 tokens, causal",
        {"32 sequences of 2048": {"sequences": "equal"}, "lengths 16 to 4096, uniform": {"sequences": "drawn"}},
        product(cases("d = {}", "dim", 64, 128), PASS), lengths_or_ids,
    )],
    "heads": ["attention_groups", Grid(
        "causal", named(heads_and_size, *"NDEKBT"), PASS, rates_and_ratio, {"group": "heads"}
    )],
    "small": ["attention_small", Grid(
        "", named("B = {B}, {N} heads of d = {D}, N = {T}".format_map, *"BNDT"), PASS, rates_and_ratio
    )],
    "decode": ["attention_decode", Grid(
        "µs: jax-flash / cuDNN / PyTorch",
        product({"one query": {"T": 1}, "16 queries": {"T": 16}}, {kv_heads_label(n): {"K": n} for n in (4, 8)}),
        {"B = 1, 131072 keys": {"B": 1}, "B = 8, 16384 keys": {"B": 8}}, microseconds,
    )],
    "float32": ["attention_float32", Grid(
        "float32", DIMS(64, 128), product(LENGTHS(2048, 8192), PASS), rates_and_xla
    )],
})  # fmt: skip


@shows("paged_gpu")
def paged(results: Results) -> str:
    contiguous, *others = ["in a row", *(f"pages of {n}" for n in (16, 64, 256)), "cudnn"]

    def line(row: Row) -> list[str]:
        lengths = f"{row['longest']}" if row["lengths"] == "equal" else f"100 to {row['longest']}"
        speed, speeds = row["gb_per_s"][contiguous], row["gb_per_s"]
        name = f"{row['sequences']} of {lengths}, {kv_heads_label(row['kv_heads'])}"
        return [name, f"{speed / 1e3:.1f}", *(f"{speeds[x] / 1e3:.1f} ({speeds[x] / speed:.2f})" for x in others)]

    head = ["TB/s (relative to contiguous)", "contiguous", *others[:-1], "cuDNN, contiguous"]
    return table(head, map(line, results["rows"]))


@shows("attention_deterministic")
def deterministic(results: Results) -> str:
    def cells(**problem: Any) -> list[str]:
        plain, fixed = (
            one(results["rows"], **problem, deterministic=flag)["milliseconds"]["jax_flash"] for flag in (False, True)
        )
        return [f"{plain:.2f} ms", f"{fixed:.2f} ms", f"{plain / fixed:.2f}"]

    return table(
        ["backward, N = 4096", "default", "`deterministic=True`", "share of the default speed"],
        (
            [f"d = {dim}" + ", causal" * causal, *cells(D=dim, causal=causal)]
            for dim in (64, 128, 256)
            for causal in (False, True)
        ),
    )


@shows("attention_tangent")
def tangent(results: Results) -> str:
    names = {"xla": "jax.nn", "plain": '`implementation="xla"`'}
    names |= {"jvp_flash": "jvp_flash_attention (PyTorch)", "fa4_jax": "fa4-jax"}
    measured = {x: name for x, name in names.items() if any(x in row["milliseconds"] for row in results["rows"])}

    def line(row: Row) -> list[str]:
        name = f"d = {row['D']}, {row['N']} heads, N = {row['T']}" + ", causal" * row["causal"]
        times = row["milliseconds"]
        ours = times["jax_flash"]
        others = (f"{times[x]:.1f} ms ({times[x] / ours:.1f})" if x in times else "–" for x in measured)
        return [name, {"jvp": "output and tangent", "tangent": "tangent"}[row["pass"]], f"{ours:.2f} ms", *others]

    return table(["", "computed", "jax_flash", *measured.values()], map(line, results["rows"]))


@shows("attention_tangent_rivals")
def tangent_rivals(results: Results) -> str:
    return tangent(results)


# --- the other benchmarks of a GPU ------------------------------------------------------------------------------------


@shows("host")
def host(results: Results) -> str:
    return table(
        ["", "jax_flash", "other"],
        (
            [row["what"].replace(", us", ", µs"), number(row["jax_flash"])]
            + [", ".join(f"{number(row[name])} ({label})" for name, label in others.items() if name in row) or "–"]
            for row in results["rows"]
            for others in [{"xla": "XLA's attention", "cudnn": "cuDNN"}]
        ),
    )


FEATURES = "mask bias dbias soft_cap sinks window segments lengths dropout block_mask gqa".split()


def feature(name: str) -> str:
    return name.replace("_", " ")


def share(row: Row | None) -> str:
    """Return the share of the plain call's speed. A: all kernels of the backward are Ampere's; a: some of them are."""
    if row is None or "share" not in row:
        return "–"
    families = row["families"]
    return number(row["share"]) + ("" if "ampere" not in families else "a" if "hopper" in families else "A")


@shows("features_gpu")
def features(results: Results) -> str:
    rows = {(row["dim"], *row["features"], row["pass"]): row for row in results["rows"]}

    def cell(dim: int, a: str, b: str) -> str:
        pair = (a,) if a == b else (a, b)
        return " / ".join(share(rows.get((dim, *pair, pass_))) for pass_ in PASSES)

    return "\n\n".join(
        table(
            [f"d = {dim}", *map(feature, FEATURES)],
            (
                [feature(a), *("" if j < i else cell(dim, a, b) for j, b in enumerate(FEATURES))]
                for i, a in enumerate(FEATURES)
            ),
        )
        for dim in (64, 128, 256)
    )


@shows("features_gpu")
def slowest_pairs(results: Results) -> str:
    def line(dim: int, pass_: str) -> list[str]:
        rows = [row for row in results["rows"] if row["dim"] == dim and row["pass"] == pass_]
        rows = sorted((row for row in rows if round(row.get("share", 1), 2) < 0.35), key=lambda row: row["share"])
        names = (f"{' + '.join(map(feature, row['features']))} {share(row)}" for row in rows)
        return [f"d = {dim}, {pass_}", ", ".join(names) or "none"]

    return table(
        ["", "features and pairs below 0.35 of the speed of a call without them"],
        (line(dim, pass_) for dim in (64, 128, 256) for pass_ in PASSES),
    )


@shows("block_sparse_gpu")
def block_sparse(results: Results) -> str:
    return fractions_kept(results)


@shows("block_sparse_16384")
def block_sparse_cpu_long(results: Results) -> str:
    return fractions_kept(results)


FRACTIONS = ["1/2", "1/4", "1/8", "1/16", "1/32"]
WITH_BACKWARD = "forward + backward"


def fractions_kept(results: Results) -> str:
    """Return the fractions of the two ideal speed-ups that are reached, and the rate on a GPU.

    The second ideal reduces only the additional time of the dense call, compared with a call with an empty mask.
    """
    columns = list(itertools.product((64, 128), ("forward", WITH_BACKWARD)))
    on_gpu = results["environment"]["devices"] != ["cpu"]

    def cell(kept: str, dim: int, pass_: str) -> str:
        row = one(results["rows"], mask=kept, dim=dim, pass_=pass_)
        both = f"{row['of_ideal']:.2f}, {row['of_ideal_beside_nothing']:.2f}"
        return f"{both} ({row['tflops']:.0f})" if on_gpu else both

    nothing = [one(results["rows"], mask="1/2", dim=d, pass_=p)["nothing_milliseconds"] for d, p in columns]
    return table(
        ["fraction kept, N = 16384", *(f"d = {dim}, {pass_}" for dim, pass_ in columns)],
        [
            *([kept, *(cell(kept, *column) for column in columns)] for kept in FRACTIONS),
            ["a call with an empty mask", *(f"{1e3 * x:.0f} µs" if on_gpu else f"{x:.1f} ms" for x in nothing)],
        ],
    )


declare({
    "butterfly": ["block_sparse_butterfly", Listing({
        "butterfly, N = 65536": "d = {dim}, {pass}".format_map,
        "fraction kept": lambda row: f"1/{1 / row['kept']:.0f}",
        "dense call": "{dense_milliseconds:.2f} ms".format_map,
        "with the mask": "{milliseconds:.2f} ms".format_map,
        "speed-up": "{speedup:.1f}".format_map,
        "share of ideal": "{of_ideal:.2f}".format_map,
    })],
})  # fmt: skip


@shows("block_sparse_gpu_4096", "block_sparse_gpu", "block_sparse_window")
def flex(short: Results, long: Results, window: Results) -> str:
    columns = list(itertools.product(((4096, short), (16384, long)), (64, 128)))

    def cell(results: Results, dim: int, mask: str) -> str:
        rows = [one(results["rows"], mask=mask, dim=dim, pass_=pass_) for pass_ in PASSES]
        return " / ".join(number(row["flex_over_ours"]) for row in rows)

    masks = {"document": "documents of 1024", "window": "causal window of 1024", "butterfly": "butterfly"}
    lines = [[name, *(cell(results, dim, mask) for (_, results), dim in columns)] for mask, name in masks.items()]
    again = ["causal window, later run", "", "", *(cell(window, dim, "window") for dim in (64, 128))]
    return table(["forward / backward", *(f"N = {length}, d = {dim}" for (length, _), dim in columns)], [*lines, again])


# --- benchmarks of a CPU ----------------------------------------------------------------------------------------------


@shows("cpu")
def cpu_readme(results: Results) -> str:
    columns = list(itertools.product((False, True), ("forward", "forward+backward")))

    def cell(dim: int, other: str, causal: bool, pass_: str) -> str:
        rates = one(results["rows"], dim=dim, length=4096, causal=causal, pass_=pass_)["gflops"]
        return number(rates["jax_flash"] / rates[other], 1)

    lines = [
        [f"d = {dim}, speed-up over {name}", *(cell(dim, other, *column) for column in columns)]
        for dim in (64, 128)
        for other, name in {"jax_nn": "jax.nn", "torch": "PyTorch"}.items()
    ]
    rates = [
        one(results["rows"], dim=d, length=4096, causal=c, pass_=p)["gflops"] for d in (64, 128) for c, p in columns
    ]
    ranges = [f"{min(x):.0f} to {max(x):.0f}" for x in ([r[k] for r in rates] for k in ("jax_flash", "matmul"))]
    memory = results["memory"]
    return (
        table(["N = 4096", *(f"{'causal ' if causal else ''}{pass_}" for causal, pass_ in columns)], lines)
        + f"\n\njax-flash reaches {ranges[0]} GFLOP/s. A plain matrix product reaches {ranges[1]}. With "
        f"N = 65536 and one head of d = 64, forward and backward need {memory['peak_over_inputs_mib']:.0f} MiB in "
        f"addition to the inputs. The output and the gradients are {memory['outputs_mib']:.0f} MiB of these."
    )


def rate_and_speedups(row: Row) -> str:
    rates = row["gflops"]
    ratios = [rates["jax_flash"] / rates[other] for other in ("jax_nn", "torch")]
    return f"{rates['jax_flash']:.0f} ({ratios[0]:.1f}, {ratios[1]:.2f})"


CPU_DIMS = cases("d = {}", "dim", 64, 128)
CPU_PASSES: Cases = {
    f"{causal}{pass_}": {"causal": bool(causal), "pass": pass_}
    for causal in ("", "causal ")
    for pass_ in ("forward", "forward+backward")
}
declare({
    "cpu": ["cpu", Grid(
        "GFLOP/s (speed-up over jax.nn, over PyTorch)", product(CPU_DIMS, CPU_PASSES),
        named("N = {length}".format_map, "length"), rate_and_speedups,
    )],
    "block sparse cpu": ["block_sparse", Grid(
        "fraction kept, d = 64 / d = 128", cases("{}", "mask", *FRACTIONS),
        product(cases("N = {}", "length", 4096, 8192), cases("{}", "pass", "forward", WITH_BACKWARD)),
        "{of_ideal:.2f}".format_map, each=list(CPU_DIMS.values()),
    )],
})  # fmt: skip


@shows("mla_cpu")
def mla_cpu(results: Results) -> str:
    columns = list(itertools.product(("contiguous", "pages"), (1024, 4096)))

    def cell(name: str, keys: int, heads: int, queries: int) -> str:
        return number(paired(one(results["rows"], keys=keys, heads=heads, queries=queries), "plain", name), 1)

    return table(
        ["speed-up over plain JAX", *(f"{name}, {keys} keys" for name, keys in columns)],
        (
            [f"{heads} heads, {queries} queries" if queries > 1 else f"{heads} heads, one query"]
            + [cell(*column, heads, queries) for column in columns]
            for heads, queries in itertools.product((16, 128), (1, 4))
        ),
    )


@shows("mla_gpu")
def mla_gpu(results: Results) -> str:
    def cells(row: Row) -> list[str]:
        sequences = "one sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
        return [
            f"{sequences}, {row['keys']} keys, {row['heads']} heads",
            f"{row['microseconds']['contiguous']:.0f}",
            f"{row['tflops']['contiguous']:.0f}",
            number(paired(row, "read", "contiguous"), 2),
            number(paired(row, "contiguous", "pages"), 2),
            number(paired(row, "plain", "contiguous"), 1),
        ]

    head = [
        "one query",
        "µs",
        "TFLOP/s",
        "rate of a read",
        "pages: speed-up over contiguous",
        "speed-up over plain JAX",
    ]
    return table(head, map(cells, results["rows"]))


declare({
    "cpu wide": ["cpu_wide", Grid(
        "speed-up over jax.nn", CPU_PASSES, named("N = {length}".format_map, "length"),
        lambda row: number(paired(row, "jax_nn", "jax_flash"), 1),
    )],
})  # fmt: skip


@shows("cpu_features")
def cpu_features(results: Results) -> str:
    columns = list(itertools.product((64, 128), PASSES))
    rows = {(row["dim"], row["pass"], row["feature"], row["dtype"]): row for row in results["rows"]}
    names = dict.fromkeys(row["feature"] for row in results["rows"] if row["pass"] == "backward")

    def cell(name: str, dim: int, pass_: str) -> str:
        found = [rows.get((dim, pass_, name, dtype)) for dtype in ("float32", "bfloat16")]
        return " / ".join(number(row["ratio"]) for row in found if row is not None)

    order = sorted(
        names.keys() - {"plain", "is_causal"}, key=lambda name: (name.startswith("dbias"), [*names].index(name))
    )
    return table(
        ["float32 / bfloat16", *(f"d = {dim}, {pass_}" for dim, pass_ in columns)],
        ([name, *(cell(name, *column) for column in columns)] for name in order),
    )


# --- score programs ---------------------------------------------------------------------------------------------------


def ratios(results: Results, program: str, dim: int, *calls: tuple[str, str]) -> list[str]:
    """Return the ratio of the times for each pair of calls, forward / backward."""
    rows = [
        next(r for r in results["rows"] if (r["program"], r["pass"], r["size"]["dim"]) == (program, pass_, dim))
        for pass_ in PASSES
    ]
    cells = []
    for above, below in calls:
        found = [flex_over_ours(row) if above == "Flex" else paired(row, above, below) for row in rows]
        cells.append("–" if found == [None, None] else " / ".join(map(number, found)))
    return cells


def programs_of(results: Results) -> list[str]:
    return list(dict.fromkeys(row["program"] for row in results["rows"]))


OURS = ("program", "plain"), ("program", "built-in"), ("XLA", "program")
PROGRAM_COLUMNS = "time over plain", "time over built-in", "speed-up over XLA"


@shows("score_programs_cpu")
def programs_cpu(results: Results) -> str:
    return table(
        ["forward / backward", *PROGRAM_COLUMNS],
        ([program, *ratios(results, program, 64, *OURS)] for program in programs_of(results)),
    )


@shows("score_programs_gpu", "score_programs_masks_gpu")
def programs(all_programs: Results, masks: Results) -> str:
    """The results for masks are in a separate file, because they were measured later."""
    later = programs_of(masks)
    kept = [row for row in all_programs["rows"] if row["program"] not in later]
    results = all_programs | masks | {"rows": kept + masks["rows"]}

    def rates(program: str, dim: int) -> str:
        rows = [row for row in results["rows"] if row["program"] == program and row["size"]["dim"] == dim]
        return " / ".join(f"{row['gflops']['program'] / 1e3:.0f}" for row in rows)

    parts = [
        table(
            [f"d = {dim}", "TFLOP/s", *PROGRAM_COLUMNS, "speed-up over Flex"],
            (
                [program, rates(program, dim), *ratios(results, program, dim, *OURS, ("Flex", "program"))]
                for program in programs_of(results)
            ),
        )
        for dim in (64, 128)
    ]
    blocks = statistics.median(results["classification_seconds"])
    parts.append(f"Classifying the blocks of a document mask at T = S = 65536 takes {1e3 * blocks:.1f} ms.")
    return "\n\n".join(parts)


# --- kernel sums and sparse MLPs --------------------------------------------------------------------------------------


@shows("kernel_sums_gpu")
def kernel_sums(results: Results) -> str:
    rows = results["rows"]
    ours, others = ("jax_flash", "jax_flash, TF32"), ("KeOps", "XLA")
    ways = [way for way in (*ours, *others) if any(way in row["seconds"] for row in rows)]
    names = {"jax_flash": "float32", "jax_flash, TF32": "TF32"}

    def line(row: Row) -> list[str]:
        seconds, errors = row["seconds"], row["error"]
        times = (f"{1e3 * statistics.median(seconds[way]):.3g}" if way in seconds else "–" for way in ways)
        faster = (" / ".join(number(paired(row, way, one), 1) for one in ours) for way in ways if way in others)
        rounding = (f"{errors[way]:.0e}" if way in errors else "–" for way in ways)
        return [f"{row['pass']}, N = {row['N']}, D = {row['D']}", *times, *faster, " / ".join(rounding)]

    shown = [names.get(way, way) for way in ways]
    head = ["", *(f"{way}, ms" for way in shown)]
    head += [f"speed-up over {way}: float32 / TF32" for way in ways if way in others]
    return table([*head, f"error: {' / '.join(shown)}"], map(line, rows))


@shows("sparse_mlp_gpu")
def sparse_mlp(results: Results) -> str:
    names = {"random": "random blocks", "butterfly": "butterfly and low rank"}
    products = "sparse, XLA's products"
    ways = ["sparse", *([products] if any(products in row["seconds"] for row in results["rows"]) else [])]

    def line(row: Row) -> list[str]:
        times = [f"{1e3 * statistics.median(row['seconds'][way]):.2f}" for way in ("dense", "sparse")]
        faster = [number(paired(row, "dense", way)) for way in ways]
        mib = [f"{row['mib'][way]:.0f}" for way in ("dense", "sparse")]
        return [f"{names[row['mask']]}, {row['kept']:.0%}, {row['pass']}", *times, *faster, " / ".join(mib)]

    head = ["mask, blocks kept", "dense, ms", "sparse, ms", "speed-up", "with XLA's products"][: 3 + len(ways)]
    return table([*head, "MiB: dense / sparse"], map(line, results["rows"]))


# --- several devices --------------------------------------------------------------------------------------------------


def median_of(results: Results, **fields: Any) -> float:
    return statistics.median(one(results["rows"], **fields)["seconds"])


@shows("ranks")
def ranks(results: Results) -> str:
    def line(length: int, pass_: str) -> list[str]:
        rows = [row for row in results["rows"] if row["length"] == length and row["pass"] == pass_]
        whole = one(rows, call="whole")
        parts = [statistics.median(row["seconds"]) for row in rows if row["call"] != "whole"]
        flops, share = whole["flops"] / len(parts) / 1e12, statistics.median(whole["seconds"]) / len(parts)
        return (
            [f"N = {length}, {pass_}"]
            + [f"{1e3 * seconds:.1f} ms ({flops / seconds:.0f} TFLOP/s)" for seconds in (share, max(parts), min(parts))]
            + [number(share / max(parts))]
        )

    cases = dict.fromkeys((row["length"], row["pass"]) for row in results["rows"])
    return table(["", "whole call / 8", "slowest of 8", "fastest of 8", "efficiency"], (line(*case) for case in cases))


WAYS = {
    "apart": "one sequence per GPU",
    "ring": "`sequence_axis`, contiguous",
    "zigzag": "`sequence_axis`, zigzag",
    "heads": "by heads, all-to-all",
    "gathered": "keys and values gathered",
}


def several_devices(pass_: str, *results: Results) -> str:
    """The last result counts if several files have the same call."""
    rows = [row for found in results for row in found["rows"] if row["pass"] == pass_]
    median = {(row["length"], row["call"]): statistics.median(row["seconds"]) for row in rows}

    def cell(count: str, way: str, length: int) -> str:
        seconds = median[length, f"{count} {way}"]
        efficiency = "" if way == "apart" else f" ({median[length, f'{count} apart'] / seconds / int(count):.2f})"
        return f"{1e3 * seconds:.{1 if seconds < 0.2 else 0}f}{efficiency}"

    lengths = sorted({row["length"] for row in rows})
    calls = dict.fromkeys(tuple(row["call"].split()) for row in rows)
    return table(
        [f"milliseconds, {pass_}", *(f"N = {length}" for length in lengths)],
        (
            [f"{count} GPU{'s' if count > '1' else ''}, {WAYS[way]}", *(cell(count, way, length) for length in lengths)]
            for count, way in sorted(calls, key=lambda call: call[0])
        ),
    )


@shows("several_devices", "several_devices_262144")
def several_devices_forward(*results: Results) -> str:
    return several_devices("forward", *results)


@shows("several_devices", "several_devices_backward")
def several_devices_backward(*results: Results) -> str:
    return several_devices("backward", *results)


@shows("exchange", "exchange_1048576")
def exchange(*results: Results) -> str:
    numbers = {
        "attention": "attention kernels",
        "others": "merging and slicing",
        "exchange": "exchange",
        "exchange alone": "exchange, not overlapped",
        "all": "whole call",
    }
    rows = [row for found in results for row in found["rows"]]
    return table(
        ["milliseconds", *numbers.values()],
        (
            [f"N = {row['length']}, {WAYS[row['way']]}, {row['pass']}", *(f"{row[name]:.1f}" for name in numbers)]
            for row in sorted(rows, key=lambda row: row["length"])
        ),
    )


@shows("ranks")
def many_devices(results: Results) -> str:
    lengths, devices = predict_devices.LENGTHS, predict_devices.DEVICES
    rate = predict_devices.kernel_rate(RESULTS / "ranks.json")

    def cell(length: int, count: int) -> str:
        found = predict_devices.seconds(length, count, rate)
        return " / ".join(number(found["kernels"] / found[way]) for way in ("ring", "all-to-all") if way in found)

    return table(
        ["N", *(f"P = {count}" for count in devices)],
        ([str(length), *(cell(length, count) for count in devices)] for length in lengths),
    )


# --- pages ------------------------------------------------------------------------------------------------------------


def source(name: str, page: pathlib.Path) -> str:
    """Return when, where and by which command a result file was produced, with a link to the file."""
    found = load(name)["environment"]
    commands = "; ".join(f"`{command}`" for command in found["command"].split("; "))
    commit = f"commit {found['commit']}, " if "commit" in found else ""
    produced = f"{commands}, {commit}{found['date'][:10]}"
    versions = [f"{label} {found['versions'][key]}" for key, label in NAMES.items() if found["versions"].get(key)]
    return f"{link(name, page)}: {', '.join([produced, machine(found), *versions])}."


def sources(names: Sequence[str], page: pathlib.Path) -> str:
    """Return the result files of some tables, with their machines and dates."""
    if len(names) <= 3:
        return "\n\n".join(source(name, page) for name in names)
    found = [load(name)["environment"] for name in names]
    days = sorted(environment["date"][:10] for environment in found)
    machines = " and ".join(dict.fromkeys(map(machine, found)))
    return f"{machines}, {days[0]} to {days[-1]}: {', '.join(link(name, page) for name in names)}."


def machine(environment: Results) -> str:
    devices = environment["devices"]
    if devices == ["cpu"]:
        return f"{environment['cores']} cores of an {environment['processor']}"
    return with_count(len(devices), devices[0])


def link(name: str, page: pathlib.Path) -> str:
    return f"[{name}.json]({os.path.relpath(RESULTS / f'{name}.json', page.parent)})"


def load(name: str) -> Results:
    return json.loads((RESULTS / f"{name}.json").read_text())


def filled(text: str, page: pathlib.Path) -> str:
    """Return the text of a page with up-to-date tables.

    Consecutive tables with the same source describe it only once.
    """
    last = ""

    def fill(found: re.Match[str]) -> str:
        nonlocal last
        begin, name, _, end = found.groups()
        if name not in TABLES:
            raise SystemExit(f"{page.relative_to(ROOT)}: unknown table {name!r}; the tables are {', '.join(TABLES)}")
        if not all((RESULTS / f"{file}.json").exists() for file in FILES[name]):
            return begin + end
        body = TABLES[name](*map(load, FILES[name]))
        described = sources(FILES[name], page)
        links = ", ".join(link(file, page) for file in FILES[name])
        shown, last = f"From the run of {links} above." if described == last else described, described
        return f"{begin}{body}\n\n{shown}\n{end}"

    return BLOCK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is not up to date")
    args = parser.parse_args()
    stale = False
    for page in PAGES:
        before = page.read_text()
        after = filled(before, page)
        if args.check and before != after:
            stale = True
            name = str(page.relative_to(ROOT))
            old, new = (text.splitlines(keepends=True) for text in (before, after))
            sys.stdout.writelines(difflib.unified_diff(old, new, name, f"{name}, from the results", n=0))
        elif before != after:
            page.write_text(after)
    if stale:
        sys.exit("Some tables do not match the results: run `python benchmarks/tables.py`.")


if __name__ == "__main__":
    main()

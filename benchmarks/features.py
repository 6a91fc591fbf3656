"""Every pair of features of `jax_flash.dot_product_attention`: the share of the plain call's speed that is left.

    python benchmarks/features.py                    # on an H200 two minutes; on a CPU, where N is 2048, longer
    python benchmarks/features.py --head-dims 128 --passes backward --features mask bias soft_cap window

The plain call has none of them, and as many key/value heads as query heads. Speed is 4 d FLOPs an entry of S that
counts over the time, 2.5 times as many in the backward. Entries that a window, segments, lengths or a block mask hide
do not count; they are counted one by one. All others do: a mask array hides half of the entries at random, so that no
tile can be left out, and dropout drops an entry when its product is there. So a share of 1 is as fast as the plain
call. What is missing is what the feature itself costs, and the hidden entries of tiles that are partly visible.

A feature and its pairs are timed in turn with the plain call, in one process. Of a table, the diagonal is the feature
alone. On a GPU, A: the kernels are of the family for Ampere; a: only those of the bias's gradient are.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attention
import block_sparse
import jax
import jax.numpy as jnp
import measure
import numpy as np
from attention import Problem
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_flash

# What a problem has with a feature beside the plain call; of lengths and block_mask, arrays: see `more_arrays`.
FEATURES: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "mask": lambda plain: {"mask": "b1ts"},
    "bias": lambda plain: {"bias": "1nts"},
    "dbias": lambda plain: {"bias": "1nts", "dbias": True},
    "soft_cap": lambda plain: {"soft_cap": 50.0},
    "sinks": lambda plain: {"sinks": True},
    "window": lambda plain: {"window": plain.S // 4},
    "segments": lambda plain: {"documents": 4},
    "lengths": lambda plain: {},
    "dropout": lambda plain: {"dropout": 0.1},
    "block_mask": lambda plain: {},
    "gqa": lambda plain: {"K": max(plain.N // 4, 1)},
}
PASSES = attention.PASSES[:2]
LITTLE = 0.35  # shares below are listed
Pair = tuple[str, ...]  # or one feature alone, or none: the plain call


def pairs_with(first: str, features: Sequence[str], pass_: str) -> list[Pair]:
    """Those of a row of the table: a feature alone, and with those after it."""
    later = features[features.index(first) + 1 :]
    pairs: list[Pair] = [(first,), *((first, second) for second in later)]
    return [x for x in pairs if set(x) != {"bias", "dbias"} and not ("dbias" in x and pass_ == "forward")]


def with_features(plain: Problem, pair: Pair) -> Problem:
    return dataclasses.replace(plain, **{key: value for name in pair for key, value in FEATURES[name](plain).items()})


def lengths(plain: Problem) -> np.ndarray:
    """Of the batch entries: all, three quarters, half and a quarter of T, and again."""
    return plain.T - np.arange(plain.B, dtype=np.int32) % 4 * (plain.T // 4)


def more_arrays(plain: Problem, pair: Pair) -> dict[str, Any]:
    """What a `Problem` of attention.py does not name; already on the device."""
    arrays: dict[str, Any] = {}
    if "lengths" in pair:
        arrays |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jnp.asarray(lengths(plain)))
    if "block_mask" in pair:
        arrays["block_mask"] = jax.device_put(block_sparse.random_blocks(plain.T, 2))
    return arrays


def visible(plain: Problem, pair: Pair) -> float:
    """The fraction of all entries that count."""
    i, j = np.arange(plain.T)[:, None], np.arange(plain.S)
    seen = np.ones((plain.T, plain.S), bool)
    problem = with_features(plain, pair)
    if problem.window is not None:
        seen &= (j <= i) & (i - j < problem.window)
    if problem.documents > 1:
        size = plain.T // problem.documents
        seen &= i // size == j // size
    if "block_mask" in pair:
        blocks = np.asarray(block_sparse.random_blocks(plain.T, 2).blocks)[0, 0] > 0
        seen &= blocks[i // block_sparse.BLOCK, j // block_sparse.BLOCK]
    of_entries = lengths(plain) if "lengths" in pair else [plain.T]
    return statistics.fmean(seen[:length, :length].sum() / seen.size for length in of_entries)


def explain(plain: Problem, pair: Pair, pass_: str) -> jax_flash.Explanation:
    problem = with_features(plain, pair)
    inputs, arrays = jax.eval_shape(lambda: attention.operands(problem))
    given = inputs | arrays | jax.eval_shape(lambda: more_arrays(plain, pair)) | attention.options(problem)
    described = jax_flash.Problem.of(**given)
    if pass_ == "backward":
        described = dataclasses.replace(described, dq=True, dk=True, dv=True, dbias=problem.dbias, dsinks=problem.sinks)
    return jax_flash.explain(described, pass_ == "backward")


def build(plain: Problem, pass_: str, pair: Pair) -> measure.Call | str:
    """The call, which has run once, so that its kernels are compiled; or why there is none."""
    try:
        problem, more = with_features(plain, pair), more_arrays(plain, pair)
        call = attention.jax_call(problem, "jax_flash", pass_, more)
        measure.finish(call())
        return call
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        if not pair:
            raise
        return str(error).splitlines()[0][:200]


def measure_pass(
    plain: Problem,
    pass_: str,
    features: Sequence[str],
    interleave: Callable[[dict[str, measure.Call]], dict[str, list[float]]],
) -> list[dict[str, Any]]:
    table = [pairs_with(first, features, pass_) for first in features]
    pairs = [(), *itertools.chain(*table)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # compiling takes longer than measuring
        built = dict(zip(pairs, pool.map(functools.partial(build, plain, pass_), pairs), strict=True))
    calls = {pair: call for pair, call in built.items() if not isinstance(call, str)}
    rows: list[dict[str, Any]] = []
    for line in table:
        now = [pair for pair in ((), *line) if pair in calls]
        samples = interleave({str(pair): calls[pair] for pair in now})
        times = {pair: statistics.median(samples[str(pair)]) for pair in now}
        for pair in line:
            row = {"dim": plain.D, "pass": pass_, "features": pair}
            if pair not in times:
                rows.append(row | {"refused": built[pair]})
                continue
            seen, explanation = visible(plain, pair), explain(plain, pair, pass_)
            rows.append(
                row
                | {
                    "share": seen * times[()] / times[pair],
                    "tflops": seen * plain.flops(pass_) / times[pair] / 1e12,
                    "milliseconds": 1e3 * times[pair],
                    "plain_milliseconds": 1e3 * times[()],
                    "visible": seen,
                    "families": sorted({kernel.family for kernel in explanation.kernels if kernel.rows}),  # has tiles
                    "kernels": [kernel._asdict() for kernel in explanation.kernels],
                    "scratch_bytes": explanation.scratch_bytes,
                }
            )
    return rows


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=4096 if gpu else 2048, help="N, a multiple of 512")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--seconds", type=float, default=2.0, help="on a CPU, spent on a line of a table")
    name = "features.json" if gpu else "features_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()
    if args.length < 512 or args.length % 512:
        parser.error("--length must be a multiple of 512: four documents of whole blocks")

    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    environment = measure.environment(["jax-flash", "jax", "jaxlib", "nvidia-cuda-nvrtc"])
    rows: list[dict[str, Any]] = []
    for dim, pass_ in track(list(itertools.product(args.head_dims, args.passes)), "Measuring features"):
        plain = Problem.square(args.length, dim)
        if not gpu:
            plain = dataclasses.replace(plain, B=1, N=8, K=8, dtype="float32")
        rows += measure_pass(plain, pass_, args.features, interleave)
        measure.save(args.json, {"environment": environment, "length": args.length, "rows": rows})
    show(rows, args.features, gpu)
    print(f"Written: {args.json}")


def cell(row: dict[str, Any] | None, gpu: bool) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    marks = {("ampere",): " A", ("ampere", "hopper"): " a"} if gpu else {}
    return f"{row['share']:.2f}" + marks.get(tuple(row["families"]), "")


def show(rows: Collection[dict[str, Any]], features: Sequence[str], gpu: bool) -> None:
    console = Console(width=130)
    for dim, pass_ in dict.fromkeys((row["dim"], row["pass"]) for row in rows):
        here = {row["features"]: row for row in rows if (row["dim"], row["pass"]) == (dim, pass_)}
        plain = next((row["plain_milliseconds"] for row in here.values() if "share" in row), float("nan"))
        table = Table("", *features, title=f"d={dim} {pass_}: share of the plain call's speed ({plain:.3f} ms)")
        for first in features:
            found = (here.get(pair) for second in features for pair in [tuple(dict.fromkeys((first, second)))])
            table.add_row(first, *(cell(row, gpu) for row in found))
        console.print(table)
    for row in sorted((row for row in rows if row.get("share", 1) < LITTLE), key=lambda row: row["share"]):
        names = " + ".join(row["features"])
        console.print(f"d={row['dim']} {row['pass']} {names}: {row['share']:.2f}, {', '.join(row['families'])}")
    for row in (row for row in rows if "refused" in row):
        console.print(f"d={row['dim']} {row['pass']} {' + '.join(row['features'])} is refused: {row['refused']}")


if __name__ == "__main__":
    main()

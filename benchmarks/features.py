"""All pairs of features of `jax_flash.dot_product_attention`: the speed relative to the plain call.

    python benchmarks/features.py                    # two minutes on an H200; longer on a CPU, where N is 2048
    python benchmarks/features.py --head-dims 128 --passes backward --features mask bias soft_cap window

The plain call has no features, and the same number of key/value heads and query heads. Speed is FLOPs over time: 4 d
per entry of S that counts, and 2.5 times that in the backward. Entries that a window, segments, lengths or a block mask
exclude do not count. All other entries count. A mask array hides half of the entries at random, so no tile can be
skipped. Dropout drops entries after their product is computed. A share of 1 therefore is the speed of the plain call. A
lower share is due to the cost of the feature, and to hidden entries of partly visible tiles.

A feature and its pairs are timed in turn with the plain call in one process. The diagonal of a table has single
features. On a GPU, "A" marks kernels of the family for Ampere, and "a" marks that only the bias gradient's kernels are.
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

# The fields of a problem with each feature. `lengths` and `block_mask` only add arrays: see `more_arrays`.
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
LOW_SHARE = 0.35  # pairs below are listed
Pair = tuple[str, ...]  # a pair, a single feature, or () for the plain call


def pairs_with(first: str, features: Sequence[str], pass_: str) -> list[Pair]:
    """Return the pairs in a row of the table: the feature alone, and with each feature after it."""
    later = features[features.index(first) + 1 :]
    pairs: list[Pair] = [(first,), *((first, second) for second in later)]
    return [x for x in pairs if set(x) != {"bias", "dbias"} and not ("dbias" in x and pass_ == "forward")]


def with_features(plain: Problem, pair: Pair) -> Problem:
    return dataclasses.replace(plain, **{key: value for name in pair for key, value in FEATURES[name](plain).items()})


def lengths(plain: Problem) -> np.ndarray:
    """Return lengths of the batch entries: all, three quarters, half and a quarter of T, repeated."""
    return plain.T - np.arange(plain.B, dtype=np.int32) % 4 * (plain.T // 4)


def more_arrays(plain: Problem, pair: Pair) -> dict[str, Any]:
    """Return the arrays that attention.py's `Problem` lacks, on the device."""
    arrays: dict[str, Any] = {}
    if "lengths" in pair:
        arrays |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jnp.asarray(lengths(plain)))
    if "block_mask" in pair:
        arrays["block_mask"] = jax.device_put(block_sparse.random_blocks(plain.T, 2))
    return arrays


def visible(plain: Problem, pair: Pair) -> float:
    """Return the fraction of all entries that count."""
    i, j = np.arange(plain.T)[:, None], np.arange(plain.S)
    counted = np.ones((plain.T, plain.S), bool)
    problem = with_features(plain, pair)
    if problem.window is not None:
        counted &= (j <= i) & (i - j < problem.window)
    if problem.documents > 1:
        size = plain.T // problem.documents
        counted &= i // size == j // size
    if "block_mask" in pair:
        blocks = np.asarray(block_sparse.random_blocks(plain.T, 2).blocks)[0, 0] > 0
        counted &= blocks[i // block_sparse.BLOCK, j // block_sparse.BLOCK]
    entry_lengths = lengths(plain) if "lengths" in pair else [plain.T]
    return statistics.fmean(counted[:length, :length].sum() / counted.size for length in entry_lengths)


def explain(plain: Problem, pair: Pair, pass_: str) -> jax_flash.Explanation:
    problem = with_features(plain, pair)
    inputs, arrays = jax.eval_shape(lambda: attention.operands(problem))
    given = inputs | arrays | jax.eval_shape(lambda: more_arrays(plain, pair)) | attention.options(problem)
    described = jax_flash.Problem.of(**given)
    if pass_ == "backward":
        requested = ("dq", "dk", "dv", *["dbias"] * problem.dbias, *["dsinks"] * problem.sinks)
        described = dataclasses.replace(described, requested=requested)
    return jax_flash.explain(described, pass_ == "backward")


def build(plain: Problem, pass_: str, pair: Pair) -> measure.Call | str:
    """Return a call that has run once, so its kernels are compiled. Return the error's text if it is not supported."""
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
            fraction, explanation = visible(plain, pair), explain(plain, pair, pass_)
            rows.append(
                row
                | {
                    "share": fraction * times[()] / times[pair],
                    "tflops": fraction * plain.flops(pass_) / times[pair] / 1e12,
                    "milliseconds": 1e3 * times[pair],
                    "plain_milliseconds": 1e3 * times[()],
                    "visible": fraction,
                    "families": sorted({kernel.family for kernel in explanation.kernels if kernel.rows}),
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
    parser.add_argument("--seconds", type=float, default=2.0, help="time for a row of a table, on a CPU")
    name = "features.json" if gpu else "features_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()
    if args.length < 512 or args.length % 512:
        parser.error("--length must be a multiple of 512: four documents of whole blocks each")

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
    for row in sorted((row for row in rows if row.get("share", 1) < LOW_SHARE), key=lambda row: row["share"]):
        names = " + ".join(row["features"])
        console.print(f"d={row['dim']} {row['pass']} {names}: {row['share']:.2f}, {', '.join(row['families'])}")
    for row in (row for row in rows if "refused" in row):
        console.print(f"d={row['dim']} {row['pass']} {' + '.join(row['features'])}: not supported: {row['refused']}")


if __name__ == "__main__":
    main()

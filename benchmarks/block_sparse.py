"""Block-sparse attention (Algorithm 5): time against the fraction of blocks kept, beside the dense call and the ideal.

    python benchmarks/block_sparse.py                                    # N = 4096 on a CPU, 16384 on a GPU
    python benchmarks/block_sparse.py --lengths 65536 --fractions --patterns butterfly

Every block row keeps the same number of blocks of 128 x 128, chosen at random, the same for all heads. All fractions of
a row are timed in turn in one process. The ideal is the dense time multiplied by the fraction; what is printed is how
much of the ideal speed-up is reached.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import measure
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_flash import BlockMask, dot_product_attention, patterns

BLOCK = 128
PATTERNS: dict[str, Callable[[int], BlockMask]] = {
    "butterfly": lambda n: patterns.butterfly(n, n),
    "window": lambda n: patterns.local_window(n, n, 1024, 1024),
    "document": lambda n: patterns.document(np.arange(n) // 1024),
}
PASSES = ("forward", "forward + backward")


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384 if gpu else 4096])
    parser.add_argument("--fractions", type=int, nargs="*", default=[2, 4, 8, 16, 32], help="keep 1 / each of them")
    parser.add_argument("--patterns", nargs="*", choices=list(PATTERNS), default=[])
    parser.add_argument("--heads", type=int, default=16 if gpu else 4)
    parser.add_argument("--seconds", type=float, default=5.0, help="time spent on a length, head dim and pass")
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS / "block_sparse.json")
    args = parser.parse_args()

    environment = measure.environment(["jax-flash", "jax", "jaxlib", "numpy"])
    problems = [(n, d, backward) for n in args.lengths for d in args.dims for backward in (False, True)]
    rows = []
    for n, d, backward in track(problems, "Measuring block-sparse attention"):
        masks = {f"1/{x}": random_blocks(n, x) for x in args.fractions}
        masks |= {name: PATTERNS[name](n) for name in args.patterns}
        rows += measure_row(n, d, args.heads, backward, masks, args.seconds, "bfloat16" if gpu else "float32")
    measure.save(args.output, {"environment": environment, "heads": args.heads, "rows": rows})
    Console().print(table(rows))
    draw(rows, args.output.with_suffix(".png"))


def random_blocks(n: int, part: int) -> BlockMask:
    """Keeps one block in `part`, in every block row as many."""
    size = n // BLOCK
    scores = np.random.default_rng(part).random((size, size))
    return BlockMask.from_dense(np.argsort(np.argsort(scores)) < max(size // part, 1))


def measure_row(
    n: int, d: int, heads: int, backward: bool, masks: dict[str, BlockMask], seconds: float, dtype: str
) -> list[dict[str, Any]]:
    arrays = [jax.random.normal(key, (1, n, heads, d), dtype) for key in jax.random.split(jax.random.key(0), 4)]

    def call(mask: BlockMask | None, q, k, v, do):
        attention = functools.partial(dot_product_attention, block_mask=mask)
        if not backward:
            return attention(q, k, v)
        o, pullback = jax.vjp(attention, q, k, v)
        return o, pullback(do)

    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(jax.jit(functools.partial(call, mask)), *arrays)
        for name, mask in {"dense": None, **masks}.items()
    }
    times = {name: statistics.median(x) for name, x in measure.interleave(calls, seconds).items()}
    return [
        {
            "length": n,
            "dim": d,
            "pass": PASSES[backward],
            "mask": name,
            "kept": float(mask.kept),
            "milliseconds": 1e3 * times[name],
            "dense_milliseconds": 1e3 * times["dense"],
            "of_ideal": times["dense"] * float(mask.kept) / times[name],
        }
        for name, mask in masks.items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ["length", "dim", "pass", "mask", "kept", "milliseconds", "dense_milliseconds", "of_ideal"]
    shown = Table(*(name.replace("_", " ") for name in columns), title="Block-sparse attention")
    for row in rows:
        shown.add_row(*(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    return shown


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time over that of the dense call against the fraction kept, one line a head dim."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({row["length"] for row in rows})
    figure, axes = plt.subplots(len(lengths), 2, figsize=(9, 3.6 * len(lengths)), squeeze=False)
    for (line, length), (column, name) in ((a, b) for a in enumerate(lengths) for b in enumerate(PASSES)):
        ax = axes[line, column]
        here = [row for row in rows if (row["length"], row["pass"]) == (length, name)]
        for dim in sorted({row["dim"] for row in here}):
            points = sorted(
                (row["kept"], row["milliseconds"] / row["dense_milliseconds"]) for row in here if row["dim"] == dim
            )
            ax.plot(*zip(*points, strict=True), "o-", label=f"d = {dim}")
        kept = sorted({row["kept"] for row in here})
        ax.plot(kept, kept, "k--", label="ideal")
        ax.set(xlabel="fraction of blocks kept", ylabel="time / dense", title=f"{name}, N = {length}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

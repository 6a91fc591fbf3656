"""Draw the paper's figures 2 and 3 and the curves of GPT-2 and Pathfinder: `python -m benchmarks.paper.figures`.

Each figure is written next to its results, if they exist: paper_figure2.png, paper_figure3.png, paper_gpt2_curves.png,
paper_pathfinder.png.
"""

import argparse
import json
import math
import pathlib
from typing import Any

import matplotlib
import measure

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from . import tables


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.figures", description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS, help="directory of the JSON files")
    args = parser.parse_args(argv)
    for draw in (figure2, figure3, gpt2_curves, pathfinder):
        path = args.results / f"paper_{draw.__name__}.json"
        if path.exists():
            draw(json.loads(path.read_text())).savefig(path.with_suffix(".png"), dpi=110)
            print(f"Written: {path.with_suffix('.png')}")


def figure2(results: dict[str, Any]) -> Any:
    """Middle: bytes and time against the size of the key block. Right: time against the fraction of kept blocks."""
    figure, (middle, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows_of_blocks = [row for row in tables.part_of(results, "blocks") if row["failure"] is None]
    blocks = [row["block"] for row in rows_of_blocks]
    middle.plot(blocks, [row["bytes"] / 1e9 for row in rows_of_blocks], "o-", color="C0")
    middle.set(xlabel="key block", xticks=blocks, title="Size of the blocks, forward", ylim=(0, None))
    middle.set_ylabel("GB that Algorithm 1 moves", color="C0")
    time = middle.twinx()
    time.plot(blocks, [row["milliseconds"] for row in rows_of_blocks], "s--", color="C1")
    time.set_ylabel("milliseconds in plain JAX", color="C1")
    time.set_ylim(0, None)

    rows = [row for row in tables.part_of(results, "sparsity") if row["pass"] == tables.BOTH]
    kept = [1.0, *(row["kept"] for row in rows)]
    right.plot([100 * x for x in kept], [rows[0]["dense_milliseconds"], *(row["milliseconds"] for row in rows)], "o-")
    right.set(xlabel="% of blocks kept", ylabel="milliseconds", ylim=(0, None))
    right.set_title(f"Block-sparse, N = {rows[0]['length']}, {tables.BOTH}")
    return figure


def figure3(results: dict[str, Any]) -> Any:
    """Time and memory against the sequence length. A cross marks where a method first runs out of memory."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    fields = {"milliseconds": ("milliseconds", 1.0), "GB": ("bytes", 1e9)}
    for axis, (unit, (field, scale)) in zip(axes, fields.items(), strict=True):
        for i, method in enumerate(tables.names_in(results["rows"], "method")):
            rows = [row for row in results["rows"] if row["method"] == method]
            ran = [row for row in rows if row["failure"] is None]
            if not ran:
                continue
            style: dict[str, Any] = {"color": f"C{i}", "linewidth": 2.5 if method == tables.FLASH else 1.2}
            points = zip(*((row["length"], row[field] / scale) for row in ran), strict=True)
            axis.plot(*points, "o-", ms=3, label=tables.NAMES[method], **style)
            first = next((row for row in rows if tables.out_of_memory(row)), None)
            if first is not None:
                axis.plot(first["length"], ran[-1][field] / scale, "x", color=f"C{i}", ms=9, mew=2)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set(xlabel="sequence length", ylabel=unit)
        axis.grid(alpha=0.3)
    axes[0].set_title(f"{tables.BOTH}; x: out of memory")
    axes[1].set_title("arguments, results and temporaries")
    axes[0].legend(fontsize=8)
    return figure


def gpt2_curves(results: dict[str, Any]) -> Any:
    """Held-out loss against steps. The curves overlap, so each is thinner than the one before."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    ran = [row for row in results["rows"] if row["failure"] is None]
    for i, row in enumerate(ran):
        steps = [results["every"] * (n + 1) for n in range(len(row["held_out"]))]
        width = 2 * (len(ran) - i) - 1
        axis.plot(steps, row["held_out"], color=f"C{i}", linewidth=width, label=tables.ATTENTIONS[row["attention"]])
    axis.set(xlabel="steps", ylabel="held-out loss, nats per byte", title="GPT-2 small, the same seed, no dropout")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def pathfinder(results: dict[str, Any]) -> Any:
    """The training loss of each stage. A dotted line marks the loss of a guess if only labels are learned."""
    rows = results["rows"]
    figure, axes = plt.subplots(1, len(rows), figsize=(12, 3), squeeze=False, layout="constrained")
    for axis, row in zip(axes[0], rows, strict=True):
        losses = row["training"]
        steps = [row["steps"] * (n + 1) / len(losses) for n in range(len(losses))]
        axis.plot(steps, losses, linewidth=1)
        if not row["targets"]:
            axis.axhline(math.log(2), color="grey", linestyle=":", label="guessing")
            axis.legend()
        learned = "pixels and labels" if row["targets"] else "labels only"
        axis.set(title=f"{row['side']} × {row['side']}\n{learned}", xlabel="steps", ylim=(0, 0.8 + row["targets"]))
    axes[0][0].set_ylabel("loss, mean over steps")
    return figure


if __name__ == "__main__":
    main()

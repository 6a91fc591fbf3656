"""Draw docs/speed.png, the plot in the README, from the committed results of attention.py.

python benchmarks/picture.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from cells import one

ROOT = pathlib.Path(__file__).parents[1]
LIBRARIES = {
    "jax_flash": ("jax-flash", "#1f5fbf"),
    "cudnn": ("cuDNN (jax.nn)", "#e08a1e"),
    "fa3": ("FlashAttention-3", "#4f9d69"),
    "fa4": ("FlashAttention-4 (PyTorch)", "#b0507a"),
    "torch": ("FlashAttention-2 (PyTorch)", "#9aa3ad"),
    "xla": ("XLA (jax.nn)", "#c9ced4"),
}
DIMS = (64, 128, 256)


def draw(path: pathlib.Path) -> None:
    results = json.loads((ROOT / "benchmarks/results/attention.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, pass_ in zip(axes, ("forward", "backward"), strict=True):
        rows = [one(results["rows"], D=dim, T=4096, causal=True, pass_=pass_)["tflops"] for dim in DIMS]
        measured = [name for name in LIBRARIES if name in rows[0]]
        width = 0.8 / len(measured)
        for i, name in enumerate(measured):
            label, color = LIBRARIES[name]
            positions, heights = [x + width * i for x in range(3)], [row[name] for row in rows]
            bars = axis.bar(positions, heights, 0.95 * width, label=label, color=color)
            axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(3)], [f"head dim {dim}" for dim in DIMS])
        axis.set_title(f"{pass_}, causal, 4 × 4096 tokens, bfloat16", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"TFLOP/s on one {results['environment']['devices'][0]}", fontsize=9)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(ROOT / "docs/speed.png")

"""Draw the picture of docs/architecture.md: the parts of the library, and the way of a call through them.

python docs/draw_architecture.py    # writes docs/architecture.png
"""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

PATH = pathlib.Path(__file__).parent / "architecture.png"
PYTHON, CPP = "#4c8fd6", "#d2802e"  # readable on white and on dark pages

# (left, bottom, width, height), color, title, text
BOXES = (
    (
        (0, 8, 12, 1.4),
        PYTHON,
        "public functions",
        "attention.py · varlen.py · paged.py · layers of Flax, Equinox and Keras",
    ),
    ((0, 6, 12, 1.4), PYTHON, "arguments", "arguments.py: Call → Problem (with its Mask and Score) and Operands"),
    ((0, 4, 12, 1.4), PYTHON, "custom calls", "custom_calls.py · derivatives.py · partitioning.py · sequence.py"),
    ((0, 0.9, 3.4, 2.5), PYTHON, "plain JAX", "blockwise.py\nreference.py\ntile.py"),
    ((3.9, 0.9, 3.4, 2.5), CPP, "cpu_src/", "handlers, threads\nforward, backward,\ntangent"),
    ((7.8, 0.9, 4.2, 2.5), CPP, "cuda_src/", "handlers → plan/ → jit\n→ kernels/hopper\nor kernels/ampere"),
    ((3.9, -1.1, 8.1, 1.4), CPP, "common/", "shared: problem · arrays · masking · program"),
)
ARROWS = [  # from (x, y) to (x, y)
    ((6, 8), (6, 7.4)),
    ((6, 6), (6, 5.4)),
    ((1.7, 4), (1.7, 3.4)),
    ((5.6, 4), (5.6, 3.4)),
    ((9.9, 4), (9.9, 3.4)),
]


def draw(path: pathlib.Path) -> None:
    figure, ax = plt.subplots(figsize=(7.6, 5.7), dpi=150)
    for (left, bottom, width, height), color, title, text in BOXES:
        shape = FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.15")
        shape.set(facecolor="none", edgecolor=color, linewidth=1.6)
        ax.add_patch(shape)
        ax.text(left + 0.2, bottom + height - 0.2, title, va="top", color=color, weight="bold", fontsize=11)
        ax.text(left + 0.2, bottom + height - 0.75, text, va="top", fontsize=9, linespacing=1.4)
    for start, end in ARROWS:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#7a7a7a", "shrinkA": 1, "shrinkB": 1})
    ax.set(xlim=(-0.1, 12.1), ylim=(-1.2, 9.5))
    ax.axis("off")
    figure.savefig(path, bbox_inches="tight", pad_inches=0.05)


if __name__ == "__main__":
    draw(PATH)

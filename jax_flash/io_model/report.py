"""`python -m jax_flash io`: the cost of the algorithms for one problem, as a table and as figures."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

import numpy as np

from jax_flash.io_model.closed_forms import (
    ALGORITHMS,
    BLOCK_SPARSE,
    Algorithm,
    extra_memory,
    flops,
    hbm_accesses,
    in_bytes,
    reads_and_writes,
)
from jax_flash.io_model.flash import block_sizes
from jax_flash.operands import DTYPES

NAMES: dict[Algorithm, str] = {
    "algorithm_0": "0  standard",
    "memory_efficient_forward": "B.1 memory-efficient",
    "algorithm_1": "1  FlashAttention",
    "algorithm_2": "2  with scale, mask, dropout",
    "algorithm_5": "5  block-sparse",
    "kernel_forward": "   as the kernels loop",
    "algorithm_3": "3  standard backward",
    "algorithm_4": "4  FlashAttention backward",
    "block_sparse_backward": "   block-sparse backward",
    "kernel_backward": "   as the kernels loop",
    "kernel_tangent": "   tangent",
}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "KIB": 2**10, "MIB": 2**20, "B": 1}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=int, default=1024, metavar="N", help="sequence length (default: 1024)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="head dim (default: 64)")
    parser.add_argument(
        "--sram",
        default="192KiB",
        metavar="M",
        help="size of SRAM: bytes with a unit (192KiB, 100KB), or a number of elements (default: 192KiB)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="dtype of all elements (default: float16)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="batch size (default: 1)")
    parser.add_argument("--heads", type=int, default=1, metavar="H", help="number of heads (default: 1)")
    parser.add_argument(
        "--sparsity", type=float, default=0.25, metavar="S", help="fraction of non-zero blocks (default: 0.25)"
    )
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="plot accesses against N, M and sparsity")


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the figure if requested, and return the exit code."""
    try:
        if min(args.batch, args.heads) < 1:
            raise ValueError(f"--batch and --heads must be positive, not {args.batch} and {args.heads}")
        M = sram_elements(args.sram, args.dtype)
        print_table(args.seq_len, args.head_dim, M, args.sparsity, args.batch * args.heads, args.dtype)
        if args.plot:
            plot(args.seq_len, args.head_dim, M, args.plot)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(f"{package} is not installed: run pip install 'jax-flash[io]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def sram_elements(text: str, dtype: str) -> int:
    """Return M in elements, from a text such as "192KiB" or "98304"."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"--sram must be a number of elements, or of bytes with KiB, MiB, KB, MB or B, not {text!r}")
    size = float(match[1]) * UNITS[match[2].upper()]
    return int(size / in_bytes(1, dtype) if match[2] else size)


def print_table(N: int, d: int, M: int, sparsity: float, copies: int, dtype: str) -> None:
    """Print one row for each algorithm. The numbers are totals over `copies` heads."""
    from rich.console import Console
    from rich.table import Table

    B_c, B_r = block_sizes(d, M)
    table = Table(
        title=f"N = {N}, d = {d}, M = {M} elements of {dtype}, heads × batch = {copies}: "
        f"B_c = {B_c}, B_r = {B_r}, s = {sparsity:g}"
    )
    table.add_column("algorithm")
    for column in ("reads", "writes", "accesses", "traffic", "standard ÷ this", "FLOPs", "extra memory"):
        table.add_column(column, justify="right")
    for algorithm in ALGORITHMS:
        if algorithm in ("algorithm_0", "algorithm_3"):  # a new pass
            table.add_section()
            standard = hbm_accesses(algorithm, N, d, M)
        if algorithm == "kernel_tangent":
            table.add_section()
        s = sparsity if algorithm in BLOCK_SPARSE else 1
        reads, writes = reads_and_writes(algorithm, N, d, M, s)
        accesses = reads + writes
        table.add_row(
            NAMES[algorithm],
            short(reads * copies),
            short(writes * copies),
            short(accesses * copies),
            short(in_bytes(accesses * copies, dtype)) + "B",
            "–" if algorithm == "kernel_tangent" else f"{standard / accesses:.2f}",
            short(flops(algorithm, N, d, M, s) * copies),
            short(in_bytes(extra_memory(algorithm, N) * copies, dtype)) + "B",
        )
    # If the output is not a terminal, use the full width of the table.
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)


def short(number: float) -> str:
    """Format a number with three digits and a decimal prefix, such as 4.85 M."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:
            return f"{number / 10**power:#.3g} {prefix}".replace(". ", " ")
    return f"{number:.0f} "


def plot(N: int, d: int, M: int, path: pathlib.Path) -> None:
    """Plot the accesses of forward and backward together against N, M and the fraction of non-zero blocks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def both(forward: Algorithm, backward: Algorithm, N: int, M: int, s: float = 1) -> float:
        return hbm_accesses(forward, N, d, M, s) + hbm_accesses(backward, N, d, M, s)

    dense: dict[str, tuple[Algorithm, Algorithm]] = {
        "standard (Algorithms 0 and 3)": ("algorithm_0", "algorithm_3"),
        "FlashAttention (1 and 4)": ("algorithm_1", "algorithm_4"),
        "as the kernels loop": ("kernel_forward", "kernel_backward"),
    }
    lengths = [max(1, int(N * 2.0**k)) for k in range(-3, 7)]
    sizes = sorted({int(M) for M in np.geomspace(d, N * d, 400)})
    shares = np.linspace(0, 1, 50)

    figure, (by_length, by_size, by_share) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for color, (name, pair) in enumerate(dense.items()):
        by_length.loglog(lengths, [both(*pair, length, M) for length in lengths], "o-", label=name)
        by_size.loglog(sizes, [both(*pair, N, size) for size in sizes])
        if color:  # the standard is far above
            by_share.axhline(both(*pair, N, M), color=f"C{color}", linestyle="--", label=name)
    sparse: tuple[Algorithm, Algorithm] = ("algorithm_5", "block_sparse_backward")
    by_share.plot(shares, [both(*sparse, N, M, share) for share in shares], color="C3", label="block-sparse (5)")
    for size, name in ((M, "M"), (d * d, "d²")):
        by_size.axvline(size, color="gray", linewidth=0.8)
        by_size.annotate(
            name, (size, 0.95), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right"
        )
    by_length.set(xlabel="N", ylabel="HBM accesses, forward + backward", title=f"d = {d}, M = {M}")
    by_size.set(xlabel="M, elements", title=f"N = {N}, d = {d}")
    by_share.set(xlabel="s, share of blocks that are not zero", ylim=(0, None), title=f"N = {N}, d = {d}, M = {M}")
    by_length.legend()
    by_share.legend()
    figure.savefig(path, dpi=110)
    print(f"Drawn: {path}")

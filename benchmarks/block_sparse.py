"""Block-sparse attention (Algorithm 5): time against the fraction of blocks kept, compared with the dense call.

    python benchmarks/block_sparse.py                                    # N = 4096 on a CPU, 16384 on a GPU
    python benchmarks/block_sparse.py --lengths 4096 16384 --fractions --patterns document window butterfly
    python benchmarks/block_sparse.py --lengths 65536 --fractions --patterns butterfly

For a fraction, every block row keeps the same number of 128 x 128 blocks. They are random, and the same for all heads.
All masks of a length, head dim and pass are timed in turn in one process.

There are two ideals. The first is the dense time multiplied by the fraction. The second adds the time of a call with an
empty mask, and multiplies only the rest of the dense time by the fraction. (With an empty mask, a call still reads and
writes O, dO and the gradients.) The tables show how much of the ideal speed-up is reached. TFLOP/s count the kept
blocks: 4 d per entry in the forward, and 2.5 times that in the backward. MiB are temporaries and results of a call.

On a GPU, the dtype is bfloat16 and a batch has 16384 tokens. The patterns are also measured in the backward alone. They
are compared with PyTorch's compiled FlexAttention, if installed, with the same inputs, mask and block size. The
difference from its results is a relative Euclidean norm, in the first head (rounding to bfloat16 gives about 0.004).
"""

import argparse
import functools
import importlib.util
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import measure
import numpy as np
from measure import Call
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_flash import BlockMask, dot_product_attention, patterns

BLOCK, TOKENS = 128, 16384
WINDOW, DOCUMENT = 1024, 1024  # keys
PATTERNS: dict[str, Callable[[int], BlockMask]] = {
    "butterfly": lambda n: patterns.butterfly(n, n),
    "window": lambda n: patterns.local_window(n, n, WINDOW - 1, 0),
    "document": lambda n: patterns.document(np.arange(n) // DOCUMENT),
}
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
WORK = {FORWARD: 1, BACKWARD: 2.5, BOTH: 3.5}  # relative to the forward
COLUMNS = {
    "length": "N",
    "dim": "d",
    "pass": "pass",
    "mask": "mask",
    "kept": "kept",
    "milliseconds": "ms",
    "dense_milliseconds": "dense ms",
    "speedup": "speed-up",
    "of_ideal": "of ideal",
    "of_ideal_beside_nothing": "of ideal above empty",
    "tflops": "TFLOP/s",
    "mib": "MiB",
    "dense_mib": "dense MiB",
    "flex_milliseconds": "Flex ms",
    "flex_over_ours": "Flex/ours",
    "flex_difference": "difference",
}


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384 if gpu else 4096])
    parser.add_argument("--fractions", type=int, nargs="*", default=[2, 4, 8, 16, 32], help="denominators")
    parser.add_argument("--patterns", nargs="*", choices=list(PATTERNS), default=[])
    parser.add_argument("--no-flex", action="store_true", help="omit FlexAttention, which compiles for minutes")
    parser.add_argument("--heads", type=int, default=16 if gpu else 4)
    parser.add_argument("--seconds", type=float, default=5.0, help="time per length, head dim and pass, on a CPU")
    name = "block_sparse_gpu.json" if gpu else "block_sparse.json"
    parser.add_argument(
        "--output", type=pathlib.Path, default=measure.RESULTS / name, help="the plot is saved next to it"
    )
    args = parser.parse_args()

    has_flex = gpu and not args.no_flex and importlib.util.find_spec("torch") is not None
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    packages = ["jax-flash", "jax", "jaxlib", "numpy", *(("nvidia-cuda-nvrtc", "torch", "triton") if gpu else ())]
    environment = measure.environment(packages)
    rows = []
    for n, d in track([(n, d) for n in args.lengths for d in args.dims], "Measuring block-sparse attention"):
        masks = {f"1/{x}": random_blocks(n, x) for x in args.fractions}
        masks |= {name: PATTERNS[name](n) for name in args.patterns}
        shape = (max(TOKENS // n, 1) if gpu else 1, n, args.heads, d)
        rows += measure_masks(shape, "bfloat16" if gpu else "float32", masks, has_flex, interleave)
        measure.save(args.output, {"environment": environment, "heads": args.heads, "rows": rows})
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    draw(rows, args.output.with_suffix(".png"))
    print(f"Written: {args.output} and {args.output.with_suffix('.png').name}")


def random_blocks(n: int, denominator: int) -> BlockMask:
    """Keep one in `denominator` blocks, with equal numbers in all block rows."""
    size = n // BLOCK
    scores = np.random.default_rng(denominator).random((size, size))
    return BlockMask.from_dense(np.argsort(np.argsort(scores)) < max(size // denominator, 1))


def measure_masks(
    shape: tuple[int, int, int, int],
    dtype: str,
    masks: dict[str, BlockMask],
    has_flex: bool,
    interleave: Callable[[dict[str, Call]], dict[str, list[float]]],
) -> list[dict[str, Any]]:
    batch, n, heads, d = shape
    arrays = [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)]
    flex = {name: flex_calls(name, masks[name], arrays) for name in PATTERNS if has_flex and name in masks}
    given = masks | {"nothing": BlockMask.from_dense(np.zeros((n // BLOCK,) * 2, bool))}
    rows = []
    for pass_, work in WORK.items():
        chosen = [name for name in masks if name in PATTERNS or pass_ != BACKWARD]
        if not chosen:
            continue
        calls, mib = {}, {}
        for name in ("dense", "nothing", *chosen):
            calls[name], mib[name] = jax_call(pass_, given.get(name), arrays)
        flex_now = {f"flex {name}": by_pass[pass_] for name, by_pass in flex.items()}
        times = {name: statistics.median(x) for name, x in interleave(calls | flex_now).items()}
        for name in chosen:
            kept, seconds = float(masks[name].kept), times[name]
            flops = kept * work * measure.attention_flops(batch, heads, n, d, causal=False, backward=False)
            dense, nothing = times["dense"], times["nothing"]
            row = {
                "length": n,
                "batch": batch,
                "dim": d,
                "pass": pass_,
                "mask": name,
                "kept": kept,
                "milliseconds": 1e3 * seconds,
                "dense_milliseconds": 1e3 * dense,
                "nothing_milliseconds": 1e3 * nothing,
                "speedup": dense / seconds,
                "of_ideal": dense * kept / seconds,
                "of_ideal_beside_nothing": (nothing + (dense - nothing) * kept) / seconds,
                "tflops": flops / seconds / 1e12,
                "mib": mib[name],
                "dense_mib": mib["dense"],
            }
            if name in flex:
                flex_seconds = times[f"flex {name}"]
                row |= {
                    "flex_milliseconds": 1e3 * flex_seconds,
                    "flex_over_ours": flex_seconds / seconds,
                    "flex_difference": difference(calls[name](), flex_now[f"flex {name}"]()),
                }
            rows.append(row)
    return rows


def jax_call(pass_: str, mask: BlockMask | None, arrays: list[jax.Array]) -> tuple[Call, float]:
    """Return one pass, and the MiB of its temporaries and results. The mask is an argument already on the device."""
    *inputs, do = jax.device_put([mask, *arrays])

    def attend(mask, q, k, v):
        return dot_product_attention(q, k, v, block_mask=mask, implementation="flash")

    def pullback(mask, q, k, v):
        return jax.vjp(functools.partial(attend, mask), q, k, v)

    def both(mask, q, k, v, do):
        o, pull = pullback(mask, q, k, v)
        return o, *pull(do)

    function: Callable[..., object]
    if pass_ == FORWARD:
        function, operands = attend, inputs
    elif pass_ == BACKWARD:
        function, operands = lambda pull, do: pull(do), [jax.jit(pullback)(*inputs)[1], do]
    else:
        function, operands = both, [*inputs, do]
    compiled = jax.jit(function).lower(*operands).compile()
    memory: Any = compiled.memory_analysis()
    return functools.partial(compiled, *operands), (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20


def flex_calls(pattern: str, mask: BlockMask, arrays: list[jax.Array]) -> dict[str, Call]:
    """Return the passes of PyTorch's FlexAttention, compiled, with the same numbers in its layout, [B, N, T, D]."""
    import torch
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kept = torch.tensor(np.asarray(mask.blocks)[0, 0] > 0, device="cuda")
    documents = torch.arange(mask.shape.q_len, device="cuda") // DOCUMENT
    mask_mod = {
        "butterfly": lambda b, h, i, j: kept[i // BLOCK, j // BLOCK],
        "window": lambda b, h, i, j: (j <= i) & (i - j < WINDOW),
        "document": lambda b, h, i, j: documents[i] == documents[j],
    }[pattern]
    block_mask = create_block_mask(mask_mod, None, None, *mask.shape[:2], device="cuda", BLOCK_SIZE=BLOCK)
    full = int(block_mask.full_kv_num_blocks.sum())
    if not torch.equal(block_mask.to_dense()[0, 0] > 0, kept) or full != (mask.blocks == 1).sum():
        raise RuntimeError(f"{pattern}: FlexAttention's block mask differs")

    torch._dynamo.config.recompile_limit = 1000  # every problem compiles the same function again
    torch._functorch.config.donated_buffer = False  # otherwise a backward can run only once
    attend = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=block_mask)
    bits = (torch.tensor(np.asarray(x).view(np.int16), device="cuda") for x in arrays)  # NumPy has no bfloat16
    q, k, v, do = (x.view(torch.bfloat16).transpose(1, 2).contiguous() for x in bits)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)

    def both():
        o = attend(*inputs)
        return o, *torch.autograd.grad(o, inputs, do)

    return {
        FORWARD: lambda: attend(q, k, v),
        BACKWARD: lambda: torch.autograd.grad(o, inputs, do, retain_graph=True),
        BOTH: both,
    }


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest |ours - theirs| / |theirs| among the results of a pass, in the first head."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    heads = ((np.asarray(x[0, :, 0], np.float32), y[0, 0].detach().float().cpu().numpy()) for x, y in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in heads)


def table(rows: list[dict[str, Any]]) -> Table:
    columns = {key: heading for key, heading in COLUMNS.items() if any(key in row for row in rows)}
    shown = Table(*columns.values(), title="Block-sparse attention")
    for row in rows:
        cells = (row.get(key, "") for key in columns)
        shown.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    return shown


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plot time relative to the dense call against the fraction kept, with a line per head dim, and the patterns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({row["length"] for row in rows})
    figure, axes = plt.subplots(len(lengths), 2, figsize=(9, 3.6 * len(lengths)), squeeze=False)
    for (line, length), (column, name) in ((a, b) for a in enumerate(lengths) for b in enumerate((FORWARD, BOTH))):
        ax = axes[line, column]
        here = [row for row in rows if (row["length"], row["pass"]) == (length, name)]
        for i, dim in enumerate(sorted({row["dim"] for row in here})):
            time = {r["mask"]: (r["kept"], 1 / r["speedup"]) for r in here if r["dim"] == dim}
            fractions = sorted(point for mask, point in time.items() if mask not in PATTERNS)
            if fractions:
                ax.plot(*zip(*fractions, strict=True), "o-", color=f"C{i}", label=f"d = {dim}")
            for mask, marker in zip(PATTERNS, "^sD", strict=True):
                if mask in time:
                    ax.plot(*time[mask], marker, color=f"C{i}", label=f"{mask}, d = {dim}")
        kept = sorted({1.0, *(row["kept"] for row in here)})
        ax.plot(kept, kept, "k--", label="ideal")
        ax.set(xlabel="fraction of blocks kept", ylabel="time / dense", title=f"{name}, N = {length}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

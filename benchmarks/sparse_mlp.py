"""Two layers with a GELU between them: `BlockSparseDense` compared with `flax.linen.Dense`, forward and backward.

    python benchmarks/sparse_mlp.py              # on a GPU a minute: 4096 -> 16384 -> 4096, 16384 tokens, bfloat16
    python benchmarks/sparse_mlp.py --tune       # on a GPU: first find the fastest tiles of the Triton kernels
    python benchmarks/sparse_mlp.py --products   # on a GPU: also XLA's batched products instead of these kernels

The masks have blocks of 128 x 128. "random" keeps a quarter of them: equally many for each block of outputs of the
first layer, and of inputs of the second. "butterfly" is the butterfly with the low-rank term of Pixelated Butterfly. On
a GPU, dense products run in cuBLAS. The backward computes the gradients of inputs and parameters, and includes the
forward. All calls are timed in turn, in one process. The ideal speed-up is 1 over the fraction of kept blocks. The
difference compares outputs of the first tokens with dense layers in float32 that have the same weights. It is relative,
in the Euclidean norm.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_flash import BlockMask, blocks_to_matrix, patterns, sparse_matrix
from jax_flash.linen import BlockSparseDense

BLOCK = 128
CHECKED = 512  # tokens whose outputs are compared with float32
CUBLAS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}  # XLA takes long to try its own
FORWARD, BOTH = "forward", "forward + backward"
DENSE, SPARSE, PRODUCTS = "dense", "sparse", "sparse, XLA's products"
TILES = [  # tokens, step, warps, stages
    sparse_matrix.Tile(*tile)
    for tile in (
        *(
            (256, 64, 8, 2),
            (256, 64, 8, 3),
            (256, 64, 8, 4),
            (256, 32, 8, 4),
            (256, 32, 8, 6),
            (256, 128, 8, 2),
            (256, 64, 4, 3),
        ),
        *((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 4, 6), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 4, 3)),
        *((128, 128, 8, 3), (128, 32, 4, 5), (64, 64, 4, 4)),
    )
]
Masks = tuple[BlockMask, BlockMask]


def random_quarter(inputs: int, outputs: int) -> BlockMask:
    """Keeps a quarter of the blocks, equally many in each block column."""
    size = inputs // BLOCK, outputs // BLOCK
    lottery = np.random.default_rng(0).random(size)
    return BlockMask.from_dense(np.argsort(np.argsort(lottery, 0), 0) < size[0] // 4, inputs, outputs)


def transposed(mask: BlockMask) -> BlockMask:
    return BlockMask.from_dense(np.swapaxes(mask.blocks > 0, -1, -2), mask.shape.kv_len, mask.shape.q_len)


PATTERNS: dict[str, Callable[[int, int], BlockMask]] = {
    "random": random_quarter,
    "butterfly": functools.partial(patterns.butterfly, global_blocks=1),
}


class MLP(nn.Module):
    inputs: int
    hidden: int
    dtype: Any
    masks: Masks | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        if self.masks is None:
            x = nn.gelu(nn.Dense(self.hidden, **options)(x))
            return nn.Dense(self.inputs, **options)(x)
        x = nn.gelu(BlockSparseDense(self.hidden, self.masks[0], **options)(x))
        return BlockSparseDense(self.inputs, self.masks[1], **options)(x)


def lowered(mlp: MLP, params: Any, x: jax.Array, pass_: str) -> jax.stages.Lowered:
    def forward(params: Any, x: jax.Array) -> Any:  # jax.jit would find mlp.apply in its cache
        return mlp.apply(params, x)

    def both(params: Any, x: jax.Array) -> Any:
        out, pull = jax.vjp(mlp.apply, params, x)
        return out, *pull(out)

    return jax.jit(forward if pass_ == FORWARD else both).lower(params, x)


def compile_one(program: jax.stages.Lowered) -> jax.stages.Compiled:
    return program.compile(compiler_options=CUBLAS)


def mib_of(compiled: jax.stages.Compiled) -> float:
    """MiB of temporaries and results."""
    memory: Any = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20


def difference(out: jax.Array, mlp: MLP, params: Any, x: jax.Array) -> float:
    """How much the outputs of sparse layers differ from dense layers in float32 with the same weights."""
    assert mlp.masks is not None
    layers = zip(("BlockSparseDense_0", "BlockSparseDense_1"), mlp.masks, strict=True)

    @jax.jit
    def expected(params: Any, x: jax.Array) -> Any:
        dense = {
            f"Dense_{i}": params["params"][name] | {"kernel": blocks_to_matrix(params["params"][name]["kernel"], mask)}
            for i, (name, mask) in enumerate(layers)
        }
        wide = jax.tree.map(lambda array: array.astype(jnp.float32), ({"params": dense}, x))
        return MLP(mlp.inputs, mlp.hidden, jnp.float32).apply(*wide)

    with jax.default_matmul_precision("highest"):
        theirs = np.asarray(expected(params, x[:CHECKED]), np.float64)
    ours = np.asarray(out[:CHECKED], np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def tune(
    inputs: int, hidden: int, tokens: int, dtype: Any, console: Console
) -> tuple[sparse_matrix.Tile, sparse_matrix.Tile]:
    """Print milliseconds of the kernels of the random mask by tile. Return the fastest for products and gradients."""
    mask = random_quarter(inputs, hidden)
    pattern = sparse_matrix.Pattern.of(mask)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (tokens, size), dtype) for key, size in zip(keys, (inputs, hidden), strict=False))
    blocks = jax.random.normal(keys[2], (pattern.count, BLOCK, BLOCK), dtype)
    kernels: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
        "product": (functools.partial(sparse_matrix.triton_product_of, pattern, False), (x, blocks)),
        "transposed": (functools.partial(sparse_matrix.triton_product_of, pattern, True), (dy, blocks)),
        "gradient": (functools.partial(sparse_matrix.triton_gradient_of, pattern), (x, dy)),
    }
    flops = 2 * tokens * pattern.count * BLOCK**2
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        lowered = {
            (name, tile): jax.jit(functools.partial(kernel, tile=tile)).lower(*arrays)
            for name, (kernel, arrays) in kernels.items()
            for tile in TILES
            if name != "gradient" or tile.tokens == TILES[0].tokens  # its tile has no tokens
        }
        compiling = {case: pool.submit(program.compile) for case, program in lowered.items()}
    products: dict[sparse_matrix.Tile, list[float]] = {}
    for name, (_, arrays) in kernels.items():
        table = Table("tokens", "step", "warps", "stages", "ms", "TFLOP/s", title=name)
        found = []
        for tile in (tile for of, tile in compiling if of == name):
            try:
                call = functools.partial(compiling[name, tile].result(), *arrays)
                (times,) = measure.interleave_enqueued({name: call}, samples=3).values()
            except jax.errors.JaxRuntimeError as error:  # shared memory does not suffice
                print(f"{name} {tile}: {str(error).splitlines()[0][:100]}")
                continue
            found.append((statistics.median(times), tile))
            products.setdefault(tile, []).append(found[-1][0])
        for seconds, tile in sorted(found):
            table.add_row(*map(str, tile), f"{1e3 * seconds:.3f}", f"{flops / seconds / 1e12:.0f}")
        console.print(table)
    both = {tile: sum(times[:2]) for tile, times in products.items() if len(times) > 1}
    return min(both, key=both.__getitem__), min(found)[1]


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=4096 if gpu else 1024)
    parser.add_argument("--hidden", type=int, default=16384 if gpu else 4096)
    parser.add_argument("--tokens", type=int, default=16384 if gpu else 2048)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument(
        "--tune", action="store_true", help="first time the Triton kernels with other tiles, and take the fastest"
    )
    parser.add_argument("--products", action="store_true", help="on a GPU, also time XLA's batched products: minutes")
    parser.add_argument("--seconds", type=float, default=8.0, help="on a CPU, spent on a row of the table")
    name = "sparse_mlp_gpu.json" if gpu else "sparse_mlp_cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=measure.RESULTS / name)
    args = parser.parse_args()

    dtype = jnp.bfloat16 if gpu else jnp.float32
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.tune:
        product, gradient = tune(args.inputs, args.hidden, args.tokens, dtype, console)
        print(f"PRODUCT_TILE, GRADIENT_TILE = {product}, {gradient}")
        sparse_matrix.triton_product_of = functools.partial(sparse_matrix.triton_product_of, tile=product)
        sparse_matrix.triton_gradient_of = functools.partial(sparse_matrix.triton_gradient_of, tile=gradient)
    interleave = measure.interleave_enqueued if gpu else functools.partial(measure.interleave, seconds=args.seconds)
    x = jax.random.normal(jax.random.key(1), (args.tokens, args.inputs), dtype)
    make = functools.partial(MLP, args.inputs, args.hidden, dtype)
    masks = {name: PATTERNS[name](args.inputs, args.hidden) for name in args.patterns}
    dense, sparse = make(), {name: make((mask, transposed(mask))) for name, mask in masks.items()}
    params = {mlp: jax.jit(mlp.init)(jax.random.key(0), x) for mlp in (dense, *sparse.values())}
    programs = {(DENSE, DENSE, pass_): lowered(dense, params[dense], x, pass_) for pass_ in (FORWARD, BOTH)}
    for pattern, mlp in sparse.items():
        for pass_ in (FORWARD, BOTH):
            programs[pattern, SPARSE, pass_] = lowered(mlp, params[mlp], x, pass_)
            if gpu and args.products:
                with mock.patch.object(sparse_matrix, "_has_kernel", lambda *_: False):
                    programs[pattern, PRODUCTS, pass_] = lowered(mlp, params[mlp], x, pass_)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        compiled = dict(zip(programs, pool.map(compile_one, programs.values()), strict=True))

    environment = measure.environment(["jax-flash", "jax", "jaxlib", "flax"])
    sizes = {"inputs": args.inputs, "hidden": args.hidden, "tokens": args.tokens, "dtype": jnp.dtype(dtype).name}
    rows: list[dict[str, Any]] = []
    table = Table(
        "mask", "kept", "pass", "dense, ms", "sparse, ms", "speed-up", "XLA's products, ms", "MiB", "difference"
    )
    for pattern, mlp in sparse.items():
        differs = difference(compiled[pattern, SPARSE, FORWARD](params[mlp], x), mlp, params[mlp], x)
        for pass_ in (FORWARD, BOTH):
            made = {way: one for (of, way, on), one in compiled.items() if of in (pattern, DENSE) and on == pass_}
            weights = {way: params[dense if way == DENSE else mlp] for way in made}
            seconds = interleave({way: functools.partial(one, weights[way], x) for way, one in made.items()})
            mib = {way: mib_of(one) for way, one in made.items()}
            kept = float(masks[pattern].kept)
            row = {"mask": pattern, "kept": kept, "pass": pass_, "seconds": seconds, "mib": mib, "difference": differs}
            rows.append(row)
            measure.save(args.json, {"environment": environment, **sizes, "rows": rows})
            median = {way: statistics.median(times) for way, times in seconds.items()}
            shown = [f"{1e3 * median[way]:.3f}" if way in median else "–" for way in (DENSE, SPARSE, PRODUCTS)]
            shown.insert(2, f"{median[DENSE] / median[SPARSE]:.2f}")
            table.add_row(pattern, f"{kept:.3f}", pass_, *shown, f"{mib[SPARSE]:.0f}", f"{differs:.1e}")
    console.print(table)
    print(f"Written: {args.json}")


if __name__ == "__main__":
    main()

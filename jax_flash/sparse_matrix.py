"""Products with a matrix that stores only some of its blocks: the weights of `BlockSparseDense`.

A block mask selects the stored blocks of the matrix [I, O]. Its rows are inputs, and its columns outputs. The blocks
[K, A, B] are in the order of rows, and in a row in the order of columns. The time and memory of a product, and of its
gradients, are proportional to the number of stored blocks.

On a GPU, products in 16-bit dtypes run in Pallas kernels for Triton. A program computes a tile of the output, and walks
the list of blocks in the tile's column. So it reads inputs in place, where products of XLA would gather them first: a
copy for each block that uses them. Other products use XLA's batched products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_flash import checks
from jax_flash.block_sparse import BlockMask, MaskOfFunction
from jax_flash.explicit import placed
from jax_flash.varying import type_varying_as, varying_alike

GROUP, GROUP_BYTES = 8, 2**25  # token tiles whose inputs stay in L2 while programs walk all columns
TOGETHER = 4  # blocks in one of XLA's products: more are faster, but gather more at a time


class Tile(NamedTuple):
    """The tile of a program of a Triton kernel."""

    tokens: int  # rows of its output, in a product
    step: int  # the inner dim of one step: features in a product, tokens in a gradient
    warps: int
    stages: int


PRODUCT_TILE, GRADIENT_TILE = Tile(128, 64, 4, 3), Tile(256, 64, 8, 3)


class Lists(NamedTuple):
    """The blocks that each part of an output sums over."""

    start: np.ndarray  # [parts + 1]: the first entry of each part in the other two arrays
    block: np.ndarray  # the number of a block
    source: np.ndarray  # the part of the input that it multiplies


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The places of the blocks. It is hashable, because it is static in JAX."""

    grid: tuple[int, int]
    block: tuple[int, int]
    bits: bytes  # whether each block of the grid is stored (`np.packbits`)

    @classmethod
    def of(cls, mask: BlockMask) -> Pattern:
        """Return the pattern of a block mask.

        Raises:
          TypeError: if it is not a BlockMask.
          ValueError: if it has partial blocks, traced blocks, several batch entries or heads, or the sizes do not
            consist of whole blocks.
        """
        if not isinstance(mask, BlockMask):
            raise TypeError(f"mask must be a jax_flash.BlockMask, not {type(mask).__name__}")
        if isinstance(mask, MaskOfFunction) or isinstance(mask.blocks, jax.core.Tracer):
            raise ValueError("mask must be concrete, because the shape of the weights depends on it")
        blocks = np.asarray(mask.blocks)
        if math.prod(blocks.shape[:-2]) != 1:
            raise ValueError(f"mask must be one mask, not a mask for each of {blocks.shape[:-2]}")
        inputs, outputs, *block = mask.shape
        if inputs % block[0] or outputs % block[1]:
            raise ValueError(f"a weight of {inputs} x {outputs} does not consist of blocks of {block[0]} x {block[1]}")
        blocks = blocks.reshape(blocks.shape[-2:])
        if (blocks > 1).any():
            raise ValueError("mask must keep or skip whole blocks, but some blocks are partial")
        return cls._of(blocks > 0, (block[0], block[1]))

    @classmethod
    def _of(cls, kept: np.ndarray, block: tuple[int, int]) -> Pattern:
        return cls((kept.shape[0], kept.shape[1]), block, np.packbits(kept).tobytes())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.grid[0] * self.block[0], self.grid[1] * self.block[1]

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Whether each block of the grid is stored: bool [U, V]."""
        size = math.prod(self.grid)
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), count=size).astype(bool).reshape(self.grid)

    @functools.cached_property
    def rows_and_columns(self) -> np.ndarray:
        """The places of the blocks: int32 [2, K]."""
        return np.argwhere(self.kept).astype(np.int32).T

    @property
    def count(self) -> int:
        """The number of blocks, K."""
        return self.rows_and_columns.shape[1]

    def lists(self, transposed: bool) -> Lists:
        """Return the lists of a product with the matrix: by column, or by row for the transposed matrix."""
        source, part = self.rows_and_columns[:: -1 if transposed else 1]
        order = np.argsort(part, kind="stable").astype(np.int32)
        count = np.bincount(part, minlength=self.grid[0 if transposed else 1])
        return Lists(np.concatenate([[0], np.cumsum(count)]).astype(np.int32), order, source[order])

    def pairs(self) -> np.ndarray:
        """Return the blocks in pairs of the same row: int32 [pairs, 2]. A block without a partner is its own."""
        start, block, _ = self.lists(transposed=True)
        rows = (block[a:b] for a, b in zip(start, start[1:], strict=False))
        padded = [np.append(row, row[-1]) if len(row) % 2 else row for row in rows if len(row)]
        return np.concatenate(padded).reshape(-1, 2)

    def repeated(self, count: int) -> Pattern:
        """Return the pattern of a block-diagonal matrix of this many such matrices."""
        return self._of(np.kron(np.eye(count, dtype=bool), self.kept), self.block)


def block_sparse_matmul(x: ArrayLike, blocks: ArrayLike, mask: BlockMask) -> jax.Array:
    """Multiply by a matrix that stores only some of its blocks.

    Time and memory are proportional to the number of stored blocks, forward and backward. The fast kernels of a GPU
    support bfloat16 and float16, blocks whose sides are 16, 32, 64 or 128, and arrays of fewer than 2^31 elements. Sums
    are float32 (float64 for float64). There are derivatives of any order in reverse mode. Forward mode is an error.

    Args:
      x: array [..., I]; float32, float64, bfloat16 or float16.
      blocks: array [K, A, B] in the same dtype, with the K blocks that the mask keeps (`matrix_to_blocks`).
      mask: the block mask, with I x O entries and blocks of A x B, all of them full or empty.

    Returns:
      Array [..., O] in the same dtype.

    Raises:
      TypeError: if dtypes differ or are unsupported, or mask is not a BlockMask.
      ValueError: if shapes do not match, the mask has partial blocks, or its sizes do not consist of whole blocks.
    """
    pattern = Pattern.of(mask)
    x, blocks = checks.floats("x", x), _checked_blocks(blocks, pattern)
    if x.dtype != blocks.dtype:
        raise TypeError(f"x and blocks must have equal dtypes, not {x.dtype} and {blocks.dtype}")
    if x.ndim == 0 or x.shape[-1] != pattern.shape[0]:
        raise ValueError(f"x must have shape [..., {pattern.shape[0]}], not {x.shape}")

    return product(x, blocks, pattern)


def product(x: jax.Array, blocks: jax.Array, pattern: Pattern) -> jax.Array:
    """Return `block_sparse_matmul` of checked arrays."""

    def multiply(x: jax.Array, blocks: jax.Array) -> jax.Array:
        x, blocks = varying_alike((x, blocks), (x, blocks))  # gradients of shared blocks are sums over devices
        rows = _product(pattern, False, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), blocks)
        return rows.reshape(*x.shape[:-1], rows.shape[-1])

    return placed(multiply, PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None), x, blocks)


def matrix_to_blocks(matrix: ArrayLike, mask: BlockMask) -> jax.Array:
    """Return the blocks [K, A, B] of a matrix [I, O] that a mask keeps, such as the kernel of a dense layer.

    Raises:
      TypeError: if matrix is not an array of floats.
      ValueError: if its shape differs from the shape of the mask, or `block_sparse_matmul` refuses the mask.
    """
    pattern = Pattern.of(mask)
    given = checks.shaped("matrix", checks.floats("matrix", matrix), pattern.shape)
    (rows, columns), (a, b) = pattern.grid, pattern.block
    row, column = pattern.rows_and_columns
    return given.reshape(rows, a, columns, b).swapaxes(1, 2)[row, column]


def blocks_to_matrix(blocks: ArrayLike, mask: BlockMask) -> jax.Array:
    """Return the matrix [I, O] with these blocks [K, A, B], and zeros elsewhere: the inverse of `matrix_to_blocks`."""
    pattern = Pattern.of(mask)
    blocks = _checked_blocks(blocks, pattern)
    (rows, columns), (a, b) = pattern.grid, pattern.block
    row, column = pattern.rows_and_columns
    tiles = jnp.zeros((rows, columns, a, b), blocks.dtype).at[row, column].set(blocks)
    return tiles.swapaxes(1, 2).reshape(pattern.shape)


def _checked_blocks(blocks: ArrayLike, pattern: Pattern) -> jax.Array:
    return checks.shaped("blocks", checks.floats("blocks", blocks), (pattern.count, *pattern.block))


# --- derivatives ------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(pattern: Pattern, transposed: bool, x: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return x [T, I] times the matrix, or x [T, O] times the transposed matrix."""
    return _batched_product(pattern, transposed)(x, blocks)


def _product_forward(pattern, transposed, x, blocks):
    return _product(pattern, transposed, x, blocks), (x, blocks)


def _product_backward(pattern, transposed, saved, dy):
    x, blocks = saved
    sides = (dy, x) if transposed else (x, dy)
    return _product(pattern, not transposed, dy, blocks), _gradient(pattern, *sides)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient(pattern: Pattern, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Return the blocks of xᵀ dy, for x [T, I] and dy [T, O]."""
    return _batched_gradient(pattern)(x, dy)


def _gradient_forward(pattern, x, dy):
    return _gradient(pattern, x, dy), (x, dy)


def _gradient_backward(pattern, saved, blocks):
    x, dy = saved
    return _product(pattern, True, dy, blocks), _product(pattern, False, x, blocks)


_gradient.defvjp(_gradient_forward, _gradient_backward)


# --- vmap: tokens join other tokens, and several matrices become one block-diagonal matrix ----------------------------


def _batched_product(pattern: Pattern, transposed: bool) -> Callable[..., jax.Array]:
    @jax.custom_batching.custom_vmap
    def call(x: jax.Array, blocks: jax.Array) -> jax.Array:
        return _one_product(pattern, transposed, x, blocks)

    @call.def_vmap
    def rule(size: int, batched: list[bool], x: jax.Array, blocks: jax.Array):
        if not batched[1]:
            rows = call(x.reshape(size * x.shape[1], x.shape[2]), blocks)
            return rows.reshape(size, x.shape[1], rows.shape[1]), True
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        rows = _batched_product(pattern.repeated(size), transposed)(
            _side_by_side(x), blocks.reshape(size * pattern.count, *pattern.block)
        )
        return rows.reshape(rows.shape[0], size, pattern.shape[0 if transposed else 1]).swapaxes(0, 1), True

    return call


def _batched_gradient(pattern: Pattern) -> Callable[..., jax.Array]:
    @jax.custom_batching.custom_vmap
    def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        return _one_gradient(pattern, x, dy)

    @gradient.def_vmap
    def rule(size: int, batched: list[bool], *sides: jax.Array):
        x, dy = (y if of else jnp.broadcast_to(y, (size, *y.shape)) for y, of in zip(sides, batched, strict=True))
        blocks = _batched_gradient(pattern.repeated(size))(_side_by_side(x), _side_by_side(dy))
        return blocks.reshape(size, pattern.count, *pattern.block), True

    return gradient


def _side_by_side(x: jax.Array) -> jax.Array:
    """[B, T, I] -> [T, B·I]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


# --- the choice of an implementation ----------------------------------------------------------------------------------


def _one_product(pattern: Pattern, transposed: bool, x: jax.Array, blocks: jax.Array) -> jax.Array:
    if not pattern.count or not x.shape[0]:
        return jnp.zeros((x.shape[0], pattern.shape[0 if transposed else 1]), x.dtype)
    plain = functools.partial(_plain_product, pattern, transposed)
    if not _has_kernel(pattern, x):
        return plain(x, blocks)
    return lax.platform_dependent(
        x, blocks, cuda=functools.partial(triton_product_of, pattern, transposed), default=plain
    )


def _one_gradient(pattern: Pattern, x: jax.Array, dy: jax.Array) -> jax.Array:
    if not pattern.count or not x.shape[0]:
        return jnp.zeros((pattern.count, *pattern.block), x.dtype)
    plain = functools.partial(_plain_gradient, pattern)
    if not _has_kernel(pattern, x):
        return plain(x, dy)
    return lax.platform_dependent(x, dy, cuda=functools.partial(triton_gradient_of, pattern), default=plain)


def _has_kernel(pattern: Pattern, x: jax.Array) -> bool:
    """Return whether the Triton kernels support a product. Their offsets have 32 bits."""
    sides = all(side in (16, 32, 64, 128) for side in pattern.block)
    return sides and x.dtype.itemsize == 2 and (x.shape[0] + PRODUCT_TILE.tokens) * max(pattern.shape) < 2**31


def _accumulation_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _plain_product(pattern: Pattern, transposed: bool, x: jax.Array, blocks: jax.Array) -> jax.Array:
    """Compute the product by XLA's batched products. Parts of the output with equally many blocks share products."""
    start, block, source = pattern.lists(transposed)
    inner, outer = pattern.block[:: -1 if transposed else 1]
    count = np.diff(start)
    inputs = x.reshape(x.shape[0], -1, inner)

    def add(total: jax.Array, entries: tuple[jax.Array, jax.Array]) -> jax.Array:
        block, source = entries
        equation = "tpnj,pnkj->ptk" if transposed else "tpnj,pnjk->ptk"
        return total + _wide_einsum(equation, inputs[:, source], blocks[block])

    totals = []
    for length in np.unique(count):
        parts = np.flatnonzero(count == length)
        entries = start[parts][:, None] + np.arange(length)
        zeros = jnp.zeros((len(parts), x.shape[0], outer), _accumulation_dtype(x))
        lists = block[entries].T, source[entries].T
        total = _in_chunks(lambda total, lists: add(total, tuple(x.T for x in lists)), zeros, lists, TOGETHER, x)
        totals.append(total.astype(x.dtype))
    order = np.argsort(np.argsort(count, kind="stable"))
    return jnp.concatenate(totals)[order].swapaxes(0, 1).reshape(x.shape[0], -1)


def _plain_gradient(pattern: Pattern, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Compute the gradient of the blocks by XLA's batched products, for as many blocks at a time as a side has."""
    a, b = pattern.block
    inputs, cotangents = x.reshape(x.shape[0], -1, a), dy.reshape(x.shape[0], -1, b)

    def add(total: jax.Array, entries: tuple[jax.Array, ...]) -> jax.Array:
        number, row, column = entries
        gradient = _wide_einsum("tki,tkj->kij", inputs[:, row], cotangents[:, column])
        return total.at[number].set(gradient.astype(x.dtype))

    places = np.arange(pattern.count, dtype=np.int32), *pattern.rows_and_columns
    zeros = jnp.zeros((pattern.count, a, b), x.dtype)
    return _in_chunks(add, zeros, places, max(pattern.grid), x)


def _wide_einsum(equation: str, *arrays: jax.Array) -> jax.Array:
    """Return a product in the dtype of sums. XLA's CPU kernels do not multiply 16-bit arrays with float32 sums."""
    return jnp.einsum(equation, *(x.astype(_accumulation_dtype(x)) for x in arrays))


def _in_chunks(
    add: Callable[..., jax.Array], total: jax.Array, lists: tuple[np.ndarray, ...], size: int, like: jax.Array
) -> jax.Array:
    """Return `add(total, lists)`, computed for some entries of the lists after others, because gathers take memory.

    XLA may gather for all products of a program at a time, but a loop has one.
    """
    whole = len(lists[0]) // size * size
    chunks = tuple(jnp.asarray(x[:whole]).reshape(-1, size, *x.shape[1:]) for x in lists)
    total = varying_alike(total, like)
    if whole:
        total, _ = lax.scan(lambda total, chunk: (add(total, chunk), None), total, chunks)
    rest = tuple(jnp.asarray(x[whole:]) for x in lists)
    return add(total, rest) if len(rest[0]) else total


# --- Triton -----------------------------------------------------------------------------------------------------------


def triton_product_of(
    pattern: Pattern, transposed: bool, x: jax.Array, blocks: jax.Array, tile: Tile = PRODUCT_TILE
) -> jax.Array:
    """Compute the product by a Triton kernel. Each device computes its own tokens."""
    lists = map(jnp.asarray, pattern.lists(transposed))
    return _divided(lambda *arrays: triton_product(pattern, transposed, tile, *arrays), 1, x, blocks, *lists)


def triton_gradient_of(pattern: Pattern, x: jax.Array, dy: jax.Array, tile: Tile = GRADIENT_TILE) -> jax.Array:
    """Compute the gradient of the blocks by a Triton kernel. Each device sums over its own tokens."""
    pairs = pattern.pairs()
    row, column = pattern.rows_and_columns
    places = map(jnp.asarray, (pairs, row[pairs[:, 0]], column[pairs]))
    return _divided(lambda *arrays: triton_gradient(pattern, tile, *arrays), 2, x, dy, *places)


def triton_product(
    pattern: Pattern,
    transposed: bool,
    tile: Tile,
    x: jax.Array,
    blocks: jax.Array,
    *lists: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Compute the product on one device, from the arrays of `Pattern.lists`."""
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    inner, outer = pattern.block[:: -1 if transposed else 1]
    step = min(tile.step, inner)
    rows = min(tile.tokens, max(16, pl.next_power_of_2(x.shape[0])))
    padded = jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0)))
    parts, tiles = pattern.grid[0 if transposed else 1], padded.shape[0] // rows
    group = math.gcd(tiles, max(1, min(GROUP, GROUP_BYTES // (rows * x.shape[1] * x.itemsize))))
    steps = inner // step
    start, block, source = lists
    block, source = (jnp.pad(x, (0, 1)) for x in (block, source))  # a step loads the next block's place

    def kernel(start_ref, block_ref, source_ref, x_ref, blocks_ref, y_ref):
        groups, rest = _divmod(pl.program_id(0), group * parts)
        part, of_group = _divmod(rest, group)
        token = (groups * group + of_group) * rows
        start, stop = start_ref[part], start_ref[part + 1]

        def place(n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            entry, of_block = _divmod(n, steps)
            return block_ref[start + entry], source_ref[start + entry], of_block * step

        # The place is loaded a step ahead: Triton would keep fewer tiles in flight if they depended on a load.
        def add(n: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            (block, source, first), total = carry
            inputs = x_ref[pl.ds(token, rows), pl.ds(source * inner + first, step)]
            if transposed:
                weights = blocks_ref[block, :, pl.ds(first, step)].T
            else:
                weights = blocks_ref[block, pl.ds(first, step), :]
            return place(n + 1), total + jnp.dot(inputs, weights, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((rows, outer), jnp.float32)
        _, total = lax.fori_loop(0, (stop - start) * steps, add, (place(jnp.int32(0)), zeros))
        y_ref[pl.ds(token, rows), pl.ds(part * outer, outer)] = total.astype(y_ref.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(parts * tiles,),
        out_shape=type_varying_as(x, (padded.shape[0], parts * outer)),
        compiler_params=triton.CompilerParams(num_warps=tile.warps if rows > 64 else 4, num_stages=tile.stages),
        interpret=interpret,
        name="block_sparse_product",
    )
    return call(start, block, source, padded, blocks)[: x.shape[0]]


def triton_gradient(
    pattern: Pattern,
    tile: Tile,
    x: jax.Array,
    dy: jax.Array,
    pairs: jax.Array,
    row: jax.Array,
    columns: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Compute the gradient of the blocks on one device.

    Args:
      pairs: `Pattern.pairs`. A program computes the two blocks of a pair, and loads their rows of x once.
      row, columns: the places of the pairs' blocks, int32 [pairs] and [pairs, 2].
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    a, b = pattern.block
    step = tile.step
    x, dy = (jnp.pad(array, ((0, -array.shape[0] % step), (0, 0))) for array in (x, dy))

    def kernel(pair_ref, row_ref, column_ref, x_ref, dy_ref, blocks_ref):
        program = pl.program_id(0)
        source = row_ref[program] * a
        places = [column_ref[program, i] * b for i in range(2)]

        def add(n: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            inputs = x_ref[pl.ds(n * step, step), pl.ds(source, a)].T
            cotangents = [dy_ref[pl.ds(n * step, step), pl.ds(place, b)] for place in places]
            return tuple(
                total + jnp.dot(inputs, cotangent, preferred_element_type=jnp.float32)
                for total, cotangent in zip(totals, cotangents, strict=True)
            )

        zeros = jnp.zeros((a, b), jnp.float32)
        totals = lax.fori_loop(0, x.shape[0] // step, add, (zeros, zeros))
        for i, total in enumerate(totals):
            blocks_ref[pair_ref[program, i]] = total.astype(blocks_ref.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(pairs.shape[0],),
        out_shape=type_varying_as(x, (pattern.count, a, b)),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="block_sparse_gradient",
    )
    return call(pairs, row, columns, x, dy)


def _divmod(n: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Return the quotient and the remainder of n >= 0. Triton cannot lower // and %, which handle signs."""
    of = jnp.asarray(divisor, n.dtype)
    return lax.div(n, of), lax.rem(n, of)


def _divided(compute: Callable[..., jax.Array], with_tokens: int, *arrays: jax.Array) -> jax.Array:
    """Return `compute(*arrays)`, computed by each device for its own tokens.

    Args:
      with_tokens: the number of leading arrays with tokens as their first dim. If it is 1, the result has tokens as
        well. If it is 2, the result is a sum over tokens. Each device needs the other arrays in full.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:  # inside of shard_map the arrays are this device's
        return compute(*arrays)
    sums = with_tokens > 1

    def tokens_of(args: Any) -> Any:
        specs = [getattr(x.sharding, "spec", PartitionSpec()) for x in args[:with_tokens]]
        return next((spec[0] for spec in specs if len(spec) and spec[0] is not None), None)

    def infer(mesh: Mesh, args: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None if sums else tokens_of(args)))

    def partition(mesh: Mesh, args: Any, result: Any):
        tokens = tokens_of(args)

        def local(*arrays: jax.Array) -> jax.Array:
            computed = compute(*arrays)
            return lax.psum(computed, tokens) if sums and tokens is not None else computed

        specs = [PartitionSpec(tokens)] * with_tokens + [PartitionSpec()] * (len(arrays) - with_tokens)
        return mesh, local, infer(mesh, args, result), tuple(NamedSharding(mesh, spec) for spec in specs)

    letters = iter("abcdefghijklmnopqrs")
    operands = [
        ["t" if i < with_tokens and dim == 0 else next(letters) for dim in range(x.ndim)] for i, x in enumerate(arrays)
    ]
    results = [next(letters) for _ in range(3)] if sums else ["t", next(letters)]
    whole = [letter for of in (*operands, results) for letter in of if letter != "t"]
    rule = SdyShardingRule(
        tuple(ArrayMapping(*of) for of in operands), (ArrayMapping(*results),), need_replication_factors=tuple(whole)
    )
    call = custom_partitioning(compute)
    call.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return call(*arrays)

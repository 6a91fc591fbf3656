"""`BlockMask`: a mask in blocks, for block-sparse attention (Algorithm 5 of arXiv 2205.14135).

The kernels skip empty blocks, forward and backward. Partial blocks share a table of element masks, so structured masks
(causal, windows, documents) need far less memory than T·S entries. `patterns.py` has the masks of the literature::

    mask = patterns.butterfly(seq_len, seq_len) & patterns.causal(seq_len, seq_len)
    o = jax_flash.dot_product_attention(q, k, v, block_mask=mask)
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike

from jax_flash.checks import described, integer, matrices, numpy_array
from jax_flash.operands import BLOCK_MASK
from jax_flash.programs import program, replay
from jax_flash.programs.arrays import aval
from jax_flash.programs.structure import Structure, without_constants

BLOCK = 128  # rows and columns of a block by default
EMPTY, FULL, PARTIAL = 0, 1, 2  # kinds in `BlockMask.blocks`; PARTIAL + p has element mask number p
WORD = 32  # entries in a word of an element mask

MaskFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Shape(NamedTuple):
    """The static sizes of a block mask: lengths T and S in entries, and the block size."""

    q_len: int
    kv_len: int
    q_block: int = BLOCK
    kv_block: int = BLOCK

    @property
    def grid(self) -> tuple[int, int]:
        """U and V, the numbers of block rows and block columns."""
        return -(-self.q_len // self.q_block), -(-self.kv_len // self.kv_block)

    def check(self) -> None:
        """Raise TypeError or ValueError if no mask can have these sizes."""
        names = ("q_block", "kv_block", "q_len", "kv_len")
        q_block, kv_block, q_len, kv_len = (integer(name, getattr(self, name)) for name in names)
        for name, block, length in (("q_block", q_block, q_len), ("kv_block", kv_block, kv_len)):
            if block <= 0 or block % 16:
                raise ValueError(f"{name} must be a positive multiple of 16, not {block}")
            if max(-(-length // block), 1) * block >= 2**31:  # positions are int32
                raise ValueError(
                    f"{name} {block} is too large for {length} positions: the whole blocks must end below 2^31"
                )

    def check_grid(self, name: str, array: Any, leading: int) -> None:
        """Raise ValueError if the array's shape after the leading dims is not [U, V]."""
        if array.shape[leading:] != self.grid:
            raise ValueError(f"{name} must have shape [B|1, N|1, U, V] with U, V = {self.grid}, not {array.shape}")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class BlockMask:
    """An immutable attention mask of T queries and S keys, stored as U x V blocks of `q_block` x `kv_block` entries.

    Create a mask with one of the constructors below or with `jax_flash.patterns`. Combine masks entry by entry with
    `&`, `|` and `~`. `mask[:512, :512]` is the mask for shorter inputs. `BlockMask.stack(masks)` stacks the masks of
    several layers.

    A mask is a pytree, and its arrays may be traced. A mask of concrete arrays is also hashable. It can be a static
    argument of `jax.jit`, a constant of the program, or an attribute of a Flax module (in nnx as `nnx.data(mask)`).

    Attributes:
      shape: the lengths T and S and the block size.
      blocks: int32 array [B|1, N|1, U, V]: 0 for an empty block, 1 for a full block, and 2 + p for a partial block with
        element mask number p.
      element_masks: uint32 array [B|1, P, q_block, kv_block / 32], or None if no block is partial. Bit j % 32 of word
        j // 32 is column j of the block.
      row_lists: int32 array [B|1, N|1, U, 2 + W], one list for each block row, the longest first: the row's index, the
        number of its non-empty blocks, and their columns in order.
      column_lists: int32 array [B|1, N|1, V, 2 + W], the same for block columns.
    """

    shape: Shape
    blocks: Any
    element_masks: Any
    row_lists: Any
    column_lists: Any

    def __init__(self, shape: Shape, blocks: Any, element_masks: Any = None):
        """Create a mask from its arrays, and compute the lists. Most users call one of the constructors instead.

        A number of an element mask that does not exist counts as an empty block.

        Args:
          shape: the lengths and the block size.
          blocks: integer array [B|1, N|1, U, V], as in the attribute.
          element_masks: uint32 array [B|1, P, q_block, kv_block / 32], as in the attribute, or None.

        Raises:
          TypeError: if an argument has a wrong type or dtype.
          ValueError: if shapes do not match or a size is not allowed.
        """
        if not isinstance(shape, Shape):
            raise TypeError(f"shape must be a jax_flash.block_sparse.Shape, not {described(shape)}")
        shape.check()
        blocks = numpy_array("blocks", blocks)
        element_masks = None if element_masks is None else numpy_array("element_masks", element_masks)
        xp, blocks, element_masks = _arrays(blocks, element_masks)
        shape.check_grid("blocks", blocks, 2)
        if not jnp.issubdtype(blocks.dtype, jnp.integer):
            raise TypeError(f"blocks must be integers, not {blocks.dtype}")
        tile = (shape.q_block, _words(shape.kv_block))
        if element_masks is not None and (
            (element_masks.ndim, element_masks.shape[2:], element_masks.dtype) != (4, tile, np.uint32)
            or 1 != element_masks.shape[0] != blocks.shape[0] != 1
        ):
            raise ValueError(
                f"element_masks must be uint32 [B|1, P, {tile[0]}, {tile[1]}], "
                f"not {element_masks.dtype} {element_masks.shape} with blocks {blocks.shape}"
            )
        kinds = PARTIAL + (0 if element_masks is None else element_masks.shape[1])
        blocks = xp.where((blocks >= 0) & (blocks < kinds), blocks, EMPTY).astype(np.int32, copy=False)
        if xp is np:
            blocks, element_masks = _compact(shape, blocks, element_masks)
        lists = {"row_lists": block_lists(blocks), "column_lists": block_lists(blocks.swapaxes(2, 3))}
        self.__setstate__({"shape": shape, "blocks": blocks, "element_masks": element_masks, **lists})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the arrays and make them read-only. The mask must own them: it was just made, copied or unpickled."""
        vars(self).update(state)
        for x in self.arrays().values():
            while isinstance(x, np.ndarray):
                x.flags.writeable = False
                x = x.base

    def tree_flatten(self):
        return (self.blocks, self.element_masks, self.row_lists, self.column_lists), self.shape

    @classmethod
    def tree_unflatten(cls, shape, children):
        mask = object.__new__(cls)
        names = ("blocks", "element_masks", "row_lists", "column_lists")
        vars(mask).update(zip(names, children, strict=True), shape=shape)
        return mask

    # --- constructors ---

    @classmethod
    def from_dense(
        cls,
        blocks: ArrayLike,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        q_block: int = BLOCK,
        kv_block: int = BLOCK,
    ) -> BlockMask:
        """Create a mask of whole blocks (M in the paper).

        Args:
          blocks: bool array [U, V], [N|1, U, V] or [B|1, N|1, U, V]. True keeps the block. The array may be traced, for
            a pattern that depends on data.
          q_len: number of queries T. Default: all positions of the blocks.
          kv_len: number of keys S. Default: all positions of the blocks.
          q_block: queries per block, a multiple of 16.
          kv_block: keys per block, a multiple of 16.

        Raises:
          TypeError: if blocks is not boolean or a size is not an integer.
          ValueError: if shapes do not match or a block size is not a multiple of 16.
        """
        kept = matrices("blocks", blocks)
        q_len = kept.shape[-2] * integer("q_block", q_block) if q_len is None else q_len
        kv_len = kept.shape[-1] * integer("kv_block", kv_block) if kv_len is None else kv_len
        return cls(Shape(q_len, kv_len, q_block, kv_block), kept.astype(np.int32))

    @classmethod
    def from_mask(cls, mask: ArrayLike, *, q_block: int = BLOCK, kv_block: int = BLOCK) -> BlockMask:
        """Create a mask from all of its entries.

        A traced mask stores T·S bits, because every block becomes an element mask. The kernels then skip no blocks.

        Args:
          mask: bool array [T, S], [N|1, T, S] or [B|1, N|1, T, S]. True means that the query may attend to the key.
          q_block: queries per block, a multiple of 16.
          kv_block: keys per block, a multiple of 16.

        Raises:
          TypeError: if the mask is not boolean.
          ValueError: if the mask does not have 2 to 4 dims, or a block size is not a multiple of 16.
        """
        entries = matrices("mask", mask)
        B, N, q_len, kv_len = entries.shape
        shape = Shape(q_len, kv_len, q_block, kv_block)
        shape.check()
        xp = jnp if _traced(entries) else np
        U, V = shape.grid
        padding = ((0, 0), (0, 0), (0, U * q_block - q_len), (0, V * kv_block - kv_len))
        if entries.size:  # repeat the last row and column beyond the lengths, so a block at the border can be full
            entries = xp.pad(entries, padding, mode="edge")
        tiles = entries.reshape(B, N, U, q_block, V, kv_block).swapaxes(3, 4)
        masks = _pack(tiles).reshape(B, N * U * V, q_block, _words(kv_block))
        numbers = np.arange(PARTIAL, PARTIAL + N * U * V, dtype=np.int32).reshape(1, N, U, V)
        return cls(shape, numbers, masks)

    @classmethod
    def from_function(
        cls,
        mask_fn: MaskFunction,
        q_len: int,
        kv_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        q_block: int = BLOCK,
        kv_block: int = BLOCK,
    ) -> BlockMask:
        """Create a mask from a function of positions.

        The function is traced like a `mask_mod` and follows the same rules (docs/score-programs.md). It is evaluated
        once, one block row at a time. If it captures traced arrays, the result is a `MaskOfFunction` without blocks:
        attention evaluates the function in the kernel, like a `mask_mod`, and skips blocks that it hides.

        Args:
          mask_fn: function (b, h, q_idx, kv_idx) of int32 scalars. True means that the query may attend to the key.
          q_len: number of queries T.
          kv_len: number of keys S.
          batch: number of batch entries with different masks. 1 means that all batch entries share one mask.
          heads: number of heads with different masks. 1 means that all heads share one mask.
          q_block: queries per block, a multiple of 16.
          kv_block: keys per block, a multiple of 16.

        Raises:
          TypeError: if mask_fn takes other arguments or does not return one bool.
          ValueError: if mask_fn has side effects or a block size is not a multiple of 16.
        """
        batch, heads = integer("batch", batch), integer("heads", heads)
        shape = Shape(q_len, kv_len, q_block, kv_block)
        shape.check()
        U, V = shape.grid
        blocks, table = np.zeros((batch, heads, U, V), np.int32), _Table(shape)
        if not blocks.size and callable(mask_fn):  # there are no entries to evaluate
            return cls(shape, blocks)
        function = program.traced("mask_fn", mask_fn, "float32")
        if _traced(*function.consts):
            return MaskOfFunction(shape, batch, heads, mask_fn)
        row_of_blocks = _row_of_blocks(Structure.of(without_constants(function)), shape)
        with jax.ensure_compile_time_eval():
            for b, h, u in np.ndindex(batch, heads, U):
                blocks[b, h, u], tiles = row_of_blocks(function.consts, *map(np.int32, (b, h, u)))
                for v in np.flatnonzero(blocks[b, h, u] == PARTIAL):
                    blocks[b, h, u, v] = table.number(_pack(np.asarray(tiles[v])))
        return cls(shape, blocks, table.masks())

    @staticmethod
    def stack(masks: Sequence[BlockMask]) -> BlockMask:
        """Stack the masks of several layers into one pytree with a leading dimension.

        `jax.lax.scan` over the stack gives one mask to each step, and `jax.vmap` gives one to each example.

        Args:
          masks: list or tuple of masks with equal lengths and block sizes. Each has 1 or B batch entries and 1 or N
            heads. Masks of functions that capture traced arrays must share one function: only the values of the
            captured arrays may differ.

        Raises:
          TypeError: if masks is not a list or tuple of block masks.
          ValueError: if masks is empty, a mask is itself a stack, or the masks do not match.
        """
        sequence = isinstance(masks, (list, tuple))
        wrong = [x for x in masks if not isinstance(x, BlockMask)] if sequence else [masks]
        if wrong:
            raise TypeError(f"masks must be a list or tuple of block masks, not {described(wrong[0])}")
        if not masks:
            raise ValueError("masks must have at least one block mask, but it is empty")
        for number, mask in enumerate(masks):
            mask._check_one_layer()
            if mask.shape != masks[0].shape:
                raise ValueError(
                    "masks must have equal lengths and block sizes: "
                    f"masks[{number}] has {mask.shape}, masks[0] has {masks[0].shape}"
                )
        functions = any(isinstance(mask, MaskOfFunction) for mask in masks)
        return _stacked_functions(masks) if functions else _stacked(masks)

    # --- contents ---

    @property
    def is_stack(self) -> bool:
        """Whether this is a stack of masks, with leading dimensions on its arrays."""
        return bool(self.blocks.ndim > 4)

    def _check_one_layer(self) -> None:
        if self.is_stack:
            raise ValueError(
                "this block mask is a stack of masks, which cannot be sliced, combined, drawn or stacked: "
                "change the masks of the layers first, then call BlockMask.stack"
            )

    @property
    def kept(self) -> float:
        """The fraction of blocks that are not empty. For a traced mask it is a traced array."""
        _, blocks = _arrays(self.blocks)
        return (blocks != EMPTY).mean() if blocks.size else 0.0

    def arrays(self) -> dict[str, Any]:
        """Return the arrays that are not None, by name. They are operands of the custom calls."""
        return {name: x for name in BLOCK_MASK if (x := getattr(self, name)) is not None}

    def to_mask(self) -> jax.Array | np.ndarray:
        """Return all entries as a bool array [B|1, N|1, T, S], for tests and small masks."""
        self._check_one_layer()
        xp, blocks, element_masks = _arrays(self.blocks, self.element_masks)
        rows, columns = xp.arange(self.shape.q_len), xp.arange(self.shape.kv_len)
        return may_attend(self.shape, blocks, element_masks, rows, columns, xp)

    def __getitem__(self, part: tuple[slice, slice]) -> BlockMask:
        """Return the mask of a range of queries and keys. ``mask[:512, :512]`` is the mask for shorter inputs.

        Positions in the result count from the start of the range.

        Args:
          part: two slices of Python integers, without steps. Each starts at a multiple of the block size.

        Raises:
          TypeError: if part is not two slices, or a bound is traced or not an integer.
          ValueError: if a slice starts inside a block or has a step.
        """
        self._check_one_layer()
        if not isinstance(part, tuple) or [type(x) for x in part] != [slice, slice]:
            raise TypeError(
                f"a block mask takes two slices, one of queries and one of keys, such as mask[:512, :512], not {part!r}"
            )
        row, q_len = _range("queries", part[0], self.shape.q_len, self.shape.q_block)
        column, kv_len = _range("keys", part[1], self.shape.kv_len, self.shape.kv_block)
        return self._part(self.shape._replace(q_len=q_len, kv_len=kv_len), row, column)

    def _part(self, shape: Shape, row: int, column: int) -> BlockMask:
        """Return the mask of this shape that starts at this row and column."""
        xp, blocks, element_masks = _arrays(self.blocks, self.element_masks)
        u, v = row // shape.q_block, column // shape.kv_block
        U, V = shape.grid
        part = BlockMask(shape, blocks[:, :, u : u + U, v : v + V], element_masks)
        return _with_extended_ends(part) if xp is np else part

    def __and__(self, other: BlockMask) -> BlockMask:
        """Return a mask that lets a query attend to a key if both masks do."""
        return _combined(operator.and_, self, other)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Return a mask that lets a query attend to a key if either mask does."""
        return _combined(operator.or_, self, other)

    def __invert__(self) -> BlockMask:
        """Return a mask that lets a query attend to a key if this mask does not."""
        self._check_one_layer()
        xp, blocks, element_masks = _arrays(self.blocks, self.element_masks)
        inverted = xp.where(blocks < PARTIAL, FULL - blocks, blocks)
        masks = None if element_masks is None else element_masks ^ _every(self.shape)[None, None]
        return BlockMask(self.shape, inverted, masks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask) or self.shape != other.shape:
            return False
        ours, theirs = self._contents(), other._contents()
        return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))

    def __hash__(self) -> int:
        return hash((self.shape, *(x.tobytes() for x in self._contents())))

    def _contents(self) -> list[np.ndarray]:
        """Return the arrays that equality and hashing compare."""
        contents = [x for x in (self.blocks, self.element_masks) if x is not None]
        if _traced(*contents):
            raise TypeError("a traced BlockMask cannot be compared or hashed: create the mask from concrete arrays")
        return [np.asarray(x) for x in contents]

    def __repr__(self) -> str:
        q_len, kv_len, q_block, kv_block = self.shape
        head = f"BlockMask({q_len} x {kv_len} in blocks of {q_block} x {kv_block}"
        concrete = isinstance(self.blocks, (np.ndarray, jax.Array)) and not _traced(self.blocks)
        if not concrete:  # JAX puts all kinds of things into pytrees
            return f"{head}, traced)"
        if self.is_stack:
            return f"{head}, a stack of {' x '.join(map(str, self.blocks.shape[:-4]))})"
        blocks = np.asarray(self.blocks)
        full = (blocks == FULL).mean() if blocks.size else 0.0
        size = " x ".join(map(str, blocks.shape[:2]))
        head += f", {self.kept:.1%} kept, {full:.1%} full, {size} batch entries x heads)"
        return "\n".join([head, *_picture(blocks)])

    def plot(self, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw the blocks of one head: empty white, partial light blue, full dark blue. It needs matplotlib.

        Args:
          batch: index of the batch entry.
          head: index of the head.
          ax: `matplotlib` axes to draw on. Default: new axes.

        Returns:
          The axes.
        """
        self._check_one_layer()
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap

        ax = plt.figure().add_subplot() if ax is None else ax
        blocks = np.asarray(self.blocks)
        kinds = np.array([0, 2, 1])[np.minimum(blocks[batch % blocks.shape[0], head % blocks.shape[1]], PARTIAL)]
        extent = (0, self.shape.kv_len, self.shape.q_len, 0)
        colors = ListedColormap(["white", "#9ecae1", "#08519c"])
        ax.imshow(kinds, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
        ax.set(xlabel="key", ylabel="query", title=f"{self.kept:.1%} of the blocks kept")
        return ax


@jax.tree_util.register_pytree_node_class
class MaskOfFunction(BlockMask):
    """A `BlockMask` of a function that captures traced arrays. The kernels evaluate the function.

    `BlockMask.from_function` returns it. It is a pytree of the captured arrays. It has no blocks, so it cannot be
    converted, combined or drawn. It can be sliced, and stacked with masks of the same function.

    Attributes:
      shape: the lengths T and S. The block size has no effect.
      batch: number of batch entries with different masks. 1 means that all batch entries share one mask.
      heads: number of heads with different masks. 1 means that all heads share one mask.
      program: the traced function.
      captured: the arrays that the function reads.
    """

    batch: int
    heads: int
    program: program.Program
    captured: tuple[jax.Array, ...]

    def __init__(self, shape: Shape, batch: int, heads: int, mask_fn: MaskFunction):
        sizes = program.Sizes(batch, heads, shape.q_len, shape.kv_len)
        traced, captured = program.trace("mask_fn", mask_fn, "float32", sizes, 0)
        vars(self).update(shape=shape, batch=batch, heads=heads, program=traced, captured=tuple(captured))

    def tree_flatten(self):
        return self.captured, (self.shape, self.batch, self.heads, self.program)

    @classmethod
    def tree_unflatten(cls, static, children):
        mask = object.__new__(cls)
        shape, batch, heads, function = static
        vars(mask).update(shape=shape, batch=batch, heads=heads, program=function, captured=tuple(children))
        return mask

    @property
    def is_stack(self) -> bool:
        shapes = zip(self.captured, self.program.jaxpr.constvars, strict=True)
        return any(array.ndim > aval(variable).ndim for array, variable in shapes)

    def _part(self, shape: Shape, row: int, column: int) -> BlockMask:
        def mask_fn(b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
            return self.program(self.captured, b, h, i + row, j + column)

        return MaskOfFunction(shape, self.batch, self.heads, mask_fn)

    def may_attend(self, batch: jax.Array, head: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        """Evaluate the function for a row and a column of the arrays."""
        first = jnp.zeros_like(batch)
        places = (batch if self.batch > 1 else first, head if self.heads > 1 else first, row, column)
        return self.program(self.captured, *places)

    def __getattr__(self, name: str) -> Any:
        if name in BLOCK_MASK:
            raise TypeError(
                f"a BlockMask of a function that captures traced arrays has no {name}: pass it to attention, or create "
                "it from concrete arrays to convert, compare or combine it"
            )
        raise AttributeError(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"BlockMask({self.shape.q_len} x {self.shape.kv_len}, of a function that captures traced arrays)"


export.register_pytree_node_serialization(
    BlockMask,
    serialized_name="jax_flash.BlockMask",
    serialize_auxdata=lambda shape: " ".join(map(str, shape)).encode(),
    deserialize_auxdata=lambda text: Shape(*map(int, text.split())),
)


def may_attend(shape: Shape, blocks: Any, element_masks: Any, rows: Any, columns: Any, xp: Any = jnp) -> Any:
    """Return whether these rows may attend to these columns (int [R] and [C]): bool [B|1, N|1, R, C]."""
    kinds = kinds_at(shape, blocks, rows, columns, xp)
    if element_masks is None:
        return kinds == FULL
    masks = xp.clip(kinds - PARTIAL, 0, element_masks.shape[1] - 1)
    row, column = (rows % shape.q_block)[None, None, :, None], (columns % shape.kv_block)[None, None, None]
    words = element_masks[xp.arange(element_masks.shape[0])[:, None, None, None], masks, row, column // WORD]
    bits = (words >> (column % WORD).astype(np.uint32)) & np.uint32(1)
    partial = (kinds >= PARTIAL) & (kinds < PARTIAL + element_masks.shape[1])
    return (kinds == FULL) | (partial & (bits == 1))


def kinds_at(shape: Shape, blocks: Any, rows: Any, columns: Any, xp: Any = jnp) -> Any:
    """Return the entry of `blocks` for each of these rows and columns: int32 [B|1, N|1, R, C]."""
    U, V = shape.grid
    if 0 in shape.grid:
        return xp.zeros((*blocks.shape[:2], rows.size, columns.size), np.int32)
    # Positions beyond the lengths are the padding of a tile, which the lengths mask.
    u, v = xp.minimum(rows // shape.q_block, U - 1), xp.minimum(columns // shape.kv_block, V - 1)
    return blocks[:, :, u][..., v]


@functools.lru_cache(maxsize=64)
def _row_of_blocks(function: Structure, shape: Shape) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a compiled function that evaluates a mask function for a row of blocks.

    It returns the kinds, int32 [V], and the entries, bool [V, q_block, kv_block].

    It is cached by the jaxpr, because a mask function that a loop defines again is traced to the same jaxpr.
    """
    q_len, kv_len, q_block, kv_block = shape
    V = shape.grid[1]

    @jax.jit
    def row_of_blocks(captured: list[jax.Array], b: jax.Array, h: jax.Array, u: jax.Array) -> Any:
        def entry(i: jax.Array, j: jax.Array) -> jax.Array:
            return replay.evaluate(function.jaxpr, captured, (b, h, i, j))[0]

        # Repeat the last row and column beyond the lengths, so a block at the border can be full.
        rows = jnp.minimum(u * q_block + jnp.arange(q_block, dtype=jnp.int32), q_len - 1)
        columns = jnp.minimum(jnp.arange(V * kv_block, dtype=jnp.int32), kv_len - 1)
        allowed = jax.vmap(jax.vmap(entry, (None, 0)), (0, None))(rows, columns)
        tiles = allowed.reshape(q_block, V, kv_block).swapaxes(0, 1)
        return jnp.where(tiles.all((1, 2)), FULL, jnp.where(tiles.any((1, 2)), PARTIAL, EMPTY)), tiles

    return row_of_blocks


def _traced(*arrays: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _arrays(*arrays: Any) -> Any:
    """Return NumPy and the arrays on the host, or jax.numpy and the arrays if one of them is traced.

    Inside `jax.jit`, results of jax.numpy are traced even if all arrays are concrete. So concrete arrays need NumPy.
    """
    xp = jnp if _traced(*arrays) else np
    return xp, *(None if x is None else xp.asarray(x) for x in arrays)


def _words(columns: int) -> int:
    return -(-columns // WORD)


def _pack(tiles: Any) -> Any:
    """Pack entries into words: bool [..., kv_block] -> uint32 [..., kv_block / 32]."""
    xp = jnp if _traced(tiles) else np
    words = _words(tiles.shape[-1])
    padding = ((0, 0),) * (tiles.ndim - 1) + ((0, words * WORD - tiles.shape[-1]),)
    bits = xp.pad(tiles, padding).reshape(*tiles.shape[:-1], words, WORD).astype(np.uint32)
    places = np.arange(WORD, dtype=np.uint32).reshape((1,) * (bits.ndim - 1) + (WORD,))
    return (bits << places).sum(-1, dtype=np.uint32)


def _every(shape: Shape) -> np.ndarray:
    """Return the element mask of a full block: uint32 [q_block, kv_block / 32]."""
    return _pack(np.ones((shape.q_block, shape.kv_block), bool))


class _Table:
    """A table of distinct element masks."""

    def __init__(self, shape: Shape):
        self._shape = (shape.q_block, _words(shape.kv_block))
        self._every = _every(shape)
        self._numbers: dict[bytes, int] = {}

    def number(self, mask: np.ndarray) -> int:
        """Return the entry of `BlockMask.blocks` for a block with this mask."""
        if not mask.any():
            return EMPTY
        if np.array_equal(mask, self._every):
            return FULL
        return PARTIAL + self._numbers.setdefault(mask.tobytes(), len(self._numbers))

    def masks(self) -> np.ndarray | None:
        if not self._numbers:
            return None
        return np.stack([np.frombuffer(x, np.uint32).reshape(self._shape) for x in self._numbers])[None]


def _compact(shape: Shape, blocks: np.ndarray, element_masks: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return blocks and element masks with one table for all batch entries.

    The table has each element mask that is used once, in the order of its first use.
    """
    if element_masks is None:
        return blocks, None
    batch, count, *mask_shape = np.shape(element_masks)
    if batch != 1:
        of_batch = np.arange(batch, dtype=np.int32).reshape(batch, 1, 1, 1) * count
        blocks = np.where(blocks < PARTIAL, blocks, blocks + of_batch)
    masks = np.asarray(element_masks).reshape(batch * count, *mask_shape)
    table, (used, first, inverse) = _Table(shape), np.unique(blocks, return_index=True, return_inverse=True)
    kinds = used.copy()
    for at in np.argsort(first):
        if used[at] >= PARTIAL:
            kinds[at] = table.number(masks[used[at] - PARTIAL])
    return kinds[inverse].reshape(blocks.shape), table.masks()


def _range(name: str, part: slice, length: int, block: int) -> tuple[int, int]:
    """Return the start and the length of a slice."""
    try:
        start, stop, step = part.indices(length)
    except TypeError:
        raise TypeError(
            f"the slice of a block mask's {name} must have integers that are known when tracing, not {part}: "
            "pass Python integers"
        ) from None
    if step != 1:
        raise ValueError(f"the slice of a block mask's {name} must have no step, but has step {step}")
    if start % block and start < stop:
        raise ValueError(
            f"the slice of a block mask's {name} must start at a multiple of the block size {block}, not at {start}"
        )
    return start, max(stop - start, 0)


def _with_extended_ends(mask: BlockMask) -> BlockMask:
    """Repeat the last row and column beyond the lengths, so a block at the border can be empty or full."""
    q_len, kv_len, q_block, kv_block = mask.shape
    rows, columns = np.arange(q_block), np.arange(kv_block)
    rows_of = rows, np.minimum(rows, (q_len - 1) % q_block)  # of inner blocks, and of blocks at the border
    columns_of = columns, np.minimum(columns, (kv_len - 1) % kv_block)
    U, V = mask.shape.grid
    below, right = np.arange(U)[:, None] == U - 1, np.arange(V) == V - 1
    used, inverse = np.unique(np.asarray(mask.blocks) * 4 + below * 2 + right, return_inverse=True)
    masks, table, kinds = _all_masks(mask), _Table(mask.shape), []
    for code in used:
        row, column = rows_of[code // 2 % 2], columns_of[code % 2]
        bits = masks[0, code // 4][row][:, column // WORD] >> (column % WORD).astype(np.uint32)
        kinds.append(table.number(_pack((bits & 1).astype(bool))))
    return BlockMask(mask.shape, np.array(kinds, np.int32)[inverse].reshape(mask.blocks.shape), table.masks())


def _stacked(masks: Sequence[BlockMask]) -> BlockMask:
    """Stack masks that have blocks. Lists and tables become as long as the longest."""
    shape, xp = masks[0].shape, jnp if _traced(*jax.tree.leaves(masks)) else np
    extents = [mask.blocks.shape[:2] for mask in masks]
    try:
        np.broadcast_shapes(*extents)
    except ValueError:
        raise ValueError(f"masks must have 1 or B batch entries and 1 or N heads, but they have {extents}") from None

    def stacked(arrays: list[Any], axis: int, filling: int) -> Any:
        longest = max(x.shape[axis] for x in arrays)
        padded = []
        for x in arrays:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, longest - x.shape[axis])
            padded.append(xp.pad(x, widths, constant_values=filling))
        return xp.stack(xp.broadcast_arrays(*padded))

    no_table = np.zeros((1, 0, shape.q_block, _words(shape.kv_block)), np.uint32)
    tables = [no_table if mask.element_masks is None else mask.element_masks for mask in masks]
    stack = object.__new__(BlockMask)
    stack.__setstate__(
        {
            "shape": shape,
            "blocks": stacked([mask.blocks for mask in masks], -1, EMPTY),
            "element_masks": stacked(tables, 1, 0) if any(x.shape[1] for x in tables) else None,
            "row_lists": stacked([mask.row_lists for mask in masks], -1, -1),
            "column_lists": stacked([mask.column_lists for mask in masks], -1, -1),
        }
    )
    return stack


def _stacked_functions(masks: Sequence[BlockMask]) -> BlockMask:
    """Stack masks of one function."""

    def structure(mask: BlockMask) -> Any:
        leaves, tree = jax.tree.flatten(mask)
        return tree, [(x.shape, x.dtype) for x in leaves]

    for number, mask in enumerate(masks):
        if structure(mask) != structure(masks[0]):
            raise ValueError(
                "masks of functions that capture traced arrays must share one function and differ only in the values "
                f"of the captured arrays, but masks[{number}] differs from masks[0] in more. Put the difference into a "
                "captured array, or create all masks from concrete arrays"
            )
    stack: BlockMask = jax.tree.map(lambda *arrays: jnp.stack(arrays), *masks)
    return stack


def _combined(op: Callable[[Any, Any], Any], a: BlockMask, b: object) -> BlockMask:
    if not isinstance(b, BlockMask):
        return NotImplemented
    a._check_one_layer()
    b._check_one_layer()
    if a.shape != b.shape:
        raise ValueError(
            f"block masks with different lengths or block sizes cannot be combined: {a.shape} and {b.shape}. "
            "Create both with the same sizes"
        )
    if _traced(*jax.tree.leaves((a, b))):
        return _combined_traced(op, a, b)
    a, b = _with_one_table(a), _with_one_table(b)
    masks_a, masks_b = _all_masks(a), _all_masks(b)
    codes = np.asarray(a.blocks, np.int64) * masks_b.shape[1] + np.asarray(b.blocks)
    used, inverse = np.unique(codes, return_inverse=True)
    table = _Table(a.shape)
    pairs = np.stack(np.divmod(used, masks_b.shape[1]), -1)
    kinds = [table.number(op(masks_a[0, x], masks_b[0, y])) for x, y in pairs]
    return BlockMask(a.shape, np.array(kinds, np.int32)[inverse].reshape(codes.shape), table.masks())


def _with_one_table(mask: BlockMask) -> BlockMask:
    """Return the mask with one table for all batch entries. A mask that was traced may have one for each."""
    one = mask.element_masks is None or mask.element_masks.shape[0] == 1
    return mask if one else BlockMask(mask.shape, mask.blocks, mask.element_masks)


def _combined_traced(op: Callable[[Any, Any], Any], a: BlockMask, b: BlockMask) -> BlockMask:
    """Combine traced masks. The result has an element mask for each pair of element masks."""
    masks_a, masks_b = _all_masks(a), _all_masks(b)
    sizes = masks_a.shape[1], masks_b.shape[1]
    kinds = PARTIAL + np.arange(sizes[0] * sizes[1], dtype=np.int32).reshape(sizes)
    kinds[:PARTIAL, :PARTIAL] = op(*np.ogrid[:PARTIAL, :PARTIAL])
    decided = EMPTY if op is operator.and_ else FULL  # a block of this kind decides the result alone
    kinds[decided] = kinds[:, decided] = decided
    masks = None
    if kinds.size > PARTIAL * PARTIAL:
        masks = op(masks_a[:, :, None], masks_b[:, None])
        masks = masks.reshape(masks.shape[0], kinds.size, *masks.shape[3:])
    return BlockMask(a.shape, jnp.asarray(kinds)[a.blocks, b.blocks], masks)


def _all_masks(mask: BlockMask) -> Any:
    """Return the element masks of all kinds, EMPTY and FULL included: [B|1, 2 + P, q_block, words]."""
    every = _every(mask.shape)
    common = np.stack([np.zeros_like(every), every])[None]
    if mask.element_masks is None:
        return common
    xp = jnp if _traced(mask.element_masks) else np
    return xp.concatenate([np.repeat(common, mask.element_masks.shape[0], 0), mask.element_masks], 1)


def block_lists(blocks: Any) -> Any:
    """Return the lists of block rows: [B|1, N|1, U, V] -> [B|1, N|1, U, 2 + W]. See `BlockMask`."""
    xp = jnp if _traced(blocks) else np
    non_empty = blocks != EMPTY
    counts = non_empty.sum(-1, dtype=np.int32)
    width = blocks.shape[-1] if xp is jnp else counts.max(initial=0)
    members = xp.argsort(~non_empty, axis=-1, stable=True)[..., :width]
    members = xp.where(np.arange(width, dtype=np.int32)[None, None, None] < counts[..., None], members, -1)
    order = xp.argsort(-counts, axis=-1, stable=True)[..., None]
    lists = xp.concatenate([counts[..., None], members], -1)
    return xp.concatenate([order, xp.take_along_axis(lists, order, -2)], -1).astype(np.int32)


def _picture(blocks: np.ndarray) -> Iterator[str]:
    """Yield a picture of the blocks of the first head, in at most 32 lines of 64 characters."""
    if not blocks.size:
        return
    kinds = np.asarray(blocks)[0, 0]
    rows = np.array_split(np.arange(len(kinds)), min(len(kinds), 32))
    columns = np.array_split(np.arange(len(kinds[0])), min(len(kinds[0]), 64))
    for r in rows:
        cells = (kinds[np.ix_(r, c)] for c in columns)
        yield "".join(" " if not x.any() else "█" if (x == FULL).all() else "░" for x in cells)

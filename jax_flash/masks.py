"""`Mask`: which entries of the score matrix are visible. Plain JAX and sequence sharding use only this definition.

A mask is static. Its arrays are operands of the call. The kernels have definitions of their own: `common/masking.h`,
`cpu_src/scores.h` and `cuda_src/kernels/semantics/mask.cuh`. docs/first-change.md shows how to add a kind of mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import block_sparse, dropout
from jax_flash.description import Description, Extent
from jax_flash.operands import Operands
from jax_flash.programs import entries
from jax_flash.programs.program import Captured, Program

Arrays = dict[str, jax.Array]
Lengths = tuple[Any, Any]  # T and S of the whole call; may be symbolic


class WindowSize(NamedTuple):
    """How many keys before and after its own position a query sees. -1 means all."""

    left: int = -1
    right: int = -1


@dataclasses.dataclass(frozen=True, repr=False)
class Mask(Description):
    """The static description of a mask. An entry is visible if no field masks it.

    The position of a query is its row, plus `query_offset` if present.
    """

    is_causal: bool = False
    local_window_size: WindowSize = WindowSize()
    query_seq_lengths: bool = False  # whether the array is present; the same for the next four
    key_value_seq_lengths: bool = False
    query_offset: bool = False
    segment_ids: bool = False
    ranges: bool = False  # in place of is_causal, local_window_size and query_seq_lengths
    array: Extent | None = None  # the argument `mask`
    block_mask: Extent | None = None
    q_block: int = 0  # number of queries in a block
    kv_block: int = 0
    element_masks: int = 0  # P, the number of element masks
    row_list_size: int = 0  # 2 + W, the length of a list
    column_list_size: int = 0
    mask_mod: Program | None = None

    @classmethod
    def of_blocks(cls, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct], q_block: int, kv_block: int) -> Mask:
        """Return the mask for the arrays of a block mask, named as in `BLOCK_MASK`."""
        return cls(
            block_mask=Extent.of_blocks(arrays["blocks"]),
            q_block=q_block,
            kv_block=kv_block,
            element_masks=arrays["element_masks"].shape[1] if "element_masks" in arrays else 0,
            row_list_size=arrays["row_lists"].shape[-1],
            column_list_size=arrays["column_lists"].shape[-1],
        )

    def __and__(self, other: Mask) -> Mask:
        """Return the mask in which an entry is visible if both masks show it.

        A field other than `is_causal` and `local_window_size` may be set in only one of the masks.
        """
        sides = zip(self.local_window_size, other.local_window_size, strict=True)
        window = WindowSize(*(min((x for x in side if x >= 0), default=-1) for side in sides))
        both: dict[str, Any] = {"is_causal": self.is_causal or other.is_causal, "local_window_size": window}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in both:
                if field.default not in (mine, theirs):
                    raise ValueError(f"two masks with {field.name} cannot be combined")
                both[field.name] = theirs if mine == field.default else mine
        return Mask(**both)

    def simplified(self, lengths: Lengths) -> Mask:
        """Return an equal mask without bounds that mask no entry.

        A window with no keys after the query becomes a causal mask, which the kernels compute faster.
        """
        (left, right), (T, S) = self.reach, lengths
        is_causal = right == 0
        if is_causal:
            right = -1
        if not self.query_offset and isinstance(T, int) and isinstance(S, int):  # query i is at position i
            if left >= T - 1:
                left = -1
            if right >= S - 1:
                right = -1
        return dataclasses.replace(self, is_causal=is_causal, local_window_size=WindowSize(left, right))

    @property
    def reach(self) -> WindowSize:
        """The local window, in which a causal mask counts as right = 0."""
        return self.local_window_size._replace(right=0) if self.is_causal else self.local_window_size

    def may_empty_rows(self, lengths: Lengths) -> bool:
        """Return whether some query may see no key."""
        if self.query_seq_lengths or self.key_value_seq_lengths or self.segment_ids or self.ranges:
            return True
        if any(x is not None for x in (self.array, self.block_mask, self.mask_mod)):
            return True
        if self.query_offset and max(self.reach) >= 0:
            return True
        left, (T, S) = self.local_window_size.left, lengths
        return left >= 0 and (not isinstance(T, int) or not isinstance(S, int) or left < T - S)

    def count(self, rows: int, keys: int, ahead: ArrayLike = 0) -> np.ndarray:
        """Count the entries of rows x keys that are visible under the causal mask and the window.

        Other masks are ignored. With a query offset all entries count, because its values are unknown.

        Args:
          ahead: int array, the position of the first row minus the position of the first key.

        Returns:
          int64, in the shape of `ahead`.
        """
        ahead = np.asarray(ahead, np.int64)
        if self.query_offset:
            return np.full(ahead.shape, rows * keys)

        def up_to(n: np.ndarray) -> np.ndarray:
            """Return the sum of min(y, keys) over y from 1 to n."""
            n = n.clip(0)
            return np.where(n <= keys, n * (n + 1) // 2, keys * (keys + 1) // 2 + (n - keys) * keys)

        def at_most(distance: int) -> np.ndarray:
            """Count the entries with a key at most `distance` after the position of its row."""
            return up_to(ahead + distance + rows) - up_to(ahead + distance)

        span = rows + keys + int(np.abs(ahead).max())  # a larger window masks no entry
        left, right = (span if x < 0 else min(x, span) for x in self.reach)
        return at_most(right) - at_most(-left - 1)

    def visible(
        self, lengths: Lengths, captured: Sequence[Captured], tile: Operands, rows: jax.Array, columns: jax.Array
    ) -> jax.Array:
        """Return which entries of a tile are visible: bool [B|1, N|1, R, C].

        Args:
          lengths: T and S of the whole call.
          captured: the captured arrays of the problem, which a mask_mod may read.
          tile: the operands at these rows and columns.
          rows, columns: int32 [R] and [C], the positions in the call's own arrays.
        """
        i, j = rows[None, None, :, None], columns[None, None, None, :]
        visible = (i < lengths[0]) & (j < lengths[1])
        if tile.query_seq_lengths is not None:
            visible &= i < _per_batch(tile.query_seq_lengths)
        if tile.key_value_seq_lengths is not None:
            visible &= j < _per_batch(tile.key_value_seq_lengths)
        behind, ahead = self._limits(tile)
        if behind is not None:
            visible &= i - j <= behind
        if ahead is not None:
            visible &= j - i <= ahead
        if tile.keys_of_rows is not None:
            begin, end = jnp.split(tile.keys_of_rows[:, None], 2, axis=-1)
            visible &= (begin <= j) & (j < end)
        if tile.query_segment_ids is not None and tile.key_value_segment_ids is not None:
            visible &= (tile.query_segment_ids[:, :, None] == tile.key_value_segment_ids[:, None, :])[:, None]
        if tile.mask is not None:
            visible &= tile.mask
        if tile.blocks is not None:
            shape = self._block_shape(lengths)
            visible &= block_sparse.may_attend(shape, tile.blocks, tile.element_masks, rows, columns)
        if self.mask_mod is not None:
            visible &= entries.evaluate(self.mask_mod, captured, tile, rows, columns)
        return visible

    def may_show(self, lengths: Lengths, tile: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
        """Return whether some entry of a tile may be visible: bool [], or None if it always may.

        This uses only positions, lengths and blocks. Arguments are as in `visible`.
        """
        behind, ahead = self._limits(tile)
        tests = []
        if behind is not None:
            tests.append((rows[0] - columns[-1] <= behind).any())
        if ahead is not None:
            tests.append((columns[0] - rows[-1] <= ahead).any())
        if tile.query_seq_lengths is not None:
            tests.append((rows[0] < tile.query_seq_lengths).any())
        if tile.key_value_seq_lengths is not None:
            tests.append((columns[0] < tile.key_value_seq_lengths).any())
        if tile.keys_of_rows is not None:
            begin, end = tile.keys_of_rows[..., 0], tile.keys_of_rows[..., 1]
            tests.append(((columns[0] < end) & (begin <= columns[-1])).any())
        if tile.blocks is not None:
            step = dropout.TILE
            kinds = block_sparse.kinds_at(self._block_shape(lengths), tile.blocks, rows[::step], columns[::step])
            tests.append((kinds != block_sparse.EMPTY).any())
        return jnp.all(jnp.stack(tests)) if tests else None

    def refusal_of_part(self, rows: int, keys: int) -> str | None:
        """Return why the mask cannot be divided into parts of rows x keys, or None if it can."""
        if self.block_mask is not None and (rows % self.q_block or keys % self.kv_block):
            blocks = f"blocks of {self.q_block} x {self.kv_block}"
            return f"a block mask needs whole {blocks} per part, not {rows} rows and {keys} keys"
        return None

    def part(
        self, lengths: Lengths, sizes: tuple[int, int], starts: tuple[jax.Array, jax.Array], arrays: Arrays
    ) -> tuple[Mask, Arrays]:
        """Return the mask of a part of the score matrix, and its arrays.

        Args:
          lengths: T and S of the whole call.
          sizes: the number of rows and keys in the part.
          starts: the first row and the first key of the part.
          arrays: operands by name, with any leading dims. Arrays with a dim of rows or keys are sliced already, except
            for the blocks.
        """
        (rows, keys), (row_start, key_start), part = sizes, starts, dict(arrays)
        # Indices and counts of rows or keys become relative to the start of the part.
        of_rows, of_keys = ("query_seq_lengths", "rows_of_keys"), ("key_value_seq_lengths", "keys_of_rows")
        for names, start, size in ((of_rows, row_start, rows), (of_keys, key_start, keys)):
            part |= {name: (part[name] - start).clip(0, size) for name in names if name in part}
        mask = self
        if max(self.reach) >= 0 or "program_batch" in part:  # programs receive positions
            part["query_offset"] = _shifted(part, row_start - key_start, sum(lengths))
            mask = dataclasses.replace(mask, query_offset=True)
        if "blocks" in part:
            u, v = row_start // self.q_block, key_start // self.kv_block
            blocks = lax.dynamic_slice_in_dim(part["blocks"], u, rows // self.q_block, axis=-2)
            blocks = lax.dynamic_slice_in_dim(blocks, v, keys // self.kv_block, axis=-1)
            mask, part = mask.with_blocks(blocks, part)
        return mask, part

    def with_blocks(self, blocks: jax.Array, arrays: Arrays) -> tuple[Mask, Arrays]:
        """Return the mask and the arrays with other blocks of the same size."""
        lists = {
            "row_lists": block_sparse.block_lists(blocks),
            "column_lists": block_sparse.block_lists(jnp.swapaxes(blocks, -1, -2)),
        }
        row_list_size, column_list_size = (x.shape[-1] for x in lists.values())
        mask = dataclasses.replace(self, row_list_size=row_list_size, column_list_size=column_list_size)
        return mask, arrays | {"blocks": blocks, **lists}

    def _block_shape(self, lengths: Lengths) -> block_sparse.Shape:
        return block_sparse.Shape(*lengths, self.q_block, self.kv_block)

    def _limits(self, tile: Operands) -> tuple[jax.Array | int | None, jax.Array | int | None]:
        """Return the upper bounds of i - j and j - i: int32 [B, 1, 1, 1], a number, or None for no bound."""
        (left, right), offset = self.reach, tile.query_offset
        behind = None if left < 0 else _minus(left, offset)
        if right < 0:
            return behind, None
        return behind, _minus(right, None) if offset is None else _minus(right - 1, ~offset)  # right + offset


def _per_batch(x: jax.Array) -> jax.Array:
    return x[:, None, None, None]


def _minus(width: int, offset: jax.Array | None) -> jax.Array | int | None:
    """Return width - offset, clamped to int32. This suffices, because differences of positions fit in int32."""
    highest = 2**31 - 1
    excess = max(width - highest, 0)
    if excess > highest:
        return None
    if offset is None:
        return width - excess
    return width - excess - (_per_batch(offset).clip(width - highest, highest) - excess)


def _shifted(arrays: Arrays, by: jax.Array, span: int) -> jax.Array:
    """Return the query offset of a part. It is clamped to int32, because such an offset is beyond all keys anyway."""
    if "query_offset" not in arrays:
        return jnp.broadcast_to(by.astype(jnp.int32), arrays["query"].shape[:-3])
    limits = np.iinfo(np.int32)
    return arrays["query_offset"].clip(limits.min + span, limits.max - span) + by.astype(jnp.int32)

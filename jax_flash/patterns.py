"""Sparsity patterns of the literature, as block masks. Combine them with `&`, `|` and `~`.

Butterfly, strided, fixed, BigBird and top-k keep or skip whole blocks. They are causal only if the paper's pattern is.
The other patterns are exact, entry by entry.

In the formulas, i is the position of a query and j the position of a key, both from 0. u and v are the indices of a
block row and a block column.

Every function takes the lengths T (`q_len`) and S (`kv_len`) in tokens, and a block size of `q_block` x `kv_block`
entries. It raises ValueError if a block size is not a multiple of 16, a length is negative, or the blocks reach beyond
2^31 positions. It raises TypeError if a number is not an integer.

No function needs time or memory proportional to T·S, because equal blocks are evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash.block_sparse import (  # internal
    BLOCK,
    EMPTY,
    FULL,
    PARTIAL,
    BlockMask,
    Shape,
    _pack,
    _Table,
    _traced,
)
from jax_flash.checks import described, integer, numpy_array


def causal(q_len: int, kv_len: int, *, q_block: int = BLOCK, kv_block: int = BLOCK) -> BlockMask:
    """Causal mask: j <= i ("Attention Is All You Need", Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3)."""
    return _causal(_shape(q_len, kv_len, q_block, kv_block))


def local_window(
    q_len: int, kv_len: int, left: int | None, right: int | None, *, q_block: int = BLOCK, kv_block: int = BLOCK
) -> BlockMask:
    """Sliding window: i - left <= j <= i + right (Longformer, Beltagy et al. 2020, arXiv 2004.05150, section 3.1).

    Args:
      left: how far before i a visible key may be, in tokens. None means no bound.
      right: how far after i a visible key may be, in tokens. None means no bound.

    Raises:
      ValueError: if left or right is negative.
    """
    return dilated_window(q_len, kv_len, left, right, 1, q_block=q_block, kv_block=kv_block)


def dilated_window(
    q_len: int,
    kv_len: int,
    left: int | None,
    right: int | None,
    dilation: int,
    *,
    q_block: int = BLOCK,
    kv_block: int = BLOCK,
) -> BlockMask:
    """Dilated sliding window: j = i - dilation·n with -right <= n <= left (Longformer, section 3.1).

    Compared with `local_window`, the window covers `dilation` times more blocks, and all of them are partial.

    Args:
      left: number of visible keys before i. None means no bound.
      right: number of visible keys after i. None means no bound.
      dilation: distance between visible keys, in tokens.

    Raises:
      ValueError: if left or right is negative, or dilation < 1.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    least = -math.inf if right is None else -integer("right", right)
    most = math.inf if left is None else integer("left", left)
    dilation = integer("dilation", dilation, 1)

    def allowed(difference: np.ndarray) -> np.ndarray:
        n, rest = np.divmod(difference, dilation)
        return (rest == 0) & (least <= n) & (n <= most)

    return _of_differences(shape, allowed)


def butterfly(
    q_len: int,
    kv_len: int,
    max_stride: int | None = None,
    *,
    global_blocks: int = 0,
    q_block: int = BLOCK,
    kv_block: int = BLOCK,
) -> BlockMask:
    """Flat block butterfly of "Pixelated Butterfly" (Dao, Chen et al. 2021, arXiv 2112.00029), section 3.

    The pattern is the sum of the block butterfly factors, I + B_2 + B_4 + … + B_k with k = `max_stride`. It keeps block
    (u, v) if u = v or if u ^ v is a power of two below k, which gives log2(k) + 1 blocks per row. FlashAttention
    (arXiv 2205.14135, section 3.3) uses this pattern. If the grid of blocks is not square, the pattern of the shorter
    side is stretched.

    Args:
      max_stride: k, in blocks, a power of two. Default: the largest stride of the grid.
      global_blocks: number of leading block rows and block columns that are kept as well (the paper's low-rank term).

    Raises:
      ValueError: if max_stride is not a power of two, or global_blocks is negative.
    """
    U, V = _shape(q_len, kv_len, q_block, kv_block).grid
    n = min(U, V)
    stride = 1 << n.bit_length() if max_stride is None else integer("max_stride", max_stride, 1)
    if stride & (stride - 1):
        raise ValueError(f"max_stride must be a power of two, not {max_stride}")
    u, v = (np.arange(U) * n // max(U, 1))[:, None], np.arange(V) * n // max(V, 1)
    leading = np.minimum(u, v) < integer("global_blocks", global_blocks)
    distance = u ^ v
    kept = (distance & (distance - 1) == 0) & (distance < stride)  # zero or a power of two
    return BlockMask.from_dense(kept | leading, q_len, kv_len, q_block=q_block, kv_block=kv_block)


def strided(q_len: int, kv_len: int, stride: int, *, q_block: int = BLOCK, kv_block: int = BLOCK) -> BlockMask:
    """Strided pattern of Sparse Transformers (Child et al. 2019, arXiv 1904.10509), section 4.3, in one head (5.1).

    In the paper, i attends to j <= i if i - j <= l or (i - j) mod l = 0. This function applies the rule to square
    blocks with n = lcm(q_block, kv_block) entries per side: i // n, j // n and l / n replace i, j and l. The causal
    bound j <= i stays exact.

    Args:
      stride: l, in tokens, a positive multiple of n.

    Raises:
      ValueError: if stride is not a positive multiple of n.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    a, b = _squares(shape)
    l = _whole_squares("stride", stride, shape)
    return _of_squares(shape, (a - b <= l) | ((a - b) % l == 0)) & _causal(shape)


def fixed(
    q_len: int, kv_len: int, stride: int, summary: int | None = None, *, q_block: int = BLOCK, kv_block: int = BLOCK
) -> BlockMask:
    """Fixed pattern of Sparse Transformers (Child et al. 2019, arXiv 1904.10509), section 4.3, in one head (5.1).

    In the paper, the sequence is split into segments of l positions, and the last c positions of each segment summarise
    it. i attends to j <= i if both are in the same segment (i // l = j // l), or if j is a summary position
    (j mod l >= l - c). This function applies the rule to square blocks as `strided` does. The causal bound j <= i stays
    exact.

    Args:
      stride: l, in tokens, a positive multiple of n = lcm(q_block, kv_block).
      summary: c, in tokens, a positive multiple of n. Default: n.

    Raises:
      ValueError: if stride or summary is not a positive multiple of n, or summary > stride.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    a, b = _squares(shape)
    l = _whole_squares("stride", stride, shape)
    c = 1 if summary is None else _whole_squares("summary", summary, shape)
    if c > l:
        raise ValueError(f"summary must be at most the stride, {stride}, not {summary}")
    return _of_squares(shape, (a // l == b // l) | (b % l >= l - c)) & _causal(shape)


def longformer(
    q_len: int,
    kv_len: int,
    window: int,
    *,
    dilation: int = 1,
    global_tokens: Sequence[int] = (),
    q_block: int = BLOCK,
    kv_block: int = BLOCK,
) -> BlockMask:
    """Longformer's sliding window with global tokens (Beltagy et al. 2020, arXiv 2004.05150, section 3.1).

    i attends to itself and to window / 2 keys on each side. A global token attends to all keys, and all queries attend
    to it.

    Args:
      window: size of the window in keys (w in the paper), an even number.
      dilation: distance between visible keys, in tokens.
      global_tokens: positions of the global tokens.

    Raises:
      ValueError: if window is odd or negative, dilation < 1, or a global token is beyond both lengths.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    if integer("window", window) % 2:
        raise ValueError(f"window must be even, because half of it is on each side, not {window}")
    local = dilated_window(q_len, kv_len, window // 2, window // 2, dilation, q_block=q_block, kv_block=kv_block)
    if not np.iterable(global_tokens):
        raise TypeError(f"global_tokens must be a sequence of ints, not {described(global_tokens)}")
    tokens = [integer("a global token", token) for token in global_tokens]
    if max(tokens, default=-1) >= max(q_len, kv_len):
        raise ValueError(f"global_tokens must be below {max(q_len, kv_len)}, the longer length, not {max(tokens)}")
    rows, columns = np.isin(np.arange(q_len), tokens), np.isin(np.arange(kv_len), tokens)
    everywhere = _rectangle(shape, rows, np.full(kv_len, True)) | _rectangle(shape, np.full(q_len, True), columns)
    return local | everywhere


def bigbird(
    q_len: int,
    kv_len: int,
    *,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int | np.random.Generator = 0,
    q_block: int = BLOCK,
    kv_block: int = BLOCK,
) -> BlockMask:
    """BigBird-ITC (Zaheer et al. 2020, arXiv 2007.14062, section 2), in blocks as in its appendix D.

    Blocks are squares with lcm(q_block, kv_block) entries per side. Each block row attends to a window around the
    diagonal, to the leading global blocks, and to random other blocks. Global block rows attend to all keys.

    Args:
      window_blocks: blocks in the window, an odd number.
      global_blocks: number of global block rows and block columns.
      random_blocks: number of random blocks per block row. If fewer blocks are left, all of them are kept.
      seed: seed of the random blocks, for `numpy.random.default_rng`.

    Raises:
      ValueError: if window_blocks is even or a number is negative.
      TypeError: if a number is not an integer, or NumPy does not accept the seed.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    if integer("window_blocks", window_blocks) % 2 == 0:
        raise ValueError(f"window_blocks must be odd, not {window_blocks}")
    a, b = _squares(shape)
    kept = (abs(a - b) <= window_blocks // 2) | (np.minimum(a, b) < integer("global_blocks", global_blocks))
    try:
        generator = np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"seed must be a seed for numpy.random.default_rng, not {described(seed)}") from error
    lottery = np.where(kept, -1.0, generator.random(kept.shape))
    return _of_squares(shape, kept | _largest(lottery, integer("random_blocks", random_blocks)))


def document(
    query_ids: ArrayLike, kv_ids: ArrayLike | None = None, *, q_block: int = BLOCK, kv_block: int = BLOCK
) -> BlockMask:
    """Document mask: query_ids[i] = kv_ids[j]. Packed documents do not see each other.

    Llama 3 uses this mask (Grattafiori et al. 2024, arXiv 2407.21783, section 3.2). Add `& causal(...)` for a language
    model.

    Args:
      query_ids: concrete integer array [T] or [B, T], the document of each query. Ids may come in any order, but
        attention is fastest if each document is contiguous.
      kv_ids: concrete integer array [S] or [B, S], the document of each key. Default: query_ids.

    Raises:
      TypeError: if ids are not integers or are traced. For traced ids use the segment ids of `dot_product_attention`.
      ValueError: if ids do not have 1 or 2 dims, or the batch sizes differ.
    """
    q_ids = _ids("query_ids", query_ids)
    kv_ids = q_ids if kv_ids is None else _ids("kv_ids", kv_ids)
    if q_ids.shape[0] != kv_ids.shape[0] and 1 not in (q_ids.shape[0], kv_ids.shape[0]):
        raise ValueError(
            f"query_ids and kv_ids must have equal batch sizes, but have shapes {q_ids.shape} and {kv_ids.shape}"
        )
    return _where_equal(_shape(q_ids.shape[1], kv_ids.shape[1], q_block, kv_block), q_ids, kv_ids)


def prefix_lm(
    q_len: int, kv_len: int, prefix_len: int | ArrayLike, *, q_block: int = BLOCK, kv_block: int = BLOCK
) -> BlockMask:
    """Prefix-LM mask: j <= i or j < prefix_len (T5, Raffel et al. 2020, arXiv 1910.10683, section 3.2.1).

    Args:
      prefix_len: length of the prefix in tokens, an int or a concrete integer array [B].

    Raises:
      TypeError: if prefix_len is traced or not an integer.
      ValueError: if prefix_len is negative, longer than kv_len, or has more than one dimension.
    """
    shape = _shape(q_len, kv_len, q_block, kv_block)
    prefix = _integers("prefix_len", prefix_len, "pass a mask to dot_product_attention instead")
    if prefix.ndim > 1 or ((prefix < 0) | (prefix > kv_len)).any():
        raise ValueError(f"prefix_len must be an int, or ints [B], between 0 and {kv_len}, not {prefix_len}")
    visible = _rectangle(shape, np.full(q_len, True), np.arange(kv_len) < prefix.reshape(-1, 1))
    return visible | _causal(shape)


def top_k(
    scores: ArrayLike, k: int, q_len: int, kv_len: int, *, q_block: int = BLOCK, kv_block: int = BLOCK
) -> BlockMask:
    """Data-dependent mask: the k blocks with the largest scores in each block row.

    MoBA selects blocks in a similar way, but for each query (Lu et al. 2025, arXiv 2502.13189, section 2.2). Each row
    keeps min(k, V) blocks. If scores are equal, the first block wins. NaN counts as the largest score. If you combine
    the mask with `causal(...)`, give future blocks a score of -inf.

    Args:
      scores: array [U, V], [N|1, U, V] or [B|1, N|1, U, V] of numbers, one for each block. It may be traced.
      k: number of blocks per block row.

    Raises:
      ValueError: if k < 1, or the shape of scores does not match the grid of blocks.
      TypeError: if scores are not numbers.
    """
    given = numpy_array("scores", scores)
    if not 2 <= given.ndim <= 4:
        raise ValueError(f"scores must have 2 to 4 dims, not shape {given.shape}")
    shape = Shape(q_len, kv_len, q_block, kv_block)
    shape.check()
    shape.check_grid("scores", given, given.ndim - 2)
    kept = _largest(given, integer("k", k, 1))
    return BlockMask.from_dense(kept, q_len, kv_len, q_block=q_block, kv_block=kv_block)


# --- exact, entry by entry ---


def _of_differences(shape: Shape, allowed: Callable[[np.ndarray], np.ndarray]) -> BlockMask:
    """Return the mask in which (i, j) is visible if and only if allowed(i - j).

    `allowed` is evaluated once, for all T + S - 1 differences. Each block has a contiguous range of them.
    """
    line = allowed(np.arange(1 - shape.kv_len, shape.q_len))
    before = np.concatenate([[0], np.cumsum(line)])
    (i, rows), (j, columns) = _extents(shape.q_len, shape.q_block), _extents(shape.kv_len, shape.kv_block)
    diagonal = i[:, None] - j + shape.kv_len - 1  # the index in `line` of the first entry of each block
    start, stop = diagonal - columns + 1, diagonal + rows[:, None]
    count = before[stop] - before[start]
    kinds = np.where(count == 0, EMPTY, np.where(count == stop - start, FULL, PARTIAL))
    # Blocks on the same diagonal have equal entries, except for blocks that are cut off at the lengths.
    alike = 4 * diagonal + 2 * (rows < shape.q_block)[:, None] + (columns < shape.kv_block)

    def entries(_: int, u: int, v: int) -> np.ndarray:
        row = np.minimum(np.arange(shape.q_block), rows[u] - 1)
        column = np.minimum(np.arange(shape.kv_block), columns[v] - 1)
        return line[diagonal[u, v] + row[:, None] - column]

    return _block_mask(shape, kinds[None], alike[None], entries)


def _causal(shape: Shape) -> BlockMask:
    return _of_differences(shape, lambda difference: difference >= 0)


def _where_equal(shape: Shape, q_ids: np.ndarray, kv_ids: np.ndarray) -> BlockMask:
    """Return the mask in which (b, i, j) is visible if and only if q_ids[b, i] = kv_ids[b, j].

    Ids are int [B|1, T] and [B|1, S]. Entries are compared only in blocks in which the ranges of both ids overlap.
    """
    (q_tiles, q_alike), (kv_tiles, kv_alike) = _tiles(q_ids, shape.q_block), _tiles(kv_ids, shape.kv_block)
    q_min, q_max = q_tiles.min(-1)[..., None], q_tiles.max(-1)[..., None]
    kv_min, kv_max = kv_tiles.min(-1)[:, None], kv_tiles.max(-1)[:, None]
    meet = (q_min <= kv_max) & (kv_min <= q_max)
    constant = (q_min == q_max) & (kv_min == kv_max)
    kinds = np.where(meet, np.where(constant, FULL, PARTIAL), EMPTY)
    alike = q_alike[..., None] * kv_alike.size + kv_alike[:, None]

    def entries(b: int, u: int, v: int) -> np.ndarray:
        return q_tiles[b % len(q_tiles), u][:, None] == kv_tiles[b % len(kv_tiles), v]

    return _block_mask(shape, kinds, alike, entries)


def _rectangle(shape: Shape, rows: np.ndarray, columns: np.ndarray) -> BlockMask:
    """Return the mask in which (b, i, j) is visible if and only if rows[b, i] and columns[b, j].

    These are bool [T] or [B|1, T], and bool [S] or [B|1, S].
    """
    return _where_equal(shape, np.atleast_2d(np.where(rows, 1, 0)), np.atleast_2d(np.where(columns, 1, 2)))


def _block_mask(
    shape: Shape, kinds: np.ndarray, alike: np.ndarray, entries: Callable[[int, int, int], np.ndarray]
) -> BlockMask:
    """Return a block mask from the kinds of its blocks.

    Args:
      kinds: int [B, U, V]: EMPTY, FULL or PARTIAL.
      alike: int [B, U, V]. PARTIAL blocks with equal numbers have equal entries.
      entries: function of (b, u, v) that returns the entries of an PARTIAL block. It is called once for each number.
    """
    table, partial = _Table(shape), kinds == PARTIAL
    _, first, inverse = np.unique(alike[partial], return_index=True, return_inverse=True)
    numbers = [table.number(_pack(entries(*block))) for block in np.argwhere(partial)[first]]
    blocks = kinds.astype(np.int32)
    blocks[partial] = np.array(numbers, np.int32)[inverse]
    return BlockMask(shape, blocks[:, None], table.masks())


def _extents(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position and the number of positions of each block."""
    first = np.arange(0, length, block)
    return first, np.minimum(length - first, block)


def _tiles(ids: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide ids [B, L] into blocks [B, blocks, block], padded with the last id.

    Also return int [B, blocks]: for each block, the number of the first block with equal ids.
    """
    batch, length = ids.shape
    blocks = -(-length // block)
    tiles = ids[:, np.minimum(np.arange(blocks * block), length - 1)].reshape(batch, blocks, block)
    first: dict[bytes, int] = {}
    alike = [first.setdefault(tile.tobytes(), n) for n, tile in enumerate(tiles.reshape(-1, block))]
    return tiles, np.array(alike, np.int64).reshape(batch, blocks)


# --- whole blocks ---


def _squares(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return the row indices [:, 1] and column indices of a grid of squares, each of which has whole blocks."""
    side = math.lcm(shape.q_block, shape.kv_block)
    return np.arange(-(-shape.q_len // side))[:, None], np.arange(-(-shape.kv_len // side))


def _of_squares(shape: Shape, kept: np.ndarray) -> BlockMask:
    (U, V), side = shape.grid, math.lcm(shape.q_block, shape.kv_block)
    blocks = kept[np.arange(U) * shape.q_block // side][:, np.arange(V) * shape.kv_block // side]
    return BlockMask.from_dense(blocks, *shape[:2], q_block=shape.q_block, kv_block=shape.kv_block)


def _largest(scores: Any, k: int) -> Any:
    """Return which scores are among the k largest of the last axis. If scores are equal, the first wins."""
    xp = jnp if _traced(scores) else np
    places = xp.argsort(xp.argsort(xp.flip(scores, -1), axis=-1, stable=True), axis=-1)
    return xp.flip(places, -1) >= scores.shape[-1] - k


# --- arguments ---


def _shape(q_len: int, kv_len: int, q_block: int, kv_block: int) -> Shape:
    shape = Shape(*map(integer, Shape._fields, (q_len, kv_len, q_block, kv_block)))
    shape.check()
    return shape


def _whole_squares(name: str, entries: int, shape: Shape) -> int:
    side = math.lcm(shape.q_block, shape.kv_block)
    if integer(name, entries, 1) % side:
        raise ValueError(f"{name} must be a multiple of {side} = lcm(q_block, kv_block), not {entries}")
    return entries // side


def _integers(name: str, x: ArrayLike, instead: str) -> np.ndarray:
    if _traced(x):
        raise TypeError(f"{name} must not be traced: {instead}")
    given: np.ndarray = numpy_array(name, x)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {given.dtype}")
    return given


def _ids(name: str, ids: ArrayLike) -> np.ndarray:
    ids = _integers(name, ids, "pass query_segment_ids and key_value_segment_ids to dot_product_attention instead")
    if ids.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape [length] or [B, length], not {ids.shape}")
    return np.atleast_2d(ids)

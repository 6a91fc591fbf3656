"""The dropout mask as a JAX function: the specification that every kernel follows bit for bit.

An entry (b, n, i, j) of P is kept if and only if its 15 random bits are at least `threshold(rate)`. The bits come from
Philox4x32-7, a counter-based generator (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC
2011). They depend only on the seed and the position of the entry. The backward can therefore regenerate them, and they
do not change with the tile size, the device or the sharding. (The paper, arXiv 2205.14135, saves the generator's state
instead: Algorithms 2 and 4.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _native, checks

TILE = 16  # the map of entries to counters repeats every 16 rows and columns

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

EVERYTHING = 1 << 15  # no random bits reach this threshold


def threshold(rate: float) -> int:
    """Return the drop threshold round(2¹⁵ · rate). An entry is kept if its 15 random bits are at least the threshold.

    The effective rate is threshold / 2¹⁵. A rate below 2⁻¹⁶ drops nothing, and a rate of at least 1 - 2⁻¹⁶ drops all
    entries.

    Raises:
      TypeError: if `rate` is not a concrete number, because the threshold is compiled into the kernels.
      ValueError: if `rate` is outside [0, 1], NaN, or between 255/256 and 1 (after rounding to 15 bits).
    """
    rate = checks.number("dropout_rate", rate)
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout_rate must be from 0 to 1, not {rate}")
    least = round(rate * EVERYTHING)
    if _native.MAX_DROP_THRESHOLD < least < EVERYTHING:
        raise ValueError(f"dropout_rate must be at most {_native.MAX_DROP_THRESHOLD / EVERYTHING}, or 1, not {rate}")
    return least


def keep_scale(drop_threshold: int) -> float:
    """Return the factor of a kept entry, which makes the expectation exact, or 0 if all entries are dropped."""
    return EVERYTHING / (EVERYTHING - drop_threshold) if drop_threshold < EVERYTHING else 0.0


def checked_key(key: jax.Array) -> jax.Array:
    """Return a typed key (`jax.random.key`) for a typed key or a raw key (`jax.random.PRNGKey`) of the default kind.

    Raises:
      TypeError: if `key` is neither a typed key nor a uint32 array.
      ValueError: if `key` is not a single key.
    """
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed:
        if not isinstance(key, (jax.Array, np.ndarray)) or key.dtype != jnp.uint32:
            kind = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else checks.described(key)
            raise TypeError(f"dropout_key must be a key from jax.random.key or jax.random.PRNGKey, not {kind}")
        shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
        if key.shape != shape:
            raise ValueError(f"dropout_key must be a single raw key, uint32{list(shape)}, not uint32{list(key.shape)}")
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"dropout_key must be a single key, not an array of keys of shape {list(key.shape)}")
    return key


def seed_from_key(key: jax.Array, batch: int) -> jax.Array:
    """Return the operand `seed`, uint32 [batch, 2], drawn once from a JAX PRNG key (see `checked_key`).

    All batch entries have the same seed. Batch entries and heads differ by the ids in the Philox counter.
    """
    return jnp.broadcast_to(jax.random.bits(checked_key(key), (2,), jnp.uint32), (batch, 2))


def operands(
    key: jax.Array, broadcast: bool, batch_ids: jax.Array | None, head_ids: jax.Array | None, batch: int, heads: int
) -> dict[str, jax.Array]:
    """Return the operands `seed`, `batch_id` and `head_id`: uint32 [batch, 2], [batch] and [heads].

    Args:
      key: JAX PRNG key, see `seed_from_key`.
      broadcast: whether all batch entries and heads share one mask.
      batch_ids, head_ids: int32 arrays [batch] and [heads]. Default: 0, 1, …

    Raises:
      ValueError: if a broadcast mask is given ids.
    """
    if broadcast and (batch_ids is not None or head_ids is not None):
        raise ValueError(
            "broadcast_dropout=True gives all batch entries and heads the same mask: "
            "leave out dropout_batch_ids and dropout_head_ids"
        )

    def ids(given: jax.Array | None, size: int) -> jax.Array:
        if broadcast:
            return jnp.zeros((size,), jnp.uint32)
        return jnp.arange(size, dtype=jnp.uint32) if given is None else given.astype(jnp.uint32)

    return {
        "seed": seed_from_key(key, batch),
        "batch_id": ids(batch_ids, batch),
        "head_id": ids(head_ids, heads),
    }


def philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Compute Philox4x32-7.

    Args:
      counter: four uint32 arrays.
      key: two uint32 arrays. All six arrays broadcast against each other.

    Returns:
      Four uint32 arrays of random bits.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _multiply(constant: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and the low word of the 64-bit product. JAX has no 64-bit integers by default."""
    a_high, a_low = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    low_low, high_low, low_high = a_low * x_low, a_high * x_low, a_low * x_high
    middle = high_low + (low_low >> 16)  # at most 2³² - 2¹⁶ - 1: no overflow
    carry = low_high + (middle & 0xFFFF)
    return a_high * x_high + (middle >> 16) + (carry >> 16), jnp.uint32(constant) * x


def random_bits(
    seed: jax.Array,
    batch_id: jax.Array,
    head_id: jax.Array,
    shape: tuple[int, int],
    row_start: jax.Array | int = 0,
    column_start: jax.Array | int = 0,
) -> jax.Array:
    """Return the random bits of a block of entries. Only this block is computed.

    Args:
      seed: uint32 array [B, 2], the Philox keys.
      batch_id: uint32 array [B], the global ids of the batch entries.
      head_id: uint32 array [N], the global ids of the heads.
      shape: (R, C), the rows and columns of the block.
      row_start, column_start: first row and column of the block, multiples of 16. They may be traced.

    Returns:
      uint32 array [B, N, R, C] with values below 2¹⁵.
    """
    rows, columns = shape
    row_tiles, column_tiles = (
        jnp.arange(-(-size // TILE), dtype=jnp.uint32) + jnp.asarray(start, jnp.uint32) // TILE
        for size, start in ((rows, row_start), (columns, column_start))
    )
    return _bits_of_tiles(seed, batch_id, head_id, row_tiles, column_tiles)[:, :, :rows, :columns]


def _bits_of_tiles(
    seed: jax.Array, batch_id: jax.Array, head_id: jax.Array, row_tiles: jax.Array, column_tiles: jax.Array
) -> jax.Array:
    """Return `random_bits` of the blocks of 16 x 16 entries with these uint32 indices of tiles of rows and columns."""
    batch, heads = batch_id.shape[0], head_id.shape[0]

    # One call decides the entries {i, i+8} x {j, j+1, j+8, j+9} of a 16x16 tile: its four words are the quadrants,
    # the lower 15 bits of the two halves of a word the neighbours j, j+1.
    row_group = (row_tiles[:, None] * 8 + jnp.arange(8, dtype=jnp.uint32)[None]).ravel()
    column_group = (column_tiles[:, None] * 4 + jnp.arange(4, dtype=jnp.uint32)[None]).ravel()

    def at(axis: int, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, [i for i in range(4) if i != axis])

    words = philox(
        (at(3, column_group), at(2, row_group), at(1, head_id), at(0, batch_id)), (at(0, seed[:, 0]), at(0, seed[:, 1]))
    )
    sizes = row_tiles.shape[0], 8, column_tiles.shape[0], 4  # may be symbolic
    quadrants = jnp.stack(words).reshape(2, 2, batch, heads, *sizes)  # row and column half, ...
    halves = jnp.stack([quadrants, quadrants >> 16], axis=-1) & 0x7FFF
    return halves.transpose(2, 3, 4, 0, 5, 6, 1, 7, 8).reshape(batch, heads, sizes[0] * TILE, sizes[2] * TILE)


def keep_mask(
    drop_threshold: int,
    seed: jax.Array,
    batch_id: jax.Array,
    head_id: jax.Array,
    shape: tuple[int, int],
    row_start: jax.Array | int = 0,
    column_start: jax.Array | int = 0,
) -> jax.Array:
    """Return whether each entry of a block of P is kept: bool [B, N, R, C]. The arguments are as in `random_bits`."""
    bits = random_bits(seed, batch_id, head_id, shape, row_start, column_start)
    return bits >= jnp.uint32(drop_threshold)


def keep_mask_of_tiles(
    drop_threshold: int,
    seed: jax.Array,
    batch_id: jax.Array,
    head_id: jax.Array,
    row_tiles: jax.Array,
    column_tiles: jax.Array,
) -> jax.Array:
    """Return `keep_mask` of the tiles of 16 rows and columns with these indices: bool [B, N, rows, columns]."""
    tiles = (x.astype(jnp.uint32) for x in (row_tiles, column_tiles))
    return _bits_of_tiles(seed, batch_id, head_id, *tiles) >= jnp.uint32(drop_threshold)

"""Random block masks, cases that use them, and checks of their lists."""

import dataclasses

import jax
import numpy as np
from cases import Case

from jax_flash import BlockMask
from jax_flash.block_sparse import EMPTY

IMPLEMENTATIONS = ["flash", "xla", "reference"]


def entries(seed, T, S, q_block, kv_block, batch=1, heads=1):
    """Return bool [batch, heads, T, S] with empty, full and partial blocks. One block row and column are empty."""
    rng = np.random.default_rng(seed)
    U, V = -(-T // q_block), -(-S // kv_block)
    kinds = rng.integers(0, 6, (batch, heads, U, V))
    kinds[..., rng.integers(U), :] = kinds[..., rng.integers(V)] = 0
    elements = np.stack([np.zeros((q_block, kv_block)), np.ones((q_block, kv_block)), np.tri(q_block, kv_block)] + [
        rng.random((q_block, kv_block)) < 0.4 for _ in range(3)
    ]).astype(bool)  # fmt: skip
    # Most rows see all keys, the others miss some odd keys: a warp must not treat such a block as full.
    elements[-1, np.arange(q_block) % 16 != 9] = elements[-1, :, np.arange(kv_block) % 4 != 3] = True
    whole = elements[kinds].swapaxes(3, 4).reshape(batch, heads, U * q_block, V * kv_block)
    return whole[..., :T, :S]


def block_mask(seed, T, S, q_block, kv_block, batch=1, heads=1):
    return BlockMask.from_mask(entries(seed, T, S, q_block, kv_block, batch, heads), q_block=q_block, kv_block=kv_block)


def sparse(q_block=32, kv_block=32, batch=1, heads=1, seed=0, **fields):
    """A case with a random block mask."""
    case = Case(**{"T": 150, "S": 210} | fields)
    return dataclasses.replace(case, block_mask=block_mask(seed, case.T, case.S, q_block, kv_block, batch, heads))


def assert_lists(block_mask):
    """Check that each list holds every non-empty block once, in order, and that the longest lists come first."""
    for lists, blocks in (
        (block_mask.row_lists, block_mask.blocks),
        (block_mask.column_lists, block_mask.blocks.swapaxes(2, 3)),
    ):
        lists, blocks = np.asarray(lists), np.asarray(blocks)
        assert lists.dtype == np.int32 and lists.shape[:3] == blocks.shape[:3]
        for b, h in np.ndindex(*blocks.shape[:2]):
            order, counts = lists[b, h, :, 0], lists[b, h, :, 1]
            np.testing.assert_array_equal(np.sort(order), np.arange(blocks.shape[2]))
            assert (np.diff(counts) <= 0).all()
            for row, count, members in zip(order, counts, lists[b, h, :, 2:], strict=True):
                np.testing.assert_array_equal(members[:count], np.flatnonzero(blocks[b, h, row] != EMPTY))
                assert (members[count:] == -1).all()


def with_unchecked_arrays(mask, **changes):
    """Return a copy of the mask with other arrays, bypassing the checks of the constructors."""
    copy = jax.tree.map(lambda x: x, mask)
    vars(copy).update(changes)  # its attributes are read-only
    return copy


GARBAGE = np.array([-1, -(2**31), 2**31 - 1, 10**6, -7])

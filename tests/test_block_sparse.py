"""Block-sparse attention: what a `BlockMask` says, and that attention under it is attention under the same entries as a
boolean mask, whatever else there is, forward and backward.
"""

import dataclasses
import functools
import operator
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXPORT_CHECKS, Case, differentiable, gathers, oracle, run, upcast
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from test_accuracy import by_numpy, check

import jax_flash
from jax_flash import BlockMask
from jax_flash.block_sparse import ELEMENTS, EVERYTHING, NOTHING, Shape

pytestmark = pytest.mark.usefixtures("device")

IMPLEMENTATIONS = ["flash", "xla", "reference"]


def entries(seed, T, S, q_block, kv_block, batch=1, heads=1):
    """bool [batch, heads, T, S]: empty, full and partial blocks, one row and one column of blocks without any."""
    rng = np.random.default_rng(seed)
    U, V = -(-T // q_block), -(-S // kv_block)
    kinds = rng.integers(0, 6, (batch, heads, U, V))
    kinds[..., rng.integers(U), :] = kinds[..., rng.integers(V)] = 0
    elements = np.stack([np.zeros((q_block, kv_block)), np.ones((q_block, kv_block)), np.tri(q_block, kv_block)] + [
        rng.random((q_block, kv_block)) < 0.4 for _ in range(3)
    ]).astype(bool)  # fmt: skip
    # Rows that see all keys, and some that miss a few, all of them odd: what a warp may not take for everything.
    elements[-1, np.arange(q_block) % 16 != 9] = elements[-1, :, np.arange(kv_block) % 4 != 3] = True
    whole = elements[kinds].swapaxes(3, 4).reshape(batch, heads, U * q_block, V * kv_block)
    return whole[..., :T, :S]


def block_mask(seed, T, S, q_block, kv_block, batch=1, heads=1):
    return BlockMask.from_mask(entries(seed, T, S, q_block, kv_block, batch, heads), q_block=q_block, kv_block=kv_block)


def sparse(q_block=32, kv_block=32, batch=1, heads=1, seed=0, **fields):
    """A case with a random block mask."""
    case = Case(**{"T": 150, "S": 210} | fields)
    return dataclasses.replace(case, block_mask=block_mask(seed, case.T, case.S, q_block, kv_block, batch, heads))


# --- BlockMask ---


def blocks_of(mask, shape):
    """What every block holds, by NumPy: bool [B, N, U, V] of any and of all entries."""
    U, V = shape.grid
    padding = [(0, 0), (0, 0), (0, U * shape.q_block - shape.q_len), (0, V * shape.kv_block - shape.kv_len)]
    tiled = (*mask.shape[:2], U, shape.q_block, V, shape.kv_block)
    there, missing = (np.pad(x, padding).reshape(tiled).any((3, 5)) for x in (mask, ~mask))
    return there, ~missing


def assert_lists(block_mask):
    """Every block that is not empty exactly once, longest rows first, and in order."""
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
                np.testing.assert_array_equal(members[:count], np.flatnonzero(blocks[b, h, row] != NOTHING))
                assert (members[count:] == -1).all()


def assert_says(block_mask, mask):
    """It says just that of every entry; its blocks are as empty and as full as can be, its element masks distinct."""
    np.testing.assert_array_equal(np.broadcast_to(block_mask.to_mask(), mask.shape), mask)
    there, full = blocks_of(mask, block_mask.shape)
    blocks = np.broadcast_to(block_mask.blocks, there.shape)
    np.testing.assert_array_equal(blocks != NOTHING, there)
    np.testing.assert_array_equal(blocks == EVERYTHING, full)
    used = np.unique(block_mask.blocks[block_mask.blocks >= ELEMENTS])
    if block_mask.element_masks is None:
        assert not used.size
    else:
        np.testing.assert_array_equal(used, ELEMENTS + np.arange(block_mask.element_masks.shape[1]))
        assert len(np.unique(block_mask.element_masks[0], axis=0)) == len(used)
    assert_lists(block_mask)


def masks():
    length, block = st.integers(1, 300), st.sampled_from([16, 32, 48, 64, 128, 256])
    return st.tuples(st.integers(0, 99), length, length, block, block, st.integers(1, 2), st.integers(1, 3))


@given(masks())
def test_from_mask(mask):
    assert_says(block_mask(*mask), entries(*mask))


@given(masks())
@settings(max_examples=10)
def test_from_mask_traced(mask):
    """Every block may be there, and none is looked at."""
    *_, q_block, kv_block, _, _ = mask
    make = functools.partial(BlockMask.from_mask, q_block=q_block, kv_block=kv_block)
    traced = jax.jit(make)(entries(*mask))
    np.testing.assert_array_equal(traced.to_mask(), entries(*mask))
    np.testing.assert_array_equal(jax.jit(lambda mask: make(mask).to_mask())(entries(*mask)), entries(*mask))
    assert_lists(traced)


@given(masks())
def test_from_dense(mask):
    seed, T, S, q_block, kv_block, B, N = mask
    shape = Shape(T, S, q_block, kv_block)
    dense = np.random.default_rng(seed).random((B, N, *shape.grid)) < 0.5
    whole = dense.repeat(q_block, 2).repeat(kv_block, 3)
    expected = whole[..., :T, :S]
    assert_says(BlockMask.from_dense(dense, T, S, q_block=q_block, kv_block=kv_block), expected)
    assert_says(BlockMask.from_dense(dense, q_block=q_block, kv_block=kv_block), whole)
    assert_says(BlockMask.from_dense(dense[0], T, S, q_block=q_block, kv_block=kv_block), expected[:1])
    assert_says(BlockMask.from_dense(dense[0, 0].tolist(), T, S, q_block=q_block, kv_block=kv_block), expected[:1, :1])


FUNCTIONS = {
    "causal": lambda b, h, i, j: j <= i,
    "dilated window": lambda b, h, i, j: (abs(i - j) < 70) & ((i - j) % 3 == 0),
    "of a head": lambda b, h, i, j: j < 40 * (h + 2 * b + 1),
    "of rows": lambda b, h, i, j: i % 50 < 20,
    "one value": lambda b, h, i, j: h > 0,
    "constant": lambda b, h, i, j: True,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("T", "S", "q_block", "kv_block"), [(200, 130, 48, 64), (7, 300, 16, 128), (96, 64, 32, 32)])
def test_from_function(name, T, S, q_block, kv_block):
    b, h, i, j = np.ogrid[:2, :3, :T, :S]
    expected = np.broadcast_to(FUNCTIONS[name](b, h, i, j), (2, 3, T, S))
    ours = BlockMask.from_function(FUNCTIONS[name], T, S, batch=2, heads=3, q_block=q_block, kv_block=kv_block)
    assert_says(ours, expected)
    assert ours == BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block)


def test_from_function_under_transformations():
    """A constant of the program, even there; what depends on the data is refused."""
    make = functools.partial(BlockMask.from_function, q_len=50, kv_len=70, q_block=16, kv_block=32)
    limits = jnp.arange(50) + 3
    expected = np.arange(70) <= np.arange(3, 53)[:, None]

    def concrete(x):
        block_mask = make(lambda b, h, i, j: j <= limits[i])
        assert isinstance(block_mask.blocks, np.ndarray)
        return x + block_mask.to_mask()

    np.testing.assert_array_equal(jax.jit(concrete)(0)[0, 0], expected)
    np.testing.assert_array_equal(jax.vmap(concrete)(jnp.zeros(2, int))[1, 0, 0], expected)
    np.testing.assert_array_equal(
        jax.lax.scan(lambda c, x: (c, concrete(x)), 0, jnp.zeros(2, int))[1][1, 0, 0], expected
    )
    for transform, n in ((jax.jit, 1), (jax.vmap, jnp.arange(2))):
        with pytest.raises(TypeError, match="traced"):
            transform(lambda n: make(lambda b, h, i, j: j <= i + n).to_mask())(n)


def test_from_function_gets_int32(x64):
    dtypes = []
    BlockMask.from_function(lambda *indices: dtypes.extend(x.dtype for x in indices) or indices[2] > indices[3], 9, 9)
    assert set(dtypes) == {np.dtype(np.int32)}


@given(masks(), st.integers(0, 99), st.booleans(), st.booleans())
def test_combinations(mask, seed, shared_batch, shared_heads):
    _, T, S, q_block, kv_block, B, N = mask
    other = (seed, T, S, q_block, kv_block, 1 if shared_batch else B, 1 if shared_heads else N)
    a, b, x, y = block_mask(*mask), block_mask(*other), entries(*mask), entries(*other)
    for ours, expected in ((a & b, x & y), (a | b, x | y), (b | a, x | y), (~a, ~x), (a & ~b, x & ~y), (a & a, x)):
        assert_says(ours, expected)
        assert ours == BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block)
        assert hash(ours) == hash(BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block))


COMBINATIONS = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a, b: ~a,
    "all": lambda a, b: ~(a | ~b) & (a | b),
}


@pytest.mark.parametrize("partial", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_traced(name, partial):
    x, y = entries(0, 70, 90, 16, 48, 2, 1), entries(1, 70, 90, 16, 48, 1, 3)
    a, b = (
        BlockMask.from_mask(mask, q_block=16, kv_block=48)
        if elements
        else BlockMask.from_dense(mask[:, :, ::16, ::48], 70, 90, q_block=16, kv_block=48)
        for mask, elements in zip((x, y), partial, strict=True)
    )
    combine = COMBINATIONS[name]
    expected = combine(a.to_mask(), b.to_mask())
    jitted = jax.jit(combine)(a, b)
    np.testing.assert_array_equal(jitted.to_mask(), expected)
    assert_lists(jitted)
    np.testing.assert_array_equal(jax.jit(lambda b: combine(a, b).to_mask())(b), expected)
    # The results of a jitted function, outside of jit and as constants in it.
    a, b = (jax.tree.map(jnp.asarray, mask) for mask in (a, b))
    np.testing.assert_array_equal(combine(a, b).to_mask(), expected)
    np.testing.assert_array_equal(jax.jit(lambda: combine(a, b).to_mask())(), expected)


def test_element_masks_of_every_batch_entry():
    """vmap makes a table of each example."""
    x = entries(3, 70, 90, 16, 48, 3)
    ours = jax.vmap(functools.partial(BlockMask.from_mask, q_block=16, kv_block=48))(x)
    for i in range(3):
        single = jax.tree.map(operator.itemgetter(i), ours)
        np.testing.assert_array_equal(single.to_mask()[0], x[i])
        assert BlockMask(single.shape, single.blocks, single.element_masks) == BlockMask.from_mask(
            x[i], q_block=16, kv_block=48
        )
    joined = jax.tree.map(lambda leaf: leaf[:, 0], ours)  # one mask of three batch entries
    np.testing.assert_array_equal(joined.to_mask(), x)
    assert_says(BlockMask(joined.shape, joined.blocks, joined.element_masks), x)
    np.testing.assert_array_equal(jax.jit(lambda m: (~m | m & m).to_mask())(joined), np.ones_like(x))
    np.testing.assert_array_equal((~joined).to_mask(), ~x)
    other, y = block_mask(4, 70, 90, 16, 48), entries(4, 70, 90, 16, 48)
    for both, expected in ((joined & other, x & y), (other & joined, x & y), (joined | other, x | y)):
        assert_says(both, expected)


def test_equality_and_hash():
    a = block_mask(0, 70, 90, 16, 48)
    assert a == block_mask(0, 70, 90, 16, 48) and hash(a) == hash(block_mask(0, 70, 90, 16, 48))
    assert a == jax.tree.map(jnp.asarray, a) and hash(a) == hash(jax.tree.map(jnp.asarray, a))
    assert a == jax.jit(lambda mask: mask)(a) and a == ~~a
    others = [
        block_mask(1, 70, 90, 16, 48),
        block_mask(0, 70, 90, 32, 48),
        block_mask(0, 71, 90, 16, 48),
        ~a,
        None,
        "a",
    ]
    assert not any(a == other for other in others)
    assert len({a, ~a, ~~a, block_mask(0, 70, 90, 16, 48)}) == 2
    with pytest.raises(TypeError, match="traced"):
        jax.jit(hash)(a)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda a: jnp.asarray(a == a))(a)


def test_ways_into_a_program():
    """A static argument, a constant, an argument; traced once for equal masks."""
    count = []

    @functools.partial(jax.jit, static_argnums=0)
    def static(mask, x):
        count.append(mask)
        return x + mask.to_mask()

    a, b = block_mask(0, 70, 90, 16, 48), block_mask(0, 70, 90, 16, 48)
    for mask in (a, b, ~~a):
        np.testing.assert_array_equal(static(mask, 0), a.to_mask())
    assert len(count) == 1
    np.testing.assert_array_equal(jax.jit(lambda: a.to_mask())(), a.to_mask())
    np.testing.assert_array_equal(jax.jit(lambda a: a.to_mask())(a), a.to_mask())
    shapes = jax.eval_shape(lambda mask: mask, a)
    assert isinstance(shapes, BlockMask) and shapes.blocks.shape == a.blocks.shape and repr(shapes)
    assert jax.tree.map(lambda x: x, a) == a


def test_arrays_are_read_only():
    """Their contents are the hash, and the lists are made of them once. What it is made of stays the caller's."""
    blocks, masks = np.full((1, 1, 2, 2), 2, np.int32), np.ones((1, 1, 16, 1), np.uint32)
    mask = BlockMask(Shape(32, 32, 16, 16), blocks, masks)
    for one in (mask, mask & ~mask, BlockMask.from_mask(mask.to_mask()), jax.tree.map(lambda x: x, mask)):
        assert not any(x.flags.writeable for x in one.arrays().values())
        with pytest.raises(ValueError, match="read-only"):
            one.blocks[...] = 0
    blocks[...] = masks[...] = 0
    assert mask.kept == 1 and mask.element_masks.all()


def test_text():
    text = repr(BlockMask.from_dense(np.eye(2, dtype=bool)))
    assert text.splitlines()[1:] == ["█ ", " █"] and "256 x 256" in text and "50.0%" in text
    texts = []
    jax.jit(lambda a: texts.append(repr(a)))(block_mask(0, 9, 9, 16, 16))
    assert "traced" in texts[0]
    large = repr(BlockMask.from_dense(np.ones((50, 90), bool), q_block=16, kv_block=16)).splitlines()
    assert len(large) == 33 and max(map(len, large[1:])) == 64


SQUARE = np.ones((2, 2), bool)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: BlockMask.from_dense(np.ones((2, 2))), TypeError, "blocks.*float"),
        (lambda: jax.jit(BlockMask.from_dense)(np.ones((2, 2), np.int32)), TypeError, "blocks.*int32"),
        (lambda: BlockMask.from_dense(SQUARE[0]), ValueError, "blocks.*dims"),
        (lambda: BlockMask.from_dense(SQUARE[None, None, None]), ValueError, "blocks.*dims"),
        (lambda: BlockMask.from_dense(SQUARE, 300, 200), ValueError, r"\(3, 2\)"),
        (lambda: BlockMask.from_dense(SQUARE, 256, 257), ValueError, r"\(2, 3\)"),
        (lambda: jax.jit(lambda x: BlockMask.from_dense(x, 300, 200))(SQUARE), ValueError, r"\(3, 2\)"),
        (lambda: BlockMask.from_dense(SQUARE, -256, 256), ValueError, "q_len must be at least 0, not -256"),
        (lambda: BlockMask.from_dense(SQUARE, q_block=2**31), ValueError, "q_block.*too large"),
        (lambda: BlockMask.from_dense(SQUARE, 20, 20, kv_block=2**62), ValueError, "kv_block.*too large"),
        (lambda: BlockMask.from_dense(SQUARE, 20, 20, kv_block=2**64), ValueError, "kv_block must be below"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i > j, 2**31 - 100, 9), ValueError, "q_block.*2147483548"),
        (lambda: BlockMask(None, SQUARE), TypeError, "shape must be .*Shape, not None"),
        (lambda: BlockMask(Shape(256, 256), None), ValueError, "blocks"),
        (lambda: BlockMask(Shape(256, 256), np.full((1, 1, 2, 2), "a")), TypeError, "blocks must be integers"),
        (lambda: BlockMask.from_dense(SQUARE, 256.0, 256), TypeError, "q_len"),
        (lambda: BlockMask.from_mask(np.ones((2, 2), np.int8)), TypeError, "mask.*int8"),
        (lambda: BlockMask.from_mask(SQUARE[0]), ValueError, "mask.*dims"),
        (lambda: BlockMask.from_mask(SQUARE[None, None, None]), ValueError, "mask.*dims"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i - j, 9, 9), TypeError, "mask_fn.*int32"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i > j, -1, 9), ValueError, "q_len must be at least 0"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: np.arange(9)[i] > j, 9, 9), TypeError, "mask_fn.*traced"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i > j if h else i < j, 9, 9), TypeError, "mask_fn.*traced"),
        (lambda: BlockMask(Shape(256, 256), SQUARE[0]), ValueError, "blocks"),
        (lambda: BlockMask(Shape(256, 256), np.zeros((1, 1, 2, 3))), ValueError, "blocks"),
        (lambda: BlockMask(Shape(9, 9), [[[[2]]]], np.zeros((1, 1, 128, 3), np.uint32)), ValueError, "element_masks"),
        (lambda: BlockMask(Shape(9, 9), [[[[2]]]], np.zeros((1, 1, 128, 4), np.int32)), ValueError, "element_masks"),
        (lambda: BlockMask.from_mask(SQUARE) & BlockMask.from_mask(SQUARE, q_block=16), ValueError, "different"),
        (lambda: BlockMask.from_mask(SQUARE) | BlockMask.from_mask(SQUARE[1:]), ValueError, "different"),
        (lambda: BlockMask.from_mask(SQUARE) & SQUARE.tolist(), TypeError, "BlockMask"),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("name", ["q_block", "kv_block"])
@pytest.mark.parametrize("size", [0, 8, 15, -16, 24])
def test_block_sizes_refused(name, size):
    for make in (
        functools.partial(BlockMask.from_dense, SQUARE),
        functools.partial(BlockMask.from_dense, SQUARE, 200, 200),
        functools.partial(BlockMask.from_mask, SQUARE),
        functools.partial(BlockMask.from_function, lambda b, h, i, j: i > j, 9, 9),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{size}"):
            make(**{name: size})


# --- attention ---

ATTENTION = {
    "shared": sparse(),
    "by head": sparse(48, 16, heads=4),
    "by batch entry": sparse(16, 64, batch=2, T=41, S=230),
    "by both": sparse(128, 64, batch=2, heads=4),
    "within one block": sparse(256, 512, heads=4, seed=1, T=100, S=70),
    "large blocks": sparse(512, 256, T=700, S=600, N=2, seed=2),
    "larger than a tile of the CPU": sparse(256, 512, B=1, T=300, S=1100, N=2, K=1, seed=3),
    "dims": sparse(64, 48, heads=6, N=6, K=2, D=40, E=8),
    "one key head": sparse(64, 128, heads=4, K=1, E=24, spread=4.0),
    "no logsumexp": sparse(64, 64, logsumexp=False),
    "causal": sparse(causal=True),
    "causal, offset": sparse(64, 16, batch=2, causal=True, offset=True),
    "window": sparse(16, 48, heads=4, window=(30, 25)),
    "lengths": sparse(48, 48, batch=2, lengths=True),
    "segments": sparse(32, 64, segments=True, causal=True),
    "soft cap": sparse(soft_cap=0.7, bias="bnts"),
    "bias": sparse(64, 32, heads=4, bias="1nts"),
    "bias of keys": sparse(16, 128, batch=2, bias="1n1s"),
    "bias of rows": sparse(96, 64, heads=4, bias="b1t1"),
    "one bias": sparse(bias="1111"),
    "mask": sparse(64, 64, batch=2, heads=4, mask="bnts"),
    "mask of keys": sparse(mask="b11s"),
    "dropout": sparse(48, 80, heads=4, dropout=0.3),
    "broadcast dropout": sparse(16, 16, dropout=0.5, broadcast_dropout=True, T=60, S=70),
    "all": sparse(
        64, 48, batch=2, heads=4, causal=True, window=(90, 40), bias="b1ts", mask="bn1s", lengths=True, offset=True,
        soft_cap=1.5, dropout=0.2,
    ),
    "deterministic": sparse(64, 64, heads=4, deterministic=True, bias="11ts", K=1, segments=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    check(ATTENTION[name], "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["by both", "dropout", "all"])
def test_attention_in_other_dtypes(name, dtype):
    check(ATTENTION[name], dtype)


def hopper(q_block=128, kv_block=128, **fields):
    return sparse(q_block, kv_block, **{"heads": 4, "B": 1, "D": 128, "E": 128} | fields)


# Hopper's kernels want blocks of whole tiles. Some of these have tiles of 16, 48 and 112 keys there. With few blocks,
# and keys for each head, the backward may be one kernel.
WHOLE_TILES = {
    "nothing": hopper(T=400, K=1),
    "dropout": hopper(batch=2, B=2, dropout=0.2),
    "causal, offset, dropout": hopper(batch=2, B=2, D=64, E=64, causal=True, offset=True, dropout=0.2),
    "lengths, mask": hopper(kv_block=256, S=400, K=2, D=96, E=80, dropout=0.2, mask="bnts", lengths=True),
    "window, segments": hopper(256, T=300, K=1, window=(90, 40), segments=True),
    "bias, soft cap": hopper(T=200, S=200, D=64, E=64, bias="bnts", soft_cap=1.5),
    "16 keys": hopper(D=192, E=192, mask="bnts", dropout=0.2),
    "48 keys": hopper(kv_block=48, D=192, E=192),
    "one kernel": hopper(K=4, T=300, S=500),
    "one kernel, dropout": hopper(kv_block=256, batch=2, B=2, K=4, D=64, E=64, T=300, S=300, dropout=0.2),
    "many lists": hopper(B=2, T=1200, S=1100, K=1, D=64, E=64),
    "112 keys": hopper(kv_block=112, dropout=0.2),
}


@pytest.mark.parametrize("name", WHOLE_TILES)
def test_blocks_of_whole_tiles(name):
    check(WHOLE_TILES[name], "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", ["by both", "larger than a tile of the CPU", "all"])
def test_other_implementations(name, implementation):
    case = ATTENTION[name]
    arrays, cotangents = upcast(case.arrays()), upcast(case.cotangents())
    results, exact = run(case, arrays, cotangents, implementation), by_numpy(case, arrays, cotangents)
    for key, x in exact.items():
        np.testing.assert_allclose(results[key], x.astype(np.float64), rtol=1e-9, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", ["by both", "dropout"])
def test_same_as_with_a_boolean_mask(name):
    """Also what has nothing to attend to, and the dropped entries."""
    case = ATTENTION[name]
    arrays, cotangents = case.arrays(), case.cotangents()
    results = run(case, arrays, cotangents)
    dense = dataclasses.replace(case, block_mask=None, mask="1nts" if name == "dropout" else "bnts")
    mask = arrays.pop("block_mask").to_mask()
    expected = run(dense, arrays | {"mask": mask}, cotangents)
    exact = oracle(dense, arrays | {"mask": mask}, cotangents)
    for key, x in exact.items():
        np.testing.assert_allclose(results[key], expected[key], rtol=2e-5, atol=2e-5, err_msg=key)
        np.testing.assert_allclose(results[key], x, rtol=2e-5, atol=2e-5, err_msg=key)


def sizes():
    block = st.sampled_from([16, 32, 48, 64, 80, 128, 256, 512])
    return st.tuples(st.integers(1, 300), st.integers(1, 300), block, block)


@given(sizes(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.2]), st.integers(0, 999))
@settings(max_examples=12)
def test_any_size(size, batch, heads, causal, dropout, seed):
    T, S, q_block, kv_block = size
    options = {"causal": causal, "dropout": dropout, "bias": "11ts" if causal else ""}
    case = sparse(q_block, kv_block, 1 + batch, 1 + 3 * heads, seed, T=T, S=S, **options)
    check(case, "float32", seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_in_the_whole_mask(implementation):
    nothing = BlockMask.from_dense(np.zeros((3, 4), bool), 150, 210, q_block=64, kv_block=64)
    case = Case(T=150, S=210, bias="11ts", block_mask=nothing)
    results = run(case, case.arrays(), case.cotangents(), implementation)
    assert np.isneginf(results.pop("logsumexp")).all()
    assert not any(x.any() for x in results.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_and_columns_without_blocks(implementation):
    """O = 0, l = 0, m = -inf, and no gradient."""
    dense = np.ones((3, 4), bool)
    dense[1], dense[:, 2] = False, False
    mask = BlockMask.from_dense(dense, 150, 210, q_block=64, kv_block=64)
    case = Case(T=150, S=210, bias="bnts", block_mask=mask)
    arrays = case.arrays()
    results = run(case, arrays, case.cotangents(), implementation)
    rows, columns = slice(64, 128), slice(128, 192)
    assert not any(results[name][:, rows].any() for name in ("o", "query"))
    assert not any(results[name][:, columns].any() for name in ("key", "value"))
    assert not results["bias"][:, :, rows].any() and not results["bias"][..., columns].any()
    _, (l, m) = jax_flash.attention_with_statistics(**arrays, implementation=implementation)
    assert not l[..., rows].any() and np.isneginf(m[..., rows]).all() and (l[..., :64] > 0).all()
    assert results["o"][:, :64].all() and results["key"][:, :128].all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("empty", [{"B": 0}, {"T": 0}, {"S": 0}, {"N": 0, "K": 2}, {"D": 0}, {"E": 0}], ids=str)
def test_empty_arrays(empty, implementation):
    case = Case(**{"T": 20, "S": 30} | empty)
    mask = BlockMask.from_mask(np.tri(case.T, case.S, dtype=bool), q_block=16, kv_block=16)
    case = dataclasses.replace(case, block_mask=mask)
    results = run(case, case.arrays(), case.cotangents(), implementation)
    assert results["o"].shape == (case.B, case.T, case.N, case.E)
    assert not any(np.isnan(x).any() for x in results.values())
    for name in ("o", "query"):
        assert case.S or not results[name].any()
    assert case.T or not results["key"].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_a_batch(implementation):
    case = ATTENTION["by head"]
    given = case.arrays()
    mask = given.pop("block_mask")
    whole = jax_flash.dot_product_attention(**given, block_mask=mask, implementation=implementation)
    first = {name: x[0] for name, x in given.items()}
    ours = jax_flash.dot_product_attention(**first, block_mask=mask, implementation=implementation)
    np.testing.assert_allclose(ours, whole[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_empty_blocks_are_not_read(bad):
    """Neither what no row sees, nor what other rows see."""
    dense = np.ones((3, 3), bool)
    dense[:, 1] = dense[2, 0] = False
    mask = BlockMask.from_dense(dense, 300, 330)
    case = Case(T=300, S=330, block_mask=mask, causal=False)
    arrays = case.arrays()
    expected = run(case, arrays, case.cotangents())
    arrays["key"][:, 128:256] = arrays["value"][:, 128:256] = bad
    results = run(case, arrays, case.cotangents())
    for name, x in expected.items():
        np.testing.assert_array_equal(results[name], x, err_msg=name)
    arrays["value"][:, :128] = bad  # of the first rows alone
    results = run(case, arrays, case.cotangents())
    for name in ("o", "query"):
        np.testing.assert_array_equal(results[name][:, 256:], expected[name][:, 256:], err_msg=name)


def test_only_the_gradients_asked_for():
    case = ATTENTION["all"]
    arrays = case.arrays()
    names = ["query", "key", "value", "bias"]

    def loss(*inputs):
        given = arrays | dict(zip(names, inputs, strict=True))
        return (jax_flash.dot_product_attention(**given, **case.options, implementation="flash") ** 2).sum()

    inputs = [arrays[name] for name in names]
    whole = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*inputs)
    for chosen in [(0,), (1,), (2,), (3,), (0, 3)]:
        gradients = jax.jit(jax.grad(loss, chosen))(*inputs)
        for i, gradient in zip(chosen, gradients, strict=True):
            np.testing.assert_allclose(gradient, whole[i], rtol=1e-5, atol=1e-5, err_msg=names[i])


def with_arrays(mask, **changes):
    """The same mask of other arrays, which no constructor has seen."""
    copy = jax.tree.map(lambda x: x, mask)
    for name, x in changes.items():
        setattr(copy, name, x)
    return copy


GARBAGE = np.array([-1, -(2**31), 2**31 - 1, 10**6, -7])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("elements", [True, False])
def test_numbers_out_of_range_are_empty_blocks(elements, implementation):
    case = sparse(32, 32, heads=4, bias="11ts")
    mask = case.block_mask
    if not elements:
        mask = BlockMask(mask.shape, np.minimum(mask.blocks, EVERYTHING))
    rng = np.random.default_rng(0)
    bad = rng.random(mask.blocks.shape) < 0.3
    first = ELEMENTS + (mask.element_masks.shape[1] if elements else 0)
    garbage = np.where(bad, rng.choice([first, *GARBAGE], bad.shape), mask.blocks).astype(np.int32)
    empty = with_arrays(mask, blocks=np.where(bad, NOTHING, mask.blocks))
    arrays, cotangents = case.arrays(), case.cotangents()
    expected = run(case, arrays | {"block_mask": empty}, cotangents, implementation)
    results = run(case, arrays | {"block_mask": with_arrays(mask, blocks=garbage)}, cotangents, implementation)
    gpu = jax.config.jax_default_device.platform == "gpu"  # which sums dQ in any order
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, rtol=0, atol=1e-6 if gpu and name == "query" else 0, err_msg=name)
    constructed = BlockMask(mask.shape, garbage, mask.element_masks)
    np.testing.assert_array_equal(constructed.to_mask(), empty.to_mask())
    np.testing.assert_array_equal((~constructed).to_mask(), ~empty.to_mask())
    np.testing.assert_array_equal((constructed | mask).to_mask(), mask.to_mask())
    assert_lists(constructed)
    traced = jax.jit(lambda blocks: BlockMask(mask.shape, blocks, mask.element_masks))(garbage)
    np.testing.assert_array_equal((~traced).to_mask(), ~empty.to_mask())
    assert_lists(traced)


def test_garbage_in_the_lists_is_survived():
    """The results are what they are, but nothing else is read or written."""
    case = sparse(32, 32, heads=4)
    rng, arrays = np.random.default_rng(0), case.arrays()
    lists = {
        name: rng.choice([0, 1, 3, 100, *GARBAGE], getattr(case.block_mask, name).shape).astype(np.int32)
        for name in ("row_lists", "column_lists")
    }
    results = run(case, arrays | {"block_mask": with_arrays(case.block_mask, **lists)}, case.cotangents())
    assert results["o"].shape == (case.B, case.T, case.N, case.E)


# --- derivatives ---

SMALL = sparse(16, 16, heads=2, B=2, T=37, S=41, N=2, K=1, D=3, E=2, bias="11ts", causal=True)


def on_cpu(device):
    if device.platform != "cpu":
        pytest.skip("float64 is for the CPU")


def test_check_grads(x64, device):
    on_cpu(device)
    attention, inputs = differentiable(SMALL, "flash")
    check_grads(attention, inputs, order=2, modes=["rev"], atol=1e-4, rtol=1e-4, eps=1e-4)


@pytest.mark.parametrize("derivative", ["hessian", "gradient of a gradient"])
def test_higher_order(derivative, x64, device):
    on_cpu(device)
    case = sparse(16, 16, B=1, T=18, S=20, N=1, K=1, D=2, E=2, seed=1)
    results = []
    for implementation in ("flash", "reference"):
        attention, inputs = differentiable(case, implementation)

        def loss(*inputs, attention=attention):
            return (attention(*inputs)[0] ** 3).sum() + jnp.sin(attention(*inputs)[1]).sum()

        def penalty(*inputs, loss=loss):
            return sum((x**2).sum() for x in jax.grad(loss, (0, 1, 2))(*inputs))

        higher = jax.hessian(loss, 1) if derivative == "hessian" else jax.grad(penalty, (0, 1, 2))
        results.append(jax.jit(higher)(*inputs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), *results)


# --- transformations ---

B, T, S, N, K, D = 2, 40, 56, 4, 2, 8
BLOCKS = {"q_block": 16, "kv_block": 16}
attend = functools.partial(jax_flash.dot_product_attention, implementation="flash")


def arrays(*lead, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, T, N, D), (*lead, S, K, D), (*lead, S, K, D))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def gradients(q, k, v, mask):
    return jax.value_and_grad(lambda q, k, v: (attend(q, k, v, block_mask=mask) ** 2).sum(), (0, 1, 2))(q, k, v)


def small(seed, batch=1, heads=1):
    return entries(seed, T, S, 16, 16, batch, heads)


def of(mask):
    return BlockMask.from_mask(mask, **BLOCKS)


def assert_close(x, y, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), x, y)


def stacked(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, N), (B, 1), (B, N)])
def test_jit_and_constants(batch, heads):
    """An argument, a constant, a static argument, or made in the program."""
    given, mask = arrays(B), small(0, batch, heads)
    expected = gradients(*given, of(mask))
    assert_close(jax.jit(gradients)(*given, of(mask)), expected)
    assert_close(jax.jit(gradients, static_argnums=3)(*given, of(mask)), expected)
    assert_close(jax.jit(lambda *given: gradients(*given, of(mask)))(*given), expected)
    assert_close(jax.jit(lambda *given, mask: gradients(*given, of(mask)))(*given, mask=mask), expected)


def test_blocks_that_depend_on_the_data():
    """The keys' blocks with the largest sums, chosen in the program."""
    given = arrays(B)

    def keep(q, k):
        score = jnp.einsum("btnd,bskd->bntsk", q, k).mean(-1)
        score = jnp.pad(score, ((0, 0), (0, 0), (0, 8), (0, 8))).reshape(B, N, 3, 16, 4, 16).sum((3, 5))
        return score >= jnp.sort(score, -1)[..., 2:3]

    def function(q, k, v):
        return gradients(q, k, v, BlockMask.from_dense(keep(q, k), T, S, **BLOCKS))

    dense = np.asarray(keep(*given[:2]))
    expected = gradients(*given, BlockMask.from_dense(dense, T, S, **BLOCKS))
    assert_close(jax.jit(function)(*given), expected)


@pytest.mark.parametrize("mapped", ["arrays", "mask", "both"])
@pytest.mark.parametrize("heads", [1, N])
def test_vmap(mapped, heads):
    """The mask shared by the examples, or one for each, with element masks of its own."""
    given = arrays(3, B) if mapped != "mask" else arrays(B)
    masks = np.stack([small(seed, B, heads) for seed in range(3)]) if mapped != "arrays" else small(0, B, heads)
    axes = tuple(0 if mapped != "mask" else None for _ in given)

    def function(q, k, v, mask):
        return gradients(q, k, v, of(mask))

    def single(i):
        picked = (x if axis is None else x[i] for x, axis in zip(given, axes, strict=True))
        return gradients(*picked, of(masks if mapped == "arrays" else masks[i]))

    expected = stacked([single(i) for i in range(3)])
    axis = None if mapped == "arrays" else 0
    block_masks = jax.vmap(of)(masks) if mapped != "arrays" else of(masks)
    assert_close(jax.jit(jax.vmap(gradients, in_axes=(*axes, axis)))(*given, block_masks), expected)
    assert_close(jax.jit(jax.vmap(function, in_axes=(*axes, axis)))(*given, masks), expected)


def test_nested_vmap():
    """Inside over masks alone, outside over arrays and masks."""
    given, masks = arrays(2, B), np.stack([[small(seed + 10 * i) for seed in range(3)] for i in range(2)])
    block_masks = jax.vmap(jax.vmap(of))(masks)
    function = jax.vmap(jax.vmap(gradients, in_axes=(None, None, None, 0)))
    expected = stacked([
        stacked([gradients(*(x[i] for x in given), of(masks[i, j])) for j in range(3)]) for i in range(2)
    ])  # fmt: skip
    assert_close(jax.jit(function)(*given, block_masks), expected)


def test_vmap_shares_one_mask():
    """A mask that the examples share is not copied for each."""
    text = jax.jit(jax.vmap(gradients, in_axes=(0, 0, 0, None))).lower(*arrays(3, B), of(small(0))).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_flash' in line]
    assert len(lines) == 2 and all("batch=6 " in line and "block_mask=11ts" in line for line in lines)


def layer(x, w, mask):
    q, k, v = (jnp.einsum("btnd,de->btne", x, w[i]) for i in range(3))
    return x + jnp.tanh(attend(q, k, v, block_mask=mask, is_causal=True))


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat):
    """A mask for every layer."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32), jnp.asarray(rng.normal(size=(3, 3, D, D)) / D)
    masks = np.stack([entries(seed, T, T, 16, 16, 1, N) for seed in range(3)])
    body = jax.checkpoint(layer) if remat else layer

    def scanned(x, w, masks):
        return (jax.lax.scan(lambda x, xs: (body(x, *xs), None), x, (w, masks))[0] ** 2).sum()

    def looped(x, w):
        for weights, mask in zip(w, masks, strict=True):
            x = layer(x, weights, of(mask))
        return (x**2).sum()

    ours = jax.jit(jax.grad(scanned, (0, 1)))(x, w, jax.vmap(of)(masks))
    assert_close(ours, jax.jit(jax.grad(looped, (0, 1)))(x, w), 1e-4)


@pytest.mark.parametrize("implementation", ["flash", None])
def test_export_round_trip(implementation, device):
    """With masks as a constant, as an argument, and made from an argument."""
    given, mask, causal = arrays(B), small(0, 1, N), of(np.tri(T, S, dtype=bool))

    def function(q, k, v, dense, causal):
        block_mask = of(mask) & BlockMask.from_dense(dense, T, S, **BLOCKS) & causal
        o = jax_flash.dot_product_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return (o**2).sum()

    gradient = jax.jit(jax.value_and_grad(function, (0, 1, 2)))
    dense = np.random.default_rng(0).random((3, 4)) < 0.7
    platform = "cuda" if device.platform == "gpu" else "cpu"
    exported = export.export(gradient, platforms=(platform,), disabled_checks=EXPORT_CHECKS)(*given, dense, causal)
    restored = export.deserialize(exported.serialize())
    assert_close(restored.call(*given, dense, causal), gradient(*given, dense, causal))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strict_promotion(implementation):
    """JAX may be told to promote neither ranks nor dtypes."""

    def function(q, k, v, mask, dense):
        mask = ~(mask & of(dense)) | mask
        return jax_flash.dot_product_attention(q, k, v, block_mask=mask, implementation=implementation).sum()

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        o, _ = jax.eval_shape(jax.value_and_grad(function), *arrays(B), of(small(0, B, N)), small(1))
    assert o.shape == ()


# --- sharding ---


@pytest.fixture
def mesh(device):
    on_cpu(device)
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, N), (8, 1), (8, N)])
def test_sharding(batch, heads, explicit, mesh):
    """Every device computes its own batch entries and heads, with their part of the mask."""
    given, mask = arrays(8), of(small(0, batch, heads))
    expected = gradients(*given, mask)
    if batch > 1:  # with a table for each batch entry
        mask = jax.tree.map(lambda x: x[:, 0], jax.vmap(of)(small(0, batch, heads)))
    if explicit:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    places = P("data" if batch > 1 else None, "model" if heads > 1 else None)
    elements = P("data") if batch > 1 else P()
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, NamedSharding(mesh, P("data", None, "model")))
        specs = dict.fromkeys(("blocks", "row_lists", "column_lists"), places) | {"element_masks": elements}
        arrays_of_mask = {
            name: jax.device_put(getattr(mask, name), NamedSharding(mesh, spec)) for name, spec in specs.items()
        }
        compiled = jax.jit(gradients).lower(*placed, with_arrays(mask, **arrays_of_mask)).compile()
        ours = compiled(*placed, with_arrays(mask, **arrays_of_mask))
    assert_close(ours, expected, 1e-4)
    assert not gathers(compiled)
    local = f"batch=2 q_len={T} kv_len={S} q_heads=2 kv_heads=1 "
    extent = f"block_mask={'b' if batch > 1 else '1'}{'n' if heads > 1 else '1'}ts "
    lines = [line for line in compiled.as_text().splitlines() if 'custom_call_target="jax_flash' in line]
    assert len(lines) == 2 and all(local in line and extent in line for line in lines)


def test_one_key_head_for_all_devices(device):
    on_cpu(device)
    q, k, v = arrays(B, seed=1)
    given, mask = (jnp.concatenate([q, q + 1], 2), k[:, :, :1], v[:, :, :1]), of(small(0, 1, 2 * N))
    expected = gradients(*given, mask)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(given[0], NamedSharding(mesh, P(None, None, "model")))
        assert_close(jax.jit(gradients)(placed, *given[1:], mask), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, mesh):
    """The masks of the heads go where the heads are; element masks are everywhere."""
    given, mask = arrays(8), of(small(0, 1, N))
    expected = gradients(*given, mask)[1]
    spec, lists = P("data", None, "model"), P(None, "model")
    specs = with_arrays(mask, blocks=lists, row_lists=lists, column_lists=lists, element_masks=P())
    function = jax.jit(
        jax.shard_map(
            lambda *args: gradients(*args)[1],
            mesh=mesh,
            in_specs=(spec, spec, spec, specs),
            out_specs=(spec,) * 3,
            check_vma=check_vma,
        )
    )
    assert_close(function(*given, mask), expected)
    assert not gathers(function.lower(*given, mask).compile())


def test_higher_order_and_vmap_under_a_mesh(mesh):
    given, mask = arrays(8), of(small(0, 8, N))

    def penalty(q, k, v, mask):
        return jax.grad(lambda q: sum((x**2).sum() for x in gradients(q, k, v, mask)[1]))(q)

    expected = jax.jit(penalty)(*given, mask)
    split = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), given)
    masks = jax.vmap(of)(small(0, 8, N).reshape(2, 4, N, T, S))
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, NamedSharding(mesh, P("data", None, "model")))
        assert_close(jax.jit(penalty)(*placed, mask), expected, 1e-3)
        placed = jax.device_put(split, NamedSharding(mesh, P(None, "data", None, "model")))
        ours = jax.jit(jax.vmap(penalty))(*placed, masks)
    assert_close(ours.reshape(expected.shape), expected, 1e-3)


# --- errors, time ---


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (np.ones((T, S), bool), TypeError, "block_mask.*ndarray"),
        (np.ones((3, 4), np.int32), TypeError, "block_mask.*ndarray"),
        ("causal", TypeError, "block_mask.*str"),
        (of(np.ones((T + 1, S), bool)), ValueError, f"block_mask.*41.*{T}"),
        (of(np.ones((T, S - 1), bool)), ValueError, f"block_mask.*55.*{S}"),
        (of(np.ones((S, T), bool)), ValueError, "block_mask.*56"),
        (of(small(0, 3, 1)), ValueError, r"block_mask.*\(3, 1, 3, 4\)"),
        (of(small(0, 1, K)), ValueError, r"block_mask.*\(1, 2, 3, 4\)"),
        (jax.vmap(of)(small(0, 2, 1)), ValueError, "block_mask"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_errors_of_attention(mask, error, match, implementation):
    """When tracing."""
    function = functools.partial(jax_flash.dot_product_attention, implementation=implementation)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda *given: function(*given, block_mask=mask), *arrays(B))


@pytest.mark.parametrize("backward", [False, True])
def test_time_is_that_of_the_blocks_kept(backward, device):
    """An eighth of the blocks costs no more than an eighth of the time divided by 0.6. The least time of each: whatever
    else the machine does only adds to it."""
    on_cpu(device)
    length, blocks = 4096, 32
    given = [jnp.asarray(np.random.default_rng(i).normal(size=(1, length, 4, 64)), jnp.float32) for i in range(3)]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(blocks), (blocks, 1)), axis=1)
    mask = BlockMask.from_dense(order < blocks // 8)
    assert mask.kept == 1 / 8

    def function(mask):
        loss = functools.partial(attend, block_mask=mask)
        return jax.jit(jax.grad(lambda *given: loss(*given).sum(), (0, 1, 2)) if backward else loss)

    functions = [function(None), function(mask)]
    times = [[], []]
    for _ in range(8):
        for run_once, taken in zip(functions, times, strict=True):
            start = time.process_time()
            jax.block_until_ready(run_once(*given))
            taken.append(time.process_time() - start)
    dense, kept = (min(taken[1:]) for taken in times)
    assert kept < dense / 8 / 0.6, (kept, dense, kept / dense * 8)

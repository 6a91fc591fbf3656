"""Construction, combination, slicing and stacking of `BlockMask`."""

import copy
import functools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import assert_lists, block_mask, entries

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash import BlockMask, patterns
from jax_flash.block_sparse import EMPTY, FULL, PARTIAL, Shape

pytestmark = pytest.mark.usefixtures("device")


def blocks_of(mask, shape):
    """Return with NumPy which blocks have a visible entry, and which are full: two arrays bool [B, N, U, V]."""
    U, V = shape.grid
    padding = [(0, 0), (0, 0), (0, U * shape.q_block - shape.q_len), (0, V * shape.kv_block - shape.kv_len)]
    tiled = (*mask.shape[:2], U, shape.q_block, V, shape.kv_block)
    nonempty, missing = (np.pad(x, padding).reshape(tiled).any((3, 5)) for x in (mask, ~mask))
    return nonempty, ~missing


def assert_equals(block_mask, mask):
    """Check all entries and lists, the kinds of empty and full blocks, and that element masks are distinct and used."""
    np.testing.assert_array_equal(np.broadcast_to(block_mask.to_mask(), mask.shape), mask)
    nonempty, full = blocks_of(mask, block_mask.shape)
    blocks = np.broadcast_to(block_mask.blocks, nonempty.shape)
    np.testing.assert_array_equal(blocks != EMPTY, nonempty)
    np.testing.assert_array_equal(blocks == FULL, full)
    used = np.unique(block_mask.blocks[block_mask.blocks >= PARTIAL])
    if block_mask.element_masks is None:
        assert not used.size
    else:
        np.testing.assert_array_equal(used, PARTIAL + np.arange(block_mask.element_masks.shape[1]))
        assert len(np.unique(block_mask.element_masks[0], axis=0)) == len(used)
    assert_lists(block_mask)


def masks():
    """Return a strategy for the arguments of `block_mask` and `entries`."""
    length, block = st.integers(1, 300), st.sampled_from([16, 32, 48, 64, 128, 256])
    return st.tuples(st.integers(0, 99), length, length, block, block, st.integers(1, 2), st.integers(1, 3))


@given(masks())
def test_from_mask(mask):
    assert_equals(block_mask(*mask), entries(*mask))


@given(masks())
@settings(max_examples=10)
def test_from_mask_traced(mask):
    """A traced mask marks every block as partial, since the blocks' contents are unknown."""
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
    padded = dense.repeat(q_block, 2).repeat(kv_block, 3)
    expected = padded[..., :T, :S]
    assert_equals(BlockMask.from_dense(dense, T, S, q_block=q_block, kv_block=kv_block), expected)
    assert_equals(BlockMask.from_dense(dense, q_block=q_block, kv_block=kv_block), padded)
    assert_equals(BlockMask.from_dense(dense[0], T, S, q_block=q_block, kv_block=kv_block), expected[:1])
    assert_equals(
        BlockMask.from_dense(dense[0, 0].tolist(), T, S, q_block=q_block, kv_block=kv_block), expected[:1, :1]
    )


FUNCTIONS = {
    "causal": lambda b, h, i, j: j <= i,
    "dilated window": lambda b, h, i, j: (abs(i - j) < 70) & ((i - j) % 3 == 0),
    "heads": lambda b, h, i, j: j < 40 * (h + 2 * b + 1),
    "rows": lambda b, h, i, j: i % 50 < 20,
    "one value per head": lambda b, h, i, j: h > 0,
    "constant": lambda b, h, i, j: True,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("T", "S", "q_block", "kv_block"), [(200, 130, 48, 64), (7, 300, 16, 128), (96, 64, 32, 32)])
def test_from_function(name, T, S, q_block, kv_block):
    b, h, i, j = np.ogrid[:2, :3, :T, :S]
    expected = np.broadcast_to(FUNCTIONS[name](b, h, i, j), (2, 3, T, S))
    result = BlockMask.from_function(FUNCTIONS[name], T, S, batch=2, heads=3, q_block=q_block, kv_block=kv_block)
    assert_equals(result, expected)
    assert result == BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block)


def test_from_function_passes_scalars():
    """The function receives scalar indices, so indexing gives rows, and a sum is a number."""
    rows, columns = (jnp.asarray(np.random.default_rng(i).normal(size=(70, 3)), jnp.float32) for i in range(2))
    expected = np.asarray(rows) @ np.asarray(columns).T > 0
    for mask_fn in (
        lambda b, h, i, j: (rows[i] * columns[j]).sum() > 0,
        lambda b, h, i, j: jnp.dot(rows[i], columns[j]) > 0,
    ):
        result = BlockMask.from_function(mask_fn, 70, 70, q_block=16, kv_block=32)
        np.testing.assert_array_equal(result.to_mask()[0, 0], expected)


def test_from_function_with_random_numbers():
    key = jax.random.key(0)
    result = BlockMask.from_function(
        lambda b, h, i, j: jax.random.bernoulli(jax.random.fold_in(key, 70 * i + j)), 50, 70
    )
    expected = jax.vmap(lambda n: jax.random.bernoulli(jax.random.fold_in(key, n)))(jnp.arange(3500))
    np.testing.assert_array_equal(result.to_mask()[0, 0], expected.reshape(50, 70))


@pytest.mark.parametrize(("T", "S"), [(0, 9), (9, 0)])
def test_from_function_of_empty_mask(T, S):
    """The function is not evaluated, so it does not index arrays without elements."""
    ids = jnp.zeros(0, int)
    assert BlockMask.from_function(lambda b, h, i, j: ids[i] == ids[j], T, S).to_mask().shape == (1, 1, T, S)


def test_from_function_under_transformations():
    """The mask is a constant, also inside a transformation. So its function must not depend on traced values."""
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


def test_from_function_compiles_once(caplog):
    """Neither new closures nor new contents of captured arrays cause a compilation."""

    def make(width):
        limits = jnp.arange(50) + width
        return BlockMask.from_function(lambda b, h, i, j: j <= limits[i], 50, 70, q_block=16, kv_block=32)

    first = make(3)
    with jax.log_compiles():
        second = make(5)
    assert not [record for record in caplog.records if "compil" in record.getMessage().lower()]
    np.testing.assert_array_equal(second.to_mask()[0, 0], np.arange(70) <= np.arange(5, 55)[:, None])
    assert first != second


def test_from_function_gets_int32(x64):
    dtypes = []
    BlockMask.from_function(lambda *indices: dtypes.extend(x.dtype for x in indices) or indices[2] > indices[3], 9, 9)
    assert set(dtypes) == {np.dtype(np.int32)}


def printing(b, h, i, j):
    jax.debug.print("{}", i)
    return i > j


@given(masks(), st.integers(0, 99), st.booleans(), st.booleans())
def test_combinations(mask, seed, shared_batch, shared_heads):
    _, T, S, q_block, kv_block, B, N = mask
    other = (seed, T, S, q_block, kv_block, 1 if shared_batch else B, 1 if shared_heads else N)
    a, b, x, y = block_mask(*mask), block_mask(*other), entries(*mask), entries(*other)
    for result, expected in ((a & b, x & y), (a | b, x | y), (b | a, x | y), (~a, ~x), (a & ~b, x & ~y), (a & a, x)):
        assert_equals(result, expected)
        assert result == BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block)
        assert hash(result) == hash(BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block))


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
    # Masks returned by a jitted function, used outside of jit and as constants inside it.
    a, b = (jax.tree.map(jnp.asarray, mask) for mask in (a, b))
    np.testing.assert_array_equal(combine(a, b).to_mask(), expected)
    np.testing.assert_array_equal(jax.jit(lambda: combine(a, b).to_mask())(), expected)


@given(masks(), st.data())
def test_slice(mask, data):
    """A slice equals a mask made from the same entries. Its last blocks may be cut.

    A slice of a traced mask has the same entries, but keeps unused element masks.
    """
    _, T, S, q_block, kv_block, _, _ = mask
    ends = data.draw(st.tuples(st.integers(-T, T + 9), st.integers(0, S)))
    starts = (data.draw(st.integers(0, (n - 1) // block)) * block for n, block in ((T, q_block), (S, kv_block)))
    part = tuple(slice(start or None, end) for start, end in zip(starts, ends, strict=True))
    full, expected = block_mask(*mask), entries(*mask)[:, :, *part]
    assert_equals(full[part], expected)
    assert full[part] == BlockMask.from_mask(expected, q_block=q_block, kv_block=kv_block)
    traced = jax.jit(lambda mask: mask[part])(full)
    np.testing.assert_array_equal(traced.to_mask(), expected)
    assert_lists(traced)


def test_slice_of_a_pattern():
    """A slice of the mask for the longest input equals the mask for a shorter input."""
    assert patterns.causal(1000, 1000)[:300, :300] == patterns.causal(300, 300)
    assert patterns.causal(512, 1000)[128:400, 128:600] == patterns.causal(272, 472)
    assert patterns.causal(300, 300)[384:, :300].to_mask().shape[2:] == (0, 300)  # beyond the end, as in NumPy


LAYERS = [
    block_mask(0, 70, 90, 16, 48, 1, 3),
    BlockMask.from_dense(np.eye(5, 2, dtype=bool), 70, 90, q_block=16, kv_block=48),
    block_mask(1, 70, 90, 16, 48, 2, 1),
    jax.tree.map(jnp.asarray, block_mask(2, 70, 90, 16, 48)),
    BlockMask.from_dense(np.zeros((5, 2), bool), 70, 90, q_block=16, kv_block=48),
]


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[1:2]], ids=["various", "without element masks"])
@pytest.mark.parametrize("make", [BlockMask.stack, jax.jit(BlockMask.stack)], ids=["concrete", "traced"])
def test_stack(layers, make):
    stack = make(layers)
    batch_and_heads = np.broadcast_shapes(*(layer.blocks.shape[:2] for layer in layers))
    assert stack.blocks.shape[:3] == (len(layers), *batch_and_heads)
    for i, layer in enumerate(layers):
        one = jax.tree.map(operator.itemgetter(i), stack)
        np.testing.assert_array_equal(one.to_mask(), np.broadcast_to(layer.to_mask(), (*batch_and_heads, 70, 90)))
        assert_lists(one)
    if make is BlockMask.stack:
        assert not any(x.flags.writeable for x in stack.arrays().values())
        assert hash(stack) == hash(BlockMask.stack(layers)) and stack == BlockMask.stack(layers)


def test_stack_is_not_one_mask():
    stack = BlockMask.stack(LAYERS)
    assert repr(stack) == "BlockMask(70 x 90 in blocks of 16 x 48, a stack of 5)"
    for use in (
        *(stack.to_mask, stack.plot, lambda: ~stack, lambda: stack[:9, :9], lambda: LAYERS[0] & stack),
        *(lambda: stack | LAYERS[0], lambda: BlockMask.stack([stack])),
    ):
        with pytest.raises(ValueError, match="this block mask is a stack"):
            use()


def test_element_masks_per_batch_entry():
    """vmap gives each example its own table of element masks."""
    x = entries(3, 70, 90, 16, 48, 3)
    result = jax.vmap(functools.partial(BlockMask.from_mask, q_block=16, kv_block=48))(x)
    for i in range(3):
        single = jax.tree.map(operator.itemgetter(i), result)
        np.testing.assert_array_equal(single.to_mask()[0], x[i])
        assert BlockMask(single.shape, single.blocks, single.element_masks) == BlockMask.from_mask(
            x[i], q_block=16, kv_block=48
        )
    joined = jax.tree.map(lambda leaf: leaf[:, 0], result)  # one mask of three batch entries
    np.testing.assert_array_equal(joined.to_mask(), x)
    assert_equals(BlockMask(joined.shape, joined.blocks, joined.element_masks), x)
    np.testing.assert_array_equal(jax.jit(lambda m: (~m | m & m).to_mask())(joined), np.ones_like(x))
    np.testing.assert_array_equal((~joined).to_mask(), ~x)
    other, y = block_mask(4, 70, 90, 16, 48), entries(4, 70, 90, 16, 48)
    for both, expected in ((joined & other, x & y), (other & joined, x & y), (joined | other, x | y)):
        assert_equals(both, expected)


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


def test_passing_masks_to_jit():
    """A mask can be a static argument, a constant or an argument. Equal static masks are traced once."""
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


def test_immutability():
    """A mask is read-only, because its hash and its lists depend on its contents. It copies the arrays it gets."""
    blocks, masks = np.full((1, 1, 2, 2), 2, np.int32), np.ones((1, 1, 16, 1), np.uint32)
    mask = BlockMask(Shape(32, 32, 16, 16), blocks, masks)
    derived = mask, mask & ~mask, BlockMask.from_mask(mask.to_mask()), jax.tree.map(lambda x: x, mask)
    copies = copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))
    for one in (*derived, *copies):
        for x in one.arrays().values():
            assert not x.flags.writeable and (x.base is None or not x.base.flags.writeable)
        with pytest.raises(ValueError, match="read-only"):
            one.blocks[...] = 0
        with pytest.raises(AttributeError, match="cannot assign to field 'blocks'"):
            one.blocks = blocks
        with pytest.raises(AttributeError, match="cannot delete field 'blocks'"):
            del one.blocks
    assert all(one == mask and hash(one) == hash(mask) for one in copies)
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
        (lambda: BlockMask(Shape(256, 256), None), TypeError, "blocks must be an array of numbers, not None"),
        (lambda: BlockMask(Shape(256, 256), np.full((1, 1, 2, 2), "a")), TypeError, "blocks must be an array of num"),
        (lambda: BlockMask(Shape(256, 256), np.ones((1, 1, 2, 2))), TypeError, "blocks must be integers"),
        (lambda: BlockMask.from_dense([[True], [True, False]]), TypeError, "blocks must be an array of numbers"),
        (lambda: BlockMask.from_dense(SQUARE, q_block=None), TypeError, "q_block must be an int, not None"),
        (lambda: BlockMask.from_dense(SQUARE, kv_block="a"), TypeError, "kv_block must be an int, not 'a'"),
        (lambda: BlockMask.from_dense(SQUARE, 256.0, 256), TypeError, "q_len"),
        (lambda: BlockMask.from_mask(np.ones((2, 2), np.int8)), TypeError, "mask.*int8"),
        (lambda: BlockMask.from_mask(SQUARE[0]), ValueError, "mask.*dims"),
        (lambda: BlockMask.from_mask(SQUARE[None, None, None]), ValueError, "mask.*dims"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i - j, 9, 9), TypeError, "mask_fn must return one bool"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i > j, -1, 9), ValueError, "q_len must be at least 0"),
        (lambda: BlockMask.from_function(None, 9, 9), TypeError, "mask_fn must be a function of .*NoneType"),
        (lambda: BlockMask.from_function(None, 0, 9), TypeError, "mask_fn must be a function of .*NoneType"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: None, 9, 9), TypeError, "mask_fn must return .* not None"),
        (lambda: BlockMask.from_function(lambda *_: SQUARE, 9, 9), TypeError, r"mask_fn must return .*bool\[2, 2\]"),
        (lambda: BlockMask.from_function(lambda b, h, i: i > 3, 9, 9), TypeError, "mask_fn must take 4 arguments"),
        (lambda: BlockMask.from_function(printing, 9, 9), ValueError, "mask_fn must not have side effects.*Debug"),
        (lambda: BlockMask.from_function(FUNCTIONS["causal"], 9, 9, batch="a"), TypeError, "batch must be an int"),
        (lambda: BlockMask.from_function(FUNCTIONS["causal"], 9, 9, batch=-1), ValueError, "batch must be at least 0"),
        (lambda: BlockMask.from_function(FUNCTIONS["causal"], 9, 9, heads=10**400), ValueError, "heads must be below"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: np.arange(9)[i] > j, 9, 9), TypeError, "mask_fn.*traced"),
        (lambda: BlockMask.from_function(lambda b, h, i, j: i > j if h else i < j, 9, 9), TypeError, "mask_fn.*traced"),
        (lambda: BlockMask(Shape(256, 256), SQUARE[0]), ValueError, "blocks"),
        (lambda: BlockMask(Shape(256, 256), np.zeros((1, 1, 2, 3))), ValueError, "blocks"),
        (lambda: BlockMask(Shape(9, 9), [[[[2]]]], np.zeros((1, 1, 128, 3), np.uint32)), ValueError, "element_masks"),
        (lambda: BlockMask(Shape(9, 9), [[[[2]]]], np.zeros((1, 1, 128, 4), np.int32)), ValueError, "element_masks"),
        (
            lambda: BlockMask(Shape(9, 9), np.full((2, 1, 1, 1), 2), np.zeros((3, 1, 128, 4), np.uint32)),
            ValueError,
            r"element_masks .* \(3, 1, 128, 4\) with blocks \(2, 1, 1, 1\)",
        ),
        (lambda: BlockMask.from_mask(SQUARE) & BlockMask.from_mask(SQUARE, q_block=16), ValueError, "different"),
        (lambda: BlockMask.from_mask(SQUARE) | BlockMask.from_mask(SQUARE[1:]), ValueError, "different"),
        (lambda: BlockMask.from_mask(SQUARE) & SQUARE.tolist(), TypeError, "BlockMask"),
        (lambda: BlockMask.from_mask(SQUARE)[:1], TypeError, r"two slices, .* such as mask\[:512, :512\]"),
        (lambda: BlockMask.from_mask(SQUARE)[0, :1], TypeError, "two slices"),
        (lambda: list(BlockMask.from_mask(SQUARE)), TypeError, "two slices"),
        (lambda: BlockMask.from_mask(SQUARE)[:1, :1.0], TypeError, "slice of .* keys must have integers.*1.0"),
        (lambda: jax.jit(lambda n: BlockMask.from_mask(SQUARE)[:n, :1])(1), TypeError, "slice of .* queries.*known"),
        (lambda: BlockMask.from_mask(SQUARE)[::2, :1], ValueError, "slice of .* queries .* no step, but has step 2"),
        (
            lambda: BlockMask.from_dense(SQUARE)[:9, 64:],
            ValueError,
            "slice of .* keys .* of .* 128, not at 64",
        ),
        (lambda: BlockMask.stack([]), ValueError, "masks .* empty"),
        (lambda: BlockMask.stack(BlockMask.from_mask(SQUARE)), TypeError, "masks must be a list or tuple.*BlockMask"),
        (lambda: BlockMask.stack([BlockMask.from_mask(SQUARE), None]), TypeError, "masks must be a list.*None"),
        (lambda: BlockMask.stack([LAYERS[0], LAYERS[0][:69, :]]), ValueError, r"masks\[1\] has .*q_len=69"),
        (lambda: BlockMask.stack([LAYERS[0], block_mask(0, 70, 90, 16, 48, 1, 2)]), ValueError, r"\(1, 3\), \(1, 2\)"),
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

"""Sparsity patterns: each compared with its definition entry by entry, their cost for long sequences, and attention."""

import math
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

import jax_flash
from jax_flash import BlockMask, patterns

# T, S, q_block, kv_block: whole and cut blocks, non-square blocks and grids, a single block, empty masks
SHAPES = [
    (128, 128, 32, 32),
    (150, 150, 32, 32),
    (150, 210, 16, 48),
    (210, 150, 64, 32),
    (97, 250, 48, 16),
    (20, 30, 128, 128),
    (1, 1, 16, 16),
    (0, 40, 16, 16),
    (40, 0, 16, 16),
]
shapes = pytest.mark.parametrize("T, S, q_block, kv_block", SHAPES)
shape_strategy = st.tuples(
    st.integers(0, 130), st.integers(0, 130), st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 80])
)


def check(mask, expected):
    """Check the entries, [T, S] or [B, N, T, S], and that no block is marked as non-empty or partial without need."""
    expected = expected.reshape((1,) * (4 - expected.ndim) + expected.shape)
    np.testing.assert_array_equal(mask.to_mask(), expected)
    blocks = {"q_block": mask.shape.q_block, "kv_block": mask.shape.kv_block}
    np.testing.assert_array_equal(
        np.minimum(mask.blocks, 2), np.minimum(BlockMask.from_mask(expected, **blocks).blocks, 2)
    )


def positions(T, S):
    return np.arange(T)[:, None], np.arange(S)[None]


def by_rule(T, S, rule):
    """Evaluate rule(i, j) for each entry."""
    return np.array([bool(rule(i, j)) for i in range(T) for j in range(S)], bool).reshape(T, S)


# --- exact patterns ---


@shapes
def test_causal(T, S, q_block, kv_block):
    i, j = positions(T, S)
    check(patterns.causal(T, S, q_block=q_block, kv_block=kv_block), j <= i)


@given(shape_strategy, st.one_of(st.none(), st.integers(0, 150)), st.one_of(st.none(), st.integers(0, 150)))
def test_local_window(shape, left, right):
    T, S, q_block, kv_block = shape
    i, j = positions(T, S)
    expected = (j >= i - (1000 if left is None else left)) & (j <= i + (1000 if right is None else right))
    check(patterns.local_window(T, S, left, right, q_block=q_block, kv_block=kv_block), expected)


@given(
    shape_strategy,
    st.one_of(st.none(), st.integers(0, 20)),
    st.one_of(st.none(), st.integers(0, 20)),
    st.integers(1, 40),
)
def test_dilated_window(shape, left, right, dilation):
    T, S, q_block, kv_block = shape
    expected = np.zeros((T, S), bool)
    for n in range(-200 if right is None else -right, 201 if left is None else left + 1):
        i = np.arange(T)
        j = i - dilation * n
        inside = (j >= 0) & (j < S)
        expected[i[inside], j[inside]] = True
    check(patterns.dilated_window(T, S, left, right, dilation, q_block=q_block, kv_block=kv_block), expected)


@pytest.mark.parametrize("window, dilation, tokens", [(0, 1, []), (40, 1, [0, 1, 77]), (8, 5, range(3, 90, 30))])
@shapes
def test_longformer(T, S, q_block, kv_block, window, dilation, tokens):
    tokens = [token for token in tokens if token < max(T, S)]
    mask = patterns.longformer(
        T, S, window, dilation=dilation, global_tokens=tokens, q_block=q_block, kv_block=kv_block
    )
    near = by_rule(T, S, lambda i, j: (i - j) % dilation == 0 and abs(i - j) // dilation <= window // 2)
    i, j = positions(T, S)
    check(mask, near | np.isin(i, tokens) | np.isin(j, tokens))


@st.composite
def documents(draw):
    T, S, q_block, kv_block = draw(shape_strategy)
    ids = st.integers(-2, 2) if draw(st.booleans()) else st.sampled_from([-(2**40), 0, 2**40])
    batches = draw(st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1)]))

    def some(batch, length):
        pieces = [draw(st.lists(st.tuples(ids, st.integers(1, 60)), min_size=9, max_size=9)) for _ in range(batch)]
        rows = [sum(([x] * n for x, n in row), []) for row in pieces]
        return np.array([(row * (length // len(row) + 1))[:length] for row in rows], np.int64).reshape(batch, length)

    return some(batches[0], T), some(batches[1], S), q_block, kv_block


@given(documents())
def test_document(drawn):
    query_ids, kv_ids, q_block, kv_block = drawn
    mask = patterns.document(query_ids, kv_ids, q_block=q_block, kv_block=kv_block)
    check(mask, (query_ids[:, :, None] == kv_ids[:, None, :])[:, None])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_document_with_one_row_of_ids(dtype):
    ids = np.repeat(np.array([7, 3, 120, 3], dtype), [50, 1, 100, 49])
    expected = ids[:, None] == ids
    check(patterns.document(ids, q_block=32, kv_block=16), expected)
    check(patterns.document(ids, ids.astype(np.int64), q_block=32, kv_block=16), expected)
    check(patterns.document(ids.tolist(), q_block=32, kv_block=16), expected)
    check(patterns.document(jnp.asarray(ids), q_block=32, kv_block=16), expected)


def test_blocks_of_a_single_document_are_full():
    mask = patterns.document(np.arange(8 * 128) // 256)
    np.testing.assert_array_equal(mask.blocks[0, 0], np.kron(np.eye(4), np.ones((2, 2))))
    assert mask.element_masks is None


@shapes
def test_prefix_lm(T, S, q_block, kv_block):
    i, j = positions(T, S)
    lengths = np.array([0, S // 3, S], np.int32)
    for prefix in lengths:
        check(patterns.prefix_lm(T, S, prefix, q_block=q_block, kv_block=kv_block), (j <= i) | (j < prefix))
    expected = (j <= i) | (j < lengths[:, None, None])
    check(patterns.prefix_lm(T, S, lengths, q_block=q_block, kv_block=kv_block), expected[:, None])


# --- patterns of blocks ---


@pytest.mark.parametrize("max_stride, global_blocks", [(None, 0), (1, 0), (4, 0), (4, 2), (1 << 20, 1)])
@shapes
def test_butterfly(T, S, q_block, kv_block, max_stride, global_blocks):
    U, V = -(-T // q_block), -(-S // kv_block)
    n = min(U, V)

    def kept(i, j):
        u, v = i // q_block * n // U, j // kv_block * n // V  # in the square pattern, which is stretched
        differ = [bit for bit in range(20) if (u >> bit) % 2 != (v >> bit) % 2]
        partners = len(differ) == 1 and (max_stride is None or 2 ** differ[0] < max_stride)
        return u == v or partners or u < global_blocks or v < global_blocks

    mask = patterns.butterfly(T, S, max_stride, global_blocks=global_blocks, q_block=q_block, kv_block=kv_block)
    check(mask, by_rule(T, S, kept))


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_butterfly_is_the_sum_of_the_block_butterfly_factors(n):
    """The product of these factors is a full matrix: log2(n) steps connect all blocks."""
    total = product = np.eye(n)
    stride = 2
    while stride <= n:
        factor = np.kron(np.eye(n // stride), np.kron(np.ones((2, 2)), np.eye(stride // 2)))
        total, product = total + factor, product @ factor
        expected = patterns.butterfly(16 * n, 16 * n, stride, q_block=16, kv_block=16).blocks[0, 0]
        np.testing.assert_array_equal(expected, total > 0)
        stride *= 2
    blocks = patterns.butterfly(16 * n, 16 * n, q_block=16, kv_block=16).blocks[0, 0]
    np.testing.assert_array_equal(blocks, total > 0)
    np.testing.assert_array_equal(blocks.sum(-1), math.log2(n) + 1)
    assert product.all()


def test_butterfly_picture():
    picture = """\
BlockMask(1024 x 1024 in blocks of 128 x 128, 50.0% kept, 50.0% full, 1 x 1 batch entries x heads)
███ █   
██ █ █  
█ ██  █ 
 ███   █
█   ███ 
 █  ██ █
  █ █ ██
   █ ███"""  # noqa: W291
    assert repr(patterns.butterfly(1024, 1024)) == picture


@pytest.mark.parametrize("squares", [1, 2, 3])
@shapes
def test_strided(T, S, q_block, kv_block, squares):
    side = math.lcm(q_block, kv_block)
    mask = patterns.strided(T, S, squares * side, q_block=q_block, kv_block=kv_block)

    def allowed(i, j):
        a, b = i // side, j // side
        return j <= i and (b in range(max(0, a - squares), a + 1) or (a - b) % squares == 0)

    check(mask, by_rule(T, S, allowed))


@pytest.mark.parametrize("squares, summary", [(1, None), (2, None), (3, 1), (3, 2), (2, 2)])
@shapes
def test_fixed(T, S, q_block, kv_block, squares, summary):
    side = math.lcm(q_block, kv_block)
    entries = None if summary is None else summary * side
    mask = patterns.fixed(T, S, squares * side, entries, q_block=q_block, kv_block=kv_block)

    def allowed(i, j):
        a, b = i // side, j // side
        return j <= i and (a // squares == b // squares or b % squares in range(squares - (summary or 1), squares))

    check(mask, by_rule(T, S, allowed))


@pytest.mark.parametrize("window, leading, random", [(3, 2, 3), (1, 0, 0), (5, 0, 1), (1, 1, 100)])
@shapes
def test_bigbird(T, S, q_block, kv_block, window, leading, random):
    blocks = {"q_block": q_block, "kv_block": kv_block}
    mask = patterns.bigbird(T, S, window_blocks=window, global_blocks=leading, random_blocks=random, **blocks)
    side = math.lcm(q_block, kv_block)
    i, j = positions(T, S)
    common = (abs(i // side - j // side) <= window // 2) | (i < leading * side) | (j < leading * side)
    entries = mask.to_mask()[0, 0]
    check(mask, entries)
    assert entries[common].all()
    chosen = (entries & ~common)[::side, ::side]  # one entry of each square
    np.testing.assert_array_equal(np.kron(chosen, np.ones((side, side)))[:T, :S], entries & ~common)
    np.testing.assert_array_equal(chosen.sum(-1), np.minimum((~common[::side, ::side]).sum(-1), random))


def test_bigbird_seed():
    first, again, other = (patterns.bigbird(4096, 4096, seed=seed) for seed in (1, np.random.default_rng(1), 2))
    assert first == again
    assert first != other
    # All random blocks are equally likely.
    drawn = sum(
        patterns.bigbird(512, 512, q_block=16, kv_block=16, global_blocks=0, window_blocks=1, seed=s).blocks[0, 0]
        for s in range(200)
    )
    elsewhere = drawn[~np.eye(32, dtype=bool)]
    assert elsewhere.min() > 0 and elsewhere.max() < 60  # 200 · 3 / 31 = 19 on average


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_top_k(k, lead):
    scores = np.random.default_rng(0).integers(-2, 3, (*lead, 4, 5)).astype(np.float32)  # with ties
    scores[..., 0, :] = -np.inf
    expected = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        expected[row][sorted(range(5), key=lambda v, row=row: -scores[row][v])[:k]] = True

    def make(scores):
        return patterns.top_k(scores, k, 120, 75, q_block=32, kv_block=16)

    for kept in (make(scores), make(jnp.asarray(scores)), jax.jit(make)(scores), make(scores.astype(np.float64))):
        blocks = np.asarray(kept.blocks)
        np.testing.assert_array_equal(blocks, expected.reshape(blocks.shape))
        np.testing.assert_array_equal(blocks.sum(-1), min(k, 5))
    if lead:
        mapped = jax.vmap(make)(scores)
        np.testing.assert_array_equal(mapped.blocks.reshape(expected.shape), expected)


# --- errors ---


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: patterns.causal(-1, 4), ValueError, "q_len must be at least 0, not -1"),
        (lambda: patterns.causal(4, 4.5), TypeError, "kv_len must be an int, not 4.5"),
        (lambda: patterns.causal(4, "4"), TypeError, "kv_len must be an int, not '4'"),
        (lambda: patterns.causal(4, 4, q_block=2**31), ValueError, "q_block 2147483648 is too large"),
        (lambda: patterns.causal(2**31, 4), ValueError, "2147483648 positions"),
        (lambda: patterns.strided(999, 999, 2**70), ValueError, "stride must be below 2.63"),
        (lambda: patterns.causal(16, 16, q_block=24), ValueError, "q_block must be a positive multiple of 16, not 24"),
        (lambda: patterns.butterfly(16, 16, kv_block=0), ValueError, "kv_block must be a positive multiple of 16"),
        (lambda: patterns.local_window(9, 9, -1, 0), ValueError, "left must be at least 0, not -1"),
        (lambda: patterns.local_window(9, 9, 0, -3), ValueError, "right must be at least 0, not -3"),
        (lambda: patterns.local_window(9, 9, 0.5, 0), TypeError, "left must be an int, not 0.5"),
        (lambda: patterns.dilated_window(9, 9, 1, 1, 0), ValueError, "dilation must be at least 1, not 0"),
        (lambda: patterns.butterfly(9, 9, 6), ValueError, "max_stride must be a power of two, not 6"),
        (lambda: patterns.butterfly(9, 9, 0), ValueError, "max_stride must be at least 1, not 0"),
        (lambda: patterns.butterfly(9, 9, global_blocks=-1), ValueError, "global_blocks must be at least 0"),
        (lambda: patterns.strided(999, 999, 200), ValueError, "stride must be a multiple of 128 .* not 200"),
        (lambda: patterns.strided(9, 9, 64, q_block=64), ValueError, "multiple of 128 = lcm.* not 64"),
        (lambda: patterns.strided(9, 9, 0), ValueError, "stride must be at least 1, not 0"),
        (lambda: patterns.fixed(9, 9, 256, 100), ValueError, "summary must be a multiple of 128"),
        (lambda: patterns.fixed(9, 9, 128, 256), ValueError, "summary must be at most the stride, 128, not 256"),
        (lambda: patterns.longformer(9, 9, 3), ValueError, "window must be even.* not 3"),
        (lambda: patterns.longformer(9, 9, -2), ValueError, "window must be at least 0, not -2"),
        (lambda: patterns.longformer(9, 8, 2, global_tokens=[1, 9]), ValueError, "global_tokens .* below 9.* not 9"),
        (lambda: patterns.longformer(9, 8, 2, global_tokens=[-1]), ValueError, "global token must be at least 0"),
        (lambda: patterns.bigbird(9, 9, window_blocks=2), ValueError, "window_blocks must be odd, not 2"),
        (lambda: patterns.bigbird(9, 9, random_blocks=-1), ValueError, "random_blocks must be at least 0"),
        (lambda: patterns.document(np.zeros((2, 3, 4), int)), ValueError, r"query_ids .* not \(2, 3, 4\)"),
        (lambda: patterns.document(np.zeros(4), np.zeros(4, int)), TypeError, "query_ids .* integers, not float64"),
        (lambda: patterns.document(np.zeros(4, int), np.zeros(4, bool)), TypeError, "kv_ids .* integers, not bool"),
        (lambda: patterns.document(np.zeros((2, 4), int), np.zeros((3, 4), int)), ValueError, "equal batch sizes"),
        (lambda: jax.jit(patterns.document)(jnp.zeros(4, int)), TypeError, "query_ids .* traced.*query_segment_ids"),
        (lambda: patterns.prefix_lm(9, 9, 10), ValueError, "prefix_len .* between 0 and 9, not 10"),
        (lambda: patterns.prefix_lm(9, 9, [2, -1]), ValueError, "prefix_len .* between 0 and 9"),
        (lambda: patterns.prefix_lm(9, 9, [[2]]), ValueError, "prefix_len"),
        (lambda: patterns.prefix_lm(9, 9, 2.0), TypeError, "prefix_len must be integers, not float64"),
        (lambda: jax.jit(lambda n: patterns.prefix_lm(9, 9, n))(3), TypeError, "prefix_len must not be traced"),
        (lambda: patterns.top_k(np.zeros((1, 1)), 0, 9, 9), ValueError, "k must be at least 1, not 0"),
        (lambda: patterns.top_k(np.zeros((1, 2)), 1, 9, 9), ValueError, r"scores .* U, V = \(1, 1\)"),
        (lambda: patterns.top_k(np.zeros(3), 1, 9, 9), ValueError, "scores must have 2 to 4 dims"),
        (lambda: patterns.top_k(None, 1, 9, 9), TypeError, "scores must be an array of numbers, not None"),
        (lambda: patterns.top_k("a", 1, 9, 9), TypeError, "scores must be an array of numbers, not 'a'"),
        (lambda: patterns.longformer(9, 8, 2, global_tokens=5), TypeError, "global_tokens must be a sequence .* not 5"),
        (lambda: patterns.bigbird(9, 9, seed="a"), TypeError, "seed must be .* not 'a'"),
        (lambda: patterns.bigbird(9, 9, seed=-1), ValueError, "seed must be .* not -1"),
        (lambda: patterns.prefix_lm(9, 9, None), TypeError, "prefix_len must be an array of numbers, not None"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- cost ---

N = 65536
PACKED = np.repeat(np.arange(40), N // 40 + 1)[:N]
LONG = {  # and the fraction of kept blocks
    "causal": (lambda: patterns.causal(N, N), (512 + 1) / 2 / 512),
    "local_window": (lambda: patterns.local_window(N, N, 4096, 0), (32 + 1) * (512 - 16) / 512**2),
    "dilated_window": (lambda: patterns.dilated_window(N, N, 64, 64, 3), 5 / 512),
    "butterfly": (lambda: patterns.butterfly(N, N), 10 / 512),
    "strided": (lambda: patterns.strided(N, N, 2048), (16 + 1 + 14) / 512),
    "fixed": (lambda: patterns.fixed(N, N, 2048), (8.5 + 15.5) / 512),
    "longformer": (lambda: patterns.longformer(N, N, 512, global_tokens=[0, 1, 2]), (5 + 2) / 512),
    "scattered": (lambda: patterns.longformer(N, N, 512, global_tokens=range(0, N, 640)), 0.368),
    "bigbird": (lambda: patterns.bigbird(N, N), 10 / 512),
    "document": (lambda: patterns.document(PACKED), 14.7 / 512),
    "documents": (lambda: patterns.document(np.stack([np.roll(PACKED, 777 * b) for b in range(4)])), 14.7 / 512),
    "unsorted": (lambda: patterns.document((PACKED * 7) % 40), 14.7 / 512),
    "prefix_lm": (lambda: patterns.prefix_lm(N, N, [0, 1000, 2000]), 0.501),
    "top_k": (lambda: patterns.top_k(np.random.default_rng(0).random((512, 512)), 16, N, N), 16 / 512),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name):
    make, kept = LONG[name]
    start = time.process_time()
    mask = make()
    seconds = time.process_time() - start
    assert mask.kept == pytest.approx(kept, rel=0.03)
    assert seconds < (3 if name.startswith("document") else 1)
    tracemalloc.start()
    make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The grid has 2^18 blocks. The lists and the search for equal blocks hold a few int64 per block. A dense mask would
    # have 2^29 bytes.
    assert peak < 48 * 2**20 * mask.blocks.shape[0]
    assert sum(x.nbytes for x in jax.tree.leaves(mask)) < 5 * 2**20 * mask.blocks.shape[0]


# --- attention ---


@pytest.mark.parametrize(
    "mask",
    [
        patterns.butterfly(150, 150, q_block=16, kv_block=16) & patterns.causal(150, 150, q_block=16, kv_block=16),
        patterns.longformer(150, 150, 24, global_tokens=[0, 140], q_block=32, kv_block=16),
        patterns.document([np.arange(150) // 40, np.arange(150) % 7], q_block=32, kv_block=32),
        patterns.prefix_lm(150, 150, [30, 100], q_block=16, kv_block=64),
        patterns.bigbird(150, 150, q_block=16, kv_block=16),
        patterns.top_k(np.random.default_rng(0).random((4, 10, 10)), 3, 150, 150, q_block=16, kv_block=16),
    ],
    ids=["butterfly", "longformer", "document", "prefix_lm", "bigbird", "top_k"],
)
def test_attention(device, mask):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 150, 4, 16))

    def gradients(**arguments):
        def loss(q, k, v):
            o = jax_flash.dot_product_attention(q, k, v, **arguments)
            return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum(), o

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    results = gradients(block_mask=mask, implementation="flash")
    expected = gradients(mask=mask.to_mask(), implementation="reference")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), results, expected)


def test_attention_with_top_k_blocks_of_the_data(device):
    """Routing under jit: scores from block means of queries and keys."""
    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 96, 4, 16))

    def masks(q, k):
        means = (x.reshape(2, 6, 16, 4, 16).mean(2) for x in (q, k))
        return patterns.top_k(jnp.einsum("bund,bvnd->bnuv", *means), 2, 96, 96, q_block=16, kv_block=16)

    results = jax.jit(lambda q, k, v: jax_flash.dot_product_attention(q, k, v, block_mask=masks(q, k)))(q, k, v)
    expected = jax_flash.dot_product_attention(q, k, v, mask=masks(q, k).to_mask(), implementation="reference")
    np.testing.assert_allclose(results, expected, atol=2e-5)


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = patterns.longformer(1000, 1500, 128, global_tokens=[0])
    axes = mask.plot()
    np.testing.assert_array_equal(axes.images[0].get_array() > 0, mask.blocks[0, 0] > 0)
    axes.figure.canvas.draw()
    assert axes.get_xlim() == (0, 1500) and axes.get_ylim() == (1000, 0)

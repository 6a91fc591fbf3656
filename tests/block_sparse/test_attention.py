"""Attention with a `BlockMask` equals attention with the same entries as a boolean mask, forward and backward."""

import dataclasses

import jax
import numpy as np
import pytest
from accuracy import by_numpy, check
from block_masks import GARBAGE, IMPLEMENTATIONS, assert_lists, sparse, with_unchecked_arrays
from cases import Case, run, upcast

import jax_flash
from jax_flash import BlockMask
from jax_flash.block_sparse import EMPTY, FULL, PARTIAL

pytestmark = pytest.mark.usefixtures("device")


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


# Hopper's kernels require that blocks consist of whole tiles. In some cases the tiles have 16, 48 or 112 keys. With few
# blocks and a key head for each query head, one kernel can compute the whole backward.
WHOLE_TILES = {
    "plain": hopper(T=400, K=1),
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
def test_equals_boolean_mask(name):
    """Compare all results, including empty rows, with and without dropout."""
    case = ATTENTION[name]
    arrays, cotangents = case.arrays(), case.cotangents()
    results = run(case, arrays, cotangents)
    dense = dataclasses.replace(case, block_mask=None, mask="1nts" if name == "dropout" else "bnts")
    mask = arrays.pop("block_mask").to_mask()
    expected = run(dense, arrays | {"mask": mask}, cotangents)
    exact = by_numpy(dense, arrays | {"mask": mask}, cotangents)
    for key, x in exact.items():
        np.testing.assert_allclose(results[key], expected[key], rtol=2e-5, atol=2e-5, err_msg=key)
        np.testing.assert_allclose(results[key], x, rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_mask(implementation):
    empty = BlockMask.from_dense(np.zeros((3, 4), bool), 150, 210, q_block=64, kv_block=64)
    case = Case(T=150, S=210, bias="11ts", block_mask=empty)
    results = run(case, case.arrays(), case.cotangents(), implementation)
    assert np.isneginf(results.pop("logsumexp")).all()
    assert not any(x.any() for x in results.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_block_rows_and_columns(implementation):
    """Empty rows have O = 0, l = 0 and m = -inf. Empty rows and columns have zero gradients."""
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
    batched = jax_flash.dot_product_attention(**given, block_mask=mask, implementation=implementation)
    first = {name: x[0] for name, x in given.items()}
    single = jax_flash.dot_product_attention(**first, block_mask=mask, implementation=implementation)
    np.testing.assert_allclose(single, batched[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_empty_blocks_are_not_read(bad):
    """Keys that no row sees, and keys that only other rows see, may hold NaN or inf."""
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
    arrays["value"][:, :128] = bad  # visible to the first rows only
    results = run(case, arrays, case.cotangents())
    for name in ("o", "query"):
        np.testing.assert_array_equal(results[name][:, 256:], expected[name][:, 256:], err_msg=name)


def test_requested_gradients():
    case = ATTENTION["all"]
    arrays = case.arrays()
    names = ["query", "key", "value", "bias"]

    def loss(*inputs):
        given = arrays | dict(zip(names, inputs, strict=True))
        return (jax_flash.dot_product_attention(**given, **case.options, implementation="flash") ** 2).sum()

    inputs = [arrays[name] for name in names]
    expected = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*inputs)
    for chosen in [(0,), (1,), (2,), (3,), (0, 3)]:
        gradients = jax.jit(jax.grad(loss, chosen))(*inputs)
        for i, gradient in zip(chosen, gradients, strict=True):
            np.testing.assert_allclose(gradient, expected[i], rtol=1e-5, atol=1e-5, err_msg=names[i])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("elements", [True, False])
def test_out_of_range_numbers_are_empty_blocks(elements, implementation):
    case = sparse(32, 32, heads=4, bias="11ts")
    mask = case.block_mask
    if not elements:
        mask = BlockMask(mask.shape, np.minimum(mask.blocks, FULL))
    rng = np.random.default_rng(0)
    bad = rng.random(mask.blocks.shape) < 0.3
    first = PARTIAL + (mask.element_masks.shape[1] if elements else 0)
    garbage = np.where(bad, rng.choice([first, *GARBAGE], bad.shape), mask.blocks).astype(np.int32)
    empty = with_unchecked_arrays(mask, blocks=np.where(bad, EMPTY, mask.blocks))
    arrays, cotangents = case.arrays(), case.cotangents()
    expected = run(case, arrays | {"block_mask": empty}, cotangents, implementation)
    results = run(
        case, arrays | {"block_mask": with_unchecked_arrays(mask, blocks=garbage)}, cotangents, implementation
    )
    gpu = jax.config.jax_default_device.platform == "gpu"  # sums dQ in any order
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


def test_corrupted_lists():
    """The results are undefined, but the kernels read and write only within bounds."""
    case = sparse(32, 32, heads=4)
    rng, arrays = np.random.default_rng(0), case.arrays()
    lists = {
        name: rng.choice([0, 1, 3, 100, *GARBAGE], getattr(case.block_mask, name).shape).astype(np.int32)
        for name in ("row_lists", "column_lists")
    }
    results = run(case, arrays | {"block_mask": with_unchecked_arrays(case.block_mask, **lists)}, case.cotangents())
    assert results["o"].shape == (case.B, case.T, case.N, case.E)

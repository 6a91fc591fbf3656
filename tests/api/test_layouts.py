"""Layouts of a sequence over devices: balanced work, documents in one piece, and the order of the tokens."""

import time

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jax_flash
from jax_flash import Layout, layouts


def work(layout, cu_seqlens, tokens):
    """Return the visible entries of each device's rows, counted token by token."""
    place = np.arange(tokens)
    document = np.searchsorted(cu_seqlens, place, side="right") - 1
    visible = np.where(place < cu_seqlens[-1], place - np.asarray(cu_seqlens)[document] + 1, 0)
    return layout.permute(visible, 0).reshape(len(layout.chunks), -1).sum(1)


def divided_documents(layout, cu_seqlens, tokens):
    """Return how many documents several devices have."""
    device = layout.inverse(np.repeat(np.arange(len(layout.chunks)), tokens // len(layout.chunks)), 0)
    return sum(len(set(device[a:b])) > 1 for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))


def random_documents(rng, tokens, least, most):
    """Return cumulative lengths of documents with log-uniform lengths."""
    lengths = np.exp(rng.uniform(np.log(least), np.log(most), 2 * tokens // least + 1)).astype(int)
    begins = np.cumsum(lengths)
    return np.concatenate([[0], begins[begins < tokens], [tokens]])


@given(
    devices=st.integers(1, 9), share=st.integers(0, 700), lengths=st.lists(st.integers(0, 900), max_size=12),
    tokens_given=st.booleans(),
)  # fmt: skip
def test_any_documents(devices, share, lengths, tokens_given):
    """Empty documents, one document, more devices than documents, long documents, and padding."""
    tokens = devices * share
    cu_seqlens = np.minimum(np.cumsum([0, *lengths]), tokens)
    if not tokens_given:
        cu_seqlens[-1] = tokens
    cu_seqlens = np.maximum.accumulate(cu_seqlens)
    cu_seqlens[0] = 0
    layout = jax_flash.balance(cu_seqlens, devices, tokens if tokens_given else None)
    if len(lengths) == 0 and not tokens_given:
        tokens = 0
    chunks = layout.chunks
    assert chunks.dtype == np.int32 and chunks.shape[0] == devices
    assert sorted(chunks.ravel()) == list(range(chunks.size)) and (np.diff(chunks, axis=1) > 0).all()
    assert tokens % chunks.size == 0
    assert chunks.shape[1] == 1 or tokens // chunks.size >= 128
    x = np.arange(tokens)
    np.testing.assert_array_equal(layout.inverse(layout.permute(x, 0), 0), x)
    entries = layouts.document_entries(layout, cu_seqlens, tokens, causal=True)
    np.testing.assert_array_equal(entries.sum(1), work(layout, cu_seqlens, tokens))


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 64])
def test_work_is_balanced(devices):
    """At most 1.1 times the mean for random documents of up to a device's share."""
    rng = np.random.default_rng(devices)
    for share in (1024, 4096, 16384):
        for least in (16, 256, share // 2):
            tokens = share * devices
            cu_seqlens = random_documents(rng, tokens, least, share)
            layout = jax_flash.balance(cu_seqlens, devices)
            each = work(layout, cu_seqlens, tokens)
            assert each.max() <= 1.1 * each.mean()


@pytest.mark.parametrize("devices", [2, 4, 7])
def test_one_document_is_dealt_like_zigzag(devices):
    tokens = 4096 * devices
    layout = jax_flash.balance([0, tokens], devices)
    each = work(layout, np.array([0, tokens]), tokens)
    assert each.max() <= 1.05 * each.mean()
    assert ((np.diff(layout.chunks, axis=1) != 1).sum(1) <= 1).all()  # two pieces a device


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_documents_stay_together(devices):
    """At most one document for each boundary between devices is divided, if documents consist of whole chunks."""
    rng = np.random.default_rng(devices)
    tokens = 16384 * devices
    for most in (512, 4096):
        cu_seqlens = np.unique(random_documents(rng, tokens, 128, most) // 128 * 128)
        layout = jax_flash.balance(cu_seqlens, devices)
        assert divided_documents(layout, cu_seqlens, tokens) < devices
        each = work(layout, cu_seqlens, tokens)
        assert each.max() <= 1.1 * each.mean()


def test_long_and_short_documents():
    """Each device gets an equal part of the long document, so each visit has equal work. Short documents stay whole."""
    cu_seqlens = np.array([0, *range(8192, 16385, 512)])
    layout = jax_flash.balance(cu_seqlens, 4)
    assert divided_documents(layout, cu_seqlens, 16384) == 1
    # The long document has 8 parts of 8 chunks. Device d gets parts d and 7 - d.
    np.testing.assert_array_equal(
        layout.chunks[:, :16] // 8, np.stack([np.arange(4), 7 - np.arange(4)], 1).repeat(8, 1)
    )
    assert len(set(work(layout, cu_seqlens, 16384))) == 1
    shared = layouts.shared_chunks(layout, cu_seqlens, 16384)
    np.testing.assert_array_equal(shared, np.arange(32)[None].repeat(4, 0) < 16)


def test_a_million_tokens_take_milliseconds():
    cu_seqlens = random_documents(np.random.default_rng(0), 2**20, 64, 4096)
    begin = time.process_time()  # not the wall time of a busy machine
    jax_flash.balance(cu_seqlens, 8)
    assert time.process_time() - begin < 0.5


def test_new_documents_need_no_compilation():
    count = 0

    @jax.jit
    def permuted(layout, x):
        nonlocal count
        count += 1
        return layout.inverse(layout.permute(x, 0), 0), layout.permute(x, 0)

    x = np.arange(4096.0)
    for cu_seqlens in ([0, 4096], [0, 1000, 1000, 4000], [0]):
        layout = jax_flash.balance(cu_seqlens, 4, tokens=4096)
        back, there = permuted(layout, x)
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(there, layout.permute(x, 0))
    assert count == 1


def test_trees_and_numpy_arrays():
    layout = jax_flash.balance([0, 300, 1024], 2)
    batch = {"tokens": np.arange(2048).reshape(2, 1024), "weights": jnp.ones((2, 1024, 3))}
    there = layout.permute(batch, axis=1)
    assert isinstance(there["tokens"], np.ndarray) and isinstance(there["weights"], jax.Array)
    np.testing.assert_array_equal(layout.inverse(there, axis=1)["tokens"], batch["tokens"])
    assert jax.tree.structure(layout) == jax.tree.structure(jax_flash.balance([0, 1024], 2))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([0, 100], 0), ValueError, "devices must be at least 1"),
        (([0, 100], 3), ValueError, "tokens must be a multiple of the 3 devices, not 100: pad the sequence"),
        (([0, 100], 2, 98), ValueError, "cu_seqlens must begin with 0, never decrease, and be at most 98"),
        (([0, 5, 4], 2), ValueError, "cu_seqlens must begin with 0, never decrease"),
        (([1, 4], 2), ValueError, "cu_seqlens must begin with 0"),
        (([[0, 4]], 2), ValueError, r"cu_seqlens must have shape \[B \+ 1\]"),
        (([0.0, 4.0], 2), TypeError, "cu_seqlens must be integers, not float32"),
        (([0, 4], 2, 4.0), TypeError, "tokens must be an int"),
    ],
)
def test_errors(arguments, error, match):
    with pytest.raises(error, match=match):
        jax_flash.balance(*arguments)


def test_traced_lengths_are_refused():
    with pytest.raises(TypeError, match="cu_seqlens must be concrete, not traced: call balance outside of jax.jit"):
        jax.jit(lambda cu: jax_flash.balance(cu, 2, tokens=8))(jnp.array([0, 8]))


def test_order_of_chunks():
    layout = Layout(np.array([[1, 2], [0, 3]], np.int32))
    np.testing.assert_array_equal(layout.permute(np.arange(8), 0), [2, 3, 4, 5, 0, 1, 6, 7])
    with pytest.raises(ValueError, match="axis 0 must be divisible by the 4 chunks"):
        layout.permute(np.arange(6), 0)

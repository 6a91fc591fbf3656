"""The function of docs/libraries.md for MaxText, with stand-ins for the parts of MaxText that it uses.

There is no comparison with MaxText's own attention, because MaxText cannot be installed with the tests.
"""

import enum
import sys
import types

import guide
import jax
import jax.numpy as jnp
import numpy as np
import pytest


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    COMPRESSED = "compressed"
    FULL = "full"


@pytest.fixture
def attend(monkeypatch):
    common_types = types.SimpleNamespace(AttentionType=AttentionType)
    for name in ("maxtext", "maxtext.common", "maxtext.common.common_types"):
        monkeypatch.setitem(sys.modules, name, common_types)
    return guide.run("MaxText")["attend"]


def op(kind: AttentionType):
    return types.SimpleNamespace(
        attention_type=kind,
        sliding_window_size=5,
        chunk_attn_window_size=8,
        attn_logits_soft_cap=2.0,
        mesh=jax.make_mesh((1,), ("context",)),
        config=types.SimpleNamespace(
            context_sharding="context", context_parallel_load_balance=True, matmul_precision="default"
        ),
    )


B, S, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8
START, T = 10, 9  # a chunk of a chunked prefill


@pytest.mark.parametrize("kind", [kind for kind in AttentionType if kind is not AttentionType.COMPRESSED])
@pytest.mark.parametrize("chunk", [False, True])
def test_masks_cap_and_sinks(attend, kind, chunk):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, S, n, DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    ids, sinks = np.array([[1] * 13 + [2] * 11, [1] * 20 + [0] * 4]), rng.normal(size=HEADS).astype(np.float32)
    rows = slice(START, START + T) if chunk else slice(None)
    previous = np.zeros((B, START)) if chunk else None
    got = attend(op(kind), query[:, rows], key, value, ids, previous, sinks, compressed_mask=None)

    i, j = np.arange(S)[:, None], np.arange(S)
    visible = {
        AttentionType.GLOBAL: j <= i,
        AttentionType.LOCAL_SLIDING: (j <= i) & (j > i - 5),
        AttentionType.CHUNK: (j <= i) & (i // 8 == j // 8),
        AttentionType.FULL: np.ones((S, S), bool),
    }[kind]
    visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = 2 * np.tanh(np.einsum("btnd,bsnd->bnts", query, key) / 2)  # MaxText scales queries before the call
    weights = np.where(visible, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    want = np.einsum("bnts,bsnd->btnd", weights, value)[:, rows]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_refusals(attend):
    x = jnp.zeros((1, 8, 1, 8))
    with pytest.raises(NotImplementedError, match="does not support indexer_mask"):
        attend(op(AttentionType.GLOBAL), x, x, x, None, None, None, indexer_mask=x)
    with pytest.raises(NotImplementedError, match="attention_type=compressed"):
        attend(op(AttentionType.COMPRESSED), x, x, x, None, None, None)
    balanced = op(AttentionType.GLOBAL)
    balanced.mesh = jax.make_mesh((2,), ("context",))
    with pytest.raises(NotImplementedError, match="context_parallel_load_balance=false"):
        attend(balanced, x, x, x, None, None, None)

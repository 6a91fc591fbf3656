"""Attention with block masks of random sizes."""

import pytest
from accuracy import check
from block_masks import sparse

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("device")


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

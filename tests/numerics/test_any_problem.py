"""Random problems: kernels compared with exact results, and their dropout masks with the specification."""

import jax
import numpy as np
import pytest
from accuracy import check
from cases import SIZES, Case
from dropout_masks import attend, from_backward, from_forward, specified

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("device")


def extents():
    return st.one_of(st.just(""), st.tuples(*(st.sampled_from([e, "1"]) for e in "bnts")).map("".join))


def cases():
    length = st.one_of(st.integers(1, 40), st.sampled_from(SIZES), st.integers(1, 300))
    dim = st.one_of(st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 256))
    flag = st.booleans()
    window = st.one_of(st.none(), st.tuples(st.integers(0, 300), st.integers(0, 300)))

    def build(group, K, **fields):
        return Case(N=group * K, K=K, **fields)

    return st.builds(
        build, group=st.integers(1, 3), K=st.integers(1, 3), B=st.integers(1, 3), T=length, S=length, D=dim, E=dim,
        causal=flag, window=window, bias=extents(), mask=extents(), lengths=flag, segments=flag, offset=flag,
        soft_cap=st.sampled_from([None, 0.5, 5.0]), dropout=st.sampled_from([0.0, 0.1, 0.8]), broadcast_dropout=flag,
        scale=st.sampled_from([None, 0.3, -1.0]), spread=st.sampled_from([1.0, 3.0]), logsumexp=flag,
        sinks=st.sampled_from([0.0, 1.0, 20.0]),
    )  # fmt: skip


@given(cases(), st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"]), st.integers(0, 1000))
def test_any_case(case, dtype, seed):
    check(case, dtype, seed)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 200), st.integers(1, 200), st.floats(0.01, 0.99))
def test_kernel_mask_matches_specification_for_any_shape(B, N, T, S, rate):
    key = jax.random.key(B + T)
    for find in (from_forward, from_backward):
        mask = find(lambda q, k, v: attend(q, k, v, rate, key), B, N, T, S)
        np.testing.assert_array_equal(mask, specified(rate, key, B, N, T, S))

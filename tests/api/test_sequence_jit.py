"""A sequence divided by the sharding of `jax.jit`: a ring, or an all-to-all that exchanges rows for heads."""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import data_collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequences import CASE, assert_close, exact, make_mesh, results

import jax_flash

pytestmark = pytest.mark.usefixtures("full_precision")

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RING, HEADS = "collective-permute", "all-to-all"
# The dims of arrays that may be sharded, as in `Case`.
DIMS = {"query": "BTN", "key": "BTK", "value": "BTK", "bias": "BNT", "mask": "BNT", "sinks": "N"}
DIMS |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), "BT")
DIMS |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), "B")


def placed(mesh, arrays, **axes):
    """Shard arrays over the mesh. `axes` has the mesh axis for each dim. Broadcast dims are not sharded."""

    def spec(name, x):
        dims = zip(DIMS.get(name, ""), np.shape(x), strict=False)
        return P(*(axes.get(dim) if size > 1 else None for dim, size in dims))

    return {name: jax.device_put(x, NamedSharding(mesh, spec(name, x))) for name, x in arrays.items()}


CASES = [  # the numbers of devices that divide the batch, the sequence and the heads
    (CASE(K=1), (1, 8, 1), RING, "auto"),
    (CASE(K=1, causal=True, dropout=0.3, bias="1nts", sinks=1.0), (1, 4, 2), RING, "explicit"),
    (CASE(B=4, causal=True, window=(20, 0), segments=True, bias="b11s", mask="b1ts"), (2, 4, 1), RING, "auto"),
    (CASE(lengths=True, soft_cap=1.0, bias="bnt1", mask="1n1s", dropout=0.5), (2, 2, 2), RING, "explicit"),
    (CASE(causal=True, offset=True), (1, 8, 1), RING, "auto"),
    (CASE(causal=True, window=(40, 0), traced=True, lengths=True), (2, 2, 2), RING, "explicit"),
    (CASE(N=8, K=8, causal=True, dropout=0.3, mask="b11s"), (1, 4, 2), HEADS, "auto"),
    # By heads, the call would have to gather the mask, which has rows but no heads.
    (CASE(N=8, K=8, mask="b1ts"), (1, 8, 1), RING, "auto"),
    (CASE(B=4, K=4, causal=True, bias="bnts"), (2, 4, 1), HEADS, "explicit"),
]


@pytest.mark.parametrize(("case", "shape", "collective", "mode"), CASES, ids=str)
def test_under_jit(case, shape, collective, mode):
    data, seq, model = shape
    mesh = make_mesh(MODES[mode], data=data, seq=seq, model=model)
    arrays = case.arrays()
    heads = "model" if case.K > 1 else None
    on_mesh = placed(mesh, arrays, B="data", T="seq", N="model", K=heads)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(results, case)).lower(on_mesh).compile()
        actual = compiled(on_mesh)
    assert_close(actual, exact(case, arrays))
    assert set(data_collectives(compiled)) == {collective}
    # Each device holds its own part of the rows only.
    local = (case.B // data, case.T // seq, case.N // model, case.E)
    assert actual["o"].sharding.shard_shape(actual["o"].shape) == local
    assert actual["query"].sharding.shard_shape(actual["query"].shape) == local


@pytest.mark.parametrize("axes", [("b", "a"), ("a", "c"), ("c", "a"), ("c", "b", "a")], ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_sequence_over_several_axes(axes, mode):
    """The order of `axes` decides which rows a device has, also if the mesh has its axes in another order."""
    mesh = make_mesh(MODES[mode], a=2, b=2, c=2)
    case = CASE(K=1, causal=True)
    arrays = case.arrays()
    expected = exact(case, arrays)
    on_mesh = placed(mesh, arrays, T=axes)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(functools.partial(results, case))(on_mesh), expected)

        @functools.partial(jax.shard_map, in_specs=P(None, axes), out_specs=P(None, axes))
        def attend(arrays):
            return jax_flash.dot_product_attention(**arrays, is_causal=True, sequence_axis=axes)

        np.testing.assert_allclose(attend(on_mesh), expected["o"], atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the GPU kernels do not support float64")
def test_sharded_float64():
    """Before jax 0.12, float64 needs x64 for the whole process. The error message explains this."""
    case = CASE(K=1, causal=True)
    with jax.enable_x64(True):
        arrays = case.arrays("float64")
        function = jax.jit(functools.partial(results, case))
        on_mesh = placed(make_mesh(seq=2), arrays, T="seq")
        if jax.__version_info__ >= (0, 12):
            for name, x in function(arrays).items():
                np.testing.assert_allclose(function(on_mesh)[name], x, rtol=1e-12, atol=1e-12, err_msg=name)
        else:
            with pytest.raises(Exception, match="need jax_enable_x64 for the whole process"):
                function(on_mesh)


INDIVISIBLE = [
    CASE(T=40, S=40, dropout=0.3),  # parts of 5 rows; dropout needs multiples of 16
    CASE(S=64, causal=True),  # different lengths of queries and keys
]


@pytest.mark.parametrize("case", INDIVISIBLE, ids=str)
def test_indivisible_sequences_are_gathered(case):
    mesh = make_mesh(seq=8)
    arrays = case.arrays()
    with jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(results, case))(placed(mesh, arrays, T="seq"))
    assert_close(actual, exact(case, arrays))


@pytest.mark.slow
def test_with_gspmd():
    """Set `jax_use_shardy_partitioner=False`, which JAX reads once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "under_jit and auto"]
    environment = os.environ | {"JAX_USE_SHARDY_PARTITIONER": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]

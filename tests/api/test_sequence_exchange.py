"""What the devices of a divided sequence send and compute.

In a ring, a device attends to its own keys at visit 0, and at visit n to the keys of the device n places before it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sequences import CASE, assert_close, divided, exact, inverse, make_mesh, permute, with_gradients

import jax_flash
from jax_flash import BlockMask, Layout, sequence
from jax_flash.sequence import Division

pytestmark = pytest.mark.usefixtures("full_precision")


def test_one_exchange_for_several_dtypes():
    """The exchange preserves all bits, also of arrays that do not fill whole words. The exchange is differentiable."""
    shapes = {"bfloat16": (3, 1, 5), "float32": (3, 2, 2), "int32": (3, 3), "float64": (3, 1, 3)}
    division, spec = Division(("seq",), 3), P("seq")
    call = jax.shard_map(lambda x: division.sent(x, 2), mesh=make_mesh(seq=3), in_specs=spec, out_specs=spec)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = {dtype: jnp.asarray(rng.normal(0, 9, shape)).astype(dtype) for dtype, shape in shapes.items()}
        sent = jax.jit(call)
        assert sent.lower(arrays).as_text().count("collective_permute") == 1
        for dtype, x in sent(arrays).items():
            np.testing.assert_array_equal(np.asarray(x), np.roll(np.asarray(arrays[dtype]), 2, 0), err_msg=dtype)
        floats = {dtype: x for dtype, x in arrays.items() if dtype != "int32"}
        _, tangents = jax.jvp(sent, (floats,), (floats,))
        (back,) = jax.vjp(sent, floats)[1](tangents)
        assert all((back[dtype] == x).all() for dtype, x in floats.items())


# --- Only what is needed ---


# Global lists, because JAX caches what it has traced, and a later test may run the same program.
SENT, COMPUTED = [], []


@pytest.fixture
def recorded(monkeypatch):
    """Record the size of each array that a device sends, and each pair of parts that it computes.

    The fixture is a function that returns the results of a call, the sizes and the number of pairs.
    """
    permuted, part = Division.permuted, sequence._part

    def sending(division, x, to):
        jax.debug.callback(lambda: SENT.append(x.size))
        return permuted(division, x, to)

    def computing(*args):
        jax.debug.callback(lambda: COMPUTED.append("a pair"))
        return part(*args)

    monkeypatch.setattr(Division, "permuted", sending)
    monkeypatch.setattr(sequence, "_part", computing)

    def run(call):
        SENT.clear(), COMPUTED.clear()
        results = jax.block_until_ready(call())
        jax.effects_barrier()
        return results, SENT.copy(), len(COMPUTED)

    return run


def test_only_shared_chunks_are_sent(recorded):
    """Devices 1 and 2 share the document of chunks 9 and 10. Each other chunk is one document."""
    own = [range(8), [8, 9, *range(16, 22)], [10, *range(22, 29)], [*range(11, 16), 29, 30, 31]]
    layout = Layout(np.array([[*chunks] for chunks in own], np.int32))
    blocks = BlockMask.from_mask(np.tri(512, dtype=bool), q_block=16, kv_block=16)
    options = {"bias": "b1ts", "mask": "1n1s", "sinks": 1.0, "segments": True, "block_mask": blocks}
    case = CASE(B=1, T=512, S=512, causal=True, dropout=0.3, **options)
    documents = np.repeat(np.where(np.arange(32) == 10, 9, np.arange(32)), 16).astype(np.int32)[None]
    arrays = case.arrays() | dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), documents)
    actual, sent, _ = recorded(lambda: divided(case, arrays, 4, layout))
    assert_close(actual, exact(case, arrays))
    keys_and_values = 2 * case.K * case.D * 16  # of one chunk of 16 tokens
    assert keys_and_values <= min(sent) and max(sent) < 2 * keys_and_values


def documents_of(length):
    return dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), np.arange(512, dtype=np.int32)[None] // length)


def lengths(name, length):
    return {name: np.array([length], np.int32)}


class Needed(NamedTuple):
    """The needed visits of four devices, of at most 4, and the needed exchanges, of at most 3."""

    causal: bool  # in the order of `balance`; otherwise contiguous
    masks: dict[str, np.ndarray]
    visits: int
    exchanges: int


NEEDED = {
    "a document for each device": Needed(False, documents_of(128), visits=1, exchanges=0),
    "causal documents for each device": Needed(True, documents_of(128), visits=1, exchanges=0),
    # Device 1 attends to device 0 at visit 1, and device 0 to device 1 at visit 3.
    "documents of two devices": Needed(False, documents_of(256), visits=3, exchanges=3),
    "causal documents of two devices": Needed(True, documents_of(256), visits=2, exchanges=1),
    "no keys": Needed(False, lengths("key_value_seq_lengths", 0), visits=1, exchanges=0),
    "queries of two devices": Needed(True, lengths("query_seq_lengths", 256), visits=2, exchanges=1),
}


@pytest.mark.parametrize(("causal", "masks", "visits", "exchanges"), NEEDED.values(), ids=NEEDED)
def test_unneeded_visits_are_skipped(causal, masks, visits, exchanges, recorded):
    """The values of masks decide, so new values need no compilation."""
    q = np.random.default_rng(0).normal(size=(1, 512, 2, 8)).astype(np.float32)
    k = q[:, :, :1]
    layout = jax_flash.balance(np.arange(0, 513, 128), 4) if causal else "contiguous"
    traced = []

    def attend(q, k, masks, **where):
        traced.append(where)
        return jax_flash.dot_product_attention(q, k, k, is_causal=causal, **masks, **where)

    local = functools.partial(attend, sequence_axis="seq", sequence_layout=layout)
    spec, specs = P(None, "seq"), {name: P(None, "seq") if "ids" in name else P() for name in masks}
    call = jax.jit(jax.shard_map(local, mesh=make_mesh(seq=4), in_specs=(spec, spec, specs), out_specs=spec))

    mask_nothing = {name: np.full_like(x, 0 if "ids" in name else 512) for name, x in masks.items()}
    _, sent, computed = recorded(lambda: call(q, k, mask_nothing))
    assert (computed, len(sent)) == (4 * 4, 4 * 3)  # all visits of all devices

    actual, sent, computed = recorded(lambda: call(q, k, masks))
    assert (computed, len(sent)) == (4 * visits, 4 * exchanges)
    assert len(traced) == 1
    np.testing.assert_allclose(actual, attend(q, k, masks), atol=1e-5)


# --- Rings of rings ---


@pytest.mark.parametrize("documents", [[0, 512], [0, 200, 440, 512]], ids=["one", "three"])
def test_inner_rings(documents):
    """Keys visit both devices of a host, then move to the next of four hosts, also if some visits are not needed."""
    case = CASE(B=1, T=512, S=512, K=1, causal=True, dropout=0.3, bias="1n1s")
    ids = np.repeat(np.arange(len(documents) - 1), np.diff(documents))[None]
    arrays = case.arrays() | dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    layout = Layout(np.array([[3, 10], [2, 6], [0, 15], [1, 11], [4, 5], [7, 12], [8, 13], [9, 14]], np.int32))
    whole = ("bias", "dropout_key")  # on every device
    axes = {name: None if name in whole else 1 for name in (*arrays, "o", "logsumexp")} | {"logsumexp": 2}
    over = ("host", "device")
    specs = {name: P() if name in whole else P(None, over) for name in arrays}

    def attend(arrays, layout=None):
        where = {} if layout is None else {"sequence_axis": over, "sequence_layout": layout}
        o, statistics = jax_flash.attention_with_statistics(**arrays, **case.options, **where)
        return o, statistics.logsumexp

    def pulled(attend, arrays, *layout):
        inputs = {name: arrays[name] for name in ("query", "key", "value", "bias")}
        return with_gradients(lambda inputs: attend(arrays | inputs, *layout), inputs)

    on_devices = jax.shard_map(
        attend,
        mesh=make_mesh(host=4, device=2),
        in_specs=(specs, P()),
        out_specs=(P(None, over), P(None, None, over)),
    )
    found = jax.jit(functools.partial(pulled, on_devices))(permute(arrays, axes, layout, 8), layout)
    actual = inverse(found, axes, layout, 8)
    assert_close(actual, jax.jit(functools.partial(pulled, attend))(arrays))


def test_memory_of_a_device():
    """With twice the sequence on twice the devices, a device needs the same memory."""

    def temporary_bytes(devices):
        mesh = make_mesh(seq=devices)
        place = NamedSharding(mesh, P(None, "seq"))
        x = jax.ShapeDtypeStruct((1, 1024 * devices, 1, 32), jnp.float32, sharding=place)

        def gradients(x):
            return jax.grad(lambda x: jax_flash.dot_product_attention(x, x, x, is_causal=True).sum())(x)

        with jax.set_mesh(mesh):
            return jax.jit(gradients).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 1.1 * temporary_bytes(4)

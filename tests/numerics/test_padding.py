"""Padding has no effect: tokens beyond a length and rows without keys may hold NaN or inf."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import padded
import pages
import pytest
from accuracy import by_numpy
from cases import Case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("cause", padded.CAUSES)
def test_flash(cause):
    padded.check(cause, "float32", sinks=2.0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("cause", padded.CAUSES)
def test_plain(cause, implementation):
    padded.check(cause, "float64", implementation)


def test_small_scale():
    """A scale below 2⁻¹⁰⁰ is multiplied into the query, so its gradient is a sum over all rows, including padding."""
    padded.check("query lengths", "float64", scale=1e-33)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_no_keys(implementation):
    """Without keys, all rows are padding although no mask hides them."""
    query, key = jnp.full((1, 3, 2, 8), np.nan), jnp.zeros((1, 0, 2, 8))

    def attention(query, sinks, scale):
        options = {"sinks": sinks, "scale": scale, "implementation": implementation}
        return jax_flash.dot_product_attention(query, key, key, **options)

    o, pull = jax.vjp(attention, query, jnp.ones(2), 0.5)
    for x in (o, *pull(query)):  # the query also serves as NaN cotangents
        assert not np.asarray(x).any()


@pytest.mark.parametrize("dtype", ["tf32", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cause", padded.CAUSES)
def test_tiles(cause, dim, dtype, device):
    """Padding in the middle of the CUDA kernels' tiles, and split-KV for decoding."""
    if device.platform == "cpu" and not os.environ.get("JAX_FLASH_EMULATE"):
        pytest.skip("covers CUDA kernels only")
    sizes = {"T": 1, "S": 1100} if cause == "decoding" else {"T": 197, "S": 333}
    padded.check(cause, dtype, **sizes, D=dim, E=dim)


SEQUENCE = {
    **dict.fromkeys(("query", "key", "value", "query_segment_ids", "key_value_segment_ids", "o"), P(None, "seq")),
    "logsumexp": P(None, None, "seq"),
    "mask": P(None, None, "seq"),
}


def sharded(function):
    """Run the function in shard_map, with the sequence sharded over four devices."""
    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def on_global_arrays(arrays, cotangents):
        specs = {name: SEQUENCE.get(name, P()) for name in arrays}
        names = ("o", "logsumexp", *(name for name in padded.DIFFERENTIATED if name in arrays))
        local = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(specs, (SEQUENCE["o"], SEQUENCE["logsumexp"])),
            out_specs={name: SEQUENCE.get(name, P()) for name in names},
        )
        return local(arrays, cotangents)

    return on_global_arrays


@pytest.mark.parametrize(
    ("cause", "implementation"),
    [("lengths", "flash"), ("mask", "flash"), ("segments", "xla"), ("offset", "flash"), ("offset", "xla")],
)
def test_sequence_over_devices(cause, implementation):
    """Some rows see no key of a device."""
    options = {"sequence_axis": "seq"}
    padded.check(cause, "float64", implementation, options, divided=sharded, T=64, S=64, sinks=2.0)


@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_packs_over_devices(implementation):
    def placed(function):
        mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
        place = NamedSharding(mesh, SEQUENCE["query"])

        def on_mesh(arrays, cotangents):
            tokens = {name: jax.lax.with_sharding_constraint(arrays[name], place) for name in ("query", "key", "value")}
            return function(arrays | tokens, cotangents)

        return on_mesh

    dtype = "float32" if implementation == "flash" else "float64"
    padded.check("packs", dtype, implementation, divided=placed, T=16, S=32)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_second_derivatives(implementation):
    """The loss contains each row's norm, whose derivative is NaN in padded rows (0/0).

    So NaN cotangents reach both backwards.
    """
    case, T, S = Case(B=1, T=12, S=11, N=2, K=1, D=4, E=4, bias="bnts", sinks=1.0), 7, 8
    parts = {"query": np.s_[:, :T], "key": np.s_[:, :S], "value": np.s_[:, :S], "bias": np.s_[:, :, :T, :S]}
    clean, weights = case.arrays("float64"), case.arrays("float64", seed=1)
    weights["o"] = case.cotangents("float64")[0]
    parts["o"] = parts["query"]

    def without_padding(arrays):
        return {name: x[parts.get(name, ...)] for name, x in arrays.items()}

    def with_padding(arrays, padding):
        result = {name: np.full_like(x, padding) for name, x in arrays.items()}
        for name, x in arrays.items():
            result[name][parts.get(name, ...)] = x[parts.get(name, ...)]
        return result

    def second_derivatives(arrays, weights, **lengths):
        def loss(name, x):
            rows = x * jnp.sqrt((x**2).sum(-1, keepdims=True))
            return (jnp.where(weights[name] == 0, 0, rows) * weights[name]).sum()

        def loss_of_output(arrays):
            o = jax_flash.dot_product_attention(**arrays, **lengths, implementation=implementation)
            return loss("o", o)

        def loss_of_gradients(arrays):
            return sum(loss(name, x) for name, x in jax.grad(loss_of_output)(arrays).items())

        return jax.jit(jax.grad(loss_of_gradients))(arrays)

    expected = second_derivatives(without_padding(clean), without_padding(weights))
    given = with_padding(clean, np.nan) | {"bias": clean["bias"]}
    lengths = {"query_seq_lengths": np.array([T]), "key_value_seq_lengths": np.array([S])}
    for name, x in second_derivatives(given, with_padding(weights, 0), **lengths).items():
        np.testing.assert_allclose(x[parts.get(name, ...)], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
        assert np.count_nonzero(x) == np.count_nonzero(expected[name]), name


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_pages(implementation):
    """Unwritten slots of pages, and queries before the first token."""
    cache = pages.Cache((20, 2, 0), 16, Case(T=3, N=4, K=2, D=16, E=16, sinks=2.0))
    arrays = cache.arrays("float32")
    exact = by_numpy(cache.contiguous, arrays, cache.contiguous.cotangents("float32"))
    before = np.arange(cache.case.T) < cache.case.T - np.array(cache.lengths)[:, None]
    arrays["query"][before] = np.nan
    for name, x in pages.run(cache, arrays, implementation=implementation).items():
        np.testing.assert_allclose(x, exact[name], rtol=1e-5, atol=1e-5)

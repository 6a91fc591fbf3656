"""Sharded calls give the same results as one device. Each device computes its own part, without all-gathers."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DIFFERENTIATED, Case, data_collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(mode, *shape):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(MODES[mode],) * len(shape))


def place(mesh, arrays, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}


def results(case, arrays, implementation=None):
    """Return o, logsumexp and gradients by name."""
    inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIATED}
    others = {name: x for name, x in arrays.items() if name not in DIFFERENTIATED}

    def attention(inputs):
        o, statistics = jax_flash.attention_with_statistics(
            **inputs, **others, **case.options, implementation=implementation
        )
        return o, statistics.logsumexp

    (o, logsumexp), pull = jax.vjp(attention, inputs)
    (gradients,) = pull((jnp.cos(o), jnp.sin(jnp.where(jnp.isfinite(logsumexp), logsumexp, 0))))
    return {"o": o, "logsumexp": logsumexp} | gradients


def specs(case, batch="data", heads="model"):
    """Return specs that shard the batch and the heads of all arrays that have them."""
    kv_heads = heads if case.K > 1 else None
    extent = {"b": batch, "n": heads, "t": None, "s": None, "1": None}
    return {
        "query": P(batch, None, heads, None),
        "key": P(batch, None, kv_heads, None),
        "value": P(batch, None, kv_heads, None),
        "bias": P(*(extent[e] for e in case.bias)),
        "mask": P(*(extent[e] for e in case.mask)),
        "sinks": P(heads),
        **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), P(batch)),
        **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), P(batch, None)),
    }


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


SHARDED = functools.partial(Case, B=4, T=19, S=23, N=4, K=2, D=8, E=8)
CASES = [
    SHARDED(),
    SHARDED(K=4, causal=True, dropout=0.3),
    SHARDED(K=1, bias="1nts", sinks=1.0),
    SHARDED(bias="111s", mask="b1ts", dropout=0.5, broadcast_dropout=True),
    SHARDED(bias="bnts", mask="bnts", lengths=True, soft_cap=1.0),
    SHARDED(K=1, segments=True, offset=True, window=(5, 3), dropout=0.2, bias="b1t1"),
    SHARDED(window=(5, 3), traced=True, lengths=True, offset=True, causal=True),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_and_heads(case, mode):
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, specs(case))
        compiled = jax.jit(functools.partial(results, case)).lower(placed).compile()
        actual = compiled(placed)
        assert_close(actual, expected)
        assert not data_collectives(compiled)
        # Each device holds its own part only.
        assert actual["o"].sharding.shard_shape(actual["o"].shape) == (1, case.T, 2, case.E)
        assert actual["query"].sharding.shard_shape(actual["query"].shape) == (1, case.T, 2, case.D)
        text = compiled.as_text()
        local = f"batch=1 q_len={case.T} kv_len={case.S} q_heads=2 kv_heads={max(case.K // 2, 1)} "
        for name in ("forward", "backward"):
            (line,) = (x for x in text.splitlines() if f'custom_call_target="jax_flash_{name}"' in x)
            assert local in line


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("N", "K", "shape", "local"), [(8, 2, (2, 4), (2, 1)), (8, 4, (2, 4), (2, 1)), (8, 1, (1, 8), (1, 1))]
)
def test_groups_over_devices(N, K, shape, local, mode):
    """Grouped queries: several devices share a key/value head, or each device has whole groups."""
    case = Case(B=2, T=19, S=23, N=N, K=K, D=8, E=8, causal=True)
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    kv = P("data", None, "model" if K % shape[1] == 0 else None, None)
    with jax.set_mesh(mesh(mode, *shape)):
        placed = place(mesh(mode, *shape), arrays, specs(case) | {"key": kv, "value": kv})
        compiled = jax.jit(functools.partial(results, case)).lower(placed).compile()
        assert_close(compiled(placed), expected)
        assert not data_collectives(compiled)
        assert f"q_heads={local[0]} kv_heads={local[1]} " in compiled.as_text()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "axes",
    [("data", None), (None, "data"), (("data", "model"), None), (None, ("data", "model"))],
    ids=str,
)
def test_one_axis_or_both_merged(axes, mode):
    case = Case(B=8, T=11, S=9, N=8, K=8, D=8, E=8, dropout=0.4, bias="11ts")
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, specs(case, *axes))
        compiled = jax.jit(functools.partial(results, case)).lower(placed).compile()
        assert_close(compiled(placed), expected)
        assert not data_collectives(compiled)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", [("query",), ("key", "value"), ("query", "key", "value", "bias")], ids=str)
def test_sharded_sequences_are_correct(where, mode):
    """Query and key lengths differ, so sharded sequences are gathered."""
    case = Case(B=2, T=16, S=24, N=2, K=2, D=8, E=8, causal=True, bias="bnts", dropout=0.2)
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    sequences = {
        "query": P(None, "data"),
        "key": P(None, "data"),
        "value": P(None, "data"),
        "bias": P(None, None, "data", "model"),
    }
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, {name: sequences[name] for name in where})
        assert_close(jax.jit(functools.partial(results, case))(placed), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "others",
    [
        {"key": P("data", None, "model"), "value": P("data", None, "model")},
        {"bias": P("data", "model")},
    ],
    ids=lambda x: "_".join(x),
)
def test_axis_over_rows_and_over_heads(others, mode):
    case = Case(B=4, T=16, S=24, N=2, K=2, D=8, E=8, causal=True, bias="bnts")
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, {"query": P("data", "model")} | others)
        actual = jax.jit(functools.partial(results, case))(placed)
        assert_close(actual, expected)
        assert mode == "auto" or jax.typeof(actual["o"]).sharding.spec == jax.typeof(placed["query"]).sharding.spec


@pytest.mark.parametrize("mode", MODES)
def test_without_jit(mode):
    case = SHARDED(causal=True, dropout=0.1)
    arrays = case.arrays()
    expected = results(case, arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        assert_close(results(case, place(mesh(mode, 4, 2), arrays, specs(case))), expected)


def test_without_a_mesh_in_context():
    """Shardings of the arguments are sufficient."""
    case = SHARDED(causal=True, dropout=0.1, bias="1n11")
    arrays = case.arrays()
    placed = place(mesh("auto", 4, 2), arrays, specs(case))
    compiled = jax.jit(functools.partial(results, case)).lower(placed).compile()
    assert_close(compiled(placed), jax.jit(functools.partial(results, case))(arrays))
    assert not data_collectives(compiled)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_replicated_arrays_under_a_mesh(jit, mode):
    """All devices compute the same if nothing is sharded."""
    case = SHARDED(causal=True, dropout=0.1, bias="1nts", K=1)
    function, arrays = jit(functools.partial(results, case)), case.arrays()
    expected = function(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        assert_close(function(arrays), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_other_implementations(implementation, mode):
    case = SHARDED(causal=True, dropout=0.1, bias="1nts")
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, specs(case))
        assert_close(jax.jit(functools.partial(results, case, implementation=implementation))(placed), expected)


def test_with_gspmd():
    """Set `jax_use_shardy_partitioner=False`, which JAX reads once. An error in GSPMD's callback aborts the process."""
    tests = "batch_and_heads and segments or groups_over_devices and 8-1 or replicated_arrays and jit"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", tests]
    environment = os.environ | {"JAX_USE_SHARDY_PARTITIONER": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("mode", MODES)
def test_higher_order_under_a_mesh(mode):
    case = SHARDED(causal=True)
    arrays = case.arrays()

    def penalty(arrays):
        def loss(query):
            return (jax_flash.dot_product_attention(**arrays | {"query": query}, **case.options) ** 2).sum()

        return jax.grad(lambda query: (jax.grad(loss)(query) ** 2).sum())(arrays["query"])

    expected = jax.jit(penalty)(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        actual = jax.jit(penalty)(place(mesh(mode, 4, 2), arrays, specs(case)))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_vmap_of_sharded_arrays(mode):
    """An ensemble with sharded members."""
    case = Case(B=2, T=11, S=9, N=2, K=1, D=8, E=8, causal=True, bias="1n1s")
    ensemble = [case.arrays(seed=seed) for seed in range(8)]
    arrays = {name: np.stack([x[name] for x in ensemble]) for name in ensemble[0]}
    function = jax.jit(jax.vmap(functools.partial(results, case)))
    expected = function(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, dict.fromkeys(arrays, P(("data", "model"))))
        compiled = function.lower(placed).compile()
        assert_close(compiled(placed), expected)
        assert not data_collectives(compiled)


# --- shard_map ---


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [None, "flash", "xla"])
def test_shard_map(implementation, check_vma):
    """The gradient is taken inside `shard_map`."""
    case = SHARDED(causal=True)
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)
    spec = P("data", None, "model", None)
    out = dict.fromkeys(("o", "query", "key", "value"), spec) | {"logsumexp": P("data", "model", None)}
    function = jax.jit(
        jax.shard_map(
            functools.partial(results, case, implementation=implementation),
            mesh=mesh("auto", 4, 2),
            in_specs=(dict.fromkeys(arrays, spec),),
            out_specs=out,
            check_vma=check_vma,
        )
    )
    assert_close(function(arrays), expected)
    assert not data_collectives(function.lower(arrays).compile())


@pytest.mark.parametrize("implementation", [None, "flash", "xla"])
def test_gradient_of_shard_map_sums_over_replicated_arrays(implementation):
    """Key, value and bias are replicated, and the gradient is taken outside."""
    case = SHARDED(bias="1nts", K=1)
    arrays = case.arrays()
    shared = {"key": arrays["key"][:1], "value": arrays["value"][:1], "bias": arrays["bias"]}

    def attention(query, shared):
        batch = query.shape[0]
        key, value = (jnp.broadcast_to(shared[name], (batch, *shared[name].shape[1:])) for name in ("key", "value"))
        return jax_flash.dot_product_attention(query, key, value, shared["bias"], implementation=implementation)

    def gradient(attention):
        return jax.jit(jax.grad(lambda *args: (attention(*args) ** 2).sum(), (0, 1)))(arrays["query"], shared)

    mapped = jax.shard_map(
        attention,
        mesh=mesh("auto", 4, 2),
        in_specs=(P("data", None, "model", None), {"key": P(), "value": P(), "bias": P(None, "model")}),
        out_specs=P("data", None, "model", None),
    )
    actual, expected = gradient(mapped), gradient(attention)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": 3}], ids="-".join)
def test_gradient_of_shard_map_with_skipped_tiles(options, jit, mode, devices):
    arrays = SHARDED(B=8).arrays()

    def loss(attention):
        return lambda arrays: (attention(arrays) ** 2).sum()

    def attention(arrays):
        return jax_flash.dot_product_attention(**arrays, **options)

    over = mesh(mode, devices)
    mapped = jax.shard_map(attention, mesh=over, in_specs=(P("data"),), out_specs=P("data"))
    with jax.set_mesh(over):
        actual = jit(jax.grad(loss(mapped)))(place(over, arrays, dict.fromkeys(arrays, P("data"))))
    assert_close(actual, jax.jit(jax.grad(loss(attention)))(arrays))


def test_shard_map_with_global_dropout_ids():
    case = SHARDED(dropout=0.4)
    arrays = case.arrays()
    expected = jax.jit(functools.partial(results, case))(arrays)["o"]

    def attention(query, key, value):
        return jax_flash.dot_product_attention(
            query, key, value, dropout_rate=case.dropout, dropout_key=arrays["dropout_key"],
            dropout_batch_ids=jax.lax.axis_index("data")[None],
            dropout_head_ids=2 * jax.lax.axis_index("model") + jnp.arange(2),
        )  # fmt: skip

    spec = P("data", None, "model", None)
    function = jax.shard_map(attention, mesh=mesh("auto", 4, 2), in_specs=(spec,) * 3, out_specs=spec)
    actual = jax.jit(function)(arrays["query"], arrays["key"], arrays["value"])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_shard_map_over_one_of_two_axes(mode):
    case = SHARDED(bias="1nts")
    arrays = case.arrays()

    def attention(arrays):
        return jax_flash.dot_product_attention(**arrays, is_causal=True)

    def gradient(attention):
        return jax.jit(jax.grad(lambda arrays: (attention(arrays) ** 2).sum()))

    expected = gradient(attention)(arrays)
    with jax.set_mesh(mesh(mode, 4, 2)):
        placed = place(mesh(mode, 4, 2), arrays, specs(case))
        in_specs = (dict.fromkeys(("query", "key", "value"), P("data")) | {"bias": P()},)
        mapped = jax.shard_map(attention, in_specs=in_specs, out_specs=P("data"), axis_names={"data"})
        assert_close(gradient(mapped)(placed), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["scale", "dropout_head_ids"])
def test_vmap_over_arguments_without_batch_dim(name, mode):
    """vmap makes a separate call for each example."""
    examples = Case(B=8, T=32, S=32, N=4, K=2).arrays()
    given = {"scale": jnp.linspace(0.1, 0.8, 8), "dropout_head_ids": jnp.arange(32).reshape(8, 4)}[name]

    def loss(query, given):
        attend = functools.partial(jax_flash.dot_product_attention, dropout_rate=0.5, dropout_key=jax.random.key(0))
        o = jax.vmap(lambda q, k, v, x: attend(q, k, v, **{name: x}))(query, examples["key"], examples["value"], given)
        return jnp.cos(o).sum()

    def both(query, given):
        return jax.value_and_grad(loss)(query, given)

    expected = both(jnp.asarray(examples["query"]), given)
    devices = mesh(mode, 4)
    with jax.set_mesh(devices):
        examples = place(devices, examples, dict.fromkeys(examples, P("data")))
        given = jax.device_put(given, NamedSharding(devices, P("data")))
        value, gradient = jax.jit(both)(examples["query"], given)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-5)


LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
LAYERS = [
    ("MultiHeadAttention", {"is_causal": True}, ()),
    ("MultiHeadLatentAttention", LATENT, ()),
    ("MultiHeadLatentAttention", LATENT, ("q_proj", "kv_b_proj")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("module", "options", "of_heads"), LAYERS, ids=["standard", "latent", "heads of latents"])
def test_flax_layers(module, options, of_heads, mode):
    """Outputs, gradients and decoding over devices that divide the batch, or the heads by these kernels."""
    pytest.importorskip("flax")
    import jax_flash.linen

    layer = getattr(jax_flash.linen, module)(num_heads=4, **options)
    x = np.random.default_rng(0).normal(size=(4, 12, 32)).astype(np.float32)
    params = layer.init(jax.random.key(0), x)["params"]

    @jax.jit
    def run(params, x):
        outputs, pull = jax.vjp(lambda *given: layer.apply({"params": given[0]}, given[1]), params, x)
        decoder = layer.clone(decode=True)
        cache, decoded = decoder.init(jax.random.key(0), x)["cache"], []
        for new in (x[:, :8], x[:, 8:]):
            out, changed = decoder.apply({"params": params, "cache": cache}, new, mutable="cache")
            cache = changed["cache"]
            decoded.append(out)
        return outputs, pull(outputs), decoded

    expected = run(params, x)
    devices = mesh(mode, 4)
    with jax.set_mesh(devices):
        spec = {name: P(None, "data") if name in of_heads else P() for name in params}
        placed = {name: jax.device_put(leaf, NamedSharding(devices, spec[name])) for name, leaf in params.items()}
        found = run(placed, jax.device_put(x, NamedSharding(devices, P() if of_heads else P("data"))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)

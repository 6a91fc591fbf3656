"""Score programs and their captured arrays under JAX's transformations, and on several devices."""

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXPORT_CHECKS, data_collectives
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash

B, T, S, N, K, D = 4, 5, 6, 4, 2, 8
DIFFERENTIABLE = tuple(range(5))  # inputs with gradients


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(batch=B, seed=0):
    """Return query, key and value; a table by head and distance; rates by batch entry; ids of keys."""
    shapes = (batch, T, N, D), (batch, S, K, D), (batch, S, K, D), (N, T + S), (batch, 2)
    ids = np.random.default_rng(seed).integers(0, 3, (batch, S)).astype(np.int32)
    return (*(normal(seed + i, *shape) for i, shape in enumerate(shapes)), jnp.asarray(ids))


def attend(query, key, value, table, rates, ids, implementation="flash", head=0, **options):
    def score_mod(s, b, h, q, k):
        return s * rates[b, 0] + jnp.tanh(table[h + head, q - k + S]) * rates[b, 1]

    def mask_mod(b, h, q, k):
        return (ids[b, k] != h + head - 1) | (q == k)

    return jax_flash.dot_product_attention(
        query, key, value, score_mod=score_mod, mask_mod=mask_mod, implementation=implementation, **options
    )


def loss(*args, **options):
    return (attend(*args, **options) ** 2).sum()


def assert_close(x, y, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), x, y)


@pytest.fixture(params=["flash", "xla"])
def implementation(request):
    return request.param


def calls(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    return tuple(text.count(f'custom_call_target="jax_flash_{name}"') for name in ("forward", "backward"))


def test_jit_and_not(implementation):
    gradient = jax.value_and_grad(functools.partial(loss, implementation=implementation), DIFFERENTIABLE)
    expected = gradient(*inputs())
    assert_close(jax.jit(gradient)(*inputs()), expected)
    if implementation == "flash":  # without jit, the loops of "xla" would run entry by entry
        with jax.disable_jit():
            assert_close(gradient(*inputs()), expected)


# --- vmap ---


MAPPED = [("flash", x) for x in ((0,), (3,), (4,), (5,), (0, 4), (1, 2, 3), (0, 1, 2, 3, 4, 5))] + [("xla", (0, 3, 5))]


@pytest.mark.parametrize(("implementation", "mapped"), MAPPED, ids=str)
def test_vmap(mapped, implementation):
    """Values, and gradients for each example, with mapped and with shared inputs."""
    axes = [0 if i in mapped else None for i in range(6)]
    others = inputs(seed=9)
    args = [jnp.stack([x, y]) if i in mapped else x for i, (x, y) in enumerate(zip(inputs(), others, strict=True))]
    gradient = jax.value_and_grad(functools.partial(loss, implementation=implementation), DIFFERENTIABLE)
    singles = [gradient(*(x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True))) for i in range(2)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *singles)
    assert_close(jax.jit(jax.vmap(gradient, axes))(*args), expected)


def test_gradient_of_vmap_sums_over_shared_inputs(implementation):
    """One table is mapped along its second axis, in a nested vmap."""
    query, key, value, table, rates, ids = inputs()
    queries, tables = jnp.stack([query, -query]), jnp.stack([table, table + 1, 2 * table], 1)  # [N, 3, T + S]

    def one(query, table, rates):
        return loss(query, key, value, table, rates, ids, implementation=implementation)

    def mapped(queries, tables, rates):
        return jax.vmap(jax.vmap(one, (None, 1, None)), (0, None, None))(queries, tables, rates).sum()

    def looped(queries, tables, rates):
        pairs = itertools.product(range(2), range(3))
        return sum(one(queries[i], tables[:, j], rates) for i, j in pairs)

    args = queries, tables, rates
    assert_close(jax.jit(jax.grad(mapped, (0, 1, 2)))(*args), jax.jit(jax.grad(looped, (0, 1, 2)))(*args))


def test_vmap_is_one_call():
    args = [jnp.stack([x, x]) for x in inputs()]
    assert calls(jax.vmap(jax.grad(loss, DIFFERENTIABLE)), *args) == (1, 1)


# --- loops and higher derivatives ---


def layers(implementation, wrap):
    """Return attention layers in a scan, each with its own table, and with shared rates."""
    query, key, value, table, rates, ids = inputs()
    tables = jnp.stack([table, -table, table + 1])

    def layer(x, table, rates):
        return x + jnp.tanh(attend(x, key, value, table, rates, ids, implementation=implementation))

    def scanned(query, tables, rates):
        x, _ = jax.lax.scan(lambda x, table: (wrap(layer)(x, table, rates), None), query, tables)
        return (x**2).sum()

    def looped(query, tables, rates):
        return (functools.reduce(lambda x, table: layer(x, table, rates), tables, query) ** 2).sum()

    return scanned, looped, (query, tables, rates)


POLICY = jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES)
WRAPS = {"plain": lambda f: f, "remat": functools.partial(jax.checkpoint, policy=POLICY)}


@pytest.mark.parametrize("wrap", WRAPS)
def test_scan(wrap, implementation):
    scanned, looped, args = layers(implementation, WRAPS[wrap])
    results, expected = (jax.jit(jax.grad(function, (0, 1, 2)))(*args) for function in (scanned, looped))
    assert_close(results, expected, 1e-4)
    if implementation == "flash" and wrap == "remat":
        assert calls(jax.grad(scanned), *args) == (1, 1)  # saved residuals are not recomputed


def few():
    """Return inputs with a small Hessian."""
    query, key, value, table, rates, ids = inputs(1)
    return query[:, :2, :1, :2], key[:, :, :1, :2], value[:, :, :1, :2], table[:1], rates, ids


def test_hessian(implementation):
    """Take second derivatives with respect to the query, a captured array, and both."""
    query, key, value, table, rates, ids = few()

    def hessian(implementation):
        def function(query, rates):
            return loss(query, key, value, table, rates, ids, implementation=implementation)

        return jax.jit(jax.hessian(function, (0, 1)))(query, rates)

    assert_close(hessian(implementation), hessian("reference"), 1e-4)


def test_second_order_by_differences(implementation, x64):
    *arrays, ids = few()
    arrays = [x.astype("float64") for x in arrays]
    function = jax.jit(lambda *arrays: loss(*arrays, ids, implementation=implementation))
    check_grads(function, arrays, order=2, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_forward_mode(implementation):
    *arrays, ids = inputs()
    tangents = [jnp.cos(x) for x in arrays]

    def derivative(implementation, wrap):
        function = wrap(lambda *arrays: loss(*arrays, ids, implementation=implementation))
        return jax.jit(lambda arrays, tangents: jax.jvp(function, arrays, tangents))(arrays, tangents)

    for wrap in (lambda f: f, functools.partial(jax.grad, argnums=DIFFERENTIABLE)):
        assert_close(derivative(implementation, wrap), derivative("reference", wrap), 1e-4)


# --- export ---


def test_export(implementation):
    """Captured arrays are arguments of the exported program."""
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, implementation=implementation), DIFFERENTIABLE))
    exported = export.export(gradient, platforms=("cpu",), disabled_checks=EXPORT_CHECKS)(*inputs())
    restored = export.deserialize(exported.serialize())
    for seed in (0, 5):
        assert_close(restored.call(*inputs(seed=seed)), gradient(*inputs(seed=seed)))


def test_lowering_for_a_platform_without_kernels():
    function = functools.partial(attend, implementation=None)
    exported = export.export(jax.jit(function), platforms=("cpu", "tpu"), disabled_checks=EXPORT_CHECKS)(*inputs())
    assert_close(exported.call(*inputs()), function(*inputs()))


# --- devices ---

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
BATCH, HEADS = P("data"), P("data", None, "model")
SPECS = (HEADS, HEADS, HEADS, P(), P(), P())


def mesh(mode):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(MODES[mode],) * 2)


def place(mesh, specs=SPECS):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs(), specs, strict=True)]


def results(*args, **options):
    o, pull = jax.vjp(lambda *arrays: attend(*arrays, args[5], **options), *args[:5])
    return o, pull(jnp.cos(o))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_batch_and_heads_over_devices(mode, implementation):
    """Every device uses global indices. Gradients of replicated arrays are summed."""
    expected = jax.jit(functools.partial(results, implementation="xla"))(*inputs())
    with jax.set_mesh(mesh(mode)):
        args = place(mesh(mode))
        compiled = jax.jit(functools.partial(results, implementation=implementation)).lower(*args).compile()
        actual = compiled(*args)
        assert_close(actual, expected)
        if implementation == "flash":
            assert not data_collectives(compiled)
            assert actual[0].sharding.shard_shape(actual[0].shape) == (1, T, N // 2, D)
            assert compiled.as_text().count("batch=1 q_len=5 kv_len=6 q_heads=2 kv_heads=1 ") == 2


@pytest.mark.parametrize("mode", MODES)
def test_score_minus_distance_under_a_mesh(mode):
    """The derivative of this function must not carry the score's sharding into a cotangent."""
    query, key, value, *_ = inputs()

    def gradients(*args):
        def slope(s, b, h, i, j):
            return s - 0.1 * (h + 1) * abs(i - j)

        attend = functools.partial(jax_flash.dot_product_attention, score_mod=slope, implementation="flash")
        o, pull = jax.vjp(attend, *args)
        return o, pull(jnp.cos(o))

    expected = gradients(query, key, value)
    with jax.set_mesh(mesh(mode)):
        assert_close(jax.jit(gradients)(*place(mesh(mode))[:3]), expected)


def special_function(s, table, key):
    return s + jax.lax.igamma(jnp.abs(table[0, key]) + 1, 2.0)


def loop(s, table, key):
    return jax.lax.fori_loop(0, 3, lambda i, x: 0.9 * x + table[i, key], s)


def branches(s, table, key):
    return jax.lax.cond(key > 2, lambda s: jnp.sin(s) + table[0, 0], lambda s: s, s)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("mod", [special_function, loop, branches])
@pytest.mark.filterwarnings("ignore:attention takes")
def test_unsupported_operations_under_a_mesh(mod, implementation, mode):
    """Every device runs plain JAX on arrays without explicit axes."""

    def gradients(query, key, value, table):
        def attend(*args):
            *arrays, table = args
            options = {"score_mod": lambda s, b, h, q, k: mod(s, table, k), "implementation": implementation}
            return jax_flash.dot_product_attention(*arrays, **options)

        o, pull = jax.vjp(attend, query, key, value, table)
        return o, pull(jnp.cos(o))

    expected = gradients(*inputs()[:4])
    with jax.set_mesh(mesh(mode)):
        assert_close(jax.jit(gradients)(*place(mesh(mode))[:4]), expected)


SHARDED = (P("data"),) * 3 + (P("model"), P("data"), P("data"))


@pytest.mark.parametrize(("specs", "mode"), [(SHARDED, "auto"), ((P(),) * 6, "auto"), ((P(),) * 6, "explicit")])
def test_other_shardings(specs, mode):
    """Sharded captured arrays, which are gathered, and replicated arrays under a mesh."""
    expected = jax.jit(functools.partial(results, implementation="xla"))(*inputs())
    with jax.set_mesh(mesh(mode)):
        assert_close(jax.jit(results)(*place(mesh(mode), specs)), expected)


def test_explicitly_sharded_captured_arrays():
    """Before jax 0.12, JAX cannot index them. A note on its error tells what to do."""
    with jax.set_mesh(mesh("explicit")):
        query, key, value, *_ = place(mesh("explicit"))
        table = jax.device_put(jnp.arange(8.0), NamedSharding(mesh("explicit"), P("data")))

        def attend(table):
            return jax_flash.dot_product_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + table[k])

        def gradient(table):
            return jax.grad(lambda table: jnp.cos(attend(table)).sum())(table)

        replicated = jax.sharding.reshard(table, P())
        expected = {"o": attend(replicated), "table": gradient(replicated)}
        if jax.__version_info__ >= (0, 12):
            assert_close({"o": attend(table), "table": gradient(table)}, expected)
        else:
            with pytest.raises(Exception, match=r"score_mod is traced .*\n.* must be replicated: use jax.shard"):
                attend(table)


@pytest.mark.parametrize("mode", MODES)
def test_vmap_over_devices(mode):
    """The members of an ensemble, and the arrays that they capture, are on separate devices."""
    ensemble = [jnp.stack(x) for x in zip(*(inputs(2, seed) for seed in range(8)), strict=True)]
    expected = jax.jit(jax.vmap(functools.partial(results, implementation="xla")))(*ensemble)
    with jax.set_mesh(mesh(mode)):
        placed = [jax.device_put(x, NamedSharding(mesh(mode), P(("data", "model")))) for x in ensemble]
        compiled = jax.jit(jax.vmap(results)).lower(*placed).compile()
        assert_close(compiled(*placed), expected)
        assert not data_collectives(compiled)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [None, "flash", "xla"])
def test_shard_map(implementation, check_vma):
    """Indices are local in `shard_map`. The function captures the global index of its first head."""

    def local(*args):
        first = jax.lax.axis_index("model") * (N // 2)
        return attend(*args, implementation=implementation, head=first)

    devices = mesh("auto")
    specs = (HEADS, HEADS, HEADS, P(), BATCH, BATCH)
    mapped = jax.shard_map(local, mesh=devices, in_specs=specs, out_specs=HEADS, check_vma=check_vma)
    assert_close(jax.jit(mapped)(*inputs()), attend(*inputs(), implementation="xla"))
    if check_vma:

        def gradient(function):
            return jax.jit(jax.grad(lambda *args: (function(*args) ** 2).sum(), DIFFERENTIABLE))(*inputs())

        assert_close(gradient(mapped), gradient(attend))


def gradient(function):
    return jax.jit(jax.grad(lambda *args: function(*args).sum()))


def derivative_along(function):
    return jax.jit(lambda table, query: jax.jvp(lambda table: function(table, query), (table,), (table[::-1],))[1])


def second_derivative(function):
    query_gradient = jax.grad(lambda *args: function(*args).sum(), 1)
    return gradient(lambda *args: query_gradient(*args) ** 2)


def mapped(function):
    return lambda table, query: jax.vmap(gradient(function), (0, None))(jnp.stack([table, -table]), query)


def in_a_scan(function):
    def layers(table, query):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(function)(table, x), None), query, length=2)[0]

    return gradient(layers)


def sharded_explicitly(function):
    def call(table, query):
        devices = mesh("explicit")
        with jax.set_mesh(devices):
            return gradient(function)(table, jax.device_put(query, NamedSharding(devices, BATCH)))

    return call


def in_shard_map(function):
    return jax.shard_map(gradient(function), mesh=mesh("auto"), in_specs=(P(), BATCH), out_specs=P())


TRANSFORMS = [derivative_along, second_derivative, mapped, in_a_scan, sharded_explicitly, in_shard_map]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_16_bit_arrays(transform, implementation):
    """Derivatives equal the rounded float32 derivatives. Multiples of 1/8 have equal values in both dtypes."""
    query, key, value, *_ = inputs()
    table = jnp.asarray(np.random.default_rng(0).integers(-8, 9, (N, T + S)) / 8, jnp.float32)

    def function(table, query):
        def score_mod(s, b, h, q, k):
            return s * (2 * table)[h, q - k + S] + jnp.where(q > k, table[0, 0] * table[h, k], table[h, q])

        options = {"score_mod": score_mod, "implementation": implementation}
        return jnp.sin(jax_flash.dot_product_attention(query, key[: len(query)], value[: len(query)], **options))

    result, expected = (transform(function)(table.astype(dtype), query) for dtype in ("bfloat16", "float32"))
    assert result.dtype == (jnp.float32 if transform is derivative_along else jnp.bfloat16)
    assert_close(result.astype("float32") / abs(expected).max(), expected / abs(expected).max(), 2.0**-8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_index_in_a_function(check_vma):
    """JAX treats it as an effect. The error message names the alternative."""

    def local(query, key, value):
        def mask_mod(b, h, q, k):
            return k <= q + jax.lax.axis_index("model")

        return jax_flash.dot_product_attention(query, key, value, mask_mod=mask_mod)

    mapped = jax.shard_map(local, mesh=mesh("auto"), in_specs=HEADS, out_specs=HEADS, check_vma=check_vma)
    with pytest.raises(ValueError, match="mask_mod must not use a named axis, but uses 'model': .* let it capture"):
        jax.jit(mapped)(*inputs()[:3])


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_custom_derivatives_in_shard_map(implementation, varying):
    """Custom derivative rules apply to arrays that vary over devices. With `varying`, so does the captured table."""
    product = jax.custom_jvp(lambda x, y: x * y)
    product.defjvp(lambda xs, ts: (product(*xs), 2 * ts[0] * xs[1] - ts[1] * xs[0]))
    halved = jax.custom_vjp(lambda x, i: x * (i + 1))
    halved.defvjp(lambda x, i: (x * (i + 1), x), lambda x, cotangent: (cotangent * jnp.cos(x) / 2, None))

    def local(query, key, value, table, implementation=implementation):
        def score_mod(s, b, h, q, k):
            entries = jax.nn.softplus(table[k]) + product(table[k], 0.5) + halved(table[q], 2)
            return jax.nn.silu(product(s, table[q])) + halved(0.1 * s, k) + entries

        return jax_flash.dot_product_attention(query, key, value, score_mod=score_mod, implementation=implementation)

    def gradient(function):
        args = *inputs()[:3], inputs()[3][0]
        return jax.jit(jax.value_and_grad(lambda *args: (function(*args) ** 2).sum(), (0, 1, 2, 3)))(*args)

    def on_devices(query, key, value, table):
        mapped = jax.shard_map(
            lambda query, key, value, tables: local(query, key, value, tables[0]),
            mesh=mesh("auto"),
            in_specs=(HEADS, HEADS, HEADS, BATCH if varying else P()),
            out_specs=HEADS,
        )
        return mapped(query, key, value, jnp.stack([table] * 4))

    assert_close(gradient(on_devices), gradient(functools.partial(local, implementation="reference")))


@pytest.mark.slow
def test_with_gspmd():
    """Set `jax_use_shardy_partitioner=False`, which JAX reads once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "test_batch_and_heads and flash or test_other_shardings"]
    environment = os.environ | {"JAX_USE_SHARDY_PARTITIONER": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]

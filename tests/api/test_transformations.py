"""The fused attention under JAX's transformations: same results, and only the necessary kernel calls."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXPORT_CHECKS
from jax import export

import jax_flash

pytestmark = pytest.mark.usefixtures("device")

B, T, S, N, K, D = 2, 21, 27, 4, 2, 8
OPTIONS = {}  # default options of `attend`


@pytest.fixture(scope="module", params=[None, "flash"], ids=["default", "flash"], autouse=True)
def implementation(request):
    """The default implementation, and the fused calls without its fallback."""
    OPTIONS["implementation"] = request.param
    jax.clear_caches()  # cached traces of `attend` have the other implementation
    return request.param


def attend(*args, **options):
    return jax_flash.dot_product_attention(*args, **OPTIONS | options)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays(*lead):
    return (
        normal(0, *lead, T, N, D),
        normal(1, *lead, S, K, D),
        normal(2, *lead, S, K, D),
        normal(3, *lead[1:], N, T, S),
    )


def loss(query, key, value, bias=None, **options):
    return (attend(query, key, value, bias, **options) ** 2).sum()


def assert_close(x, y):
    """Compare up to the rounding of XLA's code around the kernels."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), x, y)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), x) == jax.tree.map(lambda x: (x.shape, x.dtype), y)


def calls(function, *args):
    """Count the calls of the forward and the backward kernel in the compiled program."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return tuple(text.count(f'custom_call_target="jax_flash_{name}"') for name in ("forward", "backward"))


def traced_calls(function, *args):
    """Count the calls in the traced program of one platform, before XLA merges equal calls."""
    count = {"jax_flash_forward": 0, "jax_flash_backward": 0}

    def walk(x):
        if hasattr(x, "eqns"):
            for equation in x.eqns:
                params = equation.params
                if equation.primitive.name in count:
                    count[equation.primitive.name] += 1
                inside = params["branches"][:1] if equation.primitive.name == "cond" else list(params.values())
                jax.tree.map(walk, inside, is_leaf=lambda x: hasattr(x, "eqns"))

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return tuple(count.values())


def problems(function, *args):
    """Return the problem of each backward call in the compiled program, as a dict of fields."""
    text = jax.jit(function).lower(*args).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_flash_backward"' in line]
    return [dict(re.findall(r"(\w+)=([\w,]+)", line[line.index("version=") :])) for line in lines]


def test_jit():
    q, k, v, bias = arrays(B)
    gradient = jax.value_and_grad(loss, (0, 1, 2, 3))
    assert_close(jax.jit(gradient)(q, k, v, bias), gradient(q, k, v, bias))


def test_vjp():
    q, k, v, _ = arrays(B)
    o, pull = jax.vjp(attend, q, k, v)
    assert_close(pull(2 * o), jax.grad(loss, (0, 1, 2))(q, k, v))


def test_eval_shape():
    q, k, v, bias = arrays(B)
    o, statistics = jax.eval_shape(jax_flash.attention_with_statistics, *(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert (o.shape, o.dtype) == ((B, T, N, D), jnp.bfloat16)
    assert all((x.shape, x.dtype) == ((B, N, T), jnp.float32) for x in (statistics.l, statistics.m))
    gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), q, k, v, bias)
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v, bias)]


# --- vmap ---


@pytest.mark.parametrize("mapped", list(itertools.product([0, None], repeat=4))[:-1], ids=str)
def test_vmap_over_any_operands(mapped):
    """Values and gradients of mapped and of shared operands."""
    q, k, v, bias = arrays(B)
    args = [jnp.stack([x, x + 1]) if axis == 0 else x for x, axis in zip((q, k, v, bias), mapped, strict=True)]
    gradient = jax.value_and_grad(lambda *args: loss(*args, is_causal=True), (0, 1, 2, 3))
    singles = [gradient(*(x[i] if axis == 0 else x for x, axis in zip(args, mapped, strict=True))) for i in range(2)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *singles)
    assert_close(jax.jit(jax.vmap(gradient, in_axes=mapped))(*args), expected)


def test_gradient_of_vmap_sums_over_shared_operands():
    q, k, v, bias = arrays(3, B)
    k, v, bias = k[0], v[0], bias[0]

    def mapped(q, k, v, bias):
        return jax.vmap(loss, in_axes=(0, None, None, None))(q, k, v, bias).sum()

    def looped(q, k, v, bias):
        return sum(loss(q[i], k, v, bias) for i in range(3))

    arguments = (0, 1, 2, 3)
    assert_close(
        jax.jit(jax.grad(mapped, arguments))(q, k, v, bias), jax.jit(jax.grad(looped, arguments))(q, k, v, bias)
    )


def test_nested_vmap_with_other_axes():
    q, k, v, _ = arrays(2, 3, B)
    lengths = jnp.array([[[1, 5], [27, 0], [3, 9]]] * 2)
    function = functools.partial(loss, is_causal=True)

    def single(q, k, v, lengths):
        return jax.value_and_grad(function, (0, 1, 2))(q, k, v, key_value_seq_lengths=lengths)

    expected = [[single(q[i, j], k[i, j], v[i, j], lengths[i, j]) for j in range(3)] for i in range(2)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[jax.tree.map(lambda *x: jnp.stack(x), *row) for row in expected])
    inner = jax.vmap(single, in_axes=(2, 0, 3, 0))
    outer = jax.jit(jax.vmap(inner, in_axes=(0, 0, 0, 0)))
    assert_close(outer(jnp.moveaxis(q, 1, 3), k, jnp.moveaxis(v, 1, 4), lengths), expected)


@pytest.mark.parametrize(
    "name", ["mask", "query_seq_lengths", "key_value_seq_lengths", "segments", "query_offset", "dropout_key"]
)
def test_vmap_over_operands_without_gradient(name):
    q, k, v, _ = arrays(B)
    values = {
        "mask": jax.random.bernoulli(jax.random.key(5), 0.6, (3, 1, N, T, S)),
        "query_seq_lengths": jnp.array([[1, 21], [0, 4], [5, 5]]),
        "key_value_seq_lengths": jnp.array([[1, 21], [0, 4], [27, 5]]),
        "segments": jax.random.randint(jax.random.key(6), (3, B, T + S), 0, 3),
        "query_offset": jnp.array([[1, -5], [0, 4], [7, 5]]),
        "dropout_key": jax.random.split(jax.random.key(8), 3),
    }[name]

    def function(x):
        options = {name: x}
        if name == "segments":
            options = {"query_segment_ids": x[:, :T], "key_value_segment_ids": x[:, T:]}
        if name == "dropout_key":
            options["dropout_rate"] = 0.3
        return jax.value_and_grad(functools.partial(loss, is_causal=name == "query_offset", **options), (0, 1))(q, k, v)

    expected = jax.tree.map(lambda *x: jnp.stack(x), *(function(x) for x in values))
    assert_close(jax.jit(jax.vmap(function))(values), expected)


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)], ids=str)
def test_vmap_over_sinks(mapped):
    """vmap makes one call, with mapped and with shared operands."""
    q, k, v, _ = arrays(B)
    args = [jnp.stack([x, x + 1, x - 2]) if axis == 0 else x for x, axis in zip((q, normal(4, N)), mapped, strict=True)]
    gradient = jax.value_and_grad(lambda q, sinks: loss(q, k, v, sinks=sinks), (0, 1))
    singles = [gradient(*(x[i] if axis == 0 else x for x, axis in zip(args, mapped, strict=True))) for i in range(3)]
    batched = jax.vmap(gradient, in_axes=mapped)
    assert_close(jax.jit(batched)(*args), jax.tree.map(lambda *x: jnp.stack(x), *singles))
    assert calls(batched, *args) == (1, 1)


def test_vmap_is_one_call():
    q, k, v, _ = arrays(3, B)
    assert calls(jax.vmap(jax.grad(loss, (0, 1, 2))), q, k, v) == (1, 1)


# --- kernel calls ---


def test_requested_gradients():
    args = arrays(B)
    for chosen in [(0,), (1,), (2,), (3,), (0, 2), (0, 1, 2, 3)]:
        (problem,) = problems(jax.grad(loss, chosen), *args)
        assert problem["requested"] == ",".join(("dq", "dk", "dv", "dbias")[i] for i in chosen)


def test_forward_alone_is_one_call():
    assert calls(attend, *arrays(B)) == (1, 0)
    assert calls(jax.grad(loss), *arrays(B)) == (1, 1)


def block(x, w):
    """A layer: attention between products. A remat policy may discard the results of the products."""
    q, k, v = (jnp.einsum("btnd,de->btne", x, w[i]) for i in range(3))
    return x + jnp.tanh(attend(q, k, v, is_causal=True))


def test_remat():
    x, w = normal(0, B, T, N, D), normal(1, 3, D, D) / D

    def gradient(block):
        return jax.grad(lambda x, w: (block(block(x, w), w) ** 2).sum(), (0, 1))

    plain, remat = gradient(block), gradient(jax.checkpoint(block))
    assert_close(jax.jit(remat)(x, w), jax.jit(plain)(x, w))
    assert traced_calls(plain, x, w) == (2, 2)
    assert traced_calls(remat, x, w) == (4, 2)


def test_remat_policy_saves_the_residuals():
    """Then the forward does not run again."""
    x, w = normal(0, B, T, N, D), normal(1, 3, D, D) / D
    policy = jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES)

    def gradient(block):
        return jax.grad(lambda x, w: (block(block(x, w), w) ** 2).sum(), (0, 1))

    saved = gradient(jax.checkpoint(block, policy=policy))
    assert_close(jax.jit(saved)(x, w), jax.jit(gradient(block))(x, w))
    assert traced_calls(saved, x, w) == (2, 2)


def test_scan_over_layers():
    x, w = normal(0, B, T, N, D), normal(1, 4, 3, D, D) / D

    def scanned(x, w):
        return (jax.lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, w)[0] ** 2).sum()

    def looped(x, w):
        for layer in w:
            x = block(x, layer)
        return (x**2).sum()

    expected = jax.jit(jax.grad(looped, (0, 1)))(x, w)
    results = jax.jit(jax.grad(scanned, (0, 1)))(x, w)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), results, expected)
    assert calls(jax.grad(scanned, (0, 1)), x, w) == (2, 1)  # the loop over layers, and again in the backward loop


def test_control_flow():
    q, k, v, _ = arrays(B)

    def function(q, n):
        q = jax.lax.fori_loop(0, 2, lambda _, q: attend(q, k, v), q)
        return jax.lax.cond(n > 0, lambda q: attend(q, k, v), lambda q: q, q)

    expected = attend(attend(attend(q, k, v), k, v), k, v)
    assert_close(jax.jit(function)(q, 1), expected)
    gradient = jax.jit(jax.grad(lambda q: (function(q, 1) ** 2).sum()))(q)
    assert_close(gradient, jax.grad(lambda q: (attend(attend(attend(q, k, v), k, v), k, v) ** 2).sum())(q))


# --- second derivatives through loops ---

# Functions of a query, and of two keys and values.
LOOPS = {
    "scan": lambda attend, q, k, v: jax.lax.scan(lambda x, _: (attend(x, k[0], v[0]), None), q, None, length=2)[0],
    "scan of remat": lambda attend, q, k, v: jax.lax.scan(
        lambda x, _: (jax.checkpoint(attend)(x, k[0], v[0]), None), q, None, length=2
    )[0],
    "scan over keys": lambda attend, q, k, v: jax.lax.scan(lambda x, kv: (attend(x, *kv), None), q, (k, v))[0],
    "map": lambda attend, q, k, v: jax.lax.map(lambda x: attend(x, k[0], v[0]), jnp.stack([q, 2 * q])),
    "scan of vmap": lambda attend, q, k, v: jax.lax.scan(
        lambda x, _: (jax.vmap(attend, (0, None, 0))(x, k[0], v), None), jnp.stack([q, 2 * q]), None, length=2
    )[0],
}


def gradient_of_loop(loop, implementation, chosen):
    attend = functools.partial(jax_flash.dot_product_attention, is_causal=True, implementation=implementation)
    return jax.grad(lambda *args: (LOOPS[loop](attend, *args) ** 2).sum(), chosen)


@functools.cache
def shared(function, *args):
    """Return a result of plain JAX, which the tests of all implementations and devices share."""
    return function(*args)


def gradient_of_gradient(loop, chosen, implementation):
    q, k, v, _ = arrays(2, B)
    gradient = gradient_of_loop(loop, implementation, chosen)
    penalty = jax.grad(lambda *args: sum((jnp.sin(x) ** 2).sum() for x in gradient(*args)), chosen)
    return jax.tree.map(np.asarray, jax.jit(penalty)(q[0], k, v))


@pytest.mark.parametrize("chosen", [(0,), (0, 1, 2)], ids=["query", "all"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gradient_of_gradient_through_loops(loop, chosen, implementation):
    results = gradient_of_gradient(loop, chosen, implementation)
    assert_near(results, shared(gradient_of_gradient, loop, chosen, "reference"))


def jvp_of_gradient(loop, implementation):
    q, k, v, _ = arrays(2, B)
    gradient = gradient_of_loop(loop, implementation, (0, 1, 2))
    jvp = jax.jit(lambda *args: jax.jvp(gradient, args, tuple(map(jnp.cos, args))))
    return jax.tree.map(np.asarray, jvp(q[0], k, v))


@pytest.mark.parametrize("loop", LOOPS)
def test_jvp_of_gradient_through_loops(loop, implementation):
    assert_near(jvp_of_gradient(loop, implementation), shared(jvp_of_gradient, loop, "reference"))


def hessian(implementation):
    q, k, v = normal(0, 1, 3, 2, 8), normal(1, 2, 1, 3, 1, 8), normal(2, 2, 1, 3, 1, 8)
    function = jax.jit(jax.jacfwd(gradient_of_loop("scan", implementation, (0, 1, 2)), (0, 1, 2)))
    return jax.tree.map(np.asarray, function(q, k, v))


def test_hessian_through_a_loop(implementation):
    assert_near(hessian(implementation), shared(hessian, "reference"))


@pytest.mark.parametrize(
    "call", [(gradient_of_gradient, "scan over keys", (0, 1, 2)), (jvp_of_gradient, "scan of vmap")]
)
def test_plain_jax_through_a_loop(call):
    assert_near(shared(*call, "xla"), shared(*call, "reference"))


def test_derivatives_of_loops_run_the_kernels(implementation):
    q, k, v, _ = arrays(2, B)
    gradient = gradient_of_loop("scan", implementation, 0)
    penalty = jax.grad(lambda *args: (gradient(*args) ** 2).sum())
    assert min(*calls(gradient, q[0], k, v), *calls(penalty, q[0], k, v)) > 0


def assert_near(x, y):
    """Compare second derivatives, which accumulate more rounding errors."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), x, y)


# --- export and memory ---


def test_export_round_trip(device):
    q, k, v, bias = arrays(B)
    platform = "cuda" if device.platform == "gpu" else "cpu"

    def function(*args):
        return (attend(*args, is_causal=True) ** 2).sum()

    gradient = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))
    exported = export.export(gradient, platforms=(platform,), disabled_checks=EXPORT_CHECKS)(q, k, v, bias)
    restored = export.deserialize(exported.serialize())
    assert_close(restored.call(q, k, v, bias), gradient(q, k, v, bias))


def test_export_for_a_platform_without_kernels():
    """The implementation is chosen at lowering: a platform without kernels uses the blockwise implementation."""
    q, k, v, _ = arrays(B)
    function = jax.jit(jax_flash.dot_product_attention)
    exported = export.export(function, platforms=("cpu", "cuda", "tpu"), disabled_checks=EXPORT_CHECKS)(q, k, v)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert_close(export.deserialize(exported.serialize()).call(q, k, v), function(q, k, v))


def test_profiler_names():
    """Profiles show the names of instructions and operations."""
    q, k, v, _ = arrays(B)
    with jax.named_scope("layer3"):
        text = jax.jit(jax.grad(loss)).lower(q, k, v).compile().as_text()
    for name in ("jax_flash_forward", "jax_flash_backward"):
        assert re.search(rf'%{name}[.\d]* = .*op_name="[^"]*/{name}"', text)
    assert not re.search(r'%ffi_call|/ffi_call"', text)


def test_donated_arguments():
    q, k, v, _ = arrays(B)
    expected = attend(q, k, v)
    donated = q + 0
    assert_close(jax.jit(attend, donate_argnums=(0,))(donated, k, v), expected)
    step = jax.jit(lambda q, k, v: q - 0.1 * jax.grad(loss)(q, k, v), donate_argnums=(0,))
    expected, once = q - 0.1 * jax.grad(loss)(q, k, v), q + 0
    assert_close(step(once, k, v), expected)


def test_one_array_as_all_operands():
    x = normal(0, B, T, N, D)
    gradient = jax.jit(jax.grad(lambda x: loss(x, x, x)))(x)
    assert_close(gradient, sum(jax.grad(loss, (0, 1, 2))(x, x, x)))


def test_arrays_without_gradients():
    """A constant bias has no dbias. Integers and keys have no gradients."""
    q, k, v, bias = arrays(B)
    (problem,) = problems(jax.grad(lambda q: loss(q, k, v, bias, dropout_rate=0.1, dropout_key=jax.random.key(0))), q)
    assert problem["requested"] == "dq"


def test_gradients_do_not_depend_on_cached_traces():
    """JAX caches traces of a jitted function. A gradient must not depend on gradients requested before."""
    q, k, v, bias = arrays(B)
    function = jax.jit(functools.partial(attend, return_residual=True))

    def loss_of_result(index):
        return lambda *args: (function(*args)[index] ** 2).sum()

    expected = jax.grad(loss_of_result(1), (0, 3))(q, k, v, bias)
    jax.clear_caches()
    jax.grad(loss_of_result(0), (0, 3))(q, k, v, bias)
    jax.grad(loss_of_result(0), 0)(q, k, v, bias)
    assert_close(jax.grad(loss_of_result(1), (0, 3))(q, k, v, bias), expected)


def test_statistics_without_cotangent_cost_nothing():
    (without,) = problems(jax.grad(loss), *arrays(B))
    (within,) = problems(jax.grad(lambda *x: jax_flash.attention_with_statistics(*x)[1].logsumexp.sum()), *arrays(B))
    assert (without["dlogsumexp"], within["dlogsumexp"]) == ("0", "1")


def test_without_jit():
    q, k, v, _ = arrays(B)
    expected = jax.grad(loss, (0, 1, 2))(q, k, v)
    with jax.disable_jit():
        for x, y in zip(jax.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
            assert_close(x, y)

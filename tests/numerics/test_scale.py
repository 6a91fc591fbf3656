"""The scale is an operand. A traced scale is as exact as a static one, has a gradient, and causes no recompilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, upcast
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash
from jax_flash import attention

IMPLEMENTATIONS = (None, "flash", "xla", "reference")
ROUNDED = [*((implementation, "float32") for implementation in IMPLEMENTATIONS), ("flash", "bfloat16")]
SCALES = (96**-0.5, -0.5, 0.0, 1e-35)


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs(dtype="float32", B=2, T=40, S=70, N=4, K=2, D=96):
    return normal(0, B, T, N, D, dtype=dtype), normal(1, B, S, K, D, dtype=dtype), normal(2, B, S, K, D, dtype=dtype)


def attend(q, k, v, scale, **options):
    return jax_flash.dot_product_attention(q, k, v, scale=scale, **{"is_causal": True} | options)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_traced_scale_is_as_exact_as_static(dtype, implementation):
    q, k, v = inputs(dtype)
    traced = jax.jit(functools.partial(attend, implementation=implementation))
    for scale in SCALES:
        static = attend(q, k, v, scale, implementation=implementation)
        np.testing.assert_array_equal(traced(q, k, v, scale), static, err_msg=str(scale))
        np.testing.assert_array_equal(traced(q, k, v, jnp.asarray(scale, "float32")), static, err_msg=str(scale))


def materialised(q, k, v, scale):
    """Causal attention in JAX's own operations, in the dtype of the arrays."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = scale * jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type="float32")
    p = jax.nn.softmax(jnp.where(jnp.tri(*s.shape[2:], dtype=bool), s, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnd->btnd", p, v)


def gradients(attention, cotangents, scale, *arrays):
    """Return the gradient of the scale for each cotangent. XLA would convert constant cotangents while it compiles."""
    o, pull = jax.vjp(lambda scale: attention(*arrays, scale), jnp.asarray(scale, "float32"))
    return jax.vmap(lambda cotangent: pull(cotangent.astype(o.dtype))[0])(cotangents)


@functools.cache
def many_cotangents():
    return np.asarray(normal(3, 64, *inputs()[0].shape))


@functools.cache
def cases_of_gradients(dtype):
    """Return arrays, scale and exact gradients of each case.

    Equal queries, keys and values have large scores on the diagonal, so that errors of D do not cancel. (In float32 D
    has the dtype of O: `test_gradient_of_large_scores` has the bound.)
    """
    q, k, v = map(np.asarray, inputs(dtype))
    equal = np.repeat(k[:, : q.shape[1]], q.shape[2] // k.shape[2], axis=2), k, k
    scales = (96**-0.5, -0.1, 0.0, 2**-14, 1e-5, 1e-7)
    cases = [((q, k, v), scale) for scale in scales]
    cases += [(equal, scale) for scale in scales[:2] if dtype != "float32"]
    exact = jax.jit(functools.partial(gradients, functools.partial(attend, implementation="reference")))
    with jax.enable_x64(True):
        return [
            (arrays, scale, np.asarray(exact(many_cotangents(), scale, *upcast(arrays)))) for arrays, scale in cases
        ]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient(dtype, implementation):
    """Check the norm of the errors over many cotangents. The baseline's error of a few may be small by chance."""
    fused = jax.jit(functools.partial(gradients, functools.partial(attend, implementation=implementation)))
    standard = jax.jit(functools.partial(gradients, materialised))
    for arrays, scale, exact in cases_of_gradients(dtype):
        error, allowed = (np.linalg.norm(f(many_cotangents(), scale, *arrays) - exact) for f in (fused, standard))
        allowed = 2 * allowed + 2 * jnp.finfo(dtype).eps * np.linalg.norm(exact)
        assert error <= allowed, (scale, error, allowed)


def gradients_of_large_scores(implementation, dtype, scale, q, k, v):
    """Return the gradients of the query and of the scale for each of 8 cotangents."""
    o, pull = jax.vjp(lambda *xs: attend(*xs, implementation=implementation), q, k, v, scale)
    cotangents = normal(3, 8, *q.shape, dtype=dtype)
    return jax.vmap(lambda cotangent: pull(cotangent.astype(o.dtype))[::3])(cotangents)


@functools.cache
def case_of_large_scores(dtype):
    """Return a scale, arrays with scores of standard deviation 4, and the exact gradients of query and scale."""
    q, k, v = inputs(dtype)
    scale, arrays = 96**-0.5, tuple(map(np.asarray, (2 * q, 2 * k, v)))
    with jax.enable_x64(True):
        exact = gradients_of_large_scores("reference", dtype, scale, *upcast(arrays))
    return scale, arrays, *map(np.asarray, exact)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient_of_large_scores(dtype, implementation):
    """Check large scores, where the gradient is a sum Σ QdQ / τ of terms that cancel.

    P and dS, which GPUs round to the dtype, have independent errors in each row. Errors of float32 arithmetic may be
    correlated between rows.
    """
    scale, arrays, dq, exact = case_of_large_scores(dtype)
    rows = abs(arrays[0].astype("float64") * dq).sum(-1) / scale
    compute = jax.jit(functools.partial(gradients_of_large_scores, implementation, dtype))
    _, found = compute(jnp.asarray(scale, "float32"), *arrays)
    rounded = float(jnp.finfo(dtype).eps) * np.linalg.norm(rows.reshape(8, -1), axis=1)
    assert (abs(found - exact) <= rounded + np.finfo("float32").eps * rows.sum((1, 2, 3))).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=70, S=90, D=64, E=64, causal=True),
        Case(B=1, T=70, S=90, D=192, E=128, window=(30, 5), soft_cap=5.0),
        Case(K=1, sinks=2.0, bias="1nts", lengths=True, dropout=0.2, deterministic=True),
        Case(T=3, S=1100, N=8, causal=True, offset=True),
        Case(B=1, S=0),
    ],
    ids=str,
)
def test_gradient_with_features(case):
    """Check bfloat16. If the scale has a gradient, the kernels return O and dQ in float32."""
    arrays, cotangents = case.arrays("bfloat16"), case.cotangents("bfloat16")
    query = arrays.pop("query")

    def gradients(implementation, scale, query, others):
        def both(query, scale):
            o, statistics = jax_flash.attention_with_statistics(
                query, **others, **case.options | {"scale": scale}, implementation=implementation
            )
            return o, statistics.logsumexp

        results, pull = jax.vjp(both, query, scale)
        return results[0], *pull(tuple(x.astype(y.dtype) for x, y in zip(cotangents, results, strict=True)))

    with jax.enable_x64(True):
        exact = map(np.asarray, gradients("reference", 0.1, *upcast((query, arrays))))
    results = jax.jit(functools.partial(gradients, "flash"))(jnp.asarray(0.1, "float32"), query, arrays)
    (o, dq, dscale), (exact_o, exact_dq, exact_dscale) = map(np.asarray, results), exact
    eps = float(jnp.finfo("bfloat16").eps)
    for x, y in ((o, exact_o), (dq, exact_dq)):
        assert x.dtype == "bfloat16"
        assert np.linalg.norm(x.astype("float64") - y) <= 2 * eps * np.linalg.norm(y)
    rows = (query.astype("float64") * exact_dq).sum(-1) / 0.1
    assert abs(dscale - exact_dscale) <= eps * np.linalg.norm(rows)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
@pytest.mark.parametrize("scale", [0.7, -0.4, 0.0])
def test_gradients_of_all_inputs_by_finite_differences(scale, implementation):
    case = Case(B=1, T=5, S=6, N=2, K=1, D=3, E=2, bias="1nts", soft_cap=1.5, dropout=0.3)
    arrays = case.arrays("float64", 0)
    differentiated = {name: jnp.asarray(arrays.pop(name)) for name in ("query", "key", "value", "bias")}

    def both(differentiated, scale):
        o, statistics = jax_flash.attention_with_statistics(
            **differentiated, **arrays, **case.options | {"scale": scale}, implementation=implementation
        )
        return o, statistics.logsumexp

    modes = ["rev"] if implementation == "flash" else ["fwd", "rev"]
    check_grads(both, (differentiated, jnp.asarray(scale)), order=2, modes=modes, atol=1e-4, rtol=1e-4, eps=1e-4)


def test_new_value_does_not_recompile():
    q, k, v = inputs()
    attend(q, k, v, 0.25)
    programs = attention.attend._cache_size()
    for scale in (0.5, 0.75, np.float32(0.3), jnp.asarray(0.4)):
        attend(q, k, v, scale)
    assert attention.attend._cache_size() == programs


@pytest.mark.parametrize(("implementation", "dtype"), ROUNDED)
def test_transformations(implementation, dtype):
    """vmap over scales, with and without vmap over the arrays; scan over scales; remat; gradients of these."""
    q, k, v = inputs(dtype)
    queries, scales = jnp.stack([q, q[::-1], 2 * q]), jnp.array([0.3, -0.2, 0.0])
    loss = functools.partial(attend, implementation=implementation)
    gradient = jax.value_and_grad(lambda q, scale: jnp.sin(loss(q, k, v, scale)).sum(), argnums=(0, 1))
    expected = [gradient(q, scale) for q, scale in zip(queries, scales, strict=True)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    tolerance = 2e-5 if dtype == "float32" else 0.02
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    same = functools.partial(jax.tree.map, lambda x, y: close(*(np.asarray(z, "float32") for z in (x, y))))
    same(jax.jit(jax.vmap(gradient))(queries, scales), expected)
    same(jax.lax.map(lambda xs: jax.checkpoint(gradient)(*xs), (queries, scales)), expected)
    shared = jax.vmap(gradient, in_axes=(None, 0))(q, scales)
    same(shared, jax.tree.map(lambda *x: jnp.stack(x), *(gradient(q, scale) for scale in scales)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("implementation", "dtype"), ROUNDED)
def test_sharded(implementation, dtype, axis_type):
    """Inside of `shard_map` and with sharded arrays, the gradient of a scale that all devices share is summed."""
    q, k, v = inputs(dtype)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    spec = P("data", None, "model")

    def loss(scale, q, k, v):
        return jnp.sin(attend(q, k, v, scale, implementation=implementation)).sum()

    def sharded(scale, q, k, v):
        one = jax.shard_map(
            lambda *args: jax.lax.psum(loss(*args), ("data", "model")),
            mesh=mesh,
            in_specs=(P(), spec, spec, spec),
            out_specs=P(),
        )
        return one(scale, q, k, v)

    expected = jax.grad(loss)(0.3, q, k, v)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (q, k, v)]
        for function in (loss, sharded):
            np.testing.assert_allclose(jax.jit(jax.grad(function))(0.3, *placed), expected, rtol=1e-4)


def test_sharded_sequence():
    """Check bfloat16. A device merges its visits without rounding, which the gradient of the scale requires."""
    q, k, v = inputs("bfloat16", T=64, S=64)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda scale, *arrays: attend(*arrays, scale).astype("float32").sum())
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, P(None, "rows"))) for x in (q, k, v)]
        results = jax.jit(gradient)(0.3, *placed)
    np.testing.assert_allclose(results, gradient(0.3, q, k, v), rtol=1e-4)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (1j, r"scale must be a real number, not complex64\[\]"),
        (jnp.ones(3), r"scale must be a real number, not float32\[3\]"),
        (True, r"scale must be a real number, not bool\[\]"),
        (np.complex64(2 + 1j), r"scale must be a real number, not complex64\[\]"),
        (np.array(2 + 1j), r"scale must be a real number, not complex64\[\]"),
        (jnp.asarray(True), r"scale must be a real number, not bool\[\]"),
    ],
)
def test_invalid_scale_is_refused(scale, message):
    q, k, v = inputs(T=3, S=4, D=8)
    with pytest.raises(TypeError, match=message):
        jax.jit(attend)(q, k, v, scale)
    with pytest.raises(TypeError, match="scale must be a real number"):
        attend(q, k, v, scale)

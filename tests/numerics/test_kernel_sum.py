"""`kernel_sum` against the kernel matrix in float64: values, gradients, rounding, transformations and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import kernel_sum, kernels

pytestmark = pytest.mark.usefixtures("device")

M, N, D, E = 40, 70, 5, 3
SCALE, ALPHA = 0.7, 1.3
# The kernel as a function of d, and the largest slope of the kernel as a function of d².
ORACLES = {
    "gaussian": (lambda d: jnp.exp(-(d**2) / 2), 1 / 2),
    "laplace": (lambda d: jnp.exp(-d), None),
    "matern32": (lambda d: (1 + 3**0.5 * d) * jnp.exp(-(3**0.5) * d), 3 / 2),
    "matern52": (lambda d: (1 + 5**0.5 * d + 5 * d**2 / 3) * jnp.exp(-(5**0.5) * d), 5 / 6),
    "rational_quadratic": (lambda d, alpha=ALPHA: (1 + d**2 / (2 * alpha)) ** -alpha, 1 / 2),
}
POINTS = ("near", "far", "identical")


def arrays(where="near", dtype=np.float32):
    """x, y and weights of both signs. "far" is 1000 times the spread of the points away from the origin."""
    rng = np.random.default_rng(0)
    x, y, weights = (rng.standard_normal(shape) for shape in ((M, D), (N, D), (N, E)))
    if where == "identical":
        x[: M // 2] = y[: M // 2]
    x, y = (points + (1000 if where == "far" else 0) for points in (x, y))
    return [array.astype(dtype) for array in (x, y, weights)]


def kernel(name, *parameters):
    given = parameters or ((SCALE, ALPHA) if name == "rational_quadratic" else (SCALE,))
    return getattr(kernels, name)(*given)


def distances(x, y):
    """Distances with gradient 0 where they are 0."""
    d2 = ((x[:, None] - y) ** 2).sum(-1)
    return jnp.where(d2 == 0, 0, jnp.sqrt(jnp.where(d2 == 0, 1, d2)))


def expected(name, x, y, weights, scale=SCALE, *alpha):
    return ORACLES[name][0](distances(x, y) / scale, *alpha) @ weights


def in_float64(function, *inputs):
    """The value and the gradients of `function`, with cotangents that are the same for every dtype."""
    with jax.enable_x64(True):
        return value_and_gradients(function, *(jnp.asarray(x, jnp.float64) for x in inputs))


def value_and_gradients(function, *inputs):
    @jax.jit
    def both(*inputs):
        value, pull = jax.vjp(function, *inputs)
        cotangent = np.cos(np.arange(value.size)).reshape(value.shape)
        return value, pull(jnp.asarray(cotangent, value.dtype))

    return both(*inputs)


def assert_close(ours, theirs, tolerance):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        y = np.asarray(y, np.float64)
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=tolerance * max(abs(y).max(), 1e-30))


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("name", ORACLES)
def test_values_within_the_bound(name, where):
    """Rounding moves d² by at most `moved`, so a smooth kernel by its slope times that, and Laplace's by a root."""
    x, y, weights = arrays(where)
    ours = np.asarray(kernel_sum(x, y, weights, kernel(name)), np.float64)
    wide = [array.astype(np.float64) for array in (x, y, weights)]
    with jax.enable_x64(True):
        theirs = np.asarray(expected(name, *wide))
    centre = wide[1].mean(0)
    moved = 2.0**-20 * sum(((points - centre) ** 2).sum(1).max() for points in wide[:2]) / SCALE**2
    slope = ORACLES[name][1]
    of_kernel = np.sqrt(2 * moved) if slope is None else slope * moved
    bound = (of_kernel + 2.0**-20) * abs(wide[2]).sum(0)
    assert (abs(ours - theirs) <= bound).all(), abs(ours - theirs).max() / bound.min()


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("name", ORACLES)
def test_gradients(name, where):
    inputs = [*arrays(where), *([SCALE, ALPHA] if name == "rational_quadratic" else [SCALE])]
    ours = value_and_gradients(
        lambda x, y, weights, *parameters: kernel_sum(x, y, weights, kernel(name, *parameters)),
        *(jnp.asarray(x, jnp.float32) for x in inputs),
    )
    inputs[3:] = [np.float32(x) for x in inputs[3:]]
    assert_close(ours, in_float64(functools.partial(expected, name), *inputs), 3e-5)


@pytest.mark.parametrize("name", ORACLES)
def test_float64(name):
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x) for x in arrays(dtype=np.float64)]
        ours = value_and_gradients(lambda *inputs: kernel_sum(*inputs, kernel(name)), *inputs)
        theirs = value_and_gradients(functools.partial(expected, name), *inputs)
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("name", ORACLES)
def test_equal_points_have_kernel_one(name):
    """The diagonal of a kernel matrix is 1 up to rounding. Where a root magnifies errors, equal points have d² = 0."""
    x = arrays("far")[0]
    each = jax.vmap(lambda x: kernel_sum(x[None], x[None], np.ones((1, 1), np.float32), kernel(name)))
    diagonal = jax.jit(each)(x)
    np.testing.assert_allclose(diagonal, 1, rtol=0, atol=2e-7)
    matrix = kernel_sum(x, x, np.eye(M, dtype=np.float32), kernel(name))
    np.testing.assert_allclose(np.diag(matrix), 1, rtol=0, atol=2e-7 if kernel(name).sharp else 1e-5)


@pytest.mark.parametrize("name", ["laplace", "matern32", "matern52"])
def test_points_within_rounding_errors_count_as_equal(name):
    """Their kernel is 1, but derivatives pass through: the second derivative with respect to x is that of equal points.

    The passes of attention round differently. Otherwise the slopes at different d² would not cancel.
    """
    x = np.full((1, D), 3, np.float32)

    def value(t, y):
        both, weights = jnp.concatenate([y, -x]), jnp.array([[1.0], [0.0]])  # centred, so the norms are large
        return kernel_sum(x + t * jnp.eye(D)[0], both, weights, kernel(name)).sum()

    close, far = x + np.float32(2e-4), x + np.float32(2e-2)
    assert value(0, x) == value(0, close) == 1 > value(0, far)
    expected = {"laplace": 0, "matern32": -3 / SCALE**2, "matern52": -5 / 3 / SCALE**2}[name]
    for y in (x, close):
        np.testing.assert_allclose(jax.grad(jax.grad(value))(jnp.float32(0), y), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("where", ["outlier", "short length scale"])
def test_no_kernel_is_above_one(name, where):
    """Rounding makes d² negative where the points are far apart compared with the length scale."""
    x = arrays()[0]
    x[0] = 1e4 if where == "outlier" else x[0]
    scale = 1e-4 if where == "short length scale" else SCALE
    kernel_of = kernel(name, scale, *([ALPHA] if name == "rational_quadratic" else []))
    matrix = np.asarray(kernel_sum(x, x, np.eye(M, dtype=np.float32), kernel_of))
    assert (matrix >= 0).all() and (matrix <= 1 + 1e-6).all(), matrix.max()


@pytest.mark.parametrize(("scale", "error"), [(1.0, 0.003), (0.1, 0.03), (0.01, 0.28)])
def test_laplace_gradient_of_near_points(scale, error):
    """Near points count as equal. The guide has these errors."""
    x, y = np.random.default_rng(0).random((2, 1000, 1), np.float32)
    weights = np.ones((1000, 1), np.float32)
    ours = jax.grad(lambda x: kernel_sum(x, y, weights, kernels.laplace(scale)).sum())(jnp.asarray(x))
    with jax.enable_x64(True):
        wide = [jnp.asarray(array, jnp.float64) for array in (x, y, weights)]
        theirs = jax.grad(lambda x: expected("laplace", x, *wide[1:], scale).sum())(wide[0])
    assert np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) <= error * np.linalg.norm(theirs)


def test_only_the_sum_may_overflow():
    """The kernel is up to exp(100), but the weights are small."""
    x, y, weights = arrays()
    weights *= np.float32(1e-30)
    ours = kernel_sum(x, y, weights, lambda dot, x_norm2, y_norm2: 100 - 0.1 * (x_norm2 + y_norm2 - 2 * dot))
    theirs = in_float64(lambda x, y, w: jnp.exp(100 - 0.1 * distances(x, y) ** 2) @ w, x, y, weights)[0]
    assert_close(ours, theirs, 3e-5)


@pytest.mark.gpu
def test_tf32():
    """Points are rounded first, so equal points stay equal. Other platforms multiply in full precision."""
    x, y, weights = arrays("identical")
    with jax.default_device(jax.devices("gpu")[0]):
        for name in ORACLES:
            ours = kernel_sum(x, y, weights, kernel(name), precision="default")
            with jax.enable_x64(True):
                theirs = expected(name, *(array.astype(np.float64) for array in (x, y, weights)))
            assert_close(ours, theirs, 5e-3)
            matrix = kernel_sum(x, x, np.eye(M, dtype=np.float32), kernel(name), precision="default")
            np.testing.assert_allclose(np.diag(matrix), 1, rtol=0, atol=1e-4)


def test_length_scale_of_each_dimension():
    x, y, weights = (jnp.asarray(array) for array in arrays())
    scales = jnp.linspace(0.5, 2, D)
    ours = value_and_gradients(lambda *a: kernel_sum(*a[:3], kernels.matern52(a[3])), x, y, weights, scales)
    theirs = in_float64(lambda x, y, w, s: expected("matern52", x / s, y / s, w, 1.0), x, y, weights, scales)
    assert_close(ours, theirs, 3e-5)


def test_a_kernel_is_an_argument():
    """A kernel is a pytree: new parameters need no new trace, and it has a gradient."""
    traces = []

    @jax.jit
    def total(kernel):
        traces.append(kernel)
        return kernel_sum(*arrays(), kernel).sum()

    kernel = kernels.rational_quadratic(0.5, 2.0)
    first, second = total(kernel), total(jax.tree.map(lambda x: 2 * x, kernel))
    assert len(traces) == 1 and first != second
    gradient = jax.grad(total)(kernel)
    assert gradient.length_scale != 0 and gradient.parameters[0] != 0


def of_distance(factor):
    return lambda dot, x_norm2, y_norm2: -factor * (x_norm2 + y_norm2 - 2 * dot)


def test_a_function():
    """It captures a traced number, which has a gradient."""
    x, y, weights = (jnp.asarray(array) for array in arrays())
    factor = jnp.float32(0.4)
    ours = value_and_gradients(lambda *a: kernel_sum(*a[:3], of_distance(a[3])), x, y, weights, factor)
    theirs = in_float64(lambda x, y, w, c: jnp.exp(-c * distances(x, y) ** 2) @ w, x, y, weights, factor)
    assert_close(ours, theirs, 3e-5)


def test_a_kernel_that_is_zero_somewhere():
    """log k = -inf. Row 0 sees nothing: its sum is 0, and its gradient is 0."""
    x, y, weights = (jnp.asarray(array) for array in arrays())
    x, y = x.at[0].set(-abs(x[0])), abs(y)

    def log_kernel(dot, x_norm2, y_norm2):
        return jnp.where(dot > 0, 2 * jnp.log(jnp.where(dot > 0, dot, 1)), -jnp.inf)

    ours = value_and_gradients(lambda *a: kernel_sum(*a, log_kernel), x, y, weights)
    theirs = in_float64(lambda x, y, w: jnp.maximum(x @ y.T, 0) ** 2 @ w, x, y, weights)
    assert_close(ours, theirs, 3e-5)
    assert not np.asarray(ours[0][0]).any() and not np.asarray(ours[1][0][0]).any()


def test_underflow_is_exact():
    x, y, weights = (jnp.asarray(array) for array in arrays())
    for value, gradients in (
        value_and_gradients(lambda x, y, w: kernel_sum(x + 1e3, y, w, kernels.gaussian(1.0)), x, y, weights),
        value_and_gradients(lambda x, y, w: kernel_sum(x, y, w, lambda dot, a, b: dot - 1e6), x, y, weights),
    ):
        assert not any(np.asarray(array).any() for array in (value, *gradients))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_inputs_are_computed_in_float32(dtype):
    inputs = [jnp.asarray(array, dtype) for array in arrays("far")]
    ours = kernel_sum(*inputs, kernels.matern32(SCALE))
    wide = kernel_sum(*(x.astype(jnp.float32) for x in inputs), kernels.matern32(SCALE))
    assert ours.dtype == dtype
    np.testing.assert_array_equal(ours, wide.astype(dtype))


@pytest.mark.parametrize("name", ORACLES)
def test_nan_stays_in_its_row(name):
    x, y, weights = (jnp.asarray(array) for array in arrays())
    sums = kernel_sum(x.at[3, 1].set(jnp.nan), y, weights, kernel(name))
    np.testing.assert_array_equal(jnp.isnan(sums), jnp.broadcast_to(jnp.arange(M)[:, None] == 3, (M, E)))
    diverged = jax.jit(lambda scale: kernel_sum(x, y, weights, kernel(name, scale, *kernel(name).parameters)))
    assert jnp.isnan(diverged(jnp.nan)).all()


def test_without_rank_promotion():
    x, y, weights = (jnp.asarray(array) for array in arrays())
    scales = jnp.linspace(0.5, 1, D)
    expected = kernel_sum(x, y, weights, kernels.gaussian(scales))
    with jax.numpy_rank_promotion("raise"):
        for given in ((x, y, weights), (x[None], y, weights), (x, y[None], weights)):
            np.testing.assert_array_equal(kernel_sum(*given, kernels.gaussian(scales)).reshape(M, E), expected)


def test_leading_dims_broadcast():
    x, y, weights = (jnp.asarray(array) for array in arrays())
    xs, ws = jnp.stack([x, 2 * x])[:, None], jnp.stack([weights, -weights, 3 * weights])
    for kernel in (kernels.laplace(SCALE), of_distance(0.4)):
        ours = kernel_sum(xs, y, ws, kernel)
        assert ours.shape == (2, 3, M, E)
        theirs = [[kernel_sum(x, y, w, kernel) for w in ws] for x in xs[:, 0]]
        assert_close(ours, jnp.stack([jnp.stack(row) for row in theirs]), 1e-6)


@pytest.mark.parametrize("log_kernel", [kernels.laplace(SCALE), of_distance(0.4)], ids=["kernel", "function"])
@pytest.mark.parametrize("shape", [(0, N, D, E), (M, 0, D, E), (M, N, D, 0), (1, 1, 1, 1)], ids=str)
def test_sizes(shape, log_kernel):
    m, n, d, e = shape
    inputs = jnp.ones((m, d)), jnp.ones((n, d)), jnp.ones((n, e))
    for batch in ((), (2,), (0,)):
        given = [jnp.broadcast_to(x, (*batch, *x.shape)) for x in inputs]
        value, gradients = value_and_gradients(lambda *a: kernel_sum(*a, log_kernel), *given)
        np.testing.assert_allclose(value, np.full((*batch, m, e), n), rtol=1e-6)
        of_weights = np.cos(np.arange(value.size)).reshape(value.shape).sum(-2, keepdims=True)
        expected = *(np.zeros(x.shape) for x in given[:2]), np.broadcast_to(of_weights, given[2].shape)
        for ours, theirs in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)  # points have terms near 1, which cancel


def test_transformations():
    """vmap over a parameter, remat, scan and jit, and gradients through them."""
    x, y, weights = (jnp.asarray(array) for array in arrays())
    scales = jnp.array([0.5, 1.0, 2.0])

    def total(scale):
        return (kernel_sum(x, y, weights, kernels.matern32(scale)) ** 2).sum()

    expected = jnp.stack([total(scale) for scale in scales]), jnp.stack([jax.grad(total)(scale) for scale in scales])
    by_vmap = jax.jit(jax.vmap(jax.value_and_grad(jax.checkpoint(total))))(scales)
    by_scan = jax.jit(lambda scales: jax.lax.map(jax.value_and_grad(total), scales))(scales)
    assert_close(by_vmap, expected, 1e-5)
    assert_close(by_scan, expected, 1e-5)


@pytest.mark.parametrize("name", ORACLES)
def test_second_and_forward_derivatives(name):
    """Also for equal points, where d has no derivative."""
    x, _, weights = arrays()
    weights = weights[:M]

    def total(sum_of, scale):
        return (sum_of(scale) ** 2).sum()

    parameters = (ALPHA,) if name == "rational_quadratic" else ()
    ours = functools.partial(total, lambda s: kernel_sum(x, x, weights, kernel(name, s, *parameters)))
    second, forward = jax.grad(jax.grad(ours))(jnp.float32(SCALE)), jax.jvp(ours, (jnp.float32(SCALE),), (1.0,))[1]
    wide = [array.astype(np.float64) for array in (x, x, weights)]
    with jax.enable_x64(True):
        theirs = functools.partial(total, lambda s: expected(name, *wide, s, *parameters))
        expected_second, expected_forward = jax.grad(jax.grad(theirs))(SCALE), jax.grad(theirs)(SCALE)
    assert_close(second, expected_second, 1e-4)
    assert_close(forward, expected_forward, 1e-4)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("log_kernel", [kernels.laplace(SCALE), of_distance(0.4)], ids=["kernel", "function"])
def test_sharded_rows(log_kernel, mode):
    x, y, weights = (jnp.asarray(array) for array in arrays())
    function = functools.partial(kernel_sum, log_kernel=log_kernel)
    expected = value_and_gradients(function, x, y, weights)
    types = (jax.sharding.AxisType.Explicit if mode == "explicit" else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=types)
    with jax.set_mesh(mesh):
        placed = jax.device_put([x, y, weights], [NamedSharding(mesh, spec) for spec in (P("data"), P(), P())])
        assert_close(jax.jit(function)(*placed), expected[0], 1e-6)
        cotangent = jnp.cos(jnp.arange(M * E)).reshape(M, E)
        gradients = jax.jit(jax.grad(lambda *a: (function(*a) * cotangent).sum(), (0, 1, 2)))
        assert_close(gradients(*placed), expected[1], 1e-5)


@pytest.mark.parametrize("log_kernel", [kernels.laplace(SCALE), of_distance(0.4)], ids=["kernel", "function"])
def test_sharded_batch(log_kernel):
    """An explicit mesh axis divides a leading dim of x, and maybe of y and the weights."""
    x, y, weights = (jnp.asarray(array) for array in arrays())
    xs, ys, ws = (jnp.stack([(1 + 0.1 * i) * array for i in range(8)]) for array in (x, y, weights))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def call(*inputs):
        function = functools.partial(kernel_sum, log_kernel=log_kernel)
        loss = lambda *inputs: (function(*inputs) ** 2).sum()  # noqa: E731
        return jax.jit(function)(*inputs), jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)

    for inputs, specs in (((xs, y, weights), (P("data"), P(), P())), ((xs, ys, ws), (P("data"),) * 3)):
        expected = call(*inputs)
        with jax.set_mesh(mesh):
            ours = call(*jax.device_put(inputs, tuple(NamedSharding(mesh, spec) for spec in specs)))
            assert jax.typeof(ours[0]).sharding.spec[0] == "data"
        assert_close(ours, expected, 1e-5)


def test_rows_in_shard_map():
    """Each device has its rows of x. The gradients of y and weights are sums over devices."""
    x, y, weights = (jnp.asarray(array) for array in arrays())
    function = functools.partial(kernel_sum, log_kernel=kernels.matern32(SCALE))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.shard_map(function, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    assert_close(
        value_and_gradients(jax.jit(by_rows), x, y, weights), value_and_gradients(function, x, y, weights), 1e-5
    )


def test_memory_is_linear():
    count = 20_000
    x = jax.ShapeDtypeStruct((count, 3), jnp.float32)
    weights = jax.ShapeDtypeStruct((count, 1), jnp.float32)
    gradient = jax.grad(lambda *a: kernel_sum(*a, kernels.gaussian(1.0)).sum(), (0, 1, 2))
    memory = jax.jit(gradient).lower(x, x, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 400 * count  # the matrix has 4 * count bytes for each of `count` rows


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.ones((M, D), int)}, TypeError, "x has dtype"),
        ({"x": np.ones((M, D), np.float16)}, TypeError, "equal dtypes"),
        ({"x": np.ones(D, np.float32)}, ValueError, r"x must have shape \[..., M, D\]"),
        ({"x": np.ones((M, D + 1), np.float32)}, ValueError, "equal D"),
        ({"weights": np.ones((N + 1, E), np.float32)}, ValueError, "equal N"),
        ({"x": np.ones((2, M, D), np.float32), "y": np.ones((3, N, D), np.float32)}, ValueError, "broadcast"),
        ({"x": np.ones((M, 0), np.float32), "y": np.ones((N, 0), np.float32)}, ValueError, "D must be at least 1"),
        ({"log_kernel": "gaussian"}, TypeError, "log_kernel must be a kernel"),
        ({"log_kernel": kernels.gaussian}, TypeError, "call kernels.gaussian with its parameters"),
        ({"log_kernel": kernels.gaussian(np.ones(D + 1))}, ValueError, "length_scale"),
        ({"log_kernel": lambda dot, a, b: (dot, a)}, TypeError, "log_kernel must return one scalar"),
        ({"log_kernel": lambda dot, a, b: dot > 0}, TypeError, "log_kernel must return one scalar"),
        ({"log_kernel": lambda dot: dot}, TypeError, "log_kernel must take 3 arguments: dot, x_norm2, y_norm2"),
        ({"log_kernel": np.ones(3)}, TypeError, "log_kernel must be a kernel"),
        ({"precision": "high-ish"}, ValueError, "precision"),
        ({"implementation": "cudnn"}, ValueError, "implementation"),
    ],
)
def test_errors(change, error, message):
    given = dict(zip(("x", "y", "weights"), arrays(), strict=True)) | {"log_kernel": kernels.gaussian(1.0)} | change
    with pytest.raises(error, match=message):
        kernel_sum(**given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: kernels.gaussian(0.0), ValueError, "length_scale must be positive"),
        (lambda: kernels.gaussian(np.nan), ValueError, "length_scale must be positive"),
        (lambda: kernels.gaussian("1"), TypeError, "length_scale"),
        (lambda: kernels.gaussian([1.0, 2.0]), TypeError, "length_scale must be a number or an array, not a list"),
        (lambda: kernels.gaussian(True), TypeError, "length_scale must be real"),
        (lambda: kernels.laplace(np.ones((2, 2))), ValueError, "length_scale must be a number, or an array"),
        (lambda: kernels.rational_quadratic(1.0, -1.0), ValueError, "alpha must be positive"),
        (lambda: kernels.rational_quadratic(1.0, np.ones(2)), ValueError, "alpha must be a number"),
    ],
)
def test_errors_of_parameters(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_public_names():
    assert jax_flash.kernel_sum is kernel_sum and jax_flash.kernels is kernels

"""Forward mode of the fused calls: results compared with materialised attention in float64, and executed calls."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import sparse
from cases import DIFFERENTIATED, FEATURES, Case, differentiable, upcast
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import MASKS, SCORES, captured, functions, score_and_mask, undefined_where_masked

import jax_flash
from jax_flash import blockwise, custom_calls, derivatives

SMALL = functools.partial(Case, B=2, T=19, S=21, D=8, E=8)

# Each feature. `test_gradients.py` has small cases that combine more features.
CASES = [
    SMALL(K=1, E=5),
    SMALL(causal=True, lengths=True, sinks=30.0),
    SMALL(window=(5, 9), traced=True, offset=True, bias="1nts"),
    SMALL(mask="b1ts", segments=True, soft_cap=0.7),
    SMALL(dropout=0.3, sinks=2.0, spread=4.0),
    sparse(16, 16, B=1, T=40, S=50, heads=4, D=8, E=8),
]


def along(x):
    return jnp.cos(3 * x)


@pytest.fixture(scope="module", params=[None, 256, 16])
def size_of_tiles(request):
    """The parameter of `block`. Tests with the same size run one after the other, as JAX's caches hold for one size."""
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


@pytest.fixture
def block(size_of_tiles, monkeypatch):
    """The size of the tiles in which plain JAX computes tangents, or None: the kernels compute them."""
    if size_of_tiles is not None:
        monkeypatch.setattr(blockwise, "BLOCK", size_of_tiles)
        monkeypatch.setattr(custom_calls, "refusal", lambda problem, platform, moving=(): "test" if moving else None)
        monkeypatch.setattr(custom_calls, "warn", lambda message: None)
    return size_of_tiles


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    yield
    jax.clear_caches()


def jvp(case, implementation, arrays, tangents):
    """Return O and the logsumexp, and their tangents."""
    others = {name: x for name, x in arrays.items() if name not in tangents}

    def attention(inputs):
        given = inputs | others | case.options | {"implementation": implementation}
        return jax_flash.dot_product_attention(**given, return_residual=True)

    compiled = jax.jit(lambda primals, tangents: jax.jvp(attention, (primals,), (tangents,)))
    return compiled({name: arrays[name] for name in tangents}, tangents)


def all_tangents(arrays):
    return {name: np.asarray(along(arrays[name])) for name in DIFFERENTIATED if name in arrays}


@functools.cache
def exact_tangents(case):
    """Return the tangents of O and the logsumexp, by materialised attention in float64."""
    arrays = case.arrays("float64")
    (_, logsumexp), (do, dlogsumexp) = jvp(case, "reference", arrays, all_tangents(arrays))
    return do, jnp.where(jnp.isfinite(logsumexp), dlogsumexp, 0)  # -inf is a constant


@pytest.mark.usefixtures("x64", "block")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tangents(case):
    arrays = case.arrays("float64")
    results, (do, dlogsumexp) = jvp(case, "flash", arrays, all_tangents(arrays)), exact_tangents(case)
    np.testing.assert_allclose(results[1][0], do, atol=1e-12)
    np.testing.assert_allclose(results[1][1], dlogsumexp, atol=1e-12)


@pytest.mark.parametrize("inputs", [("query",), ("key", "value"), ("scale",), ("query", "scale")])
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size_of_tiles", [None, 16], indirect=True)
def test_accuracy(dtype, spread, inputs, block):
    """The error is at most twice the error of materialised attention, plus a few units in the last place.

    The query's tangent is the query itself, so Ṡ = S. Spread scores make its mean large.
    """
    sizes = {"T": 33, "S": 47} if block else {"B": 1, "T": 300, "S": 300, "N": 2, "K": 1}
    case = SMALL(**sizes, spread=spread, causal=True)

    def tangent(attention, arrays, tangents):
        attend = functools.partial(attention, is_causal=True)
        at = {name: arrays[name] for name in inputs}
        return np.asarray(jax.jvp(lambda moved: attend(**(arrays | moved)), (at,), (tangents,))[1])

    def materialised(scale, query, **arrays):
        return jax.nn.dot_product_attention(query, **arrays, scale=scale, implementation="xla").astype(query.dtype)

    baseline = 0.0
    for seed in (3, 2, 1, 0):  # the largest error of a few draws, because there are few entries
        arrays = case.arrays(dtype, seed) | {"scale": np.float32(0.3)}
        tangents = {name: arrays[name] if name == "query" else np.asarray(along(arrays[name])) for name in inputs}
        with jax.enable_x64(True):
            exact = tangent(materialised, upcast(arrays), upcast(tangents))
        baseline = max(baseline, np.abs(np.float64(tangent(materialised, arrays, tangents)) - exact).max())
    result = tangent(jax_flash.dot_product_attention, arrays, tangents)
    assert result.dtype == dtype
    assert np.abs(np.float64(result) - exact).max() <= 2 * baseline + 4 * jnp.finfo(dtype).eps * np.abs(exact).max()


@pytest.mark.usefixtures("block")
def test_constant_tangent_of_the_scores():
    """A large constant tangent of all scores changes only the tangent of the logsumexp."""
    case = SMALL(causal=True, bias="11ts", T=40, S=40)
    arrays = case.arrays()
    tangents = all_tangents(arrays)
    results = [
        jvp(case, "flash", arrays, tangents | {"bias": np.float32(tangents["bias"] * 2.0**-6 + constant)})
        for constant in (0, 2.0**16)
    ]
    rounding = 2.0**16 * 2.0**-24
    np.testing.assert_allclose(results[0][1][0], results[1][1][0], atol=4 * rounding)
    np.testing.assert_allclose(results[0][1][1] + 2.0**16, results[1][1][1], atol=4 * rounding)


LONG = [
    Case(B=1, T=101, S=530, N=2, K=1, D=8, E=16, window=(70, 9), traced=True, sinks=1.0, dropout=0.1),
    Case(B=1, T=101, S=530, N=2, K=2, D=8, E=8, bias="1n1s", soft_cap=2.0, lengths=True),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", [*FEATURES, *LONG], ids=str)
def test_features(case):
    """Every feature, and several tiles of rows and keys, with the kernels of the platform."""
    arrays = case.arrays("float64")
    results, (do, dlogsumexp) = jvp(case, "flash", arrays, all_tangents(arrays)), exact_tangents(case)
    np.testing.assert_allclose(results[1][0], do, atol=1e-11)
    np.testing.assert_allclose(results[1][1], dlogsumexp, atol=1e-11)


def is_captured(name):
    """Whether `captured` made this name of an array that a program captures, such as "score_mod 0"."""
    return " " in name


def with_mods(case, mods, implementation, dtype):
    """Return a function of the arrays that have tangents, and these arrays: floats, with the captured ones."""
    arrays = case.arrays(dtype) | captured(mods, dtype)
    moving = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}

    def attention(moved):
        given = jax.tree.map(jnp.asarray, arrays | moved)
        options = {name: x for name, x in given.items() if not is_captured(name)} | functions(mods, given)
        return jax_flash.dot_product_attention(
            **options, **case.options, return_residual=True, implementation=implementation
        )

    return attention, moving


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("moves_captured", [False, True])
@pytest.mark.parametrize(
    "make",
    [*SCORES, *MASKS, score_and_mask, undefined_where_masked],
    ids=lambda make: make.__name__,
)
def test_score_programs(make, moves_captured):
    """Programs with tangents of the arrays that they capture, and without."""
    check_program(make, moves_captured, "float64", 1e-10)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("moves_captured", [False, True])
@pytest.mark.parametrize("make", [SCORES[0], score_and_mask], ids=lambda make: make.__name__)
def test_score_programs_in_kernels(make, moves_captured):
    """The same in float32, so on a GPU in its kernels."""
    check_program(make, moves_captured, "float32", 2e-5)


def check_program(make, moves_captured, dtype, atol):
    case = Case(B=2, T=19, S=21, N=4, K=2, D=8, E=8, causal=True)
    mods = make(case)
    mods = mods if type(mods) is tuple else (mods,)
    results = []
    for implementation in ("flash", "reference"):
        attention, moving = with_mods(case, mods, implementation, dtype)
        at = {name: x for name, x in moving.items() if moves_captured or not is_captured(name)}
        tangents = {name: np.asarray(along(x)) for name, x in at.items()}
        results.append(jax.jit(lambda at, to, f=attention: jax.jvp(f, (at,), (to,)))(at, tangents))
    (o, _), (do, dlogsumexp) = results[1]
    np.testing.assert_allclose(results[0][0][0], o, atol=atol)
    np.testing.assert_allclose(results[0][1][0], do, atol=atol)
    np.testing.assert_allclose(results[0][1][1], jnp.where(jnp.isfinite(dlogsumexp), dlogsumexp, 0), atol=atol)


def test_varlen():
    ends = np.array([0, 7, 7, 30, 40])
    q, k, v = (np.asarray(x) for x in jax.random.normal(jax.random.key(0), (3, 40, 2, 8)))

    def attention(implementation, *arrays):
        return jax_flash.varlen_attention(*arrays, ends, is_causal=True, implementation=implementation)

    tangents = tuple(map(along, (q, k, v)))
    results = [jax.jvp(functools.partial(attention, x), (q, k, v), tangents)[1] for x in ("flash", "reference")]
    np.testing.assert_allclose(*results, atol=1e-5)


def test_pages_are_refused():
    q, pages = jnp.ones((1, 1, 2, 8)), jnp.ones((2, 8, 2, 8))
    table, lengths = jnp.zeros((1, 2), jnp.int32), jnp.array([9])
    with pytest.raises(NotImplementedError, match="paged attention has no gradient"):
        jax.jvp(lambda q: jax_flash.paged_attention(q, pages, pages, table, lengths), (q,), (q,))


def test_a_program_without_code_for_its_tangent_is_plain_jax():
    """It warns once, and names the score_mod: the captured arrays and their tangents are too many."""
    weights, order = [jnp.array([0.1, 0.2]) * i for i in range(16)], jnp.array([4, 2, 0, 1, 3])
    q = jnp.cos(jnp.arange(2.0 * 5 * 8)).reshape(1, 5, 2, 8) / 3

    def attention(implementation, q, weights):
        mods = {
            "score_mod": lambda s, b, h, q, k: s * sum(x[h] for x in weights),
            "mask_mod": lambda b, h, q, k: order[k] < 4,
        }
        return jax_flash.dot_product_attention(q, q, q, **mods, implementation=implementation)

    def tangent(implementation):
        f = functools.partial(attention, implementation)
        return jax.jvp(f, (q, weights), (q, weights))[1]

    with pytest.warns(UserWarning, match="plain JAX, which is slower: score_mod") as warned:
        result = tangent("flash")
    assert len(warned) == 1
    np.testing.assert_allclose(result, tangent("reference"), atol=1e-5)


def test_captured_arrays_of_a_mask():
    """They are constants. If nothing else has a tangent, there is no call for it."""
    q, table = jnp.cos(jnp.arange(2.0 * 5 * 8)).reshape(1, 5, 2, 8), jnp.array([0.2, 0.9])

    def attention(q, table):
        def mask_mod(b, h, q, k):
            return (table[h] > 0.5) | (k < 3)

        return jax_flash.dot_product_attention(q, q, q, mask_mod=mask_mod, implementation="flash")

    def tangent(q_tangent, table_tangent):
        return jax.jvp(attention, (q, table), (q_tangent, table_tangent))[1]

    def along_the_table(table):
        return jax.jvp(lambda x: attention(q, x), (table,), (table,))[1]

    assert not names(along_the_table, table)
    np.testing.assert_array_equal(along_the_table(table), 0)
    assert not names(jax.grad(lambda table: attention(q, table).sum()), table)
    assert names(tangent, q, table) == ["forward", "tangent 1"]
    np.testing.assert_array_equal(tangent(q, table), tangent(q, 0 * table))


def test_padding_is_inert():
    case = SMALL(lengths=True)
    arrays = case.arrays() | {"query_seq_lengths": np.array([7, 0]), "key_value_seq_lengths": np.array([9, 21])}
    tangents = all_tangents(arrays)
    padded_arrays, padded_tangents = (jax.tree.map(np.array, x) for x in (arrays, tangents))
    for name, lengths in (("query", [7, 0]), ("key", [9, 21]), ("value", [9, 21])):
        for padded in (padded_arrays, padded_tangents):
            for i, length in enumerate(lengths):
                padded[name][i, length:] = np.nan
    clean, padded = jvp(case, None, arrays, tangents), jvp(case, None, padded_arrays, padded_tangents)
    jax.tree.map(np.testing.assert_array_equal, clean, padded)
    assert not np.any(padded[1][0][1]) and not np.any(padded[1][0][0, 7:])


# --- kernels ----------------------------------------------------------------------------------------------------------

# Plain calls in every tiling of the kernels, and features that have code of their own there.
TILINGS = [
    dataclasses.replace(case, T=150, S=210, N=2, K=1, D=dim, E=dim)
    for dim in (64, 128)
    for case in (
        Case(B=1),
        Case(B=1, causal=True),
        Case(window=(40, 30), lengths=True),
        Case(segments=True, dropout=0.2),
        Case(B=1, soft_cap=2.0, sinks=2.0),
        Case(B=1, mask="b1ts", causal=True),
    )
]
TILINGS += [Case(B=1, T=70, S=90, N=2, K=2, D=200, E=256, causal=True), sparse(64, 64, B=1, T=150, S=210, D=64, E=64)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    list(zip([*FEATURES, *TILINGS], itertools.cycle(("bfloat16", "float16", "bfloat16", "float32")), strict=False)),
    ids=str,
)
def test_kernels(case, dtype):
    """The error is at most twice the error of materialised attention, plus a few units in the last place."""
    check(case, dtype, DIFFERENTIATED)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("inputs", [("query",), ("key",), ("value",), ("query", "value"), ("sinks",)], ids="-".join)
def test_some_inputs(inputs, dim):
    """Inputs without a tangent are constants."""
    check(Case(B=1, T=90, S=110, N=2, K=1, D=dim, E=dim, sinks=2.0), "bfloat16", inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(B=1, causal=True, D=64, E=64), "bfloat16"),
        (Case(B=1, D=128, E=128, sinks=1.0, dropout=0.2), "float16"),
        (Case(B=1, window=(9, 0), lengths=True), "float32"),
    ],
    ids=str,
)
def test_without_the_logsumexp(case, dtype):
    """The tangent of l is not computed. The tangent of O is the same."""
    arrays = case.arrays(dtype)
    tangents = all_tangents(arrays)
    others = {name: x for name, x in arrays.items() if name not in tangents} | case.options

    def tangent(primals, tangents):
        return jax.jvp(lambda x: jax_flash.dot_product_attention(**x, **others), (primals,), (tangents,))[1]

    primals = {name: arrays[name] for name in tangents}
    assert [call.results for call in calls(tangent, primals, tangents)[1:]] == [("o",)]
    result = jax.jit(tangent)(primals, tangents)
    np.testing.assert_array_equal(result, jvp(case, None, arrays, tangents)[1][0])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_widely_spread_scores(dim, dtype):
    """The scores have a standard deviation of 4, and Ṡ = S. The first tile's mean of Ṡ is far from the large mean."""
    case = Case(B=1, T=150, S=210, N=2, K=1, D=dim, E=dim, spread=2.0, causal=True)
    arrays = case.arrays(dtype)
    compare(case, arrays, {"query": arrays["query"]})


@pytest.mark.usefixtures("device")
def test_sinks_far_above_the_scores():
    """P would underflow, but the tangent of the logsumexp does not depend on the sinks."""
    check(Case(B=1, T=90, S=110, N=2, K=1, D=64, E=64, sinks=1000.0), "bfloat16", ("query", "key"))


ONE_HEAD = functools.partial(Case, B=1, T=150, S=340, N=1, K=1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        ONE_HEAD(),
        ONE_HEAD(causal=True, offset=True),
        ONE_HEAD(window=(100, 191)),
        ONE_HEAD(segments=True),
        sparse(128, 64, B=1, T=150, S=700, N=1, K=1),
    ],
    ids=str,
)
def test_large_mean_of_the_tangents_of_scores(case, dim):
    """The keys have a large common part. The tangent of the query is along it, so Ṡ is large and nearly constant.

    The kernels subtract a number close to the mean of Ṡ before they round (r in hopper/tangent.cuh). A row without it
    would have many times the error, so each row is compared. In some tiles, the first row sees only whole tiles.
    """
    case = dataclasses.replace(case, D=dim, E=dim)
    arrays = case.arrays("bfloat16")
    arrays["key"] = (2 + arrays["key"].astype(np.float32) / 8).astype(arrays["key"].dtype)
    if case.offset:
        arrays["query_offset"] = np.array([191], np.int32)
    compare(case, arrays, {"query": np.ones_like(arrays["query"])}, by_row=True)


def check(case, dtype, inputs):
    arrays = case.arrays(dtype)
    compare(case, arrays, {name: x for name, x in all_tangents(arrays).items() if name in inputs})


def compare(case, arrays, tangents, by_row=False):
    with jax.enable_x64(True):
        (_, lse), (exact, dlse) = jax.tree.map(np.asarray, jvp(case, "reference", upcast(arrays), upcast(tangents)))
    result, dlogsumexp = (np.float64(x) for x in jvp(case, None, arrays, tangents)[1])
    axis = -1 if by_row else None
    error, baseline = (np.abs(x - exact).max(axis) for x in (result, materialised(case, arrays, tangents)))
    ulp = float(jnp.finfo(arrays["query"].dtype).eps) * np.abs(exact).max(axis)
    excess = np.max(error - 2 * baseline - 4 * ulp)
    assert excess <= 0, f"error {np.max(error):.3g}, materialised attention has {np.max(baseline):.3g}"
    dlse = np.where(np.isfinite(lse), dlse, 0)  # -inf is a constant
    np.testing.assert_allclose(dlogsumexp, dlse, atol=2e-5 * (1 + np.abs(dlse).max()))


def materialised(case, arrays, tangents):
    """Return the tangent of O if P, and its tangent, are rounded to the dtype of the inputs before their products.

    With the identity as the value, attention returns P.
    """
    dtype, moving = arrays["query"].dtype, {name: x for name, x in tangents.items() if name != "value"}
    eye = np.broadcast_to(np.eye(case.S, dtype=dtype)[:, None], (case.B, case.S, case.K, case.S))
    (p, _), (dp, _) = jvp(case, "reference", arrays | {"value": eye}, moving | {"value": np.zeros_like(eye)})

    def product(p, value):
        grouped = np.float64(p).reshape(case.B, case.T, case.K, -1, case.S)
        o = np.einsum("btkgs,bske->btkge", grouped, np.float64(value))
        return o.reshape(case.B, case.T, case.N, case.E)

    o = product(dp, arrays["value"])
    if "value" in tangents:
        o += product(p, tangents["value"])
    return np.float64(o.astype(dtype))


# --- transformations --------------------------------------------------------------------------------------------------

B, T, N, D = 4, 16, 2, 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, "float64")


def mean_flow(attend, q):
    """Reverse mode through the primal output. The tangent is under stop_gradient."""

    def loss(scale):
        u, du = jax.jvp(lambda q: attend(q * scale), (q,), (along(q),))
        return ((u - jax.lax.stop_gradient(along(q) - du)) ** 2).sum()

    return jax.grad(loss)(1.3)


def gradient_of_jvp(attend, q):
    return jax.grad(lambda q: (jax.jvp(lambda q: attend(q), (q,), (along(q),))[1] ** 2).sum())(q)


def gradient(attend):
    return jax.grad(lambda q: (attend(q) ** 2).sum())


def jvp_of_gradient(attend, q):
    return jax.jvp(gradient(attend), (q,), (along(q),))


def linearized(attend, q):
    _, linear = jax.linearize(attend, q)
    tangents = jnp.stack([along(q), q])
    mapped = jax.vmap(linear)
    return mapped(tangents), jax.linear_transpose(mapped, tangents)(tangents)


def second_order(attend, q):
    few = q[:1, :2, :1]
    loss = lambda x: (attend(q.at[:1, :2, :1].set(x)) ** 2).sum()  # noqa: E731
    return jax.hessian(loss)(few), jax.jacfwd(jax.jacfwd(loss))(few), jax.jacrev(jax.jacfwd(loss))(few)


def scanned(attend, q):
    saved = jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES)

    def results(layer):
        layers = lambda q: jax.lax.scan(lambda x, _: (layer(x), None), q, length=2)[0]  # noqa: E731
        return jax.jvp(layers, (q,), (along(q),)), jvp_of_gradient(layers, q)

    return results(jax.checkpoint(attend)), results(jax.checkpoint(attend, policy=saved))


def mapped(attend, q):
    scales = jnp.array([0.5, -2.0])
    return jax.vmap(lambda s: jax.jvp(lambda s: attend(q * s), (s,), (1.0,)))(scales), jax.grad(
        lambda s: (jax.vmap(lambda s: attend(q * s))(s) ** 2).sum()
    )(scales)


def on_devices(attend, q, kind=AxisType.Auto):
    mesh = jax.make_mesh((4,), ("batch",), (kind,), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, P("batch")))
        jvp = jax.jit(lambda q: (jax.jvp(attend, (q,), (along(q),)), jvp_of_gradient(attend, q)))(q)
    return jax.tree.map(np.asarray, jvp)


def in_shard_map(attend, q):
    mesh = jax.make_mesh((4,), ("batch",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    both = lambda q: (jax.jvp(attend, (q,), (along(q),)), gradient(attend)(q))  # noqa: E731
    return jax.shard_map(both, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))(q)


TRANSFORMS = [
    mean_flow,
    gradient_of_jvp,
    jvp_of_gradient,
    linearized,
    second_order,
    scanned,
    mapped,
    on_devices,
    functools.partial(on_devices, kind=AxisType.Explicit),
    in_shard_map,
]


def name_of(transform):
    return getattr(transform, "__name__", "on_devices_explicitly")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=name_of)
def test_transformations(transform):
    kind = "float32" if "devices" in name_of(transform) else "float64"  # float64 needs x64 for the whole process
    q = normal(0, B, T, N, D).astype(kind)

    def attend(implementation, q):
        return jax_flash.dot_product_attention(q, q, jnp.sin(q), is_causal=True, implementation=implementation)

    result, expected = (transform(functools.partial(attend, x), q) for x in (None, "reference"))
    close = 1e-5 if kind == "float32" else 1e-10
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=close, atol=close), result, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "layout",
    ["contiguous", "zigzag", jax_flash.Layout(np.array([[0, 5], [1, 2], [3, 7], [4, 6]], np.int32))],
    ids=("contiguous", "zigzag", "chunks"),
)
def test_sharded_sequence(layout):
    q = normal(0, 1, 32, 2, 4)
    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def attend(q, scale, sinks, **options):
        return jax_flash.dot_product_attention(q, q, jnp.sin(q), scale=scale, sinks=sinks, is_causal=True, **options)

    def divided(q, scale, sinks):
        local = functools.partial(attend, sequence_axis="seq", sequence_layout=layout)
        call = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "seq"), P(), P()), out_specs=P(None, "seq"))
        if layout == "contiguous":
            return call(q, scale, sinks)
        if isinstance(layout, jax_flash.Layout):
            return layout.inverse(call(layout.permute(q, 1), scale, sinks), 1)
        return jax_flash.unzigzag(call(jax_flash.zigzag(q, 4, 1), scale, sinks), 4, 1)

    at, to = (q, 0.4, jnp.array([0.5, 1.0])), (along(q), 1.0, jnp.array([1.0, -2.0]))
    whole = functools.partial(attend, implementation="reference")
    results, expected = (jax.jit(lambda at, to, f=f: jax.jvp(f, at, to))(at, to) for f in (divided, whole))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-12), results, expected)
    linear = [jax.linearize(f, *at)[1](*to) for f in (divided, whole)]
    np.testing.assert_allclose(*linear, atol=1e-12)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=48, S=48, N=2, K=1, causal=True, bias="11ts", sinks=1.0),
        Case(T=64, S=64, N=2, K=1, window=(9, 4), dropout=0.2, lengths=True, segments=True),
        Case(B=1, T=32, S=32, N=8, K=8),  # heads instead of rows
    ],
    ids=str,
)
def test_sharded_sequence_under_jit(case, kind):
    """The rows of a sequence over four devices."""
    arrays = case.arrays()
    tangents = all_tangents(arrays)
    expected = jvp(case, "reference", arrays, tangents)
    mesh = jax.make_mesh((4,), ("seq",), (kind,), devices=jax.devices("cpu")[:4])

    def placed(name, x):
        place = P(None, "seq") if name in ("query", "key", "value") or "segment" in name else P()
        return jax.device_put(x, NamedSharding(mesh, place))

    with jax.set_mesh(mesh):
        arrays, tangents = ({name: placed(name, x) for name, x in given.items()} for given in (arrays, tangents))
        results = jvp(case, None, arrays, tangents)
    assert results[1][0].sharding.spec[1] == "seq"
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), results[0][0], expected[0][0])
    np.testing.assert_allclose(results[1][0], expected[1][0], atol=2e-5)
    finite = jnp.isfinite(expected[0][1])
    np.testing.assert_allclose(results[1][1], jnp.where(finite, expected[1][1], 0), atol=2e-5)


# --- executed calls ---------------------------------------------------------------------------------------------------


def names(function, *args):
    """Return the names of the calls in a compiled function."""
    return [
        f"tangent {call.order}" if isinstance(call, derivatives.Tangent) else call.target.removeprefix("jax_flash_")
        for call in calls(function, *args)
    ]


def calls(function, *args):
    """Return the calls in a compiled function's jaxpr in order, after dead-code elimination."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive in (custom_calls.primitive, derivatives.primitive):
                found.append(eqn.params["call"])
            else:
                jax.tree.map(
                    visit, [x.jaxpr for x in eqn.params.values() if isinstance(x, jax.extend.core.ClosedJaxpr)]
                )

    visit(jaxpr)
    return found


def attend(q):
    return jax_flash.dot_product_attention(q, q, q, is_causal=True)


def attend_with_logsumexp(q):
    return jax_flash.dot_product_attention(q, q, q, is_causal=True, return_residual=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gradient(attend), ["forward", "backward"]),
        (lambda q: jax.jvp(attend, (q,), (q,)), ["forward", "tangent 1"]),
        (lambda q: jax.vmap(jax.linearize(attend, q)[1])(jnp.stack([q, 2 * q])), ["forward", "tangent 1"]),
        (jax.jacfwd(attend), ["forward", "tangent 1"]),
        (functools.partial(mean_flow, attend), ["forward", "tangent 1", "backward"]),
        (functools.partial(jvp_of_gradient, attend), ["forward", "tangent 1", "backward", "tangent 1"]),
    ],
)
def test_calls(function, expected):
    """The derivative of a tangent appears only if it is used. Mapped tangents share one forward."""
    q = jnp.ones((1, 2, 1, 4))
    assert names(function, q) == expected


@pytest.mark.parametrize(
    ("function", "unrounded"),
    [
        (gradient(attend), False),
        (lambda q: gradient(lambda x: jax.lax.scan(lambda x, _: (attend(x), None), x, length=2)[0])(q), False),
        (gradient(jax.checkpoint(attend)), False),
        (gradient(jax.jit(attend)), False),
        (lambda q: jax.jvp(attend, (q,), (q,)), True),
        (lambda q: jax.linearize(attend, q)[1](q), True),
    ],
)
def test_reverse_mode_rounds_o(function, unrounded):
    """Only a tangent takes O before it is rounded to the 16 bits of the inputs."""
    first, *_ = calls(function, jnp.ones((1, 2, 1, 4), "bfloat16"))
    assert (custom_calls.UNROUNDED_O in first.results) is unrounded


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (lambda q: jax.jvp(attend, (q,), (q,)), ("o",)),
        (lambda q: jax.jvp(jax.checkpoint(jax.jit(attend)), (q,), (q,)), ("o",)),
        (lambda q: jax.jvp(lambda x: jax.lax.scan(lambda x, _: (attend(x), None), x, length=2)[0], (q,), (q,)), ("o",)),
        (lambda q: jax.jvp(lambda x: attend_with_logsumexp(x)[0], (q,), (q,)), ("o",)),
        (lambda q: jax.jvp(attend_with_logsumexp, (q,), (q,)), ("o", "l")),
        (lambda q: jax.jvp(lambda x: attend_with_logsumexp(x)[1], (q,), (q,)), ("o", "l")),
    ],
)
def test_unused_tangent_of_l(function, results):
    """Few programs use it, and it costs the kernels a sum."""
    tangents = [call for call in calls(function, jnp.ones((1, 2, 1, 4))) if isinstance(call, derivatives.Tangent)]
    assert [call.results for call in tangents] == [results]


def test_mean_flow_without_jit_runs_no_second_derivative(monkeypatch):
    ran, eagerly = [], custom_calls.eagerly

    def recorded(evaluate, call, arrays):
        ran.append(call)
        return eagerly(evaluate, call, arrays)

    monkeypatch.setattr(custom_calls, "eagerly", recorded)
    with jax.disable_jit():
        mean_flow(attend, jnp.ones((1, 2, 1, 4)))
    tangents = [call for call in ran if isinstance(call, derivatives.Tangent)]
    assert [call.order for call in tangents] == [1]


@pytest.mark.parametrize(
    ("inputs", "products"),
    [
        ((0,), ["Q Kᵀ", "Q̇ Kᵀ", "(P∘Ṡ) V", "P V"]),  # the last is O, again
        ((1,), ["Q Kᵀ", "Q K̇ᵀ", "(P∘Ṡ) V", "P V"]),
        ((2,), ["Q Kᵀ", "P V̇"]),
        ((0, 1, 2), ["Q Kᵀ", "Q̇ Kᵀ", "Q K̇ᵀ", "(P∘Ṡ) V", "P V̇", "P V"]),
    ],
)
def test_products(inputs, products, monkeypatch):
    """A tile of plain JAX takes six products, and fewer if fewer inputs have tangents."""
    q = jnp.ones((1, 300, 1, 8))
    at = [q, q + 1, q + 2]

    def tangent(*moved):
        given = dict(zip(inputs, moved, strict=True))
        return jax_flash.dot_product_attention(*(given.get(i, x) for i, x in enumerate(at)))

    monkeypatch.setattr(custom_calls, "refusal", lambda problem, platform, moving=(): "plain JAX" if moving else None)
    _, linear = jax.linearize(tangent, *(at[i] for i in inputs))
    with pytest.warns(UserWarning, match="the tangent of attention is computed in plain JAX, which is slower: plain"):
        text = jax.jit(linear).lower(*(at[i] for i in inputs)).as_text()
    assert text.count("dot_general") == len(products)


@pytest.mark.usefixtures("x64")
def test_second_order_reaches_captured_arrays():
    """Take the tangent with respect to all inputs, then its gradient with respect to all inputs."""
    attention, inputs = differentiable(SMALL(B=1, T=4, S=5, D=3, E=2, bias="1n1s", sinks=1.0), "flash")
    reference, _ = differentiable(SMALL(B=1, T=4, S=5, D=3, E=2, bias="1n1s", sinks=1.0), "reference")

    def loss(attention, inputs):
        tangents = jax.jvp(attention, inputs, list(map(along, inputs)))[1]
        return sum((jnp.sin(x) ** 2).sum() for x in tangents)

    results = [jax.jit(jax.grad(functools.partial(loss, f)))(inputs) for f in (attention, reference)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-10), *results)

"""A `BlockMask` from a function that captures traced arrays equals one that captures the same concrete arrays."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import IMPLEMENTATIONS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import BlockMask

pytestmark = pytest.mark.usefixtures("device")

B, T, S, N, K, D = 2, 40, 56, 4, 2, 8


def arrays(*lead, seed=0):
    """Return query, key and value, segment ids of queries and of keys, and a shift for each head."""
    rng = np.random.default_rng(seed)
    shapes = ((*lead, B, T, N, D), (*lead, B, S, K, D), (*lead, B, S, K, D))
    ids = (rng.integers(0, 4, (*lead, B, size)).astype(np.int32) for size in (T, S))
    given = (*(rng.normal(size=shape).astype(np.float32) for shape in shapes), *ids)
    return (*map(jnp.asarray, given), jnp.asarray(rng.integers(-9, 9, (*lead, N)).astype(np.int32)))


def make_mask(query_ids, key_ids, shifts, batch=B, heads=N, length=T):
    def mask_fn(b, h, i, j):
        return (query_ids[b, i] == key_ids[b, j]) | (i + shifts[h] > j)

    return BlockMask.from_function(mask_fn, length, S, batch=batch, heads=heads, q_block=16, kv_block=16)


def results(q, k, v, *mask_args, implementation="flash", make=make_mask, **options):
    """Return O and the gradients of the sum of its squares. `mask_args` is a mask or the arguments of `make`."""

    def loss(q, k, v):
        mask = mask_args[0] if isinstance(mask_args[0], BlockMask) else make(*mask_args)
        o = jax_flash.dot_product_attention(q, k, v, block_mask=mask, implementation=implementation, **options)
        return (o**2).sum(), o

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def assert_close(x, y, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), x, y)


OPTIONS = {
    "alone": {},
    "other masks": {"is_causal": True, "query_seq_lengths": jnp.array([33, T]), "dropout_rate": 0.2},
    "mask_mod": {"mask_mod": lambda b, h, q, k: (q + k) % 3 > 0},
    "offset": {"query_offset": jnp.array([3, 11]), "mask_mod": lambda b, h, q, k: q - k < 20},
    "mask": {"mask": np.random.default_rng(1).random((1, 1, T, S)) < 0.6, "query_offset": 5},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s * jnp.asarray([0.5, 2.0, 1.0, 3.0])[h]},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_with_other_features(name, implementation):
    """Indices of `mask_fn` are rows of the arrays. Those of a mask_mod include query_offset."""
    given, options = arrays(), OPTIONS[name] | {"implementation": implementation}
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(0)
    expected = results(*given, **options)
    assert_close(jax.jit(functools.partial(results, **options))(*given), expected)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, N), (B, 1)])
def test_shared_by_batch_and_heads(batch, heads):
    given = arrays()
    function = functools.partial(results, make=functools.partial(make_mask, batch=batch, heads=heads))
    assert_close(jax.jit(function)(*given), function(*given))


def test_one_query():
    q, *others = arrays()
    given = (q[:, :1], *others)
    function = functools.partial(results, make=functools.partial(make_mask, length=1))
    assert_close(jax.jit(function)(*given), function(*given))


def test_jit():
    """Return a mask from a jitted function and pass it to others, which new arrays must not retrace."""
    q, k, v, *mask_args = arrays()
    expected, traced = results(q, k, v, *mask_args), []

    @jax.jit
    def function(q, k, v, mask):
        traced.append(mask)
        return results(q, k, v, mask)

    mask = jax.jit(make_mask)(*mask_args)
    assert_close(results(q, k, v, mask), expected)
    for one in (mask, copy.copy(mask), copy.deepcopy(mask)):
        assert_close(function(q, k, v, one), expected)
    *_, ids, key_ids, shifts = arrays(seed=1)
    assert_close(function(q, k, v, jax.jit(make_mask)(ids, key_ids, shifts)), results(q, k, v, ids, key_ids, shifts))
    assert len(traced) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_vmap(shared):
    """Map over the captured arrays, with the mask made inside or outside, or share a mask."""
    q, k, v, *mask_args = arrays(3)
    masks = jax.jit(make_mask)(*(x[0] for x in mask_args)) if shared else jax.vmap(make_mask)(*mask_args)
    each = [results(q[i], k[i], v[i], *(x[0 if shared else i] for x in mask_args)) for i in range(3)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert_close(jax.jit(jax.vmap(results, (0, 0, 0, None if shared else 0)))(q, k, v, masks), expected)
    if not shared:
        assert_close(jax.vmap(results)(q, k, v, *mask_args), expected)


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["plain", "remat"])
def test_scan(wrap):
    """One mask per layer."""
    _, k, v, *mask_args = arrays(3)
    x = arrays()[0]

    def layer(x, k, v, mask):
        return x + jax_flash.dot_product_attention(x, k, v, block_mask=mask, implementation="flash")

    masks = [jax.jit(make_mask)(*(x[i] for x in mask_args)) for i in range(3)]

    def scanned(x, k, v):
        body = wrap(lambda x, xs: (layer(x, *xs), None))
        return (jax.lax.scan(body, x, (k, v, BlockMask.stack(masks)))[0] ** 2).sum()

    def looped(x, k, v):
        for i in range(3):
            x = layer(x, k[i], v[i], make_mask(*(args[i] for args in mask_args)))
        return (x**2).sum()

    assert_close(jax.jit(jax.grad(scanned, (0, 1, 2)))(x, k, v), jax.grad(looped, (0, 1, 2))(x, k, v), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slice(implementation):
    """Indices count from the start of the slice."""
    q, k, v, *mask_args = arrays()
    given = q[:, 16:37], k[:, 32:], v[:, 32:]

    def function(*args):
        return results(*args, make=lambda *args: make_mask(*args)[16:37, 32:], implementation=implementation)

    assert_close(jax.jit(function)(*given, *mask_args), function(*given, *mask_args))


def test_stack_shares_one_function():
    _, _, _, *mask_args = arrays()
    mask = jax.jit(make_mask)(*mask_args)
    stack = BlockMask.stack([mask, mask])
    with pytest.raises(ValueError, match="block_mask is a stack of masks"):
        jax.eval_shape(lambda *given: results(*given, stack), *arrays()[:3])
    with pytest.raises(ValueError, match="this block mask is a stack"):
        stack[:16, :16]
    other = jax.jit(functools.partial(make_mask, heads=1))(*mask_args)
    shorter = jax.jit(make_mask)(mask_args[0], mask_args[1], jnp.pad(mask_args[2], (0, 1)))
    concrete = make_mask(*mask_args)
    for masks in ([mask, other], [mask, shorter], [concrete, mask], [mask, concrete]):
        with pytest.raises(ValueError, match=r"share one function.* masks\[1\] differs from masks\[0\]"):
            BlockMask.stack(masks)


def test_higher_order():
    given = arrays()

    def penalty(q, *others):
        return (results(q, *others)[1][0] ** 2).sum()

    assert_close(jax.jit(jax.grad(penalty))(*given), jax.grad(penalty)(*given), 1e-4)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_sharding(mode, device):
    if device.platform != "cpu":
        pytest.skip("eight devices")
    q, k, v, *mask_args = arrays()
    expected = results(q, k, v, *mask_args)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(mode,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put((q, k, v), NamedSharding(mesh, P("data", None, "model")))
        assert_close(jax.jit(results)(*placed, *jax.device_put(mask_args, NamedSharding(mesh, P()))), expected, 1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, device):
    """Make the mask outside or inside, where batch entries and heads are local."""
    if device.platform != "cpu":
        pytest.skip("eight devices")
    q, k, v, *mask_args = arrays()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads = P("data", None, "model")
    own = functools.partial(make_mask, batch=1, heads=1)
    expected = results(q, k, v, *mask_args, make=own)[1]
    for masks in ((jax.jit(own)(*mask_args),), mask_args):
        function = jax.shard_map(
            lambda *args: results(*args, make=own)[1],
            mesh=mesh,
            in_specs=(heads, heads, heads, *jax.tree.map(lambda _: P(), masks)),
            out_specs=(heads,) * 3,
            check_vma=check_vma,
        )
        assert_close(jax.jit(function)(q, k, v, *masks), expected)


def test_linen():
    pytest.importorskip("flax")
    import jax_flash.linen

    x, (*_, ids, _, shifts) = arrays()[0].reshape(B, T, -1), arrays()
    layer = jax_flash.linen.MultiHeadAttention(N)

    def loss(variables, ids):
        def mask_fn(b, h, i, j):
            return (ids[b, i] == ids[b, j]) | (i + shifts[h] > j)

        mask = BlockMask.from_function(mask_fn, T, T, batch=B, heads=N)
        return (layer.apply(variables, x, block_mask=mask) ** 2).sum()

    variables = layer.init(jax.random.key(0), x)
    assert_close(jax.jit(jax.grad(loss))(variables, ids), jax.grad(loss)(variables, ids), 1e-4)


def test_blocks_are_unknown():
    mask = jax.jit(make_mask)(*arrays()[3:])
    assert repr(mask) == f"BlockMask({T} x {S}, of a function that captures traced arrays)"
    other = BlockMask.from_mask(np.ones((T, S), bool), q_block=16, kv_block=16)
    for use in (
        *(lambda: mask.blocks, lambda: mask.kept, mask.to_mask, mask.arrays, lambda: ~mask, lambda: mask & other),
        *(lambda: other | mask, lambda: mask == mask, lambda: hash(mask)),
    ):
        with pytest.raises(TypeError, match="BlockMask of a function that captures traced arrays has no"):
            use()
    with pytest.raises(AttributeError, match="shapes"):
        mask.shapes  # noqa: B018
    with pytest.raises(TypeError, match="mask_fn is a jaxpr, which JAX cannot pickle"):
        pickle.dumps(mask)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (functools.partial(make_mask, length=T + 1), ValueError, f"block_mask.*{T} x {S}.*{T + 1} x {S}"),
        (functools.partial(make_mask, batch=3), ValueError, "block_mask .* B = 2 .* N = 4 heads, not 3 and 4"),
        (functools.partial(make_mask, heads=K), ValueError, "block_mask .* B = 2 .* N = 4 heads, not 2 and 2"),
    ],
)
def test_errors_of_attention(make, error, match):
    with pytest.raises(error, match=match):
        jax.jit(functools.partial(results, make=make))(*arrays())


def test_errors_of_the_function():
    for mask_fn, match in (
        (lambda ids: lambda b, h, i, j: ids[i] - j, "mask_fn must return one bool scalar"),
        (lambda ids: lambda b, h, i, j: np.arange(T)[i] > ids[j], "mask_fn is traced"),
    ):
        with pytest.raises(TypeError, match=match):
            jax.jit(lambda ids, mask_fn=mask_fn: BlockMask.from_function(mask_fn(ids), T, T))(arrays()[3][0])

"""`block_sparse_matmul` against matrices with zeros, and its Triton kernels, interpreted."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash import BlockMask, block_sparse_matmul, blocks_to_matrix, matrix_to_blocks, patterns, sparse_matrix

pytestmark = pytest.mark.usefixtures("device")

INPUTS, OUTPUTS, TOKENS = 64, 96, 24
SIDES = {"q_block": 16, "kv_block": 16}


def random_mask(kept=0.3):
    blocks = np.random.default_rng(3).random((INPUTS // 16, OUTPUTS // 16)) < kept
    return BlockMask.from_dense(blocks, INPUTS, OUTPUTS, **SIDES)


MASKS = {
    "butterfly": patterns.butterfly(INPUTS, OUTPUTS, global_blocks=1, **SIDES),
    "random": random_mask(),
    "all": random_mask(2),
    "none": random_mask(-1),
    "oblong blocks": patterns.butterfly(INPUTS, OUTPUTS, q_block=16, kv_block=48),
}


@pytest.fixture(params=MASKS)
def mask(request):
    return MASKS[request.param]


def arrays(mask, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, dy, matrix = (rng.standard_normal(s) for s in ((TOKENS, INPUTS), (TOKENS, OUTPUTS), (INPUTS, OUTPUTS)))
    return jnp.asarray(x, dtype), matrix_to_blocks(jnp.asarray(matrix, dtype), mask), jnp.asarray(dy, dtype)


def dense(mask):
    return lambda x, blocks: x @ blocks_to_matrix(blocks, mask)


def assert_close(ours, theirs, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(abs(y).max(initial=0), 1e-30))


def results(function, x, blocks, dy):
    out, pull = jax.vjp(function, x, blocks)
    return out, *pull(dy)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_product_and_gradients(mask, dtype):
    with jax.enable_x64(dtype == "float64"):
        given = arrays(mask, dtype)
        ours = results(functools.partial(block_sparse_matmul, mask=mask), *given)
    assert all(x.dtype == dtype for x in ours)
    with jax.enable_x64(True):
        theirs = results(dense(mask), *(x.astype(jnp.float64) for x in given))
    assert_close(ours, theirs, {"float32": 1e-6, "float64": 1e-14, "bfloat16": 8e-3, "float16": 1e-3}[dtype])


def test_conversions(mask):
    matrix = np.random.default_rng(1).standard_normal((INPUTS, OUTPUTS), np.float32)
    kept = np.kron(np.asarray(mask.blocks)[0, 0] > 0, np.ones((mask.shape.q_block, mask.shape.kv_block)))
    np.testing.assert_array_equal(blocks_to_matrix(matrix_to_blocks(matrix, mask), mask), matrix * kept)


@pytest.mark.parametrize("tokens", [TOKENS, 1, 100])
@pytest.mark.parametrize("name", ["butterfly", "random", "all"])
def test_triton_kernels(name, tokens):
    """The kernels of a GPU, interpreted on a CPU: parts with no block, odd numbers of blocks, and padded tokens."""
    pattern = sparse_matrix.Pattern.of(MASKS[name])
    x, blocks, dy = arrays(MASKS[name])
    x, dy = (jnp.resize(array, (tokens, array.shape[1])) for array in (x, dy))
    tile = sparse_matrix.Tile(tokens=32, step=8, warps=4, stages=2)
    lists = [list(map(jnp.asarray, pattern.lists(transposed))) for transposed in (False, True)]
    product = functools.partial(sparse_matrix.triton_product, interpret=True)
    pairs = pattern.pairs()
    row, column = pattern.rows_and_columns
    places = map(jnp.asarray, (pairs, row[pairs[:, 0]], column[pairs]))
    ours = (
        product(pattern, False, tile, x, blocks, *lists[0]),
        product(pattern, True, tile, dy, blocks, *lists[1]),
        sparse_matrix.triton_gradient(pattern, tile, x, dy, *places, interpret=True),
    )
    assert_close(ours, results(dense(MASKS[name]), x, blocks, dy), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side", [16, 32, 64, 128])
def test_triton_kernels_on_a_gpu(dtype, side):
    mask = patterns.butterfly(4 * side, 8 * side, global_blocks=1, q_block=side, kv_block=side)
    keys = jax.random.split(jax.random.key(0), 3)
    count = sparse_matrix.Pattern.of(mask).count
    shapes = (300, 4 * side), (count, side, side), (300, 8 * side)
    with jax.default_device(jax.devices("gpu")[0]):
        given = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
        function = jax.jit(functools.partial(results, functools.partial(block_sparse_matmul, mask=mask)))
        assert "triton" in function.lower(*given).as_text()
        assert_close(function(*given), results(dense(mask), *(x.astype(jnp.float32) for x in given)), 1e-2)


def operations(jaxpr):
    """The operations of all products in a jaxpr, also in its loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            contracted, _ = eqn.params["dimension_numbers"][0]
            left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.size
            total += 2 * out * math.prod(left[dim] for dim in contracted)
        inner = (getattr(x, "jaxpr", x) for x in eqn.params.values())
        total += sum(eqn.params.get("length", 1) * operations(x) for x in inner if hasattr(x, "eqns"))
    return total


def test_time_and_memory_follow_the_blocks():
    """An eighth of the blocks takes an eighth of the operations, and memory for a few arrays of inputs or outputs."""
    size, tokens = 1024, 64
    kept = np.arange(64) % 8 == np.arange(64)[:, None] % 8
    mask = BlockMask.from_dense(kept, size, size, **SIDES)
    blocks = jax.ShapeDtypeStruct((int(kept.sum()), 16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((tokens, size), jnp.float32)
    traced = jax.jit(jax.grad(lambda x, blocks: (block_sparse_matmul(x, blocks, mask) ** 2).sum(), (0, 1))).trace(
        x, blocks
    )
    assert operations(traced.jaxpr.jaxpr) == 3 * 2 * tokens * size * size / 8
    memory = traced.lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * 4 * tokens * size


@jax.enable_x64(True)
def test_transformations():
    """vmap over inputs, blocks or both; remat, scan and second derivatives; several leading dims."""
    mask = MASKS["butterfly"]
    x, blocks, _ = arrays(mask, jnp.float64)
    xs, many = jnp.stack([x, 2 * x, -x]), jnp.stack([blocks, -blocks, 3 * blocks])

    def of(product):
        def loss(x, blocks):
            return (jnp.tanh(product(x, blocks)) ** 2).sum()

        both = jax.value_and_grad(jax.checkpoint(loss), (0, 1))
        return (
            product(xs, blocks),
            jax.vmap(both, (0, None))(xs, blocks),
            jax.jit(jax.vmap(both, (None, 0)))(x, many),
            jax.vmap(both)(xs, many),
            jax.lax.map(lambda given: both(*given), (xs, many)),
            jax.vmap(jax.vmap(both, (None, 0)), (0, None))(xs, many),
            jax.grad(lambda x: (jax.grad(loss, 1)(x, blocks) ** 2).sum())(x),
        )

    assert_close(of(functools.partial(block_sparse_matmul, mask=mask)), of(dense(mask)), 1e-12)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_over_an_empty_batch(axes):
    mask = MASKS["oblong blocks"]
    x, blocks, dy = arrays(mask)
    inputs = [jnp.zeros((0, *y.shape)) if axis == 0 else y for y, axis in zip((x, blocks), axes, strict=True)]
    function = jax.vmap(functools.partial(block_sparse_matmul, mask=mask), axes)
    out, *gradients = results(function, *inputs, jnp.zeros((0, *dy.shape)))
    assert out.shape == (0, *dy.shape)
    for gradient, given in zip(gradients, inputs, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(given.shape))


def test_forward_mode_is_refused():
    x, blocks, _ = arrays(MASKS["butterfly"])
    function = functools.partial(block_sparse_matmul, mask=MASKS["butterfly"])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(function, (x, blocks), (x, blocks))


@pytest.mark.parametrize("kernels", [False, True], ids=["XLA", "interpreted kernels"])
@pytest.mark.parametrize("mode", ["Auto", "Explicit", "Manual"])
def test_sharded_tokens(mode, kernels, monkeypatch):
    """Each device computes its own tokens, and the gradient of the blocks is a sum over devices."""
    if kernels and mode == "Explicit" and jax.__version_info__ >= (0, 11):
        pytest.skip("Pallas's interpreter mixes arrays with and without an explicit mesh")
    mask = MASKS["butterfly"]
    x, blocks, dy = arrays(mask)
    function = functools.partial(block_sparse_matmul, mask=mask)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, mode.replace("Manual", "Auto")),))
    by_token, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    given = jax.device_put([x, blocks, dy], [by_token, everywhere, by_token])
    if mode == "Manual":
        # The interpreter of kernels does not know which arrays vary over devices.
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        function = jax.shard_map(function, mesh=mesh, **specs, check_vma=not kernels)
    if kernels:
        for name in ("product", "gradient"):
            kernel = functools.partial(getattr(sparse_matrix, f"triton_{name}"), interpret=True)
            monkeypatch.setattr(sparse_matrix, f"triton_{name}", kernel)
            monkeypatch.setattr(sparse_matrix, f"_plain_{name}", getattr(sparse_matrix, f"triton_{name}_of"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(results, function)).lower(*given).compile()
        ours = compiled(*given)
    assert_close(ours, results(dense(mask), x, blocks, dy))
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"mask": np.ones((4, 6), bool)}, TypeError, "mask must be a jax_flash.BlockMask"),
        ({"mask": patterns.causal(INPUTS, OUTPUTS, **SIDES)}, ValueError, "some blocks are partial"),
        (
            {"mask": patterns.butterfly(60, OUTPUTS, **SIDES)},
            ValueError,
            "60 x 96 does not consist of blocks of 16 x 16",
        ),
        ({"mask": BlockMask.from_dense(np.ones((2, 4, 6), bool), 64, 96, **SIDES)}, ValueError, "one mask"),
        ({"x": np.ones((3, 65), np.float32)}, ValueError, r"x must have shape \[..., 64\]"),
        ({"x": np.ones((3, 64), np.float16)}, TypeError, "equal dtypes"),
        ({"x": np.ones((3, 64), int)}, TypeError, "x has dtype"),
        ({"blocks": np.ones((3, 16, 16), np.float32)}, ValueError, "blocks must have shape"),
    ],
)
def test_errors(given, error, message):
    x, blocks, _ = arrays(MASKS["butterfly"])
    with pytest.raises(error, match=message):
        block_sparse_matmul(**{"x": x, "blocks": blocks, "mask": MASKS["butterfly"]} | given)


def test_errors_of_conversions():
    with pytest.raises(ValueError, match="matrix must have shape"):
        matrix_to_blocks(np.ones((OUTPUTS, INPUTS), np.float32), MASKS["butterfly"])
    with pytest.raises(ValueError, match="blocks must have shape"):
        blocks_to_matrix(np.ones((1, 16, 16), np.float32), MASKS["butterfly"])


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda scores: patterns.top_k(scores, 1, INPUTS, OUTPUTS, **SIDES),
        lambda scores: BlockMask.from_function(
            lambda b, h, i, j: scores[i // 16, j // 16] > 0, INPUTS, OUTPUTS, **SIDES
        ),
    ],
    ids=["blocks", "function"],
)
def test_a_traced_mask_is_refused(mask_of):
    def product(scores):
        return block_sparse_matmul(jnp.ones((2, INPUTS)), jnp.ones((4, 16, 16)), mask_of(scores))

    with pytest.raises(ValueError, match="mask must be concrete"):
        jax.jit(product)(jnp.ones((4, 6)))

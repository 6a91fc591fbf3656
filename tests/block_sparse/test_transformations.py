"""Attention with a `BlockMask`: derivatives, transformations, meshes, errors and time."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import IMPLEMENTATIONS, entries, sparse, with_unchecked_arrays
from cases import EXPORT_CHECKS, data_collectives, differentiable
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash
from jax_flash import BlockMask

pytestmark = pytest.mark.usefixtures("device")


# --- derivatives ---

SMALL = sparse(16, 16, heads=2, B=2, T=37, S=41, N=2, K=1, D=3, E=2, bias="11ts", causal=True)


def on_cpu(device):
    if device.platform != "cpu":
        pytest.skip("float64 runs on the CPU only")


def test_check_grads(x64, device):
    on_cpu(device)
    attention, inputs = differentiable(SMALL, "flash")
    check_grads(attention, inputs, order=2, modes=["rev"], atol=1e-4, rtol=1e-4, eps=1e-4)


@pytest.mark.parametrize("derivative", ["hessian", "gradient of a gradient"])
def test_higher_order(derivative, x64, device):
    on_cpu(device)
    case = sparse(16, 16, B=1, T=18, S=20, N=1, K=1, D=2, E=2, seed=1)
    results = []
    for implementation in ("flash", "reference"):
        attention, inputs = differentiable(case, implementation)

        def loss(*inputs, attention=attention):
            return (attention(*inputs)[0] ** 3).sum() + jnp.sin(attention(*inputs)[1]).sum()

        def penalty(*inputs, loss=loss):
            return sum((x**2).sum() for x in jax.grad(loss, (0, 1, 2))(*inputs))

        higher = jax.hessian(loss, 1) if derivative == "hessian" else jax.grad(penalty, (0, 1, 2))
        results.append(jax.jit(higher)(*inputs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), *results)


# --- transformations ---

B, T, S, N, K, D = 2, 40, 56, 4, 2, 8
BLOCKS = {"q_block": 16, "kv_block": 16}
attend = functools.partial(jax_flash.dot_product_attention, implementation="flash")


def arrays(*lead, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, T, N, D), (*lead, S, K, D), (*lead, S, K, D))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def gradients(q, k, v, mask):
    return jax.value_and_grad(lambda q, k, v: (attend(q, k, v, block_mask=mask) ** 2).sum(), (0, 1, 2))(q, k, v)


def small(seed, batch=1, heads=1):
    return entries(seed, T, S, 16, 16, batch, heads)


def from_mask(mask):
    return BlockMask.from_mask(mask, **BLOCKS)


def assert_close(x, y, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), x, y)


def stacked(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, N), (B, 1), (B, N)])
def test_jit_and_constants(batch, heads):
    """Pass the mask as an argument, as a constant and as a static argument, or make it in the program."""
    given, mask = arrays(B), small(0, batch, heads)
    expected = gradients(*given, from_mask(mask))
    assert_close(jax.jit(gradients)(*given, from_mask(mask)), expected)
    assert_close(jax.jit(gradients, static_argnums=3)(*given, from_mask(mask)), expected)
    assert_close(jax.jit(lambda *given: gradients(*given, from_mask(mask)))(*given), expected)
    assert_close(jax.jit(lambda *given, mask: gradients(*given, from_mask(mask)))(*given, mask=mask), expected)


def test_data_dependent_blocks():
    """The program keeps the key blocks with the largest sums."""
    given = arrays(B)

    def keep(q, k):
        score = jnp.einsum("btnd,bskd->bntsk", q, k).mean(-1)
        score = jnp.pad(score, ((0, 0), (0, 0), (0, 8), (0, 8))).reshape(B, N, 3, 16, 4, 16).sum((3, 5))
        return score >= jnp.sort(score, -1)[..., 2:3]

    def function(q, k, v):
        return gradients(q, k, v, BlockMask.from_dense(keep(q, k), T, S, **BLOCKS))

    dense = np.asarray(keep(*given[:2]))
    expected = gradients(*given, BlockMask.from_dense(dense, T, S, **BLOCKS))
    assert_close(jax.jit(function)(*given), expected)


@pytest.mark.parametrize("mapped", ["arrays", "mask", "both"])
@pytest.mark.parametrize("heads", [1, N])
def test_vmap(mapped, heads):
    """The examples share the mask, or each has its own with its own element masks."""
    given = arrays(3, B) if mapped != "mask" else arrays(B)
    masks = np.stack([small(seed, B, heads) for seed in range(3)]) if mapped != "arrays" else small(0, B, heads)
    axes = tuple(0 if mapped != "mask" else None for _ in given)

    def function(q, k, v, mask):
        return gradients(q, k, v, from_mask(mask))

    def single(i):
        picked = (x if axis is None else x[i] for x, axis in zip(given, axes, strict=True))
        return gradients(*picked, from_mask(masks if mapped == "arrays" else masks[i]))

    expected = stacked([single(i) for i in range(3)])
    axis = None if mapped == "arrays" else 0
    block_masks = jax.vmap(from_mask)(masks) if mapped != "arrays" else from_mask(masks)
    assert_close(jax.jit(jax.vmap(gradients, in_axes=(*axes, axis)))(*given, block_masks), expected)
    assert_close(jax.jit(jax.vmap(function, in_axes=(*axes, axis)))(*given, masks), expected)


def test_nested_vmap():
    """The inner vmap maps masks only, the outer one arrays and masks."""
    given, masks = arrays(2, B), np.stack([[small(seed + 10 * i) for seed in range(3)] for i in range(2)])
    block_masks = jax.vmap(jax.vmap(from_mask))(masks)
    function = jax.vmap(jax.vmap(gradients, in_axes=(None, None, None, 0)))
    expected = stacked([
        stacked([gradients(*(x[i] for x in given), from_mask(masks[i, j])) for j in range(3)]) for i in range(2)
    ])  # fmt: skip
    assert_close(jax.jit(function)(*given, block_masks), expected)


def test_vmap_shares_one_mask():
    """A mask that the examples share is not copied."""
    text = (
        jax.jit(jax.vmap(gradients, in_axes=(0, 0, 0, None)))
        .lower(*arrays(3, B), from_mask(small(0)))
        .compile()
        .as_text()
    )
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_flash' in line]
    assert len(lines) == 2 and all("batch=6 " in line and "block_mask=11ts" in line for line in lines)


def layer(x, w, mask):
    q, k, v = (jnp.einsum("btnd,de->btne", x, w[i]) for i in range(3))
    return x + jnp.tanh(attend(q, k, v, block_mask=mask, is_causal=True))


def various_layer_masks():
    """Return masks with and without element masks and heads. One is a slice of a longer mask."""
    whole = from_mask(entries(0, T + 30, T + 30, 16, 16))[:T, :T]
    return [
        from_mask(entries(1, T, T, 16, 16, 1, N)),
        BlockMask.from_dense(np.eye(3, dtype=bool), T, T, **BLOCKS),
        whole,
    ]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_scan_over_layers(remat, where):
    """One mask per layer, stacked outside of the program or inside."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32), jnp.asarray(rng.normal(size=(3, 3, D, D)) / D)
    masks = various_layer_masks()
    body = jax.checkpoint(layer) if remat else layer

    def scanned(x, w, masks):
        stack = BlockMask.stack(masks) if where == "inside" else masks
        return (jax.lax.scan(lambda x, xs: (body(x, *xs), None), x, (w, stack))[0] ** 2).sum()

    def looped(x, w):
        for weights, mask in zip(w, masks, strict=True):
            x = layer(x, weights, mask)
        return (x**2).sum()

    ours = jax.jit(jax.grad(scanned, (0, 1)))(x, w, masks if where == "inside" else BlockMask.stack(masks))
    assert_close(ours, jax.jit(jax.grad(looped, (0, 1)))(x, w), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_a_stack(implementation):
    """Each example has one mask of the stack. A slice applies to all of them."""
    q, k, v = arrays(B)
    masks = [
        from_mask(small(0, 1, N)),
        BlockMask.from_dense(np.eye(3, 4, dtype=bool), T, S, **BLOCKS),
        from_mask(small(1)),
    ]

    def function(q, k, v, mask):
        def loss(q, k, v):
            o = jax_flash.dot_product_attention(q, k, v, block_mask=mask[:30, 16:], implementation=implementation)
            return (o**2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    given = q[:, :30], k[:, 16:], v[:, 16:]
    expected = stacked([function(*given, mask) for mask in masks])
    assert_close(jax.jit(jax.vmap(function, (None, None, None, 0)))(*given, BlockMask.stack(masks)), expected)


@pytest.mark.parametrize("implementation", ["flash", None])
def test_export_round_trip(implementation, device):
    """Export with a mask as a constant, as an argument, and made from an argument."""
    given, mask, causal = arrays(B), small(0, 1, N), from_mask(np.tri(T, S, dtype=bool))

    def function(q, k, v, dense, causal):
        block_mask = from_mask(mask) & BlockMask.from_dense(dense, T, S, **BLOCKS) & causal
        o = jax_flash.dot_product_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return (o**2).sum()

    gradient = jax.jit(jax.value_and_grad(function, (0, 1, 2)))
    dense = np.random.default_rng(0).random((3, 4)) < 0.7
    platform = "cuda" if device.platform == "gpu" else "cpu"
    exported = export.export(gradient, platforms=(platform,), disabled_checks=EXPORT_CHECKS)(*given, dense, causal)
    restored = export.deserialize(exported.serialize())
    assert_close(restored.call(*given, dense, causal), gradient(*given, dense, causal))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strict_promotion(implementation):
    """JAX can be configured to promote neither ranks nor dtypes."""

    def function(q, k, v, mask, dense):
        mask = ~(mask & from_mask(dense)) | mask
        return jax_flash.dot_product_attention(q, k, v, block_mask=mask, implementation=implementation).sum()

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        o, _ = jax.eval_shape(jax.value_and_grad(function), *arrays(B), from_mask(small(0, B, N)), small(1))
    assert o.shape == ()


# --- sharding ---


@pytest.fixture
def mesh(device):
    on_cpu(device)
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, N), (8, 1), (8, N)])
def test_sharding(batch, heads, explicit, mesh):
    """Each device computes its own batch entries and heads, with its part of the mask."""
    given, mask = arrays(8), from_mask(small(0, batch, heads))
    expected = gradients(*given, mask)
    if batch > 1:  # with a table of element masks for each batch entry
        mask = jax.tree.map(lambda x: x[:, 0], jax.vmap(from_mask)(small(0, batch, heads)))
    if explicit:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    places = P("data" if batch > 1 else None, "model" if heads > 1 else None)
    elements = P("data") if batch > 1 else P()
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, NamedSharding(mesh, P("data", None, "model")))
        specs = dict.fromkeys(("blocks", "row_lists", "column_lists"), places) | {"element_masks": elements}
        arrays_of_mask = {
            name: jax.device_put(getattr(mask, name), NamedSharding(mesh, spec)) for name, spec in specs.items()
        }
        compiled = jax.jit(gradients).lower(*placed, with_unchecked_arrays(mask, **arrays_of_mask)).compile()
        ours = compiled(*placed, with_unchecked_arrays(mask, **arrays_of_mask))
    assert_close(ours, expected, 1e-4)
    assert not data_collectives(compiled)
    local = f"batch=2 q_len={T} kv_len={S} q_heads=2 kv_heads=1 "
    extent = f"block_mask={'b' if batch > 1 else '1'}{'n' if heads > 1 else '1'}ts "
    lines = [line for line in compiled.as_text().splitlines() if 'custom_call_target="jax_flash' in line]
    assert len(lines) == 2 and all(local in line and extent in line for line in lines)


def test_one_key_head_on_all_devices(device):
    on_cpu(device)
    q, k, v = arrays(B, seed=1)
    given, mask = (jnp.concatenate([q, q + 1], 2), k[:, :, :1], v[:, :, :1]), from_mask(small(0, 1, 2 * N))
    expected = gradients(*given, mask)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(given[0], NamedSharding(mesh, P(None, None, "model")))
        assert_close(jax.jit(gradients)(placed, *given[1:], mask), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, mesh):
    """The lists are sharded like the heads. Element masks are replicated."""
    given, mask = arrays(8), from_mask(small(0, 1, N))
    expected = gradients(*given, mask)[1]
    spec, lists = P("data", None, "model"), P(None, "model")
    specs = with_unchecked_arrays(mask, blocks=lists, row_lists=lists, column_lists=lists, element_masks=P())
    function = jax.jit(
        jax.shard_map(
            lambda *args: gradients(*args)[1],
            mesh=mesh,
            in_specs=(spec, spec, spec, specs),
            out_specs=(spec,) * 3,
            check_vma=check_vma,
        )
    )
    assert_close(function(*given, mask), expected)
    assert not data_collectives(function.lower(*given, mask).compile())


def test_higher_order_and_vmap_under_a_mesh(mesh):
    given, mask = arrays(8), from_mask(small(0, 8, N))

    def penalty(q, k, v, mask):
        return jax.grad(lambda q: sum((x**2).sum() for x in gradients(q, k, v, mask)[1]))(q)

    expected = jax.jit(penalty)(*given, mask)
    split = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), given)
    masks = jax.vmap(from_mask)(small(0, 8, N).reshape(2, 4, N, T, S))
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, NamedSharding(mesh, P("data", None, "model")))
        assert_close(jax.jit(penalty)(*placed, mask), expected, 1e-3)
        placed = jax.device_put(split, NamedSharding(mesh, P(None, "data", None, "model")))
        ours = jax.jit(jax.vmap(penalty))(*placed, masks)
    assert_close(ours.reshape(expected.shape), expected, 1e-3)


# --- errors, time ---


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (np.ones((T, S), bool), TypeError, "block_mask.*ndarray"),
        (np.ones((3, 4), np.int32), TypeError, "block_mask.*ndarray"),
        ("causal", TypeError, "block_mask.*str"),
        (from_mask(np.ones((T + 1, S), bool)), ValueError, f"block_mask.*{T}.*41"),
        (from_mask(np.ones((T, S - 1), bool)), ValueError, f"block_mask.*{S}.*55"),
        (from_mask(np.ones((S, T), bool)), ValueError, "block_mask.*56"),
        (from_mask(small(0, 3, 1)), ValueError, r"block_mask.*\(3, 1, 3, 4\)"),
        (from_mask(small(0, 1, K)), ValueError, r"block_mask.*\(1, 2, 3, 4\)"),
        (BlockMask.stack([from_mask(small(0)), from_mask(small(1))]), ValueError, "block_mask is a stack of masks"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_errors_of_attention(mask, error, match, implementation):
    """The error is raised at trace time."""
    function = functools.partial(jax_flash.dot_product_attention, implementation=implementation)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda *given: function(*given, block_mask=mask), *arrays(B))


@pytest.mark.parametrize("backward", [False, True])
def test_time_is_proportional_to_kept_blocks(backward, device):
    """An eighth of the blocks takes at most 1/8/0.6 of the time.

    The test compares minimum times, because other load on the machine only adds to a time.
    """
    on_cpu(device)
    length, blocks = 4096, 32
    given = [jnp.asarray(np.random.default_rng(i).normal(size=(1, length, 4, 64)), jnp.float32) for i in range(3)]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(blocks), (blocks, 1)), axis=1)
    mask = BlockMask.from_dense(order < blocks // 8)
    assert mask.kept == 1 / 8

    def function(mask):
        loss = functools.partial(attend, block_mask=mask)
        return jax.jit(jax.grad(lambda *given: loss(*given).sum(), (0, 1, 2)) if backward else loss)

    functions = [function(None), function(mask)]
    times = [[], []]
    for _ in range(8):
        for run_once, taken in zip(functions, times, strict=True):
            start = time.process_time()
            jax.block_until_ready(run_once(*given))
            taken.append(time.process_time() - start)
    dense, kept = (min(taken[1:]) for taken in times)
    assert kept < dense / 8 / 0.6, (kept, dense, kept / dense * 8)

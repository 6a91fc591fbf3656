"""Paged keys and values give the same results as contiguous ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from cases import Case, data_collectives
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import Cache

import jax_flash
import jax_flash.linen
import jax_flash.nnx

CACHES = [
    Cache((5, 96, 1, 0), 8, Case(T=1, N=4, K=2, D=16, E=24)),
    Cache((40, 600, 17), 544, Case(T=3, N=4, K=1, D=16, E=16, window=(50, 0), sinks=2.0)),
    Cache((200, 130), 48, Case(T=70, N=2, K=2, D=16, E=16, soft_cap=2.0)),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_accuracy(cache, dtype):
    pages.check(cache, dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_implementations(cache, implementation):
    pages.check(cache, "float64", implementation=implementation)


def cache(B=2, T=2, N=4, K=2, D=8, page=16, count=9, M=4, seed=0):
    """Return query, key_pages, value_pages, page_table and lengths."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, D), (count, page, K, D), (count, page, K, D)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    table = np.stack([rng.permutation(count)[:M] for _ in range(B)]).astype(np.int32)
    return q, k, v, table, rng.integers(T, M * page + 1, B).astype(np.int32)


def contiguous(q, k, v, table, lengths, **options):
    """Return attention over the gathered pages."""
    k, v = (x[table].reshape(len(table), -1, *x.shape[2:]) for x in (k, v))
    given = {"is_causal": True, "key_value_seq_lengths": lengths, "query_offset": lengths - q.shape[1]}
    return jax_flash.dot_product_attention(q, k, v, **given, **options)


@pytest.mark.usefixtures("device")
def test_mods():
    """Arguments `query` and `key` are positions in the sequence."""
    table = jnp.linspace(-1, 1, 64)
    mods = {
        "score_mod": lambda score, batch, head, query, key: score + table[query - key] * (head + 1),
        "mask_mod": lambda batch, head, query, key: (key % 3 > 0) | (query == key),
    }
    given = cache()
    expected = contiguous(*given, **mods, implementation="reference")
    np.testing.assert_allclose(jax_flash.paged_attention(*given, **mods), expected, atol=1e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mapped", [(0, None, None, 0, 0), (0, 0, 0, 0, 0), (None, 0, 0, None, None)], ids=str)
def test_vmap(mapped):
    """Each mapped call equals attention over contiguous keys, also if the calls share pages."""
    each = [cache(seed=seed) for seed in range(3)]
    given = [
        jnp.stack(x) if axis == 0 else jnp.asarray(x[0])
        for axis, x in zip(mapped, zip(*each, strict=True), strict=True)
    ]
    found = jax.jit(jax.vmap(jax_flash.paged_attention, mapped))(*given)
    for i, x in enumerate(found):
        one = [x[i] if axis == 0 else x for axis, x in zip(mapped, given, strict=True)]
        np.testing.assert_allclose(x, contiguous(*one, implementation="reference"), atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2)])
def test_heads_over_devices(heads, kv_heads, kind):
    """Pages are sharded by heads if the mesh divides the heads, and nothing is gathered."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    q, k, v, table, lengths = cache(N=heads, K=kv_heads)
    expected = contiguous(q, k, v, table, lengths)
    with jax.set_mesh(mesh):
        replicated = kv_heads % 4 > 0
        specs = P(None, None, "x"), *[P() if replicated else P(None, None, "x")] * 2
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, v), specs, strict=True)]
        compiled = jax.jit(jax_flash.paged_attention).lower(*placed, table, lengths).compile()
        np.testing.assert_allclose(compiled(*placed, table, lengths), expected, atol=1e-5)
    assert not data_collectives(compiled)


def test_batch_over_devices():
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v, table, lengths = cache(B=8)
    expected = contiguous(q, k, v, table, lengths)
    placed = jax.device_put((q, table, lengths), NamedSharding(mesh, P("x")))
    attend = jax.jit(lambda q, table, lengths: jax_flash.paged_attention(q, k, v, table, lengths))
    np.testing.assert_allclose(attend(*placed), expected, atol=1e-5)


def test_growing_cache_in_a_scan():
    """One token after another, without recompilation, gives the same result as all tokens at once."""
    T, N, D, page = 40, 2, 8, 16
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, T, N, D)), jnp.float32) for i in range(3))
    table = jnp.array([[2, 0, 1]])

    def step(pools, t):
        slot = table[0, t // page], t % page
        pools = [pool.at[slot].set(x[0, t]) for pool, x in zip(pools, (k, v), strict=True)]
        return pools, jax_flash.paged_attention(q[:, t][:, None], *pools, table, t[None] + 1)[0, 0]

    _, found = jax.lax.scan(step, [jnp.zeros((3, page, N, D))] * 2, jnp.arange(T))
    np.testing.assert_allclose(found, jax_flash.dot_product_attention(q, k, v, is_causal=True)[0], atol=1e-5)


def test_traced_page_numbers_are_clamped():
    q, k, v, table, lengths = cache()
    lengths = np.full_like(lengths, 64)
    out_of_range = np.where(table == table.max(), 2**31 - 1, np.where(table == 0, -5, table))
    clamped = np.where(table == table.max(), len(k) - 1, table)
    attend = jax.jit(jax_flash.paged_attention)
    np.testing.assert_array_equal(attend(q, k, v, out_of_range, lengths), attend(q, k, v, clamped, lengths))


def test_captured_arrays_on_a_gpu(monkeypatch):
    """No backward is planned, so the GPU's restrictions on gradients of captured arrays do not apply."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    table = jnp.linspace(-1, 1, 64)
    attend = functools.partial(jax_flash.paged_attention, score_mod=lambda s, b, h, q, k: s + table[k] * (h + 1))
    assert jax.eval_shape(attend, *cache()).shape == (2, 2, 4, 8)


def test_gradients_are_refused():
    q, k, v, table, lengths = cache()
    with pytest.raises(NotImplementedError, match="paged attention has no gradient in the fused kernels"):
        jax.grad(lambda q: jax_flash.paged_attention(q, k, v, table, lengths).sum())(q)
    with pytest.raises(NotImplementedError, match="paged attention has no gradient in the fused kernels"):
        jax.jvp(lambda q: jax_flash.paged_attention(q, k, v, table, lengths), (q,), (q,))


# --- writing ---


def test_append():
    """Lengths include the T new tokens. A sequence shorter than T takes only the last of them."""
    _, k, v, table, _ = cache(B=4, count=16, M=4, seed=1)
    table = np.random.default_rng(0).permutation(16).reshape(4, 4).astype(np.int32)
    lengths, T = np.array([40, 2, 0, 64]), 5
    new_k, new_v = (np.random.default_rng(i).normal(size=(4, T, 2, 8)).astype(np.float32) for i in range(2))
    expected = [np.array(k), np.array(v)]
    for b, length in enumerate(lengths):
        for position in range(max(length - T, 0), length):
            for pool, new in zip(expected, (new_k, new_v), strict=True):
                pool[table[b, position // 16], position % 16] = new[b, position - (length - T)]
    given = (k, v, new_k, new_v, table, lengths)
    for append in (jax_flash.append_to_pages, jax.jit(jax_flash.append_to_pages)):
        for found, pool in zip(append(*given), expected, strict=True):
            np.testing.assert_array_equal(found, pool)
    half = jax_flash.append_to_pages(k.astype(jnp.bfloat16), v, *given[2:])
    assert [x.dtype for x in half] == [jnp.bfloat16, jnp.float32]
    assert np.array_equal(half[0], expected[0].astype(jnp.bfloat16))


def test_append_ignores_invalid_slots():
    """Nothing is written for traced page numbers out of range, or for lengths beyond the table."""
    _, k, v, table, _ = cache()
    new, append = jnp.ones((2, 3, 2, 8)), jax.jit(jax_flash.append_to_pages)
    nowhere = np.array([[-1] * 4, [9] * 4])
    cases = ((nowhere, [20, 20]), (table, [0, -5]), (table, [67, 2**31 - 1]), (table[:, :0], [0, 0]))
    for numbers, lengths in cases:
        for found, pool in zip(append(k, v, new, new, numbers, np.array(lengths)), (k, v), strict=True):
            np.testing.assert_array_equal(found, pool)


def test_append_in_place():
    """Donated pages are updated in place. vmap over pages is supported."""
    x, k, v, table, lengths = cache()
    new_k, new_v = jnp.split(x, 2, axis=2)  # two of four heads each
    table = np.arange(8).reshape(2, 4)
    append = jax.jit(jax_flash.append_to_pages, donate_argnames=("key_pages", "value_pages"))
    address = k.unsafe_buffer_pointer()
    found, _ = append(k, v, new_k, new_v, table, lengths)
    assert found.unsafe_buffer_pointer() == address
    pools = jnp.stack([found, 2 * found])
    mapped = jax.vmap(jax_flash.append_to_pages, (0, 0, None, None, None, None))
    again, _ = mapped(pools, pools, new_k, new_v, table, lengths)
    np.testing.assert_array_equal(again[0], found)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_append_on_several_devices(axis_type):
    """Heads and sequences are sharded. The heads of the pages stay on their devices."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(axis_type,) * 2)
    x, k, v, _, lengths = cache()
    table = np.arange(8).reshape(2, 4).astype(np.int32)
    given = (k, v, *jnp.split(x, 2, axis=2), table, lengths)
    expected = jax_flash.append_to_pages(*given)
    specs = P(None, None, "heads"), P(None, None, "heads"), *[P("batch", None, "heads")] * 2, P("batch"), P("batch")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
        for found, pool in zip(jax.jit(jax_flash.append_to_pages)(*placed), expected, strict=True):
            np.testing.assert_array_equal(found, pool)
            assert found.sharding.spec[2] == "heads"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": jnp.zeros((2, 3, 2, 9))}, ValueError, r"take key \[B, T, K, D\] and value"),
        ({"value": jnp.zeros((2, 4, 2, 8))}, ValueError, "take key"),
        ({"value_pages": jnp.zeros((9, 32, 2, 8))}, ValueError, "take key"),
        ({"key": np.zeros((2, 3, 2, 8), int)}, TypeError, "key"),
        ({"page_table": np.full((2, 4), 9)}, ValueError, "page numbers from 0 to 8"),
        ({"lengths": np.array([3, 65])}, ValueError, "lengths must be from 0 to 64"),
        ({"lengths": np.array([3])}, ValueError, r"lengths must have shape \(2,\)"),
    ],
)
def test_errors_of_append(changes, error, message):
    _, k, v, table, lengths = cache()
    given = {"key_pages": k, "value_pages": v, "page_table": table, "lengths": lengths}
    new = {"key": jnp.zeros((2, 3, 2, 8)), "value": jnp.zeros((2, 3, 2, 8))}
    with pytest.raises(error, match=message):
        jax_flash.append_to_pages(**given | new | changes)


# --- Flax ---

FEATURES, OPTIONS = 32, {"is_causal": True, "local_window_size": (6, 0), "logits_soft_cap": 3.0, "use_sinks": True}


def make_nnx(dtype, **options):
    """Return a module without a cache, and a function that calls it with its paged cache."""
    layer = jax_flash.nnx.MultiHeadAttention(
        4, FEATURES, num_kv_heads=2, dtype=dtype, decode=False, rngs=nnx.Rngs(0), **options
    )
    layer.init_pages(9, 16, dtype)
    call = nnx.jit(lambda layer, x, table, lengths: layer(x, page_table=table, lengths=lengths))
    return layer, functools.partial(call, layer)


def make_linen(dtype, **options):
    layer = jax_flash.linen.MultiHeadAttention(4, num_kv_heads=2, dtype=dtype, **options)
    paged = layer.clone(decode=True, pages=9, page=16)
    state = paged.init(jax.random.key(0), jnp.zeros((1, 1, FEATURES)))
    apply = jax.jit(functools.partial(paged.apply, mutable="cache"))

    def call(x, table, lengths):
        out, changed = apply(state, x, page_table=table, lengths=lengths)
        state.update(changed)
        return out

    return functools.partial(layer.apply, {"params": state["params"]}), call


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{"is_causal": True}, OPTIONS], ids=["causal", "options"])
@pytest.mark.parametrize("make", [make_nnx, make_linen])
def test_modules(make, options, dtype):
    """Prompts of 20 and 3 tokens in one call, then single tokens. The second sequence ends after one of these."""
    unpaged, paged = make(dtype, **options)
    x = jax.random.normal(jax.random.key(1), (2, 24, FEATURES), dtype)
    table, ends = np.array([[3, 7], [5, 0]]), np.array([20, 3])
    prompts = jnp.stack([x[0, :20], jnp.pad(x[1, :3], ((17, 0), (0, 0)))])
    found = paged(prompts, table, ends)
    expected = unpaged(x)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(found[0], expected[0, :20], atol=tolerance)
    np.testing.assert_allclose(found[1, 17:], expected[1, :3], atol=tolerance)
    for i in range(20, 24):
        step = paged(jnp.stack([x[0, i : i + 1], x[1, 3:4]]), table, np.array([i + 1, 4 if i == 20 else 0]))
        np.testing.assert_allclose(step[0, 0], expected[0, i], atol=tolerance)
        if i == 20:
            np.testing.assert_allclose(step[1, 0], expected[1, 3], atol=tolerance)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": jnp.ones((1, 1, 1, 32), bool)}, "mask must not be given with a paged cache"),
        ({"query_segment_ids": jnp.zeros((2, 1), int)}, "query_segment_ids must not be given with a paged cache"),
        ({"query_offset": 3}, "query_offset must not be given"),
        ({"lengths": None}, "needs page_table and lengths"),
    ],
)
def test_errors_of_modules(given, message):
    call = {"page_table": np.zeros((2, 2), int), "lengths": np.array([1, 1])} | given
    x = jnp.zeros((2, 1, FEATURES))
    layer, _ = make_nnx(jnp.float32)
    with pytest.raises(ValueError, match=message):
        layer(x, **call)
    linen = jax_flash.linen.MultiHeadAttention(4, decode=True, pages=9)
    state = linen.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=message):
        linen.apply(state, x, mutable="cache", **call)


def test_modules_need_equally_many_queries_and_keys():
    """With fewer keys than queries, the queries would see a key that was never written."""
    layer, _ = make_nnx(jnp.float32)
    x, call = jnp.zeros((2, 3, FEATURES)), {"page_table": np.zeros((2, 2), int), "lengths": np.array([3, 3])}
    with pytest.raises(ValueError, match="as many queries as keys"):
        layer(x, x[:, -2:], **call)


def test_modules_without_a_paged_cache():
    x, call = jnp.zeros((2, 1, FEATURES)), {"page_table": np.zeros((2, 2), int), "lengths": np.array([1, 1])}
    layer = jax_flash.nnx.MultiHeadAttention(4, FEATURES, decode=False, dropout_rate=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="call `init_pages` first"):
        layer(x, **call)
    layer.init_pages(9)
    with pytest.raises(ValueError, match="a paged cache does not support dropout"):
        layer(x, **call)
    assert layer(x, deterministic=True, **call).shape == x.shape
    with pytest.raises(ValueError, match="multiple of 8 keys from 8 to 1024, not 20"):
        layer.init_pages(9, 20)
    with pytest.raises(ValueError, match="multiple of 8 keys from 8 to 1024, not 20"):
        jax_flash.linen.MultiHeadAttention(4, decode=True, pages=9, page=20).init(jax.random.key(0), x)
    for options in ({"decode": True}, {"pages": 9}):
        linen = jax_flash.linen.MultiHeadAttention(4, **options)
        state = linen.init(jax.random.key(0), x)
        with pytest.raises(ValueError, match="set decode=True and pages"):
            linen.apply(state, x, mutable="cache", **call)


def pools(*shape):
    return {name: jnp.zeros(shape) for name in ("key_pages", "value_pages")}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((2, 4, 8))}, ValueError, "do not fit together"),
        ({"key_pages": jnp.zeros((9, 16, 2, 9))}, ValueError, "do not fit together"),
        (pools(9, 16, 2, 9), ValueError, r"key_pages .* do not fit together: .* \(2, 2, 4, 8\), \(9, 16, 2, 9\)"),
        ({"value_pages": jnp.zeros((9, 32, 2, 8))}, ValueError, "do not fit together"),
        (
            {"key_pages": jnp.zeros((9, 16, 2, 8), jnp.bfloat16)},
            TypeError,
            r"key_pages has dtype bfloat16, .* key_pages\.astype\(query\.dtype\)",
        ),
        (pools(9, 12, 2, 8), ValueError, "multiple of 8 keys from 8 to 1024, not 12"),
        (pools(9, 1032, 2, 8), ValueError, "multiple of 8 keys from 8 to 1024, not 1032"),
        (pools(0, 16, 2, 8), ValueError, "at least one page"),
        (pools(9, 16, 3, 8), ValueError, "4 heads, .* multiple of the 3 heads in key_pages and value_pages"),
        ({"page_table": np.zeros((3, 4), int)}, ValueError, r"page_table must have .* B = 2, not \(3, 4\)"),
        ({"page_table": np.zeros((2, 4))}, TypeError, "page_table must be integers"),
        ({"page_table": np.full((2, 4), 9)}, ValueError, "page numbers from 0 to 8, but has 9 to 9"),
        ({"page_table": np.full((2, 4), -1)}, ValueError, "but has -1 to -1"),
        ({"lengths": np.array([1])}, ValueError, r"lengths must have shape \(2,\)"),
        ({"lengths": np.array([3, 65])}, ValueError, r"lengths must be from 0 to 64, .* 4 pages of 16, not \[3, 65\]"),
        ({"lengths": np.array([-1, 5])}, ValueError, "lengths must be from 0"),
        ({"is_causal": True}, TypeError, "unexpected keyword argument 'is_causal'"),
        ({"return_residual": None}, TypeError, "return_residual must be True or False"),
    ],
)
def test_errors(changes, error, message):
    given = dict(zip(("query", "key_pages", "value_pages", "page_table", "lengths"), cache(), strict=True))
    with pytest.raises(error, match=message):
        jax_flash.paged_attention(**given | changes)


def test_symbolic_number_of_pages_is_refused():
    (query, *pages), shape = cache()[:3], jax.export.symbolic_shape("2, m")
    attend = functools.partial(jax_flash.paged_attention, query, *pages, lengths=jnp.ones(2, jnp.int32))
    with pytest.raises(NotImplementedError, match=r"symbolic shapes: .* page_table \(2, m\)"):
        jax.export.export(jax.jit(attend))(jax.ShapeDtypeStruct(shape, jnp.int32))


@pytest.mark.parametrize("shape", ["b, 1", "2, t"])
def test_symbolic_sizes_are_refused(shape):
    pages, (batch, queries) = jnp.zeros((3, 16, 2, 8)), jax.export.symbolic_shape(shape)
    table, lengths = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    attend = functools.partial(jax_flash.paged_attention, page_table=table, lengths=lengths)
    with pytest.raises(NotImplementedError, match=r"symbolic shapes: query \(.*, 4, 8\)"):
        jax.export.export(jax.jit(attend))(
            jax.ShapeDtypeStruct((batch, queries, 4, 8), jnp.float32), key_pages=pages, value_pages=pages
        )

"""Keys and values in pages: what the contiguous ones give, whatever the pages are."""

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from cases import Case, gathers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import Cache

import jax_flash

CACHES = [
    Cache((5, 96, 1, 0), 16, Case(T=1, N=4, K=2, D=16, E=24)),
    Cache((40, 300, 17), 64, Case(T=3, N=4, K=1, D=16, E=16, window=(50, 0), sinks=2.0)),
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
    """In plain JAX, NaN where no sequence has anything reach products with 0."""
    pages.check(cache, "float64", np.nan if implementation == "flash" else 1e3, implementation=implementation)


def cache(B=2, T=2, N=4, K=2, D=8, page=16, count=9, M=4, seed=0):
    """query, key_pages, value_pages, page_table, lengths."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, D), (count, page, K, D), (count, page, K, D)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    table = np.stack([rng.permutation(count)[:M] for _ in range(B)]).astype(np.int32)
    return q, k, v, table, rng.integers(T, M * page + 1, B).astype(np.int32)


def contiguous(q, k, v, table, lengths, **options):
    """The same by copying the pages together."""
    k, v = (x[table].reshape(len(table), -1, *x.shape[2:]) for x in (k, v))
    given = {"is_causal": True, "key_value_seq_lengths": lengths, "query_offset": lengths - q.shape[1]}
    return jax_flash.dot_product_attention(q, k, v, **given, **options)


@pytest.mark.usefixtures("device")
def test_mods():
    """query and key are places in the sequence."""
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
    """Of sequences that share the pages, and of caches apart."""
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
    """Pages are sharded by heads where these divide, and nothing is gathered."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    q, k, v, table, lengths = cache(N=heads, K=kv_heads)
    expected = contiguous(q, k, v, table, lengths)
    with jax.set_mesh(mesh):
        whole = kv_heads % 4 > 0
        places = P(None, None, "x"), *[P() if whole else P(None, None, "x")] * 2
        placed = [jax.device_put(x, NamedSharding(mesh, place)) for x, place in zip((q, k, v), places, strict=True)]
        compiled = jax.jit(jax_flash.paged_attention).lower(*placed, table, lengths).compile()
        np.testing.assert_allclose(compiled(*placed, table, lengths), expected, atol=1e-5)
    assert not gathers(compiled)


def test_batch_over_devices():
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v, table, lengths = cache(B=8)
    expected = contiguous(q, k, v, table, lengths)
    placed = jax.device_put((q, table, lengths), NamedSharding(mesh, P("x")))
    attend = jax.jit(lambda q, table, lengths: jax_flash.paged_attention(q, k, v, table, lengths))
    np.testing.assert_allclose(attend(*placed), expected, atol=1e-5)


def test_a_cache_that_grows_in_a_scan():
    """One token after another, without compiling again: what all tokens at once give."""
    T, N, D, page = 40, 2, 8, 16
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, T, N, D)), jnp.float32) for i in range(3))
    table = jnp.array([[2, 0, 1]])

    def step(pools, t):
        place = table[0, t // page], t % page
        pools = [pool.at[place].set(x[0, t]) for pool, x in zip(pools, (k, v), strict=True)]
        return pools, jax_flash.paged_attention(q[:, t][:, None], *pools, table, t[None] + 1)[0, 0]

    _, found = jax.lax.scan(step, [jnp.zeros((3, page, N, D))] * 2, jnp.arange(T))
    np.testing.assert_allclose(found, jax_flash.dot_product_attention(q, k, v, is_causal=True)[0], atol=1e-5)


def test_traced_numbers_of_no_page_are_those_of_one():
    q, k, v, table, lengths = cache()
    lengths = np.full_like(lengths, 64)
    wild = np.where(table == table.max(), 2**31 - 1, np.where(table == 0, -5, table))
    near = np.where(table == table.max(), len(k) - 1, table)
    attend = jax.jit(jax_flash.paged_attention)
    np.testing.assert_array_equal(attend(q, k, v, wild, lengths), attend(q, k, v, near, lengths))


def test_gradients_are_refused_by_name():
    q, k, v, table, lengths = cache()
    with pytest.raises(NotImplementedError, match="paged_attention has no gradient: keys in pages are for inference"):
        jax.grad(lambda q: jax_flash.paged_attention(q, k, v, table, lengths).sum())(q)


def pools(*shape):
    return {name: jnp.zeros(shape) for name in ("key_pages", "value_pages")}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((2, 4, 8))}, ValueError, "do not fit together"),
        ({"key_pages": jnp.zeros((9, 16, 2, 9))}, ValueError, "do not fit together"),
        ({"value_pages": jnp.zeros((9, 32, 2, 8))}, ValueError, "do not fit together"),
        ({"key_pages": jnp.zeros((9, 16, 2, 8), jnp.bfloat16)}, TypeError, "dtype"),
        (pools(9, 24, 2, 8), ValueError, "multiple of 16 keys from 16 to 256, not 24"),
        (pools(9, 512, 2, 8), ValueError, "multiple of 16 keys from 16 to 256, not 512"),
        (pools(0, 16, 2, 8), ValueError, "at least one page"),
        (pools(9, 16, 3, 8), ValueError, "4 heads, key and value 3"),
        ({"page_table": np.zeros((3, 4), int)}, ValueError, r"page_table must be .* B = 2, not shape \(3, 4\)"),
        ({"page_table": np.zeros((2, 4))}, TypeError, "page_table must be integers"),
        ({"page_table": np.full((2, 4), 9)}, ValueError, "numbers of 9 pages, but there are 9 to 9"),
        ({"page_table": np.full((2, 4), -1)}, ValueError, "there are -1 to -1"),
        ({"lengths": np.array([1])}, ValueError, r"lengths must have shape \(2,\)"),
        ({"lengths": np.array([3, 65])}, ValueError, r"lengths must be from 0 to 64, 4 pages of 16, not \[3, 65\]"),
        ({"lengths": np.array([-1, 5])}, ValueError, "lengths must be from 0"),
        ({"is_causal": True}, TypeError, "unexpected keyword argument 'is_causal'"),
        ({"return_residual": None}, TypeError, "return_residual must be True or False"),
    ],
)
def test_errors(changes, error, message):
    given = dict(zip(("query", "key_pages", "value_pages", "page_table", "lengths"), cache(), strict=True))
    with pytest.raises(error, match=message):
        jax_flash.paged_attention(**given | changes)

"""Packed sequences with cumulative lengths. Each sequence attends only to itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packs
import pytest
from cases import EXPORT_CHECKS, Case, data_collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from packs import Pack

import jax_flash

SMALL = Case(N=4, K=2, D=16, E=16)
WINDOW = functools.partial(Case, N=2, K=2, D=16, E=16, window=(7, 4))
PACKS = [
    Pack((5, 0, 30, 1, 20), (5, 0, 30, 1, 20), case=SMALL),
    Pack((5, 0, 30, 1, 20), (20, 10, 18, 70, 0), padding=7, case=Case(N=4, K=2, D=16, E=24, causal=True)),
    Pack((40, 3, 60), (30, 50, 40), padding=3, case=WINDOW(sinks=2.0, soft_cap=2.0)),
    Pack((40, 3, 60), (30, 50, 40), padding=3, case=WINDOW(traced=True)),
    Pack((1, 1, 1, 1), (300, 17, 0, 64), case=Case(N=8, K=2, D=16, E=16, causal=True, window=(50, 0))),
    Pack(
        (130, 70),
        (130, 70),
        padding=5,
        case=Case(N=2, K=1, D=16, E=16, causal=True, dropout=0.2, deterministic=True),
    ),
    Pack((), (), padding=20, case=SMALL),
]


def tokens(T, heads, dim, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(T, heads, dim)), jnp.float32)


def one_by_one(attention, cu_q, cu_k, query, key, value):
    """Apply `attention(number, query, key, value, offset)` to each sequence separately."""
    parts = [jnp.zeros((0, *query.shape[1:]), query.dtype)]
    for b, (q0, q1, k0, k1) in enumerate(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)):
        if q0 < q1:
            parts.append(attention(b, query[q0:q1], key[k0:k1], value[k0:k1], int(k1 - k0 - q1 + q0)))
    parts.append(jnp.zeros((len(query) - cu_q[-1], *query.shape[1:]), query.dtype))
    return jnp.concatenate(parts)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_accuracy(pack, dtype):
    packs.check(pack, dtype)


@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_implementations(pack, implementation):
    packs.check(pack, "float64", implementation)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_mods_use_positions_in_sequences(kind):
    """The batch index is the sequence number, and positions count within sequences. Captured arrays have gradients."""
    cu_q, cu_k = np.array([0, 5, 5, 35, 52]), np.array([0, 25, 30, 60, 71])
    q, k, v, table = tokens(55, 2, 16), tokens(75, 1, 16, 1), tokens(75, 1, 16, 2), tokens(4, 40, 2, 3)

    def mod(table, number=None):
        def score_mod(score, batch, head, query, key):
            batch = batch if number is None else number
            return score + table[batch, jnp.clip(query - key + 20, 0, 39), head] * (key + 1)

        def mask_mod(batch, head, query, key):
            batch = batch if number is None else number
            return (key * (batch + 2) <= query * 2) | (key == head)

        return {"score_mod": score_mod, "mask_mod": mask_mod}[kind]

    def packed(q, k, v, table):
        return jax_flash.varlen_attention(q, k, v, cu_q, cu_k, is_causal=True, **{kind: mod(table)})

    def expected(q, k, v, table):
        def attention(number, q, k, v, offset):
            options = {"is_causal": True, "query_offset": offset, "implementation": "reference"}
            return jax_flash.dot_product_attention(q, k, v, **options, **{kind: mod(table, number)})

        return one_by_one(attention, cu_q, cu_k, q, k, v)

    (o, pull), (o_expected, pull_expected) = (jax.vjp(f, q, k, v, table) for f in (packed, expected))
    for x, y in zip((o, *pull(jnp.cos(o))), (o_expected, *pull_expected(jnp.cos(o_expected))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("mask_mod", "given", "window"),
    [
        (lambda b, h, i, j: j <= i, {}, {"is_causal": True}),
        (lambda b, h, i, j: abs(i - j) <= 5, {}, {"local_window_size": 5}),
        (lambda b, h, i, j: abs(i - j) <= 5, {"is_causal": True}, {"local_window_size": (5, 0)}),
        (lambda b, h, i, j: (j <= i) & (i - j < 9), {"local_window_size": (3, 20)}, {"local_window_size": (3, 0)}),
    ],
)
def test_mask_mod_that_is_a_window(mask_mod, given, window):
    """A mask_mod that is a window becomes that window in each sequence.

    If a sequence has more queries than keys, its first queries see no key.
    """
    q, k = tokens(55, 2, 16), tokens(75, 1, 16, 1)
    for cu in (([0, 5, 5, 35, 52], [0, 25, 30, 60, 71]), ([0, 30], [0, 12]), ([0], [0])):
        of_varlen = functools.partial(jax_flash.Problem.of_varlen, q, k, k, *cu)
        assert of_varlen(mask_mod=mask_mod, **given).mask.mask_mod is None
        attend = functools.partial(jax_flash.varlen_attention, q, k, k, *cu)
        o = attend(mask_mod=mask_mod, **given)
        np.testing.assert_array_equal(o, attend(**window))
        # The second condition is always true, but with it the mask_mod is not recognised as a window.
        by_entry = {"mask_mod": lambda *x: mask_mod(*x) & (x[2] > -(10**6)), **given}
        assert of_varlen(**by_entry).mask.mask_mod is not None
        np.testing.assert_allclose(o, attend(**by_entry, implementation="reference"), atol=1e-5)


def test_new_lengths_do_not_recompile():
    @jax.jit
    def attend(q, cu):
        return jax_flash.varlen_attention(q, q, q, cu, is_causal=True)

    q = tokens(60, 2, 8)
    results = [attend(q, np.array(cu)) for cu in ([0, 30, 60], [0, 1, 60], [0, 0, 44])]
    assert attend._cache_size() == 1
    assert not np.allclose(results[0][30:], results[1][30:])
    assert (results[2][44:] == 0).all()


def test_invalid_traced_lengths():
    """The first number counts as 0. If numbers decrease, each counts as the largest so far. The end limits them."""
    q, k = tokens(60, 2, 8), tokens(40, 2, 8, 1)

    @jax.jit
    def attend(cu_q, cu_k):
        return jax_flash.varlen_attention(q, k, k, cu_q, cu_k)

    found = attend(np.array([-5, 20, 10, 2**31 - 1]), np.array([9, 20, -7, 100]))
    np.testing.assert_array_equal(found, attend(np.array([0, 20, 20, 60]), np.array([0, 20, 20, 40])))


@pytest.mark.usefixtures("device")
def test_vmap_remat_and_scan():
    """vmap over packs with different lengths, and layers over one pack."""
    q = tokens(3 * 50, 2, 16).reshape(3, 50, 2, 16)
    cu = np.array([[0, 20, 50], [0, 0, 31], [0, 49, 50]])

    def attend(q, cu):
        return jax_flash.varlen_attention(q, q, q, cu, is_causal=True)

    def total(f):
        return jax.jit(jax.grad(lambda q: jnp.sum(jnp.cos(f(q)))))

    each = jnp.stack([attend(x, c) for x, c in zip(q, cu, strict=True)])
    mapped = jax.vmap(attend)
    np.testing.assert_allclose(mapped(q, cu), each, atol=1e-5)
    expected = total(lambda q: mapped(q, cu))(q)
    np.testing.assert_allclose(total(lambda q: jax.checkpoint(mapped)(q, cu))(q), expected, atol=1e-5)

    def layers(attend, q):
        return jax.lax.scan(lambda x, _: (x + attend(x, cu[0]), None), q, length=2)[0]

    def unrolled(q):
        x = q + attend(q, cu[0])
        return x + attend(x, cu[0])

    expected = total(unrolled)(q[0])
    np.testing.assert_allclose(total(functools.partial(layers, jax.checkpoint(attend)))(q[0]), expected, atol=1e-4)


@pytest.mark.usefixtures("x64")
def test_derivatives():
    """The kernels compute first derivatives in both modes. Second derivatives are in plain JAX."""
    q, k = (jnp.asarray(x, jnp.float64) for x in (tokens(12, 2, 4), tokens(14, 1, 4, 1)))

    def attend(q, k, implementation=None):
        cu_q, cu_k = np.array([0, 3, 11]), np.array([0, 6, 13])
        return jax_flash.varlen_attention(q, k, k, cu_q, cu_k, is_causal=True, implementation=implementation)

    check_grads(attend, (q, k), 2, modes=["fwd", "rev"], atol=1e-3, rtol=1e-3)
    check_grads(functools.partial(attend, implementation="xla"), (q, k), 1, modes=["fwd"], atol=1e-3, rtol=1e-3)


def test_symbolic_number_of_tokens_is_refused():
    q = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 2, 4"), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"symbolic shapes: query \(t, 2, 4\)"):
        jax.export.export(jax.jit(lambda q: jax_flash.varlen_attention(q, q, q, np.array([0, 5]))))(q)


def test_symbolic_number_of_sequences_is_refused():
    q, (size,) = tokens(8, 2, 4), jax.export.symbolic_shape("b")
    with pytest.raises(NotImplementedError, match=r"symbolic shapes: cu_seqlens_q \(b,\)"):
        jax.export.export(jax.jit(lambda cu: jax_flash.varlen_attention(q, q, q, cu)))(
            jax.ShapeDtypeStruct((size,), jnp.int32)
        )


def test_export():
    q, cu = tokens(40, 2, 16), np.array([0, 13, 40], np.int32)
    exported = jax.export.export(
        jax.jit(functools.partial(jax_flash.varlen_attention, is_causal=True)), disabled_checks=EXPORT_CHECKS
    )(q, q, q, cu)
    np.testing.assert_array_equal(
        jax.export.deserialize(exported.serialize()).call(q, q, q, cu),
        jax_flash.varlen_attention(q, q, q, cu, is_causal=True),
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [(None, "x"), ("x", None), ("x", "y")], ids=str)
def test_sharded(axes, kind):
    """Heads and tokens are sharded independently of the sequences."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (kind, kind))
    q, k, cu = tokens(64, 8, 16), tokens(64, 4, 16, 1), np.array([0, 3, 40, 40, 61])

    def gradients(q, k):
        def total(q, k):
            return jnp.sum(jnp.cos(jax_flash.varlen_attention(q, k, k, cu, is_causal=True, local_window_size=20)))

        return jax.grad(total, (0, 1))(q, k)

    expected = gradients(q, k)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P(*axes))) for x in (q, k)]
        compiled = jax.jit(gradients).lower(*placed).compile()
        for x, y in zip(compiled(*placed), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)
    if axes == (None, "x"):
        assert not data_collectives(compiled)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_lengths(kind):
    """Sharded lengths of one call, and of a batch of packs with one pack per device."""
    mesh, q = jax.make_mesh((4,), ("x",), (kind,)), tokens(4 * 24, 4, 16).reshape(4, 24, 4, 16)
    cu = np.array([[0, 3, 9, 24], [0, 0, 20, 21], [0, 8, 16, 24], [0, 24, 24, 24]])

    def attend(q, cu):
        return jax_flash.varlen_attention(q, q, q, cu, is_causal=True, score_mod=lambda s, b, h, i, j: s - 0.1 * i * b)

    expected = jnp.stack([attend(*pack) for pack in zip(q, cu, strict=True)])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (q, cu)]
        np.testing.assert_allclose(jax.vmap(attend)(*placed), expected, atol=1e-6)
        one = jax.device_put(cu[0], NamedSharding(mesh, P("x")))
        np.testing.assert_allclose(attend(q[0], one), expected[0], atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_no_tokens(implementation):
    """No queries or no keys, with score_mod and mask_mod."""
    options = {"score_mod": lambda s, b, h, i, j: s + b, "mask_mod": lambda b, h, i, j: j <= i + b}
    q = tokens(8, 4, 16)
    attend = functools.partial(jax_flash.varlen_attention, implementation=implementation, **options)
    assert attend(q[:0], q, q, [0, 0], [0, 8]).shape == (0, 4, 16)
    o, pull = jax.vjp(lambda q, k: attend(q, k, k, [0, 8], [0, 0]), q, q[:0])
    assert not o.any() and not pull(o + 1)[0].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((1, 8, 2, 4))}, ValueError, r"query must have shape .* not \(1, 8, 2, 4\)"),
        ({"key": jnp.zeros((8, 2, 5))}, ValueError, r"do not fit together: .* \(8, 2, 4\), \(8, 2, 5\), \(8, 2, 4\)"),
        ({"value": jnp.zeros((9, 2, 4))}, ValueError, r"value \[Tk, K, E\] do not fit together"),
        ({"cu_seqlens_q": "08"}, TypeError, "cu_seqlens_q must be an array of numbers, not '08'"),
        ({"cu_seqlens_k": [b"0", b"8"]}, TypeError, "cu_seqlens_k must be an array of numbers, not list"),
        ({"cu_seqlens_q": np.array([0.0, 8.0])}, TypeError, "cu_seqlens_q must be integers, not float64"),
        ({"cu_seqlens_q": np.array([[0, 8]])}, ValueError, r"cu_seqlens_q must have shape \[B \+ 1\] .*, not \(1, 2\)"),
        ({"cu_seqlens_q": np.array([], int)}, ValueError, r"cu_seqlens_q must have shape \[B \+ 1\]"),
        ({"cu_seqlens_q": np.array([1, 8])}, ValueError, r"must begin with 0, .* at most 8, not \[1, 8\]"),
        ({"cu_seqlens_q": np.array([0, 9])}, ValueError, "at most 8, not"),
        ({"cu_seqlens_k": np.array([0, 5, 3])}, ValueError, "cu_seqlens_k must .* never decrease"),
        ({"cu_seqlens_k": np.array([0, 5, 3], np.uint32)}, ValueError, "cu_seqlens_k must .* never decrease"),
        ({"cu_seqlens_k": np.array([0, 100, -100], np.int8)}, ValueError, "cu_seqlens_k must .* never decrease"),
        ({"cu_seqlens_k": np.array([0, 5, 8])}, ValueError, "must have equally many sequences, not 1 and 2"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
        ({"return_residual": 1}, TypeError, "return_residual must be True or False"),
        ({"local_window_size": -1}, ValueError, "local_window_size must not be negative"),
        ({"bias": jnp.zeros((8, 8))}, TypeError, "unexpected keyword argument 'bias'"),
        ({"mask_mod": 3}, TypeError, "mask_mod"),
        ({"mask_mod": lambda query, key: key <= query}, TypeError, "mask_mod must take 4 arguments: batch, head"),
        ({"score_mod": lambda score, query, key: score}, TypeError, "score_mod must take 5 arguments: score, batch"),
        ({"dropout_rate": 0.1}, ValueError, "needs a dropout_key"),
    ],
)
def test_errors(changes, error, message):
    q = jnp.zeros((8, 2, 4))
    given = {"query": q, "key": q, "value": q, "cu_seqlens_q": np.array([0, 8])} | changes
    with pytest.raises(error, match=message):
        jax_flash.varlen_attention(**given)

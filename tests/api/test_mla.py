"""`mla_attention` and its paged form, compared with standard attention of the latent as key and as value."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import latents
import numpy as np
import pytest
from cases import Case, data_collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import Cache
from processes import one_device

import jax_flash
from jax_flash import Problem

ROOT = pathlib.Path(__file__).parents[2]
SCALE = 192**-0.5

CASES = [
    Case(B=2, T=1, S=70, N=16, K=1, D=576, E=512, scale=SCALE, logsumexp=False),
    Case(B=2, T=3, S=300, N=5, K=1, D=40, E=24, scale=0.2, causal=True, lengths=True, offset=True, logsumexp=False),
    Case(B=1, T=50, S=50, N=2, K=1, D=24, E=24, scale=0.7, causal=True, logsumexp=False),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(case, dtype):
    latents.check(case, dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=1, S=1030, N=8, K=1, D=264, E=256, logsumexp=False),
        Case(B=1, T=3, S=1100, N=22, K=1, D=264, E=256, causal=True, offset=True, lengths=True, logsumexp=False),
    ],
    ids=str,
)
def test_many_keys(case):
    """Few queries see many keys, so the keys are split on a GPU."""
    latents.check(dataclasses.replace(case, scale=SCALE), "bfloat16")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementations(case, implementation):
    latents.check(case, "float64", implementation=implementation)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(B=2, T=3, S=20, N=8, D=40):
    return normal(0, B, T, N, D), normal(1, B, S, D)


attend = functools.partial(jax_flash.mla_attention, value_dim=24, scale=0.3)


def expected(query, latent, **options):
    key = latent[..., None, :]
    return jax_flash.dot_product_attention(query, key, key[..., :24], scale=0.3, implementation="reference", **options)


@pytest.mark.usefixtures("device")
def test_without_a_batch():
    query, latent = (x[0] for x in inputs())
    np.testing.assert_allclose(attend(query, latent), expected(query, latent), atol=1e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap(axes):
    query, latent = normal(0, 3, 2, 3, 8, 40), normal(1, 3, 2, 20, 40)
    given = [x if axis == 0 else x[0] for x, axis in zip((query, latent), axes, strict=True)]

    def gradients(function):
        return jax.jit(jax.vmap(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1)), axes))(*given)

    for got, want in zip(gradients(attend), gradients(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.usefixtures("device")
def test_scan_and_remat():
    """Layers in a scan, each rematerialised, have the gradients of the reference."""
    query, latent = inputs(T=20)

    def loss(attend, query, latent):
        @jax.checkpoint
        def layer(x, _):
            return x + jnp.pad(attend(x, latent, is_causal=True), ((0, 0),) * 3 + ((0, 16),)), None

        return (jax.lax.scan(layer, query, None, length=3)[0] ** 2).mean()

    for got, want in zip(
        *(jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(query, latent) for f in (attend, expected)), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.usefixtures("device")
def test_forward_mode():
    """The tangent of the latent moves keys and values."""
    given, tangents = inputs(), (normal(2, 2, 3, 8, 40), normal(3, 2, 20, 40))
    for got, want in zip(*(jax.jvp(f, given, tangents) for f in (attend, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_problems():
    """A forward reads each latent once, and counts two products."""
    query, latent = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs())
    problem = Problem.of_mla(query, latent, 24, is_causal=True, query_offset=17)
    assert (problem.qk_dim, problem.v_dim, problem.kv_heads, problem.latent) == (40, 24, 1, True)
    assert problem.flops() == 2 * 2 * 3 * 8 * 20 * (40 + 24)
    rest = 2 * 3 * 8 * (40 + 24 + 2) + 1 + 2  # query, output, statistics, scale and offsets
    assert problem.bytes() == 4 * (rest + 2 * 20 * 40)
    assert problem.bytes(backward=True) > 4 * (rest + 2 * 2 * 20 * (40 + 24))
    pages, integers = jax.ShapeDtypeStruct((9, 16, 40), query.dtype), jax.ShapeDtypeStruct((2,), "int32")
    paged = Problem.of_paged_mla(query, pages, jax.ShapeDtypeStruct((2, 4), "int32"), integers, 24)
    assert (paged.kv_len, paged.page, paged.pages, paged.latent) == (64, 16, 9, True)
    for method, given in (
        (Problem.of_mla, (query, latent)),
        (Problem.of_paged_mla, (query, pages, integers, integers)),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_rate': the arguments are scale, "):
            method(*given, 24, dropout_rate=0.1)


@pytest.mark.parametrize("paged", [False, True])
def test_the_latent_is_read_once(paged):
    """The CPU kernels have no operand for the value, and no program copies it."""
    pools, table, query = jnp.zeros((8, 16, 40)), jnp.zeros((2, 4), int), inputs()[0]
    if paged:
        call = functools.partial(jax_flash.paged_mla_attention, value_dim=24, scale=0.3)
        program = jax.jit(call).lower(query, pools, table, jnp.full(2, 40))
    else:
        program = jax.jit(attend).lower(*inputs())
    text = program.compile().as_text()
    assert "jax_flash_forward" in text and "slice(" not in text


@pytest.mark.usefixtures("device")
def test_traced_scale():
    query, latent = inputs()
    key = latent[:, :, None]
    found = jax.grad(lambda scale: (attend(query, latent, scale=scale) ** 2).sum())(0.3)
    want = jax.grad(lambda scale: (jax_flash.dot_product_attention(query, key, key[..., :24], scale=scale) ** 2).sum())(
        0.3
    )
    np.testing.assert_allclose(found, want, rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("paged", [False, True])
def test_heads_over_devices(kind, paged):
    """Each device has some heads and the whole latent. Nothing is gathered; the latent's gradient is summed."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    query, latent = inputs(S=32)
    function = attend if not paged else in_pages
    want = function(query, latent)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((query, latent), (P(None, None, "x"), P()), strict=True)
        ]
        compiled = jax.jit(function).lower(*placed).compile()
        np.testing.assert_allclose(compiled(*placed), want, atol=1e-5)
        assert not data_collectives(compiled)
        if not paged:
            gradient = jax.jit(jax.grad(lambda latent: (attend(placed[0], latent) ** 2).sum()))(placed[1])
            want = jax.grad(lambda latent: (attend(query, latent) ** 2).sum())(latent)
            np.testing.assert_allclose(gradient, want, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_over_devices(kind):
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    given = inputs(B=4)
    loss = jax.grad(lambda *given: (attend(*given) ** 2).sum(), (0, 1))
    want = loss(*given)
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, NamedSharding(mesh, P("x")))
        compiled = jax.jit(loss).lower(*placed).compile()
        assert not data_collectives(compiled)
        for x, y in zip(compiled(*placed), want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


def test_no_warning_on_a_gpu(monkeypatch):
    """There are CUDA kernels for latents of 576 entries, so no call takes plain JAX with a warning."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(functools.partial(jax_flash.mla_attention, scale=1.0), *inputs(D=576))


GIVEN = {"query": jnp.zeros((2, 3, 8, 40)), "latent": jnp.zeros((2, 20, 40)), "scale": 1.0, "value_dim": 24}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((2, 3, 8, 48))}, ValueError, r"same last dim, not \(48,\) and \(40,\)"),
        ({"query": jnp.zeros((2, 3, 40))}, ValueError, r"shapes \[B, T, N, D\] and \[B, S, D\]"),
        ({"latent": jnp.zeros((2, 20, 1, 40))}, ValueError, r"not \(2, 3, 8, 40\) and \(2, 20, 1, 40\)"),
        ({"latent": jnp.zeros(())}, ValueError, "same last dim"),
        ({"latent": jnp.zeros((3, 20, 40))}, ValueError, r"same batch size, not 2 and 3: .* \(3, 20, 40\)"),
        ({"latent": jnp.zeros((2, 20, 40), jnp.bfloat16)}, TypeError, r"latent has dtype bfloat16, .*latent\.astype"),
        ({"value_dim": 20}, ValueError, "value_dim must be a multiple of 8 and at most 40, .* of latent, not 20"),
        ({"value_dim": 48}, ValueError, "value_dim must be a multiple of 8 and at most 40, .* not 48"),
        ({"value_dim": 0}, ValueError, "value_dim must be at least 1, not 0"),
        ({"scale": None}, TypeError, "scale must be a real number, not None: pass 1/√d"),
        ({"softmax_scale": 1.0}, TypeError, "use scale instead"),
        *(
            (
                {"query": jnp.zeros((2, 3, 8, dim)), "latent": jnp.zeros((2, 20, dim))},
                ValueError,
                f"last dim of latent must be a multiple of 8 from 8 to 576, not {dim}",
            )
            for dim in (0, 36, 584)
        ),
    ],
)
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        jax_flash.mla_attention(**GIVEN | changes)


def test_benchmark(tmp_path):
    """At tiny sizes, all calls of the benchmark of decoding run."""
    sizes = ["--batch", 1, "--keys", 64, "--heads", 16, "--queries", 1, 2, "--page", 32, "--seconds", 0.01]
    script, output = ROOT / "benchmarks/mla.py", tmp_path / "mla.json"
    command = [sys.executable, script, *map(str, sizes), "--output", output]
    done = subprocess.run(command, env=one_device(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["queries"] for row in rows] == [1, 2]
    assert all(row["microseconds"].keys() == {"contiguous", "pages", "plain", "read"} for row in rows)


def test_the_scale_is_required():
    with pytest.raises(TypeError, match="required keyword-only argument: 'scale'"):
        jax_flash.mla_attention(GIVEN["query"], GIVEN["latent"])


# --- pages ---

CACHES = [
    Cache((5, 96, 1, 0), 8, Case(T=1, N=20, K=1, D=40, E=24, scale=0.3)),
    Cache((90, 30), 16, Case(T=3, N=16, K=1, D=576, E=512, scale=SCALE)),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_paged_accuracy(cache, dtype):
    """Unused pages and rows, and page numbers beyond a sequence, have no influence."""
    latents.check_pages(cache, dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "cache",
    [
        Cache((1100, 70), 64, Case(T=3, N=22, K=1, D=264, E=256, scale=0.1)),
        Cache((1000, 3), 128, Case(T=1, N=8, K=1, D=576, E=512, scale=SCALE)),
    ],
    ids=str,
)
def test_many_keys_in_pages(cache):
    latents.check_pages(cache, "bfloat16")


def in_pages(query, latent):
    """Return causal attention of the last T of S tokens to their latents [B, S, D], which are written to pages."""
    (B, S, D), page = latent.shape, 8
    table = jnp.arange(B * S // page).reshape(B, -1)[::-1]
    pools, lengths = jnp.zeros((B * S // page, page, D), latent.dtype), jnp.full(B, S)
    pools = jax_flash.append_to_latent_pages(pools, latent, table, lengths)
    return jax_flash.paged_mla_attention(query, pools, table, lengths, value_dim=24, scale=0.3)


@pytest.mark.usefixtures("device")
def test_pages_of_appended_latents():
    query, latent = inputs(S=32)
    want = expected(query, latent, is_causal=True, query_offset=29)
    np.testing.assert_allclose(in_pages(query, latent), want, atol=1e-5)
    both = jnp.stack([query, query[::-1]]), jnp.stack([latent, latent[::-1]])
    np.testing.assert_allclose(jax.jit(jax.vmap(in_pages))(*both), jnp.stack([want, want[::-1]]), atol=1e-5)


def test_append_in_place():
    """Of 16 latents, the last 7 go to a sequence of length 7. The others are dropped."""
    query, latent = inputs(S=16)
    append = jax.jit(jax_flash.append_to_latent_pages, donate_argnames="latent_pages")
    pools = jnp.zeros((4, 8, 40))
    address = pools.unsafe_buffer_pointer()
    pools = append(pools, latent, np.array([[3, 0], [2, 1]]), np.array([16, 7]))
    assert pools.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(pools[3], latent[0, :8])
    np.testing.assert_array_equal(pools[2, :7], latent[1, 9:])
    assert not np.asarray(pools)[2, 7:].any() and not np.asarray(pools)[1].any()


def test_gradients_through_pages_are_refused():
    with pytest.raises(NotImplementedError, match="paged attention has no gradient in the fused kernels"):
        jax.grad(lambda query: in_pages(query, inputs(S=32)[1]).sum())(inputs()[0])


PAGED = {
    "query": jnp.zeros((2, 3, 8, 40)),
    "latent_pages": jnp.zeros((9, 16, 40)),
    "page_table": np.zeros((2, 4), int),
    "lengths": np.array([3, 3]),
    "scale": 1.0,
    "value_dim": 24,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((2, 3, 8, 48))}, ValueError, r"query and latent_pages must have the same last dim"),
        ({"latent_pages": jnp.zeros((9, 16, 1, 40))}, ValueError, r"\[pages, page, D\], not .* \(9, 16, 1, 40\)"),
        ({"latent_pages": jnp.zeros((9, 12, 40))}, ValueError, "multiple of 8 keys from 8 to 1024, not 12"),
        ({"latent_pages": jnp.zeros((9, 16, 40), jnp.float16)}, TypeError, "latent_pages has dtype float16"),
        ({"lengths": np.array([3, 65])}, ValueError, "lengths must be from 0 to 64"),
        ({"value_dim": 48}, ValueError, "value_dim must be a multiple of 8 and at most 40, .* of latent_pages, not 48"),
        ({"scale": None}, TypeError, "scale must be a real number, not None"),
    ],
)
def test_errors_of_pages(changes, error, message):
    with pytest.raises(error, match=message):
        jax_flash.paged_mla_attention(**PAGED | changes)


def test_errors_of_append():
    with pytest.raises(ValueError, match=r"takes latent \[B, T, D\], but their shapes are \(9, 16, 40\), \(2, 3, 48\)"):
        jax_flash.append_to_latent_pages(jnp.zeros((9, 16, 40)), jnp.zeros((2, 3, 48)), np.zeros((2, 4), int), [3, 3])

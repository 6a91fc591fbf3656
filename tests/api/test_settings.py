"""Results do not depend on the user's JAX settings, and JAX's debugging checks find only real problems."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

pytestmark = pytest.mark.usefixtures("device")

B, T, N, D = 2, 8, 2, 16
SAVED = jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@contextlib.contextmanager
def setting(name, value):
    """Change a setting of the process, as users do, and clear JAX's caches."""
    before = getattr(jax.config, name)
    jax.clear_caches()
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def loss(attend, q):
    return (attend(q) ** 2).sum()


def without_jit(function, *args):
    with jax.disable_jit():
        return function(*args)


# Uses of attention outside jit, and derivatives with residuals from a jitted function.
USES = {
    "eager": lambda attend, q: attend(q),
    "gradient": lambda attend, q: jax.grad(functools.partial(loss, attend))(q),
    "gradient of jit": lambda attend, q: jax.grad(jax.jit(functools.partial(loss, attend)))(q),
    "remat": lambda attend, q: jax.grad(jax.checkpoint(functools.partial(loss, attend), policy=SAVED))(q),
    "vmap": lambda attend, q: jax.vmap(attend)(q[None]),
    "disable_jit": lambda attend, q: without_jit(jax.grad(functools.partial(loss, attend)), q),
}


@pytest.mark.parametrize("use", USES)
def test_debug_infs_accepts_a_fully_masked_row(use):
    """The row maximum of such a row is -inf."""
    q = normal(0, B, T, N, D)
    mask = jnp.arange(T)[:, None] != 3
    attend = functools.partial(jax_flash.dot_product_attention, key=q, value=q, mask=mask)
    expected = USES[use](lambda x: attend(x), q)
    with setting("jax_debug_infs", True):
        np.testing.assert_allclose(USES[use](lambda x: attend(x), q), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_debug_nans_and_infs_accept_statistics_of_a_fully_masked_row(kind):
    q = normal(0, B, T, N, D)
    results = functools.partial(jax_flash.attention_with_statistics, q, q, q, mask=jnp.arange(T)[:, None] != 3)
    varlen = functools.partial(jax_flash.varlen_attention, *[q[0]] * 3, np.array([0, 3, 6]), return_residual=True)
    expected = results(), varlen()
    with setting(f"jax_debug_{kind}s", True):
        found = results(), varlen()
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        _, merged = jax_flash.merge(found[0], found[0])
        assert all(np.isneginf(np.asarray(x.logsumexp)[..., 3]).all() for x in (found[0][1], merged))


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_debug_nans_and_infs_find_bad_results(kind):
    """The error names the result. A valid m of -inf does not hide it."""
    q = normal(0, B, T, N, D)
    bad = q.at[0, 0, 0, 0].set(float(kind))
    # In full precision, a GPU turns inf into NaN: it splits inf into inf + (inf - inf).
    attention = functools.partial(jax_flash.dot_product_attention, precision="default")
    attend = functools.partial(attention, q, q, bad, mask=jnp.arange(T)[:, None] != 3)
    pull = jax.vjp(lambda q: attention(q, q, q), q)[1]
    with setting(f"jax_debug_{kind}s", True):
        with pytest.raises(FloatingPointError, match=rf"\({kind}\) in result o of jax_flash_forward"):
            jax.jit(lambda: attend())()
        with pytest.raises(FloatingPointError, match=rf"\({kind}\) in result d. of jax_flash_backward"):
            pull(bad)


# Settings under which JAX refuses implicit conversions, or looks for errors.
STRICT = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "bfloat16",
    "jax_check_tracer_leaks": True,
    "jax_debug_key_reuse": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_legacy_prng_key": "error",
    "jax_check_static_indices": True,
}


def everything(implementation, q, bias, table, sinks, key):
    """Return the results of all public functions, with every kind of mask, score and dtype."""
    options = {"implementation": implementation, "precision": "highest"}
    window = 5 + 0 * jnp.argmax(sinks)  # traced
    lengths, ids = np.array([T - 1, T]), np.zeros((B, T), np.int32)
    attend = functools.partial(jax_flash.dot_product_attention, q, q, q, **options)
    masks = attend(
        bias,
        jnp.arange(T)[:, None] != 3,
        scale=jnp.exp(sinks[0]),
        is_causal=True,
        local_window_size=(5, window),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        query_offset=lengths - T,
        logits_soft_cap=2.0,
        sinks=sinks,
        dropout_rate=0.1,
        dropout_key=key,
    )
    programs = attend(
        score_mod=lambda score, batch, head, query, key: score + table[head, query].astype(score.dtype),
        mask_mod=lambda batch, head, query, key: table[head, query] > table[head, key],
        query_offset=lengths - T,
        local_window_size=window,
    )
    blocks = attend(block_mask=jax_flash.patterns.causal(T, T, q_block=16, kv_block=16))
    merged, _ = jax_flash.merge(*[jax_flash.attention_with_statistics(q, q, q, **options)] * 2)
    packed = jax_flash.varlen_attention(q[0], q[1], q[1], np.array([0, 3, 6]), is_causal=True, **options)
    pages = jax.lax.stop_gradient(jnp.concatenate([q, q], 1))
    paged = jax_flash.paged_attention(pages[:, :1], pages, pages, np.array([[0], [1]]), lengths, **options)
    return [masks, programs, blocks, merged, packed, paged]


@pytest.mark.parametrize(
    ("implementation", "settings"),
    [
        (None, STRICT),
        ("xla", STRICT),
        ("reference", STRICT),
        (None, {"jax_enable_x64": True}),
        ("reference", {"jax_enable_x64": True}),
        (None, {"jax_disable_jit": True}),
    ],
)
def test_results_do_not_depend_on_settings(implementation, settings):
    arrays = normal(0, B, T, N, D), normal(1, 1, N, T, T).astype("bfloat16"), normal(2, N, T).astype("bfloat16")
    arguments = *arrays, normal(3, N), jax.random.key(4)

    @jax.jit
    def gradients(q, bias, table, sinks, key):
        def loss(q, bias, table, sinks):
            return sum((x**2).sum() for x in everything(implementation, q, bias, table, sinks, key))

        return jax.grad(loss, (0, 1, 2, 3))(q, bias, table, sinks)

    expected = gradients(*arguments)
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(setting(name, value))
        for x, y in zip(gradients(*arguments), expected, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "deterministic"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_cpu_enable_fast_math=true --xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops=1 --xla_gpu_deterministic_ops=0", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=false", True),
    ],
)
def test_flags_of_xla_make_gradients_deterministic(flags, deterministic, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    q = jax.ShapeDtypeStruct((B, T, N, D), "float32")
    assert jax_flash.Problem.of(q, q, q).deterministic is deterministic
    assert jax_flash.Problem.of(q, q, q, deterministic=True).deterministic

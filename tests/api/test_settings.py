"""Nothing depends on the user's settings of JAX, and the checks that JAX makes for users find what they look for."""

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
    """A setting for the whole process, as users make it, and JAX without what it compiled under another one."""
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


# What a user may do with attention outside of jit, and where the residuals of a derivative leave a jitted function.
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
    """Its row maximum is -inf."""
    q = normal(0, B, T, N, D)
    mask = jnp.arange(T)[:, None] != 3
    attend = functools.partial(jax_flash.dot_product_attention, key=q, value=q, mask=mask)
    expected = USES[use](lambda x: attend(x), q)
    with setting("jax_debug_infs", True):
        np.testing.assert_allclose(USES[use](lambda x: attend(x), q), expected, rtol=1e-5, atol=1e-6)


def test_debug_infs_accepts_statistics_of_a_fully_masked_row():
    q = normal(0, B, T, N, D)
    results = functools.partial(jax_flash.attention_with_statistics, q, q, q, mask=jnp.arange(T)[:, None] != 3)
    varlen = functools.partial(jax_flash.varlen_attention, *[q[0]] * 3, np.array([0, 3, 6]), return_residual=True)
    expected = results(), varlen()
    with setting("jax_debug_infs", True):
        found = results(), varlen()
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        _, merged = jax_flash.merge(found[0], found[0])
        assert all(np.isneginf(np.asarray(x.logsumexp)[..., 3]).all() for x in (found[0][1], merged))


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_debug_nans_and_infs_find_what_they_look_for(kind):
    """And say which result has it, though m is -inf as it may be."""
    q = normal(0, B, T, N, D)
    bad = q.at[0, 0, 0, 0].set(float(kind))
    attend = functools.partial(jax_flash.dot_product_attention, q, q, bad, mask=jnp.arange(T)[:, None] != 3)
    pull = jax.vjp(lambda q: jax_flash.dot_product_attention(q, q, q), q)[1]
    with setting(f"jax_debug_{kind}s", True):
        with pytest.raises(FloatingPointError, match=rf"\({kind}\) in result o of jax_flash_forward"):
            jax.jit(lambda: attend())()
        with pytest.raises(FloatingPointError, match=rf"\({kind}\) in result d. of jax_flash_backward"):
            pull(bad)

"""`MultiHeadLatentAttention` of linen and nnx, compared with the formulas of DeepSeek-V3 and with each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

import jax_flash
import jax_flash.linen
import jax_flash.nnx
from jax_flash import _latent

pytestmark = pytest.mark.usefixtures("device")

BATCH, LENGTH, FEATURES, HEADS = 2, 24, 32, 4
DIMS = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
OPTIONS = [{"q_lora_rank": 12}, {"use_bias": True, "rope_theta": 100.0, "scale": 0.3}]
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, FEATURES)).astype(np.float32)


class Linen:
    """A module as functions of its parameters, which are nested dicts of arrays, equal in both APIs."""

    def __init__(self, dtype=jnp.float32, **options):
        self.module = jax_flash.linen.MultiHeadLatentAttention(HEADS, dtype=dtype, **DIMS | options)
        self.params = jax.jit(self.module.init)(jax.random.key(0), X)["params"]

    def __call__(self, params, x, **call):
        return self.module.apply({"params": params}, x, **call)

    def cache(self, dtype=jnp.float32):
        return jax.jit(self.module.clone(decode=True).init)(jax.random.key(0), X.astype(dtype))["cache"]

    def pages(self, count, page):
        return jax.jit(self._in_pages(count, page).init)(jax.random.key(0), X[:, :1])["cache"]

    def _in_pages(self, count, page):
        return self.module.clone(decode=True, pages=count, page=page)

    def decode(self, params, cache, x, **call):
        pages = (cache["latent_pages"].shape[:2] if "latent_pages" in cache else (0, 64),)[0]
        module = self._in_pages(*pages)
        out, changed = module.apply({"params": params, "cache": cache}, x, mutable="cache", **call)
        return out, changed["cache"]


class Nnx:
    def __init__(self, dtype=jnp.float32, **options):
        module = jax_flash.nnx.MultiHeadLatentAttention
        self.make = lambda: module(HEADS, FEATURES, dtype=dtype, rngs=nnx.Rngs(0), **DIMS | options)
        self.params = self._state(nnx.Param)

    def __call__(self, params, x, **call):
        return self._with(params, {})(x, **call)

    def cache(self, dtype=jnp.float32):
        return self._state(nnx.Cache, lambda module: module.init_cache(X.shape, dtype))

    def pages(self, count, page):
        return self._state(nnx.Cache, lambda module: module.init_pages(count, page))

    def _state(self, kind, change=lambda module: None):
        """Return the variables of a new module, from one program: eager initializers compile dozens."""

        @jax.jit
        def state():
            module = self.make()
            change(module)
            return nnx.to_pure_dict(nnx.state(module, kind))

        return state()

    def _with(self, params, cache):
        module = self.make()
        if "latent_pages" in cache:
            module.init_pages(*cache["latent_pages"].shape[:2])
        elif cache:
            module.init_cache((1, FEATURES))
        nnx.update(module, params)
        nnx.update(module, cache)
        return module

    def decode(self, params, cache, x, **call):
        module = self._with(params, cache)
        out = module(x, **call if "latent_pages" in cache else {"decode": True} | call)
        return out, nnx.to_pure_dict(nnx.state(module, nnx.Cache))


@pytest.fixture(params=[Linen, Nnx], ids=["linen", "nnx"])
def api(request):
    return request.param


def random_params(layer):
    """Return the layer's parameters with random scales and biases, which are constant after initialization."""
    leaves, tree = jax.tree.flatten(layer.params)
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(
        tree, [x if x.ndim > 1 else rng.uniform(0.5, 1.5, x.shape).astype(x.dtype) for x in leaves]
    )


def formulas(params, x, positions=None, segment_ids=None, theta=10000.0, scale=24**-0.5):
    """Return the outputs by DeepSeek-V3's formulas, with the scores in memory and complex rotary embeddings."""

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name].get("bias", 0)

    def norm(name, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params[name]["scale"]

    def rotate(x):  # [B, T, N, 8]
        turns = positions[..., None, None] * theta ** (-np.arange(0, 8, 2) / 8)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * turns)
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    params, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, x))
    B, T, _ = x.shape
    positions = np.arange(T) if positions is None else positions
    compressed = "q_a_proj" in params
    q = dense("q_b_proj", norm("q_a_layernorm", dense("q_a_proj", x))) if compressed else dense("q_proj", x)
    q = q.reshape(B, T, HEADS, 24)
    c = dense("kv_a_proj_with_mqa", x)
    kv = dense("kv_b_proj", norm("kv_a_layernorm", c[..., :24])).reshape(B, T, HEADS, 24)
    q = np.concatenate([q[..., :16], rotate(q[..., 16:])], -1)
    k = np.concatenate([kv[..., :16], np.broadcast_to(rotate(c[..., None, 24:]), (B, T, HEADS, 8))], -1)
    visible = np.tri(T, dtype=bool)
    if segment_ids is not None:
        visible = (visible & (segment_ids[:, :, None] == segment_ids[:, None]))[:, None]
    s = np.where(visible, scale * np.einsum("btnd,bsnd->bnts", q, k), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o = np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), kv[..., 16:])
    return dense("o_proj", o.reshape(B, T, -1))


def settings(options):
    return {"theta": options.get("rope_theta", 10000.0), "scale": options.get("scale", 24**-0.5)}


@pytest.mark.parametrize("options", OPTIONS, ids=["compressed queries", "biases"])
def test_formulas(api, options):
    layer = api(**options)
    params = random_params(layer)
    np.testing.assert_allclose(jax.jit(layer)(params, X), formulas(params, X, **settings(options)), atol=2e-5)


def test_parameters(api):
    """The tree has the names and the transposed shapes of a DeepSeek-V3 checkpoint."""
    shapes = {
        "q_a_proj": {"kernel": (32, 12)},
        "q_a_layernorm": {"scale": (12,)},
        "q_b_proj": {"kernel": (12, 96)},
        "kv_a_proj_with_mqa": {"kernel": (32, 32)},
        "kv_a_layernorm": {"scale": (24,)},
        "kv_b_proj": {"kernel": (24, 96)},
        "o_proj": {"kernel": (32, 32)},
    }
    assert jax.tree.map(jnp.shape, api(q_lora_rank=12).params) == shapes
    with_bias = jax.tree.map(jnp.shape, api(use_bias=True).params)
    assert {name for name, layer in with_bias.items() if "bias" in layer} == {"kv_a_proj_with_mqa", "o_proj"}
    assert with_bias["q_proj"] == {"kernel": (32, 96)}


def test_packed_sequences(api):
    layer = api(q_lora_rank=12)
    ids, positions = np.repeat([[0, 1, 2]], 8, 1).repeat(2, 0), np.tile(np.arange(8), (2, 3))
    params = random_params(layer)
    found = jax.jit(layer)(params, X, positions=positions, segment_ids=ids)
    np.testing.assert_allclose(found, formulas(params, X, positions, ids), atol=2e-5)
    np.testing.assert_allclose(found[:, 8:16], jax.jit(layer)(params, X[:, 8:16]), atol=2e-5)


def test_gradients(api):
    """The fused kernels and materialised attention give the same gradients."""
    layers = [api(q_lora_rank=12, implementation=name) for name in (None, "reference")]
    params = random_params(layers[0])
    found, want = (
        jax.jit(jax.grad(lambda params, x, layer=layer: (layer(params, x) ** 2).mean(), (0, 1)))(params, X)
        for layer in layers
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5), found, want)


def test_other_transformations(api):
    """Leading dims, rematerialisation and vmap over inputs."""
    layer = api()
    attend = jax.jit(layer)
    want = attend(layer.params, X)
    deep = attend(layer.params, X.reshape(1, 2, 1, LENGTH, FEATURES))
    np.testing.assert_allclose(deep.reshape(want.shape), want, atol=1e-5)
    mapped = jax.jit(jax.vmap(jax.checkpoint(lambda x: layer(layer.params, x))))(X)
    np.testing.assert_allclose(mapped, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=["compressed queries", "biases"])
def test_decoding(api, options, dtype):
    """A prompt, then single tokens, from absorbed weights and the latent cache: equal to the expanded computation."""
    layer = api(dtype, **options)
    params, x = random_params(layer), X.astype(dtype)
    tolerance = 2e-5 if dtype == jnp.float32 else 0.05
    want, cache, decode = jax.jit(layer)(params, x), layer.cache(dtype), jax.jit(layer.decode)
    assert cache["cached_latent"].shape == (BATCH, LENGTH, 32) and cache["cached_latent"].dtype == dtype
    for first, last in ((0, 3), *((i, i + 1) for i in range(3, 8)), (8, LENGTH)):
        found, cache = decode(params, cache, x[:, first:last])
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.astype(np.float32), want[:, first:last].astype(np.float32), atol=tolerance, err_msg=f"{first}:{last}"
        )
    assert cache["cache_index"] == LENGTH


@pytest.mark.parametrize("absorbs", [False, True])
def test_prompts_expanded_and_absorbed(api, absorbs, monkeypatch):
    """Both computations of a prompt that continues a cache give the same result."""
    monkeypatch.setattr(_latent, "absorbs", lambda *_: absorbs)
    layer = api(q_lora_rank=12)
    want, cache, decode = jax.jit(layer)(layer.params, X), layer.cache(), jax.jit(layer.decode)
    calls = []
    attend = _latent.mla_attention
    monkeypatch.setattr(_latent, "mla_attention", lambda *args, **given: calls.append(args) or attend(*args, **given))
    for first, last in ((0, 10), (10, 21)):  # each is traced
        found, cache = decode(layer.params, cache, X[:, first:last])
        np.testing.assert_allclose(found, want[:, first:last], atol=2e-5)
    assert len(calls) == 2 * absorbs


def test_choice_of_the_computation():
    """With the dims of DeepSeek-V3 and many keys, absorbed weights are cheaper up to 170 queries."""
    of = _latent.LatentAttributes()
    assert of.latent_dim == 576
    assert _latent.absorbs(of, 1, 16) and _latent.absorbs(of, 170, 10**9) and not _latent.absorbs(of, 171, 10**9)
    assert not _latent.absorbs(of, 1000, 1000)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages(api, dtype):
    """Prompts of 20 and 3 tokens in one call, then single tokens. The second sequence ends after its first one."""
    layer = api(dtype, q_lora_rank=12)
    params, cache, x = random_params(layer), layer.pages(9, 16), X.astype(dtype)
    decode, tolerance = jax.jit(layer.decode), 2e-5 if dtype == jnp.float32 else 0.05
    want = np.asarray(jax.jit(layer)(params, x), np.float32)
    table = np.array([[3, 7], [5, 0]])
    prompts = jnp.stack([x[0, :20], jnp.pad(x[1, :3], ((17, 0), (0, 0)), constant_values=7)])
    found, cache = decode(params, cache, prompts, page_table=table, lengths=np.array([20, 3]))
    assert found.dtype == dtype
    np.testing.assert_allclose(found[0].astype(np.float32), want[0, :20], atol=tolerance)
    np.testing.assert_allclose(found[1, 17:].astype(np.float32), want[1, :3], atol=tolerance)
    for i in range(20, LENGTH):
        lengths = np.array([i + 1, 4 if i == 20 else 0])
        step = jnp.stack([x[0, i : i + 1], x[1, 3:4]])
        found, cache = decode(params, cache, step, page_table=table, lengths=lengths)
        np.testing.assert_allclose(found[0, 0].astype(np.float32), want[0, i], atol=tolerance)
        if i == 20:
            np.testing.assert_allclose(found[1, 0].astype(np.float32), want[1, 3], atol=tolerance)


def test_rotary_frequencies(api):
    """The default frequencies, passed as numbers, change nothing. Others do."""
    layer = api()
    want = jax.jit(layer)(layer.params, X)
    frequencies = tuple(10000.0 ** (-i / 8) for i in range(0, 8, 2))
    np.testing.assert_allclose(jax.jit(api(rope_frequencies=frequencies))(layer.params, X), want, atol=1e-5)
    assert abs(jax.jit(api(rope_frequencies=(1.0,) * 4))(layer.params, X) - want).max() > 1e-3


def test_without_a_causal_mask(api):
    layer = api(is_causal=False)
    reversed_ = jax.jit(layer)(layer.params, X[:, ::-1], positions=np.arange(LENGTH)[::-1])
    np.testing.assert_allclose(reversed_[:, ::-1], jax.jit(layer)(layer.params, X), atol=2e-5)


TABLE, ENDS = np.zeros((BATCH, 2), int), np.array([1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"positions": np.zeros(1, int)}, "positions must not be given with a cache"),
        ({"segment_ids": np.zeros((2, 1), int)}, "segment_ids must not be given with a cache"),
    ],
)
@pytest.mark.parametrize("paged", [False, True])
def test_errors_of_calls_with_a_cache(api, call, message, paged):
    layer = api()
    cache = layer.pages(4, 16) if paged else layer.cache()
    given = {"page_table": TABLE, "lengths": ENDS} if paged else {}
    with pytest.raises(ValueError, match=message):
        layer.decode(layer.params, cache, X[:, :1], **given, **call)


def test_errors_of_pages(api):
    layer = api()
    with pytest.raises(ValueError, match="page_table and lengths need a paged cache"):
        layer(layer.params, X, page_table=TABLE, lengths=ENDS)
    with pytest.raises(ValueError, match="needs page_table and lengths: pass both"):
        layer.decode(layer.params, layer.pages(4, 16), X[:, :1], page_table=TABLE)
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\), not \(3,\)"):
        layer.decode(layer.params, layer.pages(4, 16), X[:, :1], page_table=TABLE, lengths=np.array([1, 1, 1]))
    with pytest.raises(ValueError, match=r"inputs must have shape \[B, T, features\], not \(1, 32\)"):
        layer.decode(layer.params, layer.pages(4, 16), X[0, :1], page_table=TABLE, lengths=ENDS)
    with pytest.raises(ValueError, match="multiple of 8 keys from 8 to 1024, not 12"):
        layer.pages(4, 12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be at least 1, not 0"),
        ({"q_lora_rank": -1}, ValueError, "q_lora_rank must be at least 1, not -1"),
        ({"v_head_dim": 1.5}, TypeError, "v_head_dim must be an int"),
        ({"qk_rope_head_dim": 7}, ValueError, "qk_rope_head_dim must be even, not 7"),
        ({"rope_frequencies": (1.0,)}, ValueError, r"rope_frequencies must have .* = 4 numbers, not 1"),
        ({"rank": 3}, TypeError, "rank"),
    ],
)
def test_errors_of_attributes(api, options, error, message):
    with pytest.raises(error, match=message):
        api(**options)


@pytest.mark.parametrize("shape", [(), (25,), (3, 24), (2, 1), (1, 1, 24)])
def test_errors_of_positions(api, shape):
    layer = api()
    with pytest.raises(ValueError, match=re.escape(f"positions must have shape (2, 24) or (24,), not {shape}")):
        layer(layer.params, X, positions=np.zeros(shape, int))


def test_errors_of_calls(api):
    layer = api()
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask': the arguments are"):
        layer(layer.params, X, mask=None)
    with pytest.raises(ValueError, match=r"latents must have shape \(2, 'T', 32\) with T <= 24 .*, not \(2, 48, 32\)"):
        jax.jit(layer.decode)(layer.params, layer.cache(), np.concatenate([X, X], 1))
    with pytest.raises(ValueError, match=r"latents must have shape \(2, 'T', 32\) .*, not \(1, 24, 32\)"):
        jax.jit(layer.decode)(layer.params, layer.cache(), X[:1])
    narrow = api(kv_lora_rank=20)
    with pytest.raises(ValueError, match="last dim of latent must be a multiple of 8 from 8 to 576, not 28"):
        jax.jit(narrow.decode)(narrow.params, narrow.cache(), X[:, :1])


def test_errors_of_nnx():
    layer = jax_flash.nnx.MultiHeadLatentAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **DIMS)
    with pytest.raises(ValueError, match="in_features=32 features"):
        layer(X[..., :8])
    with pytest.raises(ValueError, match="call `init_cache` first"):
        layer(X, decode=True)

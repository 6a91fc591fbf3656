"""`jax_flash.linen` and `jax_flash.nnx` compared with the stock Flax functions and modules."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

import flax.errors
import flax.linen as nn
import forwarded_options
from flax import nnx
from flax_layers import BATCH, FEATURES, HEADS, INPUTS, LENGTH, Linen, Nnx, normal
from flax_options import IDS, LEADING, NOT_ARRAYS, OPTIONS, WRONG, WRONG_ATTRIBUTES, functional, problems

import jax_flash

pytestmark = pytest.mark.usefixtures("device")

VALID = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 5]])  # padded at the end: [BATCH, LENGTH]
MASK = (np.tri(LENGTH, dtype=bool) & VALID[:, None] & VALID[:, :, None])[:, None].astype(np.float32)  # Flax's format
DISTANCE = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
STACKED = normal(5, *LEADING, LENGTH, FEATURES)
HEADS_OF = normal(0, *LEADING, LENGTH, HEADS, 8)


@pytest.fixture(params=[Linen, Nnx], ids=["linen", "nnx"])
def api(request):
    return request.param


def assert_close(got, want, tolerance=2e-5):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


def repeated(params):
    """Return parameters for a stock layer equivalent to `params`, which have half as many key/value heads."""
    double = functools.partial(jax.tree.map, lambda x: np.repeat(x, 2, axis=-2))
    return params | {name: double(params[name]) for name in ("key", "value")}


# The function


@pytest.mark.parametrize(
    "leading, mask_leading, kv_heads",
    [
        ((), (), HEADS),
        ((), (), 2),
        ((2,), (), HEADS),
        ((2,), (1,), HEADS),
        ((2, 3), (2, 3), HEADS),
        ((2, 3), (3,), HEADS),
        ((2, 1, 3), (1, 1, 1), HEADS),
        ((2, 1, 3), (2, 1, 1), 2),
    ],
)
def test_function_takes_any_leading_dimensions(api, leading, mask_leading, kv_heads):
    query, key, value = (
        normal(i, *leading, t, n, 8) for i, (t, n) in enumerate([(7, HEADS), (9, kv_heads), (9, kv_heads)])
    )
    mask = (normal(3, *mask_leading, HEADS, 7, 9) > -0.5).astype(np.float32)
    mask[..., 0] = 1.0
    bias = normal(4, *mask_leading, 1 if kv_heads == HEADS else HEADS, 7, 9)
    # With a dropout rate, the stock function does not call jax.nn, which does not support [T, N, D].
    stock = functools.partial(api.stock_function, dropout_rate=0.5, deterministic=True)
    want = stock(query, *(np.repeat(x, HEADS // kv_heads, axis=-2) for x in (key, value)), bias, mask)
    assert_close(jax.jit(api.function)(query, key, value, bias, mask), want)


def test_function_as_attention_fn_of_the_stock_module(api):
    stock = api.layer(api.stock)
    fused = api.layer(api.stock, attention_fn=api.function, dropout_rate=0.5)
    got = fused(INPUTS, mask=MASK, deterministic=True)
    assert_close(got[VALID], stock(INPUTS, mask=MASK)[VALID])
    assert (fused(INPUTS, mask=MASK, deterministic=False, stream=jax.random.key(0)) != got).any()
    with pytest.raises(NotImplementedError, match="`module`"):
        fused(INPUTS, deterministic=True, sow_weights=True)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_function_grouped_query_window_and_cap(api, implementation):
    query, key, value = normal(0, 2, 10, 4, 8), normal(1, 2, 10, 2, 8), normal(2, 2, 10, 2, 8)
    options = {"is_causal": True, "local_window_size": (3, 0), "logits_soft_cap": 2.0}
    key_per_head, value_per_head = (np.repeat(x, 2, axis=2) for x in (key, value))
    scores = 2.0 * np.tanh(np.einsum("btnd,bsnd->bnts", query, key_per_head) / np.sqrt(8.0) / 2.0)
    distance = np.arange(10)[:, None] - np.arange(10)
    weights = np.where((distance >= 0) & (distance <= 3), np.exp(scores), 0.0)
    want = np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), value_per_head)
    attend = functools.partial(api.function, implementation=implementation, **options)
    assert_close(jax.jit(attend)(query, key, value), want)


def test_function_gives_zeros_for_empty_rows(api):
    query = normal(0, 1, 4, 2, 8)
    mask = np.ones((1, 1, 4, 4), np.float32)
    mask[:, :, 2] = 0.0
    out = np.asarray(jax.jit(api.function)(query, query, query, mask=mask))
    assert not out[0, 2].any() and out[0, 1].any()


def test_function_causal_of_nnx():
    query = normal(0, 2, 9, HEADS, 8)
    got, want = (
        functools.partial(function, is_causal=True)(query, query, query)
        for function in (Nnx.function, Nnx.stock_function)
    )
    assert_close(got, want)


@pytest.mark.parametrize("broadcast", [True, False])
def test_function_dropout(api, broadcast):
    """With zero queries and the identity as values, the output is the matrix of weights after dropout."""
    length, rate = 64, 0.3
    zeros = np.zeros((2, 3, length, 4, length), np.float32)
    value = np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], zeros.shape)

    @functools.partial(jax.jit, static_argnames="deterministic")
    def attend(key, deterministic=False):
        options = {"dropout_rate": rate, "broadcast_dropout": broadcast, "deterministic": deterministic}
        return api.function(zeros, zeros, value, dropout_rng=key, **options)

    weights = np.asarray(attend(jax.random.key(0)))
    kept = weights > 0
    np.testing.assert_allclose(weights[kept], 1 / length / (1 - rate), rtol=1e-4)
    draws = length**2 if broadcast else weights.size
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / draws) + 2**-16
    masks = np.moveaxis(kept, 3, 2).reshape(-1, length, length)
    assert len(np.unique(masks, axis=0)) == (1 if broadcast else len(masks))

    np.testing.assert_array_equal(weights, attend(jax.random.key(0)))
    assert (weights != attend(jax.random.key(1))).any()
    np.testing.assert_allclose(attend(None, deterministic=True), 1 / length, rtol=1e-5)
    with pytest.raises(ValueError, match="dropout_rng"):
        attend(None)


def test_function_dtype(api):
    query = normal(0, 2, 8, 2, 8)
    half = query.astype(jnp.bfloat16)

    def dtype_of(*args, **options):
        return jax.eval_shape(functools.partial(api.function, **options), *args).dtype

    assert dtype_of(query, query, query) == jnp.float32
    assert dtype_of(query, query, query, dtype=jnp.bfloat16) == jnp.bfloat16
    assert dtype_of(half, query, query) == jnp.float32
    assert dtype_of(half, half, half) == jnp.bfloat16


@pytest.mark.parametrize(
    "function, name, value",
    [
        (Linen.function, "module", nn.Dense(1)),
        (Linen.function, "einsum_dot_general", jax.lax.dot_general),
        (Linen.function, "qk_attn_weights_einsum", jnp.einsum),
        (Linen.function, "attn_weights_value_einsum", jnp.einsum),
        (Nnx.function, "module", nnx.Dropout(0.5)),
    ],
)
def test_function_refuses_unsupported_arguments(function, name, value):
    with pytest.raises(NotImplementedError, match=f"`{name}`"):
        function(HEADS_OF, HEADS_OF, HEADS_OF, **{name: value})


def test_function_shape_errors(api):
    query = normal(0, 2, 8, 2, 8)
    with pytest.raises(ValueError, match="leading dimensions"):
        api.function(query, query[:1], query)
    with pytest.raises(ValueError, match="leading dimensions"):
        api.function(query[0, 0], query[0, 0], query[0, 0])
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        api.function(query, query, query, mask=np.ones((1, 1, 1, 8, 8)))


@pytest.mark.parametrize(("inputs", "message"), NOT_ARRAYS)
def test_function_refuses_non_arrays(api, inputs, message):
    with pytest.raises(TypeError, match=message):
        api.function(**{"query": HEADS_OF, "key": HEADS_OF, "value": HEADS_OF} | inputs)


def test_function_takes_the_stock_arguments_by_position(api):
    """The stock arguments come first, in Flax's order."""
    query = normal(0, 2, 8, 2, 8)
    by_position = (None, None, False, jax.random.key(0), 0.5, False, jnp.bfloat16)
    by_name = {"broadcast_dropout": False, "dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
    got = api.function(query, query, query, *by_position)
    want = api.function(query, query, query, **by_name, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == jnp.bfloat16
    parameters, stock = (list(inspect.signature(f).parameters) for f in (api.function, api.stock_function))
    assert parameters[: len(stock)] == stock and "query_segment_ids" in parameters[len(stock) :]


# The module


@pytest.mark.parametrize(
    "options, mask_dtype",
    [
        ({}, None),
        ({}, np.float32),
        ({"normalize_qk": True, "use_bias": False, "qkv_features": 64, "out_features": 8}, bool),
        ({"out_kernel_init": nn.initializers.constant(0.1), "bias_init": nn.initializers.normal(1.0)}, np.float32),
        ({"num_kv_heads": 2}, np.float32),
    ],
)
def test_module_equals_stock(api, options, mask_dtype):
    """Initial parameters, outputs, and gradients of parameters and inputs are equal."""
    fused = api.layer(api.fused, **options)
    grouped = "num_kv_heads" in options
    stock = api.layer(api.stock, **{} if grouped else options)
    if grouped:
        assert fused.params["key"]["kernel"].shape == (FEATURES, 2, FEATURES // HEADS)
    else:
        jax.tree.map(np.testing.assert_array_equal, fused.params, stock.params)
    counted = np.ones_like(VALID) if mask_dtype is None else VALID
    mask = None if mask_dtype is None else MASK.astype(mask_dtype)

    def gradients(layer, prepare=lambda params: params):
        def loss(params, inputs):
            return (jnp.sin(layer.run(prepare(params), inputs, mask=mask)[0]) * counted[..., None]).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(fused.params, INPUTS)

    assert_close(gradients(fused), gradients(stock, repeated if grouped else lambda params: params), 1e-4)


def test_module_cross_attention(api):
    inputs = INPUTS, normal(1, BATCH, 5, 6), normal(2, BATCH, 5, 3 if api is Linen else 6)  # nnx has one size for both
    stock, fused = (api.layer(kind, *inputs) for kind in (api.stock, api.fused))
    assert_close(fused(*inputs), stock(*inputs))
    with pytest.raises(ValueError, match="inputs_k"):
        fused(INPUTS, inputs_v=INPUTS)


def test_module_in_half_precision(api):
    stock, fused = (api.layer(kind, dtype=jnp.bfloat16) for kind in (api.stock, api.fused))
    got, want = fused(INPUTS), stock(INPUTS)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(np.float32), want.astype(np.float32), 2e-2)


@pytest.mark.parametrize(
    "attributes, options, mask",
    [
        ({"is_causal": True}, {}, DISTANCE >= 0),
        ({"local_window_size": (3, 1)}, {}, (DISTANCE <= 3) & (DISTANCE >= -1)),
        ({"local_window_size": (3, 1)}, {"is_causal": True}, (DISTANCE <= 3) & (DISTANCE >= 0)),
        ({"local_window_size": (3, 1), "is_causal": True}, {"is_causal": False}, (DISTANCE <= 3) & (DISTANCE >= -1)),
        ({"is_causal": True}, {"is_causal": None}, DISTANCE >= 0),
    ],
)
def test_module_causal_and_window(api, attributes, options, mask):
    """Use attributes and options of a call. An option overrides the attribute."""
    assert_close(api.layer(api.fused, **attributes)(INPUTS, **options), api.layer(api.stock)(INPUTS, mask=mask))


def test_block_masks(api):
    """A block mask equals a mask of its entries: in the function, in the module, and in the stock module with it."""
    blocks = jax_flash.BlockMask.from_mask(
        np.tri(LENGTH, k=2, dtype=bool) & (np.arange(LENGTH) > 1), q_block=16, kv_block=16
    )
    entries = jnp.asarray(blocks.to_mask())
    q, k, v = (jnp.asarray(normal(seed, BATCH, LENGTH, HEADS, 8)) for seed in range(3))
    assert_close(api.function(q, k, v, block_mask=blocks), api.function(q, k, v, mask=entries))

    module = api.layer(api.fused)
    want = api.layer(api.stock)(INPUTS, mask=entries)
    assert_close(module(INPUTS, block_mask=blocks), want)
    attention_fn = functools.partial(api.function, block_mask=blocks)
    assert_close(api.layer(api.stock, attention_fn=attention_fn)(INPUTS), want)
    with pytest.raises(ValueError, match="block_mask must have .* entries, not 12 x 12"):
        module(INPUTS[:, 1:], block_mask=blocks)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "local_window_size": 3, "normalize_qk": True}])
def test_decoding_equals_one_causal_pass(api, options):
    decoder = api.layer(api.fused, decode=True, **options)
    expected = api.layer(api.fused, is_causal=True, **options)(INPUTS, params=decoder.params)
    step = jax.jit(lambda cache, tokens: decoder.run(decoder.params, tokens, cache=cache))
    for pieces in ([1] * LENGTH, [5, 1, 1, 5]):
        cache, outputs = decoder.cache, []
        for tokens in np.split(INPUTS, np.cumsum(pieces)[:-1], axis=1):
            out, cache = step(cache, tokens)
            outputs.append(out)
        assert_close(np.concatenate(outputs, axis=1), expected)
        assert cache["cache_index"] == LENGTH


def test_nnx_decode_as_option_of_the_call():
    """The attribute `decode` of the causal module is None. `nnx.jit` updates the cache."""
    module = Nnx.fused(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    expected = module(INPUTS, decode=False)
    module.init_cache(INPUTS.shape)
    step = nnx.jit(lambda module, tokens: module(tokens, decode=True))
    outputs = [step(module, tokens) for tokens in np.split(INPUTS, [5, 6, 7], axis=1)]
    assert_close(np.concatenate(outputs, axis=1), expected)
    assert module.cache_index[...] == LENGTH


@pytest.mark.parametrize("options", [{"api": Linen}, {"api": Nnx, "num_kv_heads": 2}], ids=["linen", "nnx"])
def test_decoding_equals_stock(options):
    """Each step has the same output and the same cache, with a mask that hides one token."""
    api, options = options["api"], {name: x for name, x in options.items() if name != "api"}
    layers = [api.layer(kind, decode=True, **options) for kind in (api.fused, api.stock)]
    jax.tree.map(np.testing.assert_array_equal, *((layer.params, layer.cache) for layer in layers))
    mask = np.ones((BATCH, 1, 1, LENGTH), np.float32)
    mask[1, ..., 2] = 0.0
    steps = [jax.jit(functools.partial(layer.run, layer.params, mask=mask)) for layer in layers]
    caches = [layer.cache for layer in layers]
    for t in range(LENGTH):
        outputs, caches = zip(
            *(step(INPUTS[:, t : t + 1], cache=cache) for step, cache in zip(steps, caches, strict=True)), strict=True
        )
        assert_close(*outputs)
        assert_close(*caches)


def test_decoding_errors(api):
    decoder = api.layer(api.fused, decode=True)
    step = functools.partial(decoder.run, decoder.params, cache=decoder.cache)
    with pytest.raises(ValueError, match="cache"):
        step(INPUTS[:1])
    with pytest.raises(ValueError, match="cache"):
        step(np.concatenate([INPUTS, INPUTS], axis=1))
    with pytest.raises(ValueError, match="as many queries as keys"):
        step(INPUTS[:, :1], INPUTS[:, :2])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\), .* of the cache: leave out a causal mask"):
        step(INPUTS[:, :2], mask=np.tri(2, dtype=bool))
    with pytest.raises(ValueError, match="query_offset must not be given when decoding"):
        step(INPUTS[:, :1], query_offset=3)


def test_decoding_packed_sequences(api):
    """Segment ids are those of the new tokens and of the full cache. The cache gives the query positions."""
    decoder = api.layer(api.fused, decode=True)
    ids = {"query_segment_ids": IDS, "key_value_segment_ids": IDS}
    expected = api.layer(api.fused, is_causal=True)(INPUTS, params=decoder.params, **ids)
    cache, outputs = decoder.cache, []
    for start, stop in ((0, 7), (7, LENGTH)):
        ids = {"query_segment_ids": IDS[start:stop], "key_value_segment_ids": IDS}
        out, cache = decoder.run(decoder.params, INPUTS[:, start:stop], cache=cache, **ids)
        outputs.append(out)
    assert_close(np.concatenate(outputs, axis=1), expected)


def test_module_dropout(api):
    layer = api.layer(api.fused, dropout_rate=0.5)
    drop = jax.jit(lambda key: layer.run(layer.params, INPUTS, deterministic=False, stream=key)[0])
    first, again, other = (drop(jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert_close(layer(INPUTS, deterministic=True), api.layer(api.stock)(INPUTS))
    with pytest.raises(ValueError, match="deterministic"):
        layer.run(layer.params, INPUTS)


def test_linen_dropout_rng():
    """A key in the call overrides the rng streams. Without either, Flax raises an error."""
    layer = Linen.layer(Linen.fused, dropout_rate=0.5)
    drop = functools.partial(layer, INPUTS, deterministic=False, dropout_rng=jax.random.key(7))
    np.testing.assert_array_equal(*(drop(stream=jax.random.key(i)) for i in (0, 1)))
    with pytest.raises(flax.errors.InvalidRngError):
        layer.run(layer.params, INPUTS, deterministic=False)


def test_nnx_dropout_rngs():
    """The module's own stream advances with each call. Streams in the call override it."""
    make = functools.partial(Nnx.fused, HEADS, FEATURES, dropout_rate=0.5)
    module, same_seed = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0))
    drop = nnx.jit(lambda module, rngs=None: module(INPUTS, deterministic=False, decode=False, rngs=rngs))
    first = drop(module)
    assert (drop(module) != first).any()
    np.testing.assert_array_equal(drop(same_seed), first)
    np.testing.assert_array_equal(*(drop(module, nnx.Rngs(dropout=7)) for _ in range(2)))
    module.eval()  # turns dropout off
    np.testing.assert_array_equal(module(INPUTS), module(INPUTS, deterministic=True))
    with pytest.raises(ValueError, match="rngs"):
        make(rngs=nnx.Rngs(0), keep_rngs=False)(INPUTS, deterministic=False)


@pytest.mark.parametrize(
    "api, attributes, options",
    [
        (Linen, {}, {"sow_weights": True}),
        (Linen, {"attention_fn": nn.dot_product_attention}, {}),
        (Linen, {"qk_attn_weights_einsum_cls": lambda: jnp.einsum}, {}),
        (Linen, {"attn_weights_value_einsum_cls": lambda: jnp.einsum}, {}),
        (Nnx, {}, {"sow_weights": True}),
        (Nnx, {}, {"input_positions": np.arange(3)}),
        (Nnx, {"attention_fn": nnx.dot_product_attention}, {}),
    ],
)
def test_module_refuses_unsupported_options(api, attributes, options):
    (name,) = attributes | options
    with pytest.raises(NotImplementedError, match=f"`{name}`"):
        layer = api.layer(api.fused, **attributes)
        layer.run(layer.params, INPUTS, **options)


@pytest.mark.parametrize("heads", [3, -1, 0])
def test_module_num_kv_heads_errors(api, heads):
    with pytest.raises(ValueError, match="num_kv_heads"):
        api.layer(api.fused, num_kv_heads=heads)
    with pytest.raises(ValueError, match="num_kv_heads"):
        Nnx.fused(HEADS, FEATURES, FEATURES, FEATURES, heads, rngs=nnx.Rngs(0))  # by position


def test_linen_num_heads_error():
    with pytest.raises(ValueError, match="num_heads must divide qkv_features"):
        Linen.layer(Linen.fused, num_heads=3)


def test_nnx_input_errors():
    module = Nnx.fused(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        module(INPUTS)
    with pytest.raises(ValueError, match="in_features=32"):
        module(INPUTS[..., :-1])


def test_linen_always_computes_softmax_in_float32():
    option = {"force_fp32_for_softmax": True}
    inputs = (HEADS_OF,) * 3
    np.testing.assert_array_equal(Linen.function(*inputs, **option), Linen.function(*inputs))
    np.testing.assert_array_equal(Linen.layer(Linen.fused, **option)(INPUTS), Linen.layer(Linen.fused)(INPUTS))


def test_module_with_sinks_as_a_parameter(api):
    """The parameter starts at 0, acts like the option and has a gradient. The option is then refused."""
    module, plain = api.layer(api.fused, use_sinks=True), api.layer(api.fused)
    assert "sinks" not in plain.params
    np.testing.assert_array_equal(module.params["sinks"], np.zeros(HEADS))
    params = module.params | {"sinks": normal(5, HEADS)}
    assert_close(module(INPUTS, params=params), plain(INPUTS, params=plain.params, sinks=params["sinks"]))
    gradient = jax.grad(lambda params: (module.run(params, INPUTS)[0] ** 2).sum())(module.params)
    assert np.abs(gradient["sinks"]).min() > 0
    with pytest.raises(ValueError, match="sinks must not be given with use_sinks=True"):
        module(INPUTS, sinks=normal(5, HEADS))


# Transformations


def test_linen_under_vmap():
    module = Linen.fused(HEADS, is_causal=True)
    variables = jax.jit(jax.vmap(module.init, (0, None)))(jax.random.split(jax.random.key(1), 3), INPUTS)
    got = jax.jit(jax.vmap(module.apply, (0, None)))(variables, INPUTS)
    one = jax.jit(module.apply)
    assert_close(got, np.stack([one(jax.tree.map(lambda x, i=i: x[i], variables), INPUTS) for i in range(3)]))


def test_linen_under_scan_over_layers():
    """Layers have their own parameters and dropout masks. Gradients are equal with and without remat."""

    def gradients(attention_class):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                options = {"is_causal": True, "dropout_rate": 0.2, "deterministic": False}
                return x + attention_class(HEADS, name="attention", **options)(x), None

        stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)()
        variables = jax.jit(stack.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, INPUTS, None)
        assert variables["params"]["attention"]["query"]["kernel"].shape[0] == 3

        def loss(variables):
            return jnp.sin(stack.apply(variables, INPUTS, None, rngs={"dropout": jax.random.key(3)})[0]).sum()

        return jax.jit(jax.grad(loss))(variables)

    assert_close(gradients(nn.remat(Linen.fused)), gradients(Linen.fused), 1e-4)


def test_nnx_under_vmap_and_scan_over_layers():
    """nnx.scan over layers from nnx.vmap equals single calls. Gradients are equal with remat."""

    @nnx.vmap(in_axes=0)
    def make(key):
        return Nnx.fused(HEADS, FEATURES, is_causal=True, decode=False, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))

    def forward(stack, x, remat):
        layer = lambda x, attention: x + attention(x)  # noqa: E731
        layer = nnx.remat(layer) if remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)

    def loss(stack, remat):
        return jnp.sin(forward(stack, INPUTS, remat)).sum()

    want = INPUTS
    graphdef, state = nnx.split(stack)
    one = nnx.jit(lambda module, x: x + module(x))
    for i in range(3):
        want = one(nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)), want)
    assert_close(nnx.jit(forward, static_argnums=2)(stack, INPUTS, False), want, 1e-4)

    plain, remat = (nnx.jit(nnx.grad(functools.partial(loss, remat=remat)))(stack) for remat in (False, True))
    assert_close(nnx.to_pure_dict(remat), nnx.to_pure_dict(plain), 1e-4)


def test_nnx_trains_in_one_jitted_step():
    module = Nnx.fused(HEADS, FEATURES, dropout_rate=0.1, deterministic=False, decode=False, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(module):
        loss, gradients = nnx.value_and_grad(lambda module: ((module(INPUTS) - 1.0) ** 2).mean())(module)
        params = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients))
        return loss

    losses = [float(step(module)) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_nnx_variable_as_offset():
    x = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 8))
    attend = functools.partial(jax_flash.dot_product_attention, *x, is_causal=True)
    offset = jnp.array([3, -1])
    result = nnx.jit(lambda offset: attend(query_offset=offset))(nnx.Variable(offset))
    np.testing.assert_allclose(result, attend(query_offset=offset), rtol=1e-6, atol=1e-6)


# Options that Flax does not have


@pytest.mark.parametrize("name", OPTIONS)
def test_function_with_options_of_jax_flash(api, name):
    """The layer and the functional call have the same problem, values and gradients."""
    given, expected = OPTIONS[name]
    inputs = tuple(normal(i, *LEADING, LENGTH, HEADS, 8) for i in range(3))
    got, want = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: jnp.sin(3 * f(*args)).sum(), (0, 1, 2))).lower(*inputs)
        for f in (functools.partial(api.function, **given), functional(expected))
    )
    assert_close(got.compile()(*inputs), want.compile()(*inputs))
    assert problems(got) == problems(want)


@pytest.mark.parametrize("name", OPTIONS)
def test_module_with_options_of_jax_flash(api, name):
    """Options in a call, and as attributes where these exist, equal the functional call in the stock module."""
    given, functional_options = OPTIONS[name]
    stock = api.layer(api.stock, STACKED, attention_fn=functional(functional_options))

    def gradients(layer, options):
        loss = lambda params, x: jnp.sin(3 * layer.run(params, x, **options)[0]).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(stock.params, STACKED)

    want = gradients(stock, {})
    expected = want.compile()(stock.params, STACKED)
    is_attribute = inspect.signature(api.fused.__init__).parameters.keys()
    attributes = {name: x for name, x in given.items() if name in is_attribute}
    rest = {name: x for name, x in given.items() if name not in attributes}
    ways = [({}, given), (attributes, rest)]
    for made_with, options in ways if attributes else ways[:1]:
        got = gradients(api.layer(api.fused, STACKED, **made_with), options)
        assert_close(got.compile()(stock.params, STACKED), expected, 1e-4)
        assert problems(got) == problems(want)


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options(api, options, error, message):
    with pytest.raises(error, match=message):
        api.function(HEADS_OF, HEADS_OF, HEADS_OF, **options)
    module = api.layer(api.fused, STACKED)
    with pytest.raises(error, match=message):
        module.run(module.params, STACKED, **options)


@pytest.mark.parametrize(("attributes", "error", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes(api, attributes, error, message):
    with pytest.raises(error, match=message):
        module = api.layer(api.fused, STACKED, **attributes)
        module.run(module.params, STACKED)


def test_stock_attributes_are_not_options(api):
    module = api.layer(api.fused)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_rate'"):
        module.run(module.params, INPUTS, dropout_rate=0.5)


def test_each_option_reaches_the_call(api, monkeypatch):
    layer = api.layer(api.fused)
    called = functools.wraps(api.fused.__call__)(lambda **options: layer.run(layer.params, INPUTS, **options))
    module = inspect.getmodule(api.function)
    forwarded_options.check(monkeypatch, module, "Call", api.function, *[HEADS_OF] * 3)
    forwarded_options.check(monkeypatch, module, "Call", called)


def test_signature_has_the_options(api):
    for function in (api.function, api.fused.__call__):
        parameters = inspect.signature(function).parameters
        assert {"scale", "block_mask", "reproducible_gradients"} < parameters.keys() and "options" not in parameters

"""`jax_flash.linen` against the stock Flax linen modules."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_options import IDS, LEADING, NO_INPUTS, OPTIONS, WRONG, WRONG_ATTRIBUTES, functional, problems

pytest.importorskip("flax")

import flax.errors
import flax.linen as nn

import jax_flash
from jax_flash.linen import MultiHeadAttention, dot_product_attention

pytestmark = pytest.mark.usefixtures("device")

BATCH, LENGTH, FEATURES, HEADS = 2, 12, 32, 4  # the CUDA kernels want head dims that are multiples of 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def init(module: nn.Module, *inputs):
    return jax.jit(functools.partial(module.init, deterministic=True))(jax.random.key(1), *inputs)


def apply(module: nn.Module, variables, *inputs, **options):
    return jax.jit(lambda variables, inputs: module.apply(variables, *inputs, **options))(variables, inputs)


def assert_close(got, want, tolerance=2e-5):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


INPUTS = normal(0, BATCH, LENGTH, FEATURES)
VALID = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 5]])  # padded at the end: [BATCH, LENGTH]


@pytest.fixture(scope="module")
def mask() -> jax.Array:
    """float32 [BATCH, 1, LENGTH, LENGTH], as Flax makes it."""
    combined = nn.combine_masks(nn.make_causal_mask(VALID), nn.make_attention_mask(VALID, VALID))
    assert combined.dtype == jnp.float32
    return combined


# The function


@pytest.mark.parametrize(
    "leading, mask_leading",
    [
        ((), ()),
        ((2,), ()),
        ((2,), (1,)),
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((2, 1, 3), (1, 1, 1)),
        ((2, 1, 3), (2, 1, 1)),
    ],
)
def test_function_takes_any_leading_dimensions(leading, mask_leading):
    query, key, value = (normal(i, *leading, t, HEADS, 8) for i, t in enumerate((7, 9, 9)))
    mask = (normal(3, *mask_leading, HEADS, 7, 9) > -0.5).astype(np.float32)
    mask[..., 0] = 1.0
    bias = normal(4, *mask_leading, 1, 7, 9)
    args = (query, key, value, bias, mask)
    assert_close(jax.jit(dot_product_attention)(*args), jax.jit(nn.dot_product_attention)(*args))


def test_function_as_attention_fn_of_the_stock_module(mask):
    stock = nn.MultiHeadDotProductAttention(HEADS)
    fused = nn.MultiHeadDotProductAttention(HEADS, attention_fn=dot_product_attention, dropout_rate=0.5)
    variables = init(stock, INPUTS)
    got = apply(fused, variables, INPUTS, mask=mask, deterministic=True)
    assert_close(got[VALID], apply(stock, variables, INPUTS, mask=mask)[VALID])
    dropped = apply(fused, variables, INPUTS, mask=mask, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert (dropped != got).any()
    with pytest.raises(NotImplementedError, match="`module`"):
        fused.apply(variables, INPUTS, deterministic=True, sow_weights=True)


def test_function_grouped_query_window_and_cap():
    query, key, value = normal(0, 2, 10, 4, 8), normal(1, 2, 10, 2, 8), normal(2, 2, 10, 2, 8)
    attend = functools.partial(dot_product_attention, is_causal=True, local_window_size=(3, 0), logits_soft_cap=2.0)
    key_per_head, value_per_head = (np.repeat(x, 2, axis=2) for x in (key, value))
    scores = 2.0 * np.tanh(np.einsum("btnd,bsnd->bnts", query, key_per_head) / np.sqrt(8.0) / 2.0)
    distance = np.arange(10)[:, None] - np.arange(10)
    weights = np.where((distance >= 0) & (distance <= 3), np.exp(scores), 0.0)
    want = np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), value_per_head)
    for implementation in (None, "xla", "reference"):
        assert_close(jax.jit(functools.partial(attend, implementation=implementation))(query, key, value), want)


def test_function_query_with_nothing_to_attend_to_is_zero():
    query = normal(0, 1, 4, 2, 8)
    mask = np.ones((1, 1, 4, 4), np.float32)
    mask[:, :, 2] = 0.0
    out = np.asarray(jax.jit(dot_product_attention)(query, query, query, mask=mask))
    assert not out[0, 2].any() and out[0, 1].any()


@pytest.mark.parametrize("broadcast", [True, False])
def test_function_dropout(broadcast):
    """With zero queries and the identity as values the output is the matrix of dropped-out weights itself."""
    length, rate = 64, 0.3
    zeros = np.zeros((2, 3, length, 4, length), np.float32)
    value = np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], zeros.shape)

    @functools.partial(jax.jit, static_argnames="deterministic")
    def attend(key, deterministic=False):
        return dot_product_attention(
            zeros,
            zeros,
            value,
            dropout_rng=key,
            dropout_rate=rate,
            broadcast_dropout=broadcast,
            deterministic=deterministic,
        )

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


def test_function_computes_in_the_dtype_asked_for():
    query = normal(0, 2, 8, 2, 8)
    half = query.astype(jnp.bfloat16)

    def dtype_of(*args, **options):
        return jax.eval_shape(functools.partial(dot_product_attention, **options), *args).dtype

    assert dtype_of(query, query, query) == jnp.float32
    assert dtype_of(query, query, query, dtype=jnp.bfloat16) == jnp.bfloat16
    assert dtype_of(half, query, query) == jnp.float32
    assert dtype_of(half, half, half) == jnp.bfloat16


@pytest.mark.parametrize(
    "name, value",
    [
        ("module", nn.Dense(1)),
        ("einsum_dot_general", jax.lax.dot_general),
        ("qk_attn_weights_einsum", jnp.einsum),
        ("attn_weights_value_einsum", jnp.einsum),
    ],
)
def test_function_refuses_what_a_fused_kernel_cannot_do(name, value):
    query = normal(0, 2, 8, 2, 8)
    with pytest.raises(NotImplementedError, match=f"`{name}`"):
        dot_product_attention(query, query, query, **{name: value})


def test_function_names_wrong_shapes():
    query = normal(0, 2, 8, 2, 8)
    with pytest.raises(ValueError, match="leading dimensions"):
        dot_product_attention(query, query[:1], query)
    with pytest.raises(ValueError, match="leading dimensions"):
        dot_product_attention(query[0, 0], query[0, 0], query[0, 0])
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        dot_product_attention(query, query, query, mask=np.ones((1, 1, 1, 8, 8)))


# The module


@pytest.mark.parametrize(
    "options, mask_dtype",
    [
        ({}, None),
        ({}, jnp.float32),
        ({"normalize_qk": True, "use_bias": False, "qkv_features": 64, "out_features": 8}, jnp.bool_),
        ({"out_kernel_init": nn.initializers.ones, "force_fp32_for_softmax": True}, jnp.float32),
    ],
)
def test_module_equals_stock(options, mask_dtype, mask):
    """The same initial parameters, outputs, and gradients in parameters and inputs."""
    stock, fused = nn.MultiHeadDotProductAttention(HEADS, **options), MultiHeadAttention(HEADS, **options)
    variables = init(stock, INPUTS)
    jax.tree.map(np.testing.assert_array_equal, init(fused, INPUTS), variables)
    mask = None if mask_dtype is None else mask.astype(mask_dtype)
    counted = np.ones_like(VALID) if mask_dtype is None else VALID

    def loss(module, variables, inputs):
        return (jnp.sin(module.apply(variables, inputs, mask=mask)) * counted[..., None]).sum()

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, module), (0, 1)))(variables, INPUTS)
        for module in (fused, stock)
    )
    assert_close(got, want, 1e-4)


def test_module_cross_attention():
    inputs = INPUTS, normal(1, BATCH, 5, 6), normal(2, BATCH, 5, 3)
    stock, fused = nn.MultiHeadDotProductAttention(HEADS), MultiHeadAttention(HEADS)
    variables = init(stock, *inputs)
    assert_close(apply(fused, variables, *inputs), apply(stock, variables, *inputs))
    with pytest.raises(ValueError, match="inputs_k"):
        fused.apply(variables, INPUTS, inputs_v=INPUTS)


def test_module_in_half_precision():
    dtype = jnp.bfloat16
    stock, fused = nn.MultiHeadDotProductAttention(HEADS, dtype=dtype), MultiHeadAttention(HEADS, dtype=dtype)
    variables = init(stock, INPUTS)
    got, want = apply(fused, variables, INPUTS), apply(stock, variables, INPUTS)
    assert got.dtype == dtype
    assert_close(got.astype(np.float32), want.astype(np.float32), 2e-2)


def test_module_causal_and_window():
    stock = nn.MultiHeadDotProductAttention(HEADS)
    variables = init(stock, INPUTS)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    for options, mask in (
        ({"is_causal": True}, distance >= 0),
        ({"local_window_size": (3, 1)}, (distance <= 3) & (distance >= -1)),
    ):
        got = apply(MultiHeadAttention(HEADS, **options), variables, INPUTS)
        assert_close(got, apply(stock, variables, INPUTS, mask=mask))


def test_block_masks():
    """Of the function, of the module, and of the stock module with the function in it: as the mask of its entries."""
    blocks = jax_flash.BlockMask.from_mask(
        np.tri(LENGTH, k=2, dtype=bool) & (np.arange(LENGTH) > 1), q_block=16, kv_block=16
    )
    entries = jnp.asarray(blocks.to_mask())
    q, k, v = (jnp.asarray(normal(seed, BATCH, LENGTH, HEADS, 8)) for seed in range(3))
    assert_close(dot_product_attention(q, k, v, block_mask=blocks), dot_product_attention(q, k, v, mask=entries))

    module = MultiHeadAttention(num_heads=HEADS)
    variables = init(module, INPUTS)
    want = apply(module, variables, INPUTS, mask=entries)
    assert_close(apply(module, variables, INPUTS, block_mask=blocks), want)
    attention_fn = functools.partial(dot_product_attention, block_mask=blocks)
    assert_close(apply(nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn), variables, INPUTS), want)
    with pytest.raises(ValueError, match="block_mask must have .* entries, not 12 x 12"):
        apply(module, variables, INPUTS[:, 1:], block_mask=blocks)


def test_module_grouped_query():
    """Equals the stock module whose key and value heads are repeated."""
    fused = MultiHeadAttention(HEADS, num_kv_heads=2)
    params = init(fused, INPUTS)["params"]
    assert params["key"]["kernel"].shape == (FEATURES, 2, FEATURES // HEADS)
    repeated = {
        name: jax.tree.map(lambda x: np.repeat(x, HEADS // 2, axis=-2), layer) if name in ("key", "value") else layer
        for name, layer in params.items()
    }
    want = apply(nn.MultiHeadDotProductAttention(HEADS), {"params": repeated}, INPUTS)
    assert_close(apply(fused, {"params": params}, INPUTS), want)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "local_window_size": 3, "normalize_qk": True}])
def test_module_decodes_as_one_causal_pass(options):
    decoder = MultiHeadAttention(HEADS, decode=True, **options)
    variables = init(decoder, INPUTS)
    params = {"params": variables["params"]}
    whole = apply(MultiHeadAttention(HEADS, is_causal=True, **options), params, INPUTS)
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    for pieces in ([1] * LENGTH, [5, 1, 1, 5]):
        cache, outputs = variables["cache"], []
        for tokens in np.split(INPUTS, np.cumsum(pieces)[:-1], axis=1):
            out, updated = step({**params, "cache": cache}, tokens)
            cache = updated["cache"]
            outputs.append(out)
        assert_close(np.concatenate(outputs, axis=1), whole)
        assert cache["cache_index"] == LENGTH


def test_module_decodes_like_stock():
    """Step by step the same outputs and the same cache, with a mask that hides a token."""
    stock, fused = nn.MultiHeadDotProductAttention(HEADS, decode=True), MultiHeadAttention(HEADS, decode=True)
    variables = init(stock, INPUTS)
    jax.tree.map(np.testing.assert_array_equal, init(fused, INPUTS), variables)
    params, cache, stock_cache = {"params": variables["params"]}, variables["cache"], variables["cache"]
    mask = np.ones((BATCH, 1, 1, LENGTH), np.float32)
    mask[1, ..., 2] = 0.0
    step, stock_step = (
        jax.jit(functools.partial(module.apply, mask=mask, mutable=["cache"])) for module in (fused, stock)
    )
    for t in range(LENGTH):
        tokens = INPUTS[:, t : t + 1]
        got, updated = step({**params, "cache": cache}, tokens)
        want, stock_updated = stock_step({**params, "cache": stock_cache}, tokens)
        cache, stock_cache = updated["cache"], stock_updated["cache"]
        assert_close(got, want)
        assert_close(cache, stock_cache)


def test_module_decode_names_what_does_not_fit():
    decoder = MultiHeadAttention(HEADS, decode=True)
    variables = init(decoder, INPUTS)
    step = functools.partial(decoder.apply, variables, mutable=["cache"])
    with pytest.raises(ValueError, match="cache"):
        step(INPUTS[:1])
    with pytest.raises(ValueError, match="cache"):
        step(np.concatenate([INPUTS, INPUTS], axis=1))
    with pytest.raises(ValueError, match="as many queries as keys"):
        step(INPUTS[:, :1], INPUTS[:, :2])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\), .* of the cache: leave out a causal mask"):
        step(INPUTS[:, :2], mask=np.tri(2, dtype=bool))


def test_module_dropout_rngs():
    module = MultiHeadAttention(HEADS, dropout_rate=0.5)
    variables = init(module, INPUTS)

    @jax.jit
    def drop(rngs, dropout_rng=None):
        return module.apply(variables, INPUTS, deterministic=False, dropout_rng=dropout_rng, rngs=rngs)

    first, again, other = (drop({"dropout": jax.random.key(i)}) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    explicit = [drop({"dropout": jax.random.key(i)}, jax.random.key(7)) for i in (0, 1)]  # goes before rngs
    np.testing.assert_array_equal(*explicit)

    got = apply(module, variables, INPUTS, deterministic=True)
    assert_close(got, apply(nn.MultiHeadDotProductAttention(HEADS), variables, INPUTS))
    with pytest.raises(flax.errors.InvalidRngError):
        module.apply(variables, INPUTS, deterministic=False)
    with pytest.raises(ValueError, match="deterministic"):
        module.apply(variables, INPUTS)


def test_module_refuses_by_name():
    module = MultiHeadAttention(HEADS)
    variables = init(module, INPUTS)
    with pytest.raises(NotImplementedError, match="`sow_weights`"):
        module.apply(variables, INPUTS, sow_weights=True)
    for name, value in {
        "attention_fn": nn.dot_product_attention,
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }.items():
        with pytest.raises(NotImplementedError, match=f"`{name}`"):
            MultiHeadAttention(HEADS, **{name: value}).apply(variables, INPUTS)
    for options in ({"num_heads": 3}, *({"num_heads": HEADS, "num_kv_heads": heads} for heads in (3, -1, 0))):
        with pytest.raises(ValueError, match="must divide|num_kv_heads must be at least 1"):
            init(MultiHeadAttention(**options), INPUTS)


# Transformations


def test_module_under_vmap():
    module = MultiHeadAttention(HEADS, is_causal=True)
    variables = jax.jit(jax.vmap(module.init, (0, None)))(jax.random.split(jax.random.key(1), 3), INPUTS)
    got = jax.jit(jax.vmap(module.apply, (0, None)))(variables, INPUTS)
    want = [apply(module, jax.tree.map(lambda x, i=i: x[i], variables), INPUTS) for i in range(3)]
    assert_close(got, np.stack(want))


def test_module_under_scan_over_layers():
    """Layers with their own parameters and dropout masks; with and without remat the same gradients."""

    def gradients(attention_class):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                options = {"is_causal": True, "dropout_rate": 0.2, "deterministic": False}
                return x + attention_class(HEADS, name="attention", **options)(x), None

        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)()
        variables = jax.jit(stack.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, INPUTS, None)
        assert variables["params"]["attention"]["query"]["kernel"].shape[0] == 3

        def loss(variables):
            return jnp.sin(stack.apply(variables, INPUTS, None, rngs={"dropout": jax.random.key(3)})[0]).sum()

        return jax.jit(jax.grad(loss))(variables)

    assert_close(gradients(nn.remat(MultiHeadAttention)), gradients(MultiHeadAttention), 1e-4)


# Options beside Flax's own

STACKED = normal(5, *LEADING, LENGTH, FEATURES)


@pytest.mark.parametrize("name", OPTIONS)
def test_function_with_options_of_jax_flash(name):
    """The problem, the values and the gradients of the functional call."""
    given, wanted = OPTIONS[name]
    inputs = tuple(normal(i, *LEADING, LENGTH, HEADS, 8) for i in range(3))
    got, want = (
        jax.value_and_grad(lambda *args, f=f: jnp.sin(3 * f(*args)).sum(), (0, 1, 2))
        for f in (functools.partial(dot_product_attention, **given), functional(wanted))
    )
    assert_close(jax.jit(got)(*inputs), jax.jit(want)(*inputs))
    assert problems(got, *inputs) == problems(want, *inputs)


@pytest.mark.parametrize("name", OPTIONS)
def test_module_with_options_of_jax_flash(name):
    """Of a call, and as attributes where they are some: as the stock module with the functional call in it."""
    given, wanted = OPTIONS[name]
    stock = nn.MultiHeadDotProductAttention(HEADS, attention_fn=functional(wanted))
    variables = init(stock, STACKED)

    def gradients(module, options):
        loss = lambda *args: jnp.sin(3 * module.apply(*args, **options)).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))

    want = gradients(stock, {})
    expected = jax.jit(want)(variables, STACKED)
    attributes = {name: x for name, x in given.items() if hasattr(MultiHeadAttention, name)}
    rest = {name: x for name, x in given.items() if name not in attributes}
    ways = [(MultiHeadAttention(HEADS), given), (MultiHeadAttention(HEADS, **attributes), rest)]
    for module, options in ways if attributes else ways[:1]:
        got = gradients(module, options)
        assert_close(jax.jit(got)(variables, STACKED), expected, 1e-4)
        assert problems(got, variables, STACKED) == problems(want, variables, STACKED)


def test_a_call_goes_before_the_attributes():
    module = MultiHeadAttention(HEADS, is_causal=True, local_window_size=2)
    variables = init(module, INPUTS)
    plain = apply(MultiHeadAttention(HEADS, local_window_size=2), variables, INPUTS)
    assert_close(apply(module, variables, INPUTS, is_causal=False), plain)
    np.testing.assert_array_equal(apply(module, variables, INPUTS, is_causal=None), apply(module, variables, INPUTS))


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options(options, error, message):
    query = normal(0, *LEADING, LENGTH, HEADS, 8)
    with pytest.raises(error, match=message):
        dot_product_attention(query, query, query, **options)
    module = MultiHeadAttention(HEADS)
    with pytest.raises(error, match=message):
        module.init(jax.random.key(1), STACKED, **options)


@pytest.mark.parametrize(("attributes", "error", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes(attributes, error, message):
    with pytest.raises(error, match=message):
        MultiHeadAttention(**{"num_heads": HEADS} | attributes).init(jax.random.key(1), STACKED)


@pytest.mark.parametrize(("inputs", "message"), NO_INPUTS)
def test_function_names_what_is_no_array(inputs, message):
    query = normal(0, *LEADING, LENGTH, HEADS, 8)
    with pytest.raises(TypeError, match=message):
        dot_product_attention(**{"query": query, "key": query, "value": query} | inputs)


def test_module_takes_stock_attributes_not_as_options():
    module = MultiHeadAttention(HEADS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_rate'"):
        module.init(jax.random.key(1), STACKED, dropout_rate=0.5)


def test_signature_has_the_options():
    for function in (dot_product_attention, MultiHeadAttention.__call__):
        parameters = inspect.signature(function).parameters
        assert {"scale", "block_mask", "reproducible_gradients"} < parameters.keys() and "options" not in parameters


def test_function_takes_the_stock_arguments_by_position():
    """All of them, in the order that Flax has them."""
    query = normal(0, 2, 8, 2, 8)
    by_position = (None, None, False, jax.random.key(0), 0.5, False, jnp.bfloat16)
    by_name = {"broadcast_dropout": False, "dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
    got = dot_product_attention(query, query, query, *by_position)
    want = dot_product_attention(query, query, query, **by_name, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == jnp.bfloat16
    parameters = list(inspect.signature(dot_product_attention).parameters)
    stock = list(inspect.signature(nn.dot_product_attention).parameters)
    assert parameters[: len(stock)] == stock and "query_segment_ids" in parameters[len(stock) :]


def test_module_decodes_packed_sequences():
    """Segment ids of the new tokens and of the whole cache; where the queries are, the cache says."""
    module = MultiHeadAttention(HEADS, decode=True)
    variables = init(module, INPUTS)
    params, cache, outputs = {"params": variables["params"]}, variables["cache"], []
    segments = {"query_segment_ids": IDS, "key_value_segment_ids": IDS}
    whole = apply(MultiHeadAttention(HEADS, is_causal=True), params, INPUTS, **segments)
    for start, stop in ((0, 7), (7, LENGTH)):
        ids = {"query_segment_ids": IDS[start:stop], "key_value_segment_ids": IDS}
        out, updated = module.apply(params | {"cache": cache}, INPUTS[:, start:stop], **ids, mutable=["cache"])
        cache = updated["cache"]
        outputs.append(out)
    assert_close(np.concatenate(outputs, axis=1), whole)
    with pytest.raises(ValueError, match="query_offset must not be given when decoding"):
        module.apply(variables, INPUTS[:, :1], query_offset=3, mutable=["cache"])


def test_sinks_as_a_parameter():
    """They are what the option is, start at 0 and have a gradient; the option is refused beside them."""
    module, plain = MultiHeadAttention(HEADS, use_sinks=True), MultiHeadAttention(HEADS)
    params = dict(init(module, INPUTS)["params"])
    np.testing.assert_array_equal(params["sinks"], np.zeros(HEADS))
    others, sinks = {name: x for name, x in params.items() if name != "sinks"}, normal(5, HEADS)
    got = apply(module, {"params": others | {"sinks": sinks}}, INPUTS)
    assert_close(got, apply(plain, {"params": others}, INPUTS, sinks=sinks))
    gradient = jax.grad(lambda params: (module.apply({"params": params}, INPUTS) ** 2).sum())(params)
    assert np.abs(gradient["sinks"]).min() > 0
    with pytest.raises(ValueError, match="sinks must not be given with use_sinks=True"):
        module.apply({"params": params}, INPUTS, sinks=sinks)

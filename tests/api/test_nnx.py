"""`jax_flash.nnx` against the stock Flax nnx modules."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx
from flax_options import IDS, LEADING, NO_INPUTS, OPTIONS, WRONG, WRONG_ATTRIBUTES, functional, problems

import jax_flash
from jax_flash.nnx import MultiHeadAttention, dot_product_attention

pytestmark = pytest.mark.usefixtures("device")

BATCH, LENGTH, FEATURES, HEADS = 2, 12, 32, 4  # the CUDA kernels want head dims that are multiples of 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stock_and_fused(fused_options=None, **options) -> tuple[nnx.MultiHeadAttention, MultiHeadAttention]:
    """A stock module, and a fused one made from another seed that then loads the parameters of the stock one."""
    stock = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options)
    fused = MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(1), **options, **(fused_options or {}))
    checkpoint = nnx.to_pure_dict(nnx.state(stock, nnx.Param))
    state = nnx.state(fused, nnx.Param)
    assert jax.tree.structure(nnx.to_pure_dict(state)) == jax.tree.structure(checkpoint)
    nnx.replace_by_pure_dict(state, checkpoint)
    nnx.update(fused, state)
    return stock, fused


def apply(module, *inputs, **options) -> jax.Array:
    return nnx.jit(lambda module, inputs: module(*inputs, **options))(module, inputs)


def assert_close(got, want, tolerance=2e-5):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


INPUTS = normal(0, BATCH, LENGTH, FEATURES)
VALID = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 5]])  # padded at the end: [BATCH, LENGTH]


@pytest.fixture(scope="module")
def mask() -> jax.Array:
    """float32 [BATCH, 1, LENGTH, LENGTH], as Flax makes it."""
    combined = nnx.combine_masks(nnx.make_causal_mask(VALID), nnx.make_attention_mask(VALID, VALID))
    assert combined.dtype == jnp.float32
    return combined


# The function


@pytest.mark.parametrize("leading", [(), (2, 1, 3)])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_function_equals_stock(leading, kv_heads):
    query, key, value = (
        normal(i, *leading, t, n, 8) for i, t, n in ((0, 7, HEADS), (1, 9, kv_heads), (2, 9, kv_heads))
    )
    mask = (normal(3, *leading, HEADS, 7, 9) > -0.5).astype(np.float32)
    mask[..., 0] = 1.0
    bias = normal(4, *leading, HEADS, 7, 9)
    # With a dropout rate the stock function computes by itself, without one it calls jax.nn: [T, N, D] is beyond that.
    stock = functools.partial(nnx.dot_product_attention, dropout_rate=0.5, deterministic=True)
    assert_close(
        jax.jit(dot_product_attention)(query, key, value, bias, mask), jax.jit(stock)(query, key, value, bias, mask)
    )


def test_function_causal():
    query = normal(0, 2, 9, HEADS, 8)
    got, want = (
        jax.jit(functools.partial(function, is_causal=True))(query, query, query)
        for function in (dot_product_attention, nnx.dot_product_attention)
    )
    assert_close(got, want)


@pytest.mark.parametrize("broadcast", [True, False])
def test_function_dropout(broadcast):
    """With zero queries and the identity as values the output is the matrix of dropped-out weights itself."""
    length, rate = 64, 0.3
    zeros = np.zeros((6, length, 4, length), np.float32)
    value = np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], zeros.shape)
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": rate, "broadcast_dropout": broadcast}
    weights = np.asarray(jax.jit(functools.partial(dot_product_attention, **options))(zeros, zeros, value))
    kept = np.moveaxis(weights > 0, 2, 1).reshape(-1, length, length)
    np.testing.assert_allclose(weights[weights > 0], 1 / length / (1 - rate), rtol=1e-4)
    draws = length**2 if broadcast else weights.size
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / draws) + 2**-16
    assert len(np.unique(kept, axis=0)) == (1 if broadcast else len(kept))


def test_function_refuses_to_sow():
    query = normal(0, 2, 8, 2, 8)
    with pytest.raises(NotImplementedError, match="`module`"):
        dot_product_attention(query, query, query, module=nnx.Dropout(0.5))


def test_function_as_attention_fn_of_the_stock_module(mask):
    stock, _ = stock_and_fused()
    want = apply(stock, INPUTS, mask=mask)
    stock.attention_fn = dot_product_attention
    assert_close(apply(stock, INPUTS, mask=mask)[VALID], want[VALID])
    with pytest.raises(NotImplementedError, match="`module`"):
        stock(INPUTS, sow_weights=True)


# The module


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_qk": True, "use_bias": False, "qkv_features": 64, "out_features": 8},
        {"num_kv_heads": 2, "bias_init": nnx.initializers.normal(1.0)},
    ],
    ids=["default", "normalized", "grouped"],
)
def test_module_equals_stock(options, mask):
    """From the stock module's checkpoint the same outputs, and gradients in parameters and inputs."""
    stock, fused = stock_and_fused(**options)
    for chosen in (mask,) if options else (mask.astype(bool), None):
        counted = np.ones_like(VALID) if chosen is None else VALID

        def loss(module, inputs, mask=chosen, counted=counted):
            return (jnp.sin(module(inputs, mask=mask)) * counted[..., None]).sum()

        got, want = (nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(module, INPUTS) for module in (fused, stock))
        assert_close(nnx.to_pure_dict(got[1][0]), nnx.to_pure_dict(want[1][0]), 1e-4)
        assert_close((got[0], got[1][1]), (want[0], want[1][1]), 1e-4)


def test_module_cross_attention():
    stock, fused = stock_and_fused(in_kv_features=6)
    inputs = INPUTS, normal(1, BATCH, 5, 6), normal(2, BATCH, 5, 6)
    assert_close(apply(fused, *inputs), apply(stock, *inputs))
    with pytest.raises(ValueError, match="inputs_k"):
        fused(INPUTS, inputs_v=INPUTS)
    with pytest.raises(ValueError, match="in_features=32"):
        fused(INPUTS[..., :-1])


def test_module_in_half_precision():
    stock, fused = stock_and_fused(dtype=jnp.bfloat16)
    got, want = apply(fused, INPUTS), apply(stock, INPUTS)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(np.float32), want.astype(np.float32), 2e-2)


def test_module_causal_and_window():
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    for options, mask in (
        ({"is_causal": True}, distance >= 0),
        ({"local_window_size": (3, 1)}, (distance <= 3) & (distance >= -1)),
    ):
        stock, fused = stock_and_fused(options)
        assert_close(apply(fused, INPUTS), apply(stock, INPUTS, mask=mask[None, None]))
    assert_close(
        apply(fused, INPUTS, is_causal=True), apply(stock, INPUTS, mask=((distance <= 3) & (distance >= 0))[None, None])
    )


def test_block_masks():
    """Of the function and of the module: as the mask of its entries."""
    blocks = jax_flash.BlockMask.from_mask(np.tri(LENGTH, k=2, dtype=bool), q_block=16, kv_block=16)
    entries = jnp.asarray(blocks.to_mask())
    q, k, v = (jnp.asarray(normal(seed, BATCH, LENGTH, HEADS, 8)) for seed in range(3))
    assert_close(dot_product_attention(q, k, v, block_mask=blocks), dot_product_attention(q, k, v, mask=entries))
    stock, fused = stock_and_fused()
    assert_close(apply(fused, INPUTS, block_mask=blocks), apply(stock, INPUTS, mask=entries))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "local_window_size": 3, "normalize_qk": True}])
def test_module_decodes_as_one_causal_pass(options):
    module = MultiHeadAttention(HEADS, FEATURES, is_causal=True, **options, rngs=nnx.Rngs(0))
    whole = apply(module, INPUTS)
    step = nnx.jit(lambda module, tokens: module(tokens, decode=True))
    for pieces in ([1] * LENGTH, [5, 1, 1, 5]):
        module.init_cache(INPUTS.shape)
        outputs = [step(module, tokens) for tokens in np.split(INPUTS, np.cumsum(pieces)[:-1], axis=1)]
        assert_close(np.concatenate(outputs, axis=1), whole)
        assert module.cache_index[...] == LENGTH


def test_module_decodes_like_stock():
    """Step by step the same outputs and the same cache, with a mask that hides a token."""
    stock, fused = stock_and_fused(num_kv_heads=2)
    mask = np.ones((BATCH, 1, 1, LENGTH), np.float32)
    mask[1, ..., 2] = 0.0
    step = nnx.jit(lambda module, tokens: module(tokens, mask=mask, decode=True))
    for module in (stock, fused):
        module.init_cache(INPUTS.shape)
    for t in range(LENGTH):
        tokens = INPUTS[:, t : t + 1]
        assert_close(step(fused, tokens), step(stock, tokens))
        assert_close(*(nnx.to_pure_dict(nnx.state(module, nnx.Cache)) for module in (fused, stock)))


def test_module_decode_names_what_does_not_fit():
    module = MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        module(INPUTS)
    module.init_cache(INPUTS.shape)
    with pytest.raises(ValueError, match="cache"):
        module(INPUTS[:1])
    with pytest.raises(ValueError, match="cache"):
        module(np.concatenate([INPUTS, INPUTS], axis=1))
    with pytest.raises(ValueError, match="as many queries as keys"):
        module(INPUTS[:, :1], INPUTS[:, :2])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\), .* of the cache: leave out a causal mask"):
        module(INPUTS[:, :2], mask=np.tri(2, dtype=bool))


def test_module_dropout_rngs():
    make = functools.partial(MultiHeadAttention, HEADS, FEATURES, dropout_rate=0.5)
    module, same_seed = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0))
    drop = nnx.jit(lambda module, rngs=None: module(INPUTS, deterministic=False, rngs=rngs))
    first = drop(module)
    assert (drop(module) != first).any()  # the stream moved on
    np.testing.assert_array_equal(drop(same_seed), first)
    given = [drop(module, nnx.Rngs(dropout=7)) for _ in range(2)]  # goes before the module's own
    np.testing.assert_array_equal(*given)

    module.eval()
    stock = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    assert_close(apply(module, INPUTS), apply(stock, INPUTS))
    with pytest.raises(ValueError, match="deterministic"):
        make(rngs=nnx.Rngs(0))(INPUTS)
    with pytest.raises(ValueError, match="rngs"):
        make(rngs=nnx.Rngs(0), keep_rngs=False)(INPUTS, deterministic=False)


def test_module_refuses_by_name():
    with pytest.raises(NotImplementedError, match="`attention_fn`"):
        MultiHeadAttention(HEADS, FEATURES, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="`sow_weights`"):
        MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))(INPUTS, sow_weights=True)
    with pytest.raises(NotImplementedError, match="`input_positions`"):
        MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))(INPUTS, input_positions=jnp.arange(3))
    for heads in (3, -1, 0):
        with pytest.raises(ValueError, match="num_kv_heads"):
            MultiHeadAttention(HEADS, FEATURES, num_kv_heads=heads, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="num_kv_heads"):
            MultiHeadAttention(HEADS, FEATURES, FEATURES, FEATURES, heads, rngs=nnx.Rngs(0))


# Transformations


def test_module_under_vmap_and_scan_over_layers():
    """Layers stacked by nnx.vmap under nnx.scan equal the layers one by one; with remat the same gradients."""

    @nnx.vmap(in_axes=0)
    def make(key):
        return MultiHeadAttention(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))

    def forward(stack, x, remat):
        layer = lambda x, attention: x + attention(x)  # noqa: E731
        layer = nnx.remat(layer) if remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)

    def loss(stack, remat):
        return jnp.sin(forward(stack, INPUTS, remat)).sum()

    want = INPUTS
    graphdef, state = nnx.split(stack)
    for i in range(3):
        want = want + apply(nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)), want)
    assert_close(nnx.jit(forward, static_argnums=2)(stack, INPUTS, False), want, 1e-4)

    plain, remat = (nnx.jit(nnx.grad(functools.partial(loss, remat=remat)))(stack) for remat in (False, True))
    assert_close(nnx.to_pure_dict(remat), nnx.to_pure_dict(plain), 1e-4)


def test_module_trains_in_one_jitted_step():
    module = MultiHeadAttention(HEADS, FEATURES, dropout_rate=0.1, deterministic=False, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(module):
        loss, gradients = nnx.value_and_grad(lambda module: ((module(INPUTS) - 1.0) ** 2).mean())(module)
        params = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients))
        return loss

    losses = [float(step(module)) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_a_variable_as_offset():
    x = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 8))
    attend = functools.partial(jax_flash.dot_product_attention, *x, is_causal=True)
    offset = jnp.array([3, -1])
    ours = nnx.jit(lambda offset: attend(query_offset=offset))(nnx.Variable(offset))
    np.testing.assert_allclose(ours, attend(query_offset=offset), rtol=1e-6, atol=1e-6)


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

    def results(module, options):
        loss = lambda module, x: jnp.sin(3 * module(x, **options)).sum()  # noqa: E731
        (value, (params, inputs)) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(module, STACKED)
        return value, nnx.to_pure_dict(params), inputs, problems(lambda x: loss(module, x), STACKED)

    is_attribute = inspect.signature(MultiHeadAttention.__init__).parameters.keys()
    attributes = {name: x for name, x in given.items() if name in is_attribute}
    rest = {name: x for name, x in given.items() if name not in attributes}
    for made_with, options in ({}, given), (attributes, rest):
        stock, fused = stock_and_fused(made_with)
        stock.attention_fn = functional(wanted)
        (*got, problem), (*want, expected) = results(fused, options), results(stock, {})
        assert_close(got, want, 1e-4)
        assert problem == expected


def test_a_call_goes_before_the_attributes():
    stock, module = stock_and_fused({"is_causal": True})
    assert_close(apply(module, INPUTS, is_causal=False), apply(stock, INPUTS))
    np.testing.assert_array_equal(apply(module, INPUTS, is_causal=None), apply(module, INPUTS))


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options(options, error, message):
    query = normal(0, *LEADING, LENGTH, HEADS, 8)
    with pytest.raises(error, match=message):
        dot_product_attention(query, query, query, **options)
    module = MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=message):
        module(STACKED, **options)


@pytest.mark.parametrize(("attributes", "error", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes(attributes, error, message):
    with pytest.raises(error, match=message):
        MultiHeadAttention(**{"num_heads": HEADS} | attributes, in_features=FEATURES, rngs=nnx.Rngs(0))(STACKED)


@pytest.mark.parametrize(("inputs", "message"), NO_INPUTS)
def test_function_names_what_is_no_array(inputs, message):
    query = normal(0, *LEADING, LENGTH, HEADS, 8)
    with pytest.raises(TypeError, match=message):
        dot_product_attention(**{"query": query, "key": query, "value": query} | inputs)


def test_module_takes_stock_attributes_not_as_options():
    module = MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_rate'"):
        module(STACKED, dropout_rate=0.5)


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
    stock = list(inspect.signature(nnx.dot_product_attention).parameters)
    assert parameters[: len(stock)] == stock and "query_segment_ids" in parameters[len(stock) :]


def test_module_decodes_packed_sequences():
    """Segment ids of the new tokens and of the whole cache; where the queries are, the cache says."""
    module = MultiHeadAttention(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    whole = apply(module, INPUTS, query_segment_ids=IDS, key_value_segment_ids=IDS)
    module.init_cache(INPUTS.shape)
    outputs = []
    for tokens, ids in ((INPUTS[:, :7], IDS[:7]), (INPUTS[:, 7:], IDS[7:])):
        outputs.append(module(tokens, decode=True, query_segment_ids=ids, key_value_segment_ids=IDS))
    assert_close(np.concatenate(outputs, axis=1), whole)
    with pytest.raises(ValueError, match="query_offset must not be given when decoding"):
        module(INPUTS[:, :1], decode=True, query_offset=3)


def test_sinks_as_a_parameter():
    """They are what the option is, start at 0 and have a gradient; the option is refused beside them."""
    module, plain = (MultiHeadAttention(HEADS, FEATURES, use_sinks=x, rngs=nnx.Rngs(0)) for x in (True, False))
    assert "sinks" not in nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    np.testing.assert_array_equal(module.sinks[...], np.zeros(HEADS))
    module.sinks[...] = jnp.asarray(normal(5, HEADS))
    assert_close(module(INPUTS, decode=False), plain(INPUTS, decode=False, sinks=normal(5, HEADS)))
    gradient = nnx.grad(lambda module: (module(INPUTS, decode=False) ** 2).sum())(module)
    assert np.abs(nnx.to_pure_dict(gradient)["sinks"]).min() > 0
    with pytest.raises(ValueError, match="sinks must not be given with use_sinks=True"):
        module(INPUTS, decode=False, sinks=normal(5, HEADS))

"""Programs are equal if they compute the same values and derivatives. Equal programs share compiled code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_flash
from jax_flash import Problem, attention
from jax_flash.programs import program

QUERY = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 8)), jnp.float32)


def described(**options) -> Problem:
    return Problem.of(QUERY, QUERY, QUERY, **options)


def attend(query=QUERY, implementation="xla", **options):
    return jax_flash.dot_product_attention(query, query, query, implementation=implementation, **options)


def gradient(**options):
    return jax.grad(lambda query: (attend(query, **options) ** 2).sum())(QUERY)


def with_rule(rule, kind):
    """Return x² with this derivative."""
    if kind == "jvp":
        square = jax.custom_jvp(lambda x: x * x)
        square.defjvp(lambda primals, tangents: (square(*primals), rule(*primals) * tangents[0]))
    else:
        square = jax.custom_vjp(lambda x: x * x)
        square.defvjp(lambda x: (x * x, x), lambda x, cotangent: (rule(x) * cotangent,))
    return lambda score, *_: square(score)


def test_equal_functions_are_one_program():
    """Closures may differ, and so may the contents of captured arrays."""

    def relative(table):
        return lambda score, b, h, q, k: jax.nn.relu(score + jnp.where(q > k, table[q - k], 0.0))

    one, other = (described(score_mod=relative(jnp.arange(5.0) * x)) for x in (1, 2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != described(score_mod=relative(jnp.arange(6.0)))
    assert one != described(score_mod=relative(jnp.arange(5, dtype=jnp.int32)))
    assert described(mask_mod=lambda b, h, q, k: q >= k) != described(mask_mod=lambda b, h, q, k: q > k)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_different_derivatives_give_different_programs(kind):
    double, half = with_rule(lambda x: 4 * x, kind), with_rule(lambda x: x, kind)
    assert described(score_mod=double) != described(score_mod=half)
    assert described(score_mod=double) == described(score_mod=with_rule(lambda x: 4 * x, kind))
    assert np.abs(gradient(score_mod=double) - gradient(score_mod=half)).max() > 1e-3


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_stop_gradient_gives_another_program(implementation):
    """Their values are the same."""
    plain, stopped = lambda s, *_: s * 2, lambda s, *_: lax.stop_gradient(s) * 2
    assert described(score_mod=plain) != described(score_mod=stopped)
    results = [gradient(score_mod=f, implementation=implementation) for f in (plain, stopped)]
    assert np.abs(results[0] - results[1]).max() > 1e-3


def loop(score_mod):
    """Apply a score_mod three times, in a loop that the kernels do not support."""
    return lambda score, *rest: lax.fori_loop(0, 3, lambda _, score: score_mod(score, *rest), score)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_different_derivatives_without_code(kind):
    double, half = loop(with_rule(lambda x: 4 * x, kind)), loop(with_rule(lambda x: x, kind))
    assert described(score_mod=double).score.score_mod.refusal
    assert described(score_mod=double) != described(score_mod=half)
    assert described(score_mod=double) == described(score_mod=double)


@pytest.mark.parametrize("wrap", [lambda f: f, loop], ids=["kernels", "no kernels"])
def test_captures_of_jitted_functions_are_operands(wrap):
    """JAX stores such arrays as constants in the jaxpr of the call."""

    def score_mod(table):
        inner = jax.jit(lambda score, key: score + table[key])
        return wrap(lambda score, b, h, q, k: jax.jit(inner)(score, k) * 0.5)

    tables = [jnp.arange(5.0) * x for x in (1, -3)]
    one, other = (attend(score_mod=score_mod(table)) for table in tables)
    for table, result in zip(tables, (one, other), strict=True):
        factor, bias = (0.5, 0.5 * table) if wrap is not loop else (0.125, 0.875 * table)
        expected = attend(scale=8**-0.5 * factor, bias=bias)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    if wrap is not loop:
        assert described(score_mod=score_mod(tables[0])) == described(score_mod=score_mod(tables[1]))
        assert described(score_mod=score_mod(tables[0])).score.score_mod.refusal is None


def test_captures_of_custom_jvp_functions_change_the_program():
    """The captured array is no operand, so another array gives another program."""

    def score_mod(shift):
        inner = jax.jit(lambda x: x + shift[0])
        function = jax.custom_jvp(lambda x: inner(x) ** 2)
        function.defjvp(lambda primals, tangents: (function(*primals), 2 * inner(*primals) * tangents[0]))
        return lambda score, *_: function(score)

    results = [attend(score_mod=score_mod(jnp.full(2, x))) for x in (0.0, 1.0)]
    assert np.abs(results[0] - results[1]).max() > 1e-3


@pytest.mark.parametrize("wrap", [lambda f: f, loop], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_captures_of_derivatives_change_the_program(kind, wrap):
    factors = [jnp.array([0.0, x]) for x in (1, 3)]
    results = [gradient(score_mod=wrap(with_rule(lambda x, factor=factor: factor[1] * x, kind))) for factor in factors]
    assert np.abs(results[0] - results[1]).max() > 1e-3

    @jax.jit
    def traced(factor):
        return gradient(score_mod=wrap(with_rule(lambda x: factor[1] * x, kind)))

    with pytest.raises(TypeError, match="score_mod calls .* custom derivative rule that captures a traced array"):
        traced(factors[0])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_new_values_do_not_recompile(implementation):
    """Without jax.jit and with a new function for each call. A captured number counts as an array."""
    traces = []

    def call(seed, query=QUERY):
        table, number = jnp.asarray(np.random.default_rng(seed).normal(size=9), jnp.float32), jnp.float32(seed)

        def score_mod(score, b, h, q, k):
            traces.append(seed)
            return score * number + table[q - k + 4]

        return attend(query, implementation, score_mod=score_mod, mask_mod=lambda b, h, q, k: q - k < number + 4)

    call(0)
    before = attention.attend._cache_size()
    call(1)
    assert attention.attend._cache_size() == before
    assert traces == [0, 1]  # each function is traced once


def test_new_values_under_jit():
    @jax.jit
    def function(query, table):
        nonlocal traces
        traces += 1
        return attend(query, score_mod=lambda s, b, h, q, k: s + table[k])

    traces = 0
    results = [function(QUERY, jnp.arange(5.0) * x) for x in (1, 2)]
    assert traces == 1
    for x, result in zip((1, 2), results, strict=True):
        np.testing.assert_allclose(result, attend(bias=jnp.arange(5.0) * x), rtol=1e-5, atol=1e-6)


def test_identity_programs_are_dropped():
    """A program that keeps values but changes derivatives is not dropped."""
    same = described(score_mod=lambda s, b, h, q, k: s, mask_mod=lambda b, h, q, k: (q >= 0) & (k < 5))
    assert same == described()
    assert described(score_mod=lambda s, b, h, q, k: lax.stop_gradient(s)) != described()
    assert described(mask_mod=lambda b, h, q, k: k < 4) != described()


def test_equal_traces_are_lowered_once():
    """Functions may differ, and so may the contents of their arrays."""

    def lowered(number, table):
        described(score_mod=lambda s, b, h, q, k: s * number + table[k])
        return program._lowered.cache_info().misses

    first = lowered(0.1, jnp.arange(5.0))
    assert lowered(0.1, jnp.zeros(5)) == first
    for i, again in enumerate([(0.2, jnp.zeros(5)), (0.1, jnp.zeros(6)), (0.1, jnp.zeros(5, jnp.bfloat16))], 1):
        assert lowered(*again) == first + i


def test_numbers_differ_by_their_bits():
    next_to = np.nextafter(np.float32(0.1), np.float32(1))
    texts = {described(score_mod=lambda s, *_, x=x: s * x).score.score_mod.text for x in (0.1, next_to, 0.0, -0.0)}
    assert len(texts) == 4


def test_numbers_differ_from_variables():
    def width(q, k):
        return jnp.where(q > k, 1, 2)

    mods = [lambda b, h, q, k: width(q, k) + 3 > q, lambda b, h, q, k: (lambda w: w + w)(width(q, k)) > q]
    assert len({described(mask_mod=mod).mask.mask_mod.text for mod in mods}) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_types_that_jaxprs_do_not_print(order):
    """A Python number differs from a number with a dtype of 64 bits."""

    def refusal(number):
        def score_mod(s, b, h, q, k):
            return jnp.where(jnp.where(q > k, number(1), number(2)) + number(order) > 2, s, 2 * s)

        return described(score_mod=score_mod).score.score_mod.refusal

    with jax.enable_x64(True):
        refusals = {number: refusal(number) for number in (int, np.int64)[::order]}
    assert refusals[int] is None
    assert "int64 values" in refusals[np.int64]


def test_refusal_names_the_line_of_its_own_function():
    one, other = (
        lambda s, *_: lax.igamma(s, s),
        lambda s, *_: lax.igamma(s, s),
    )
    refusals = [described(score_mod=function).score.score_mod.refusal for function in (one, other, one)]
    assert refusals[0] == refusals[2] != refusals[1]


class Scaled:
    """A function with parameters that can be changed."""

    rate, table = 1.0, jnp.ones(5)

    def __call__(self, s, b, h, q, k):
        return s + self.rate * self.table[k]


@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_function_is_traced_for_each_call(implementation):
    """A number or an array that the function refers to may change between calls."""
    function = Scaled()

    def result():
        return attend(implementation=implementation, score_mod=function)

    for rate, table in ((1.0, jnp.arange(5.0)), (-2.0, jnp.arange(5.0)), (-2.0, jnp.cos(jnp.arange(5.0)))):
        function.rate, function.table = rate, table
        np.testing.assert_allclose(result(), attend(bias=rate * table), rtol=1e-5, atol=1e-6)


def test_function_is_traced_for_each_trace():
    """Arrays captured in an earlier trace are gone."""
    function = Scaled()

    @jax.jit
    def call(table):
        function.table = table
        return attend(QUERY * 1, score_mod=function)

    for table in (jnp.arange(5.0), jnp.arange(5.0)[::-1].astype(jnp.bfloat16)):
        np.testing.assert_allclose(call(table), attend(bias=table), rtol=1e-5, atol=1e-6)
    function.table = jnp.zeros(5)
    np.testing.assert_allclose(attend(score_mod=function), attend(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_derivative_is_traced_for_each_call(kind):
    factor = 1.0
    function = with_rule(lambda x: factor * x, kind)
    before = gradient(score_mod=function)
    factor = 3.0
    assert np.abs(gradient(score_mod=function) - before).max() > 1e-3


def test_different_callbacks_give_different_programs():
    """JAX prints both in the same way."""

    def score_mod(rate):
        return lambda s, *_: jax.pure_callback(lambda s: rate * s, s, s, vmap_method="broadcast_all")

    for rate in (np.float32(2), np.float32(-1)):
        result = attend(score_mod=score_mod(rate))
        np.testing.assert_allclose(result, attend(scale=float(rate) * 8**-0.5), rtol=1e-5, atol=1e-6)


def test_different_second_derivatives_give_different_programs():
    """Values and first derivatives are the same."""

    def second(rule):
        mod = with_rule(rule, "jvp")
        first = jax.grad(lambda query: (attend(query, score_mod=mod) ** 2).sum())
        return jax.grad(lambda query: (first(query) ** 2).sum())(QUERY)

    results = [second(rule) for rule in (lambda x: 2 * x, lambda x: 2 * lax.stop_gradient(x))]
    assert np.abs(results[0] - results[1]).max() > 1e-3

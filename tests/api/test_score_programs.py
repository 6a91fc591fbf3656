"""Attention with score programs, compared with the materialised matrix in float64: values and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from cases import Case
from jax import lax
from programs import (
    MASKS,
    SCORES,
    Mod,
    assert_accurate,
    captured,
    check,
    constant,
    exact,
    flags,
    functions,
    masked_by_score,
    relative_table,
    run,
    score_and_mask,
    t5,
)

import jax_flash
from jax_flash import BlockMask

pytestmark = pytest.mark.usefixtures("device")

CASE = Case(B=2, T=32, S=32, N=4, K=2, D=8, E=8)
CASES = {"flamingo": Case(B=2, T=32, S=12, N=4, K=2, D=8, E=8)}
SMALL = functools.partial(Case, B=2, T=19, S=23, N=4, K=2, D=8, E=8)
IMPLEMENTATIONS = ["flash", "xla"]


@functools.cache
def mods(program, case):
    """Return a function that returns the mods of a program. It is the same function for the same case."""
    result = program(case)
    return lambda: (result,) if isinstance(result, Mod) else result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("program", SCORES + MASKS, ids=lambda program: program.__name__)
def test_program(program, implementation):
    case = CASES.get(program.__name__, CASE)
    check(case, mods(program, case), implementation)


@pytest.mark.parametrize("implementation", ["reference", None])
def test_other_implementations(implementation):
    check(CASE, mods(score_and_mask, CASE), implementation)


BLOCKS = BlockMask.from_mask((np.arange(19)[:, None] + np.arange(23)) // 9 % 2 == 0, q_block=16, kv_block=16)
FEATURES = [
    SMALL(causal=True, bias="bnts", K=1),
    SMALL(window=(5, 3), offset=True, mask="b1ts", bias="b1t1"),
    SMALL(lengths=True, segments=True, soft_cap=1.5, bias="1n1s"),
    SMALL(block_mask=BLOCKS, dropout=0.3, bias="11ts"),
    SMALL(T=1, offset=True, causal=True, lengths=True),
    SMALL(N=6, K=2, D=24, E=40, scale=0.3, dropout=0.5, broadcast_dropout=True),
    SMALL(causal=True, window=(9, 4), bias="b1ts", mask="bn1s", lengths=True, offset=True, soft_cap=1.5, dropout=0.2),
    SMALL(B=1, N=1, K=1, T=3, S=70, deterministic=True),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_with_other_features(case, implementation):
    """A program receives scores after the scale, the cap and the bias. Masks and dropout follow it."""
    check(case, mods(score_and_mask, case), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_masked_by_the_score(implementation):
    case = SMALL(bias="1nts")
    check(case, mods(masked_by_score, case), implementation)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "reference", None])
def test_masked_entries_have_no_derivative(implementation):
    """Even if their scores and derivatives are NaN."""
    arrays = SMALL(N=2).arrays()

    def gradients(**options):
        def loss(query, key):
            o = jax_flash.dot_product_attention(query, key, arrays["value"], is_causal=True, **options)
            return (o**2).sum()

        return jax.grad(loss, (0, 1))(arrays["query"], arrays["key"])

    mods = [lambda s, b, h, q, k, f=f: s * jnp.sqrt(f(q - k)) for f in (lambda x: x, jnp.abs)]
    found, expected = (gradients(score_mod=mod, implementation=implementation) for mod in mods)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert np.isfinite(x).all()


def array_uses(case):
    """Use each captured array in another way. Their entries are multiples of 1/8, which 16 bits represent exactly."""

    def make(least, table, factor, doubled, branch, loop, ruled):
        def score_mod(s, b, h, q, k):
            s = jnp.maximum(s, least[b].astype(s.dtype)) + table[jnp.clip(q - k, -4, 4) + 4]
            s = s * (factor * (1 + k % 3)) + (2 * doubled)[k % 4]
            s = lax.cond(q > k, lambda: s * branch[0], lambda: s + branch[k % 4])
            s = lax.fori_loop(0, 2, lambda n, s: s * loop[(k + n) % 4], s)
            return s * jax.nn.relu(ruled)[k % 4]

        return score_mod

    rng = np.random.default_rng(0)
    shapes = (case.B,), (9,), (), (4,), (4,), (4,), (4,)
    return Mod("score_mod", make, tuple(np.asarray(rng.integers(3, 16, n) / 8, np.float32) for n in shapes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_of_16_bit_arrays_are_rounded_once(implementation, dtype):
    """Sums over 2^18 entries have the error for float32 arrays plus half a unit in the last place."""
    case = Case(B=1, T=512, S=512, N=1, K=1, D=8, E=8)
    make, arrays, cotangents = mods(array_uses, case), case.arrays(), case.cotangents()
    in_16_bits = arrays | captured(make(), dtype)
    expected = exact(case, make, in_16_bits, cotangents)
    in_float32 = run(case, make, arrays | captured(make()), cotangents, implementation)
    results = run(case, make, in_16_bits, cotangents, implementation)
    for name, x in expected.items():
        rounding = float(jnp.finfo(results[name].dtype).eps) / 2 * np.abs(x)
        error, error_in_float32 = (np.abs(y[name].astype(x.dtype) - x) for y in (results, in_float32))
        assert (error <= rounding + 2 * error_in_float32.max()).all(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tail_of_erfc(implementation):
    """erfc is accurate where 1 - erf would be 0. With one key, the logsumexp is its score."""
    x, one = jnp.linspace(0, 9, 64), jnp.ones((64, 1, 8))

    def results(x):
        def score_mod(s, b, h, q, k):
            return jnp.log(lax.erfc(x[q]))

        options = {"score_mod": score_mod, "implementation": implementation, "return_residual": True}
        return jax_flash.dot_product_attention(one, one[:1], one[:1], **options)[1][:, 0]

    exact = scipy.special.erfc(np.asarray(x, np.float64))
    np.testing.assert_allclose(results(x), np.log(exact), rtol=0, atol=1e-5)
    slope = -2 / np.sqrt(np.pi) * np.exp(-np.square(x, dtype=np.float64)) / exact
    np.testing.assert_allclose(jax.grad(lambda x: results(x).sum())(x), slope, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_captured_bools(implementation):
    check(SMALL(), mods(flags, SMALL()), implementation)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtypes(implementation, dtype):
    """A score of float64 operands is a float64. All other scores have at least the precision of float32."""
    case = SMALL(causal=True, bias="1nts")
    check(case, mods(score_and_mask, case), implementation, dtype)
    if dtype == "float64":
        check(CASE, mods(t5, CASE), implementation, dtype)


@pytest.mark.parametrize("program", SCORES, ids=lambda program: program.__name__)
def test_constant_arrays(program):
    """Captured arrays without gradients."""
    constant_mods = constant(mods(program, CASE)())
    check(CASE, lambda: constant_mods, "flash", "float16")


def test_table_in_bfloat16():
    """The gradient has the dtype of the table and is rounded once."""
    arrays, cotangents, make = CASE.arrays(), CASE.cotangents(), mods(relative_table, CASE)
    arrays |= {"score_mod 0": captured(make())["score_mod 0"].astype(jnp.bfloat16)}
    results, expected = run(CASE, make, arrays, cotangents, "flash"), exact(CASE, make, arrays, cotangents)
    assert results["score_mod 0"].dtype == jnp.bfloat16
    errors = np.abs(results["score_mod 0"].astype(np.float64) - expected["score_mod 0"])
    assert (errors <= 2**-8 * np.abs(expected["score_mod 0"]) + 1e-5).all()


@pytest.mark.parametrize(("input", "B", "N"), [(0, 4, 1), (1, 3, 4), (2, 1, 1)], ids=["batch", "head", "query"])
def test_table_indexed_by_an_input_in_either_dim(input, B, N):
    """Different batch entries, heads or parts of the keys add to the same elements. A race would lose additions."""
    case = Case(B=B, T=64, S=300, N=N, K=N, D=8, E=8)  # few enough terms for the tolerance in float32

    def make(table):
        def score_mod(s, *indices):
            x, y = indices[input], indices[3] % len(table)
            return s + table[x, y] * table[y, x]

        return score_mod

    table = np.random.default_rng(0).normal(size=(300 if input == 2 else 4,) * 2).astype(np.float32)
    indexed = (Mod("score_mod", make, (table,)),)
    arrays, cotangents = case.arrays() | captured(indexed), case.cotangents()
    expected = exact(case, lambda: indexed, arrays, cotangents)
    for _ in range(5):
        assert_accurate(run(case, lambda: indexed, arrays, cotangents, "flash"), expected, "float32")


# --- arguments and results of the call --------------------------------------------------------------------------------


def attention(case, implementation):
    """Return attention as a function of arrays and options, with the mods of `score_and_mask`."""
    make = mods(score_and_mask, case)
    options = functions(make(), jax.tree.map(jnp.asarray, captured(make())))
    return functools.partial(jax_flash.dot_product_attention, implementation=implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_residual_and_unbatched(implementation):
    case = SMALL(B=1)
    arrays, cotangents = case.arrays(), case.cotangents()
    attend, make = attention(case, implementation), mods(score_and_mask, case)
    expected = exact(case, make, arrays | captured(make()), cotangents)
    o, residual = attend(**{name: x[0] for name, x in arrays.items()}, return_residual=True)
    np.testing.assert_allclose(o, expected["o"][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(residual, expected["logsumexp"][0].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_query_offset(implementation):
    """A number, an array or a traced integer selects the rows from there on."""
    case = SMALL()
    arrays, attend = case.arrays(), attention(case, implementation)
    full = np.asarray(attend(**arrays))
    rest = arrays | {"query": arrays["query"][:, 7:]}
    traced = jax.jit(lambda rest, offset: attend(**rest, query_offset=offset))
    for result in (
        attend(**rest, query_offset=7),
        attend(**rest, query_offset=np.array([7, 7])),
        traced(rest, 7),
        traced(rest, jnp.full(2, 7)),
    ):
        np.testing.assert_allclose(result, full[:, 7:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding(implementation):
    """One query at a time, with one compilation, gives the rows of the full result."""
    case = SMALL(T=9, S=9)
    arrays, attend = case.arrays(), attention(case, implementation)

    @jax.jit
    def step(query, offset):
        return attend(query, arrays["key"], arrays["value"], query_offset=offset, is_causal=True)

    steps = [step(arrays["query"][:, i : i + 1], i) for i in range(case.T)]
    assert step._cache_size() == 1
    np.testing.assert_allclose(np.concatenate(steps, 1), attend(**arrays, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_some_gradients(implementation):
    """A gradient does not depend on which others are requested."""
    case = SMALL()
    arrays, cotangents, make = case.arrays(), case.cotangents(), mods(score_and_mask, case)
    arrays |= captured(make())
    expected = exact(case, make, arrays, cotangents)
    for chosen in (["query"], ["score_mod 0"], ["value", "score_mod 1"]):

        def attend(some):
            given = arrays | some
            inputs = {name: x for name, x in given.items() if " " not in name}
            return jax_flash.attention_with_statistics(
                **inputs, **functions(make(), jax.tree.map(jnp.asarray, given)), implementation=implementation
            )

        def loss(some):
            o, statistics = attend(some)
            return (o * cotangents[0]).sum() + (statistics.logsumexp * cotangents[1]).sum()

        gradients = jax.jit(jax.grad(loss))({name: jnp.asarray(arrays[name]) for name in chosen})
        for name, x in gradients.items():
            limit = 1e-5 * np.abs(expected[name]).max()
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=limit, err_msg=name)


def test_mask_mod_alone():
    """`mask_mod` alone has no gradients and needs no score program."""
    problem = jax_flash.Problem.of(
        *(jax.ShapeDtypeStruct((1, 4, 2, 8), "float32"),) * 3, mask_mod=lambda b, h, q, k: q > k
    )
    assert (problem.score.score_mod, problem.captured) == (None, ())
    assert problem.differentiated({"dq"}).score.score_grad is None


@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_infinite_derivatives_in_masked_tiles(implementation):
    """A `mask_mod` that masks whole tiles gives the same derivatives as `is_causal`, up to second order."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 1, 8)), jnp.float32)

    def slope(rate, **mask):
        def total(rate):
            def score_mod(s, b, h, i, j):
                return s + rate * jnp.log(i - j + 1.0)

            return (jax_flash.dot_product_attention(q, q, q, score_mod=score_mod, **mask) ** 2).sum()

        return jax.grad(total)(rate)

    causal = {"is_causal": True, "implementation": implementation}
    by_program = {"mask_mod": lambda b, h, i, j: j <= i, "implementation": implementation}
    for derivative in (slope, lambda rate, **mask: jax.grad(lambda rate: slope(rate, **mask) ** 2)(rate)):
        np.testing.assert_allclose(derivative(0.5, **by_program), derivative(0.5, **causal), rtol=1e-4)


@pytest.mark.parametrize("implementation", ["flash", "xla", "reference"])
def test_infinite_derivatives_of_masked_entries(implementation):
    """log(0) and logarithms of negative numbers at masked entries do not affect the gradients."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 33, 2, 8)), jnp.float32)

    def total(rate, q, implementation):
        def score_mod(s, b, h, i, j):
            return s - rate * jnp.log((i - j + 1).astype(s.dtype))

        options = {"is_causal": True, "implementation": implementation}
        return (jax_flash.dot_product_attention(q, q, q, score_mod=score_mod, **options) ** 2).sum()

    def by_bias(rate, q):
        distance = jnp.maximum(jnp.arange(33)[:, None] - jnp.arange(33), 0) + 1.0
        bias = -rate * jnp.log(distance)
        return (jax_flash.dot_product_attention(q, q, q, bias[None, None], is_causal=True) ** 2).sum()

    found = jax.grad(total, (0, 1))(0.5, q, implementation)
    for x, expected in zip(found, jax.grad(by_bias, (0, 1))(0.5, q), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)

"""Errors of score programs name the argument. Operations that the kernels do not support name their source line."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_flash
from jax_flash import Problem

QUERY = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 8)), jnp.float32)
TABLE = jnp.arange(5.0)
EMPTY = TABLE[:0]
COMPLEX, KEY = jnp.ones(5, jnp.complex64), jax.random.key(0)


def attend(implementation=None, query=QUERY, **options):
    return jax_flash.dot_product_attention(query, query, query, implementation=implementation, **options)


def printing(s, b, h, q, k):
    jax.debug.print("{}", s)
    return s


def yielding(s, b, h, q, k):
    yield s


FIVE, FOUR = "score, batch, head, query, key", "batch, head, query, key"
WRONG = [
    ("score_mod", 3, TypeError, rf"must be a function of \({FIVE}\), not int"),
    ("mask_mod", "causal", TypeError, rf"must be a function of \({FOUR}\), not str"),
    ("score_mod", TABLE, TypeError, "must be a function of"),
    ("score_mod", lambda b, h, q, k: q * 1.0, TypeError, f"must take 5 arguments: {FIVE}"),
    ("score_mod", lambda: 1.0, TypeError, f"must take 5 arguments: {FIVE}"),
    ("mask_mod", lambda s, b, h, q, k: q > k, TypeError, f"must take 4 arguments: {FOUR}"),
    ("mask_mod", lambda b, h, q, k, *, more: q > k, TypeError, f"must take 4 arguments: {FOUR}"),
    ("score_mod", lambda s, b, h, q, k: (s, s), TypeError, r"must return one float32 scalar, not \('float32\[\]'"),
    ("score_mod", lambda s, b, h, q, k: None, TypeError, "must return one float32 scalar, not None"),
    ("score_mod", lambda s, b, h, q, k: {"score": s}, TypeError, "must return one float32 scalar, not {'score'"),
    ("score_mod", lambda s, b, h, q, k: s + TABLE, TypeError, r"must return one float32 scalar, not float32\[5\]"),
    ("score_mod", lambda s, b, h, q, k: s[None], TypeError, r"must return one float32 scalar, not float32\[1\]"),
    ("score_mod", lambda s, b, h, q, k: q, TypeError, r"must return one float32 scalar, not int32\[\]"),
    ("score_mod", lambda s, b, h, q, k: s > 0, TypeError, r"must return one float32 scalar, not bool\[\]"),
    ("score_mod", lambda s, b, h, q, k: s.astype("bfloat16"), TypeError, "must return one float32 scalar, not bfloat"),
    ("mask_mod", lambda b, h, q, k: q - k, TypeError, r"must return one bool scalar, not int32\[\]"),
    ("mask_mod", lambda b, h, q, k: q >= jnp.arange(5), TypeError, r"must return one bool scalar, not bool\[5\]"),
    ("mask_mod", lambda b, h, q, k: [q > k], TypeError, r"must return one bool scalar, not \['bool\[\]'\]"),
    ("score_mod", printing, ValueError, "must not have side effects, but has Debug"),
    ("mask_mod", lambda b, h, q, k: printing(q > k, b, h, q, k), ValueError, "must not have side effects"),
    ("score_mod", lambda s, b, h, q, k: s + COMPLEX[k].real, TypeError, "captures an array of dtype complex64"),
    ("score_mod", lambda s, b, h, q, k: jax.random.normal(KEY), TypeError, "captures an array of dtype key<"),
    ("score_mod", lambda s, b, h, q, k: "score", TypeError, "must return one float32 scalar, not str"),
    pytest.param(
        *("score_mod", yielding, TypeError, "must return one float32 scalar, not generator"),
        marks=pytest.mark.filterwarnings("ignore:Python iterable type 'generator':DeprecationWarning"),
    ),
    ("mask_mod", lambda b, h, q, k: object(), TypeError, "must return one bool scalar, not object"),
    ("score_mod", lambda s, b, h, q, k: s if q > k else 0.0, TypeError, r"is traced .* branch .* jnp.where"),
    ("mask_mod", lambda b, h, q, k: q > k and q < 9, TypeError, r"is traced .* branch .* &, \| and ~"),
    (
        "mask_mod",
        lambda b, h, q, k: np.ones(5, bool)[k],
        TypeError,
        r"is traced .* NumPy: .* jnp.asarray\(table\)\[key\]",
    ),
    ("score_mod", lambda s, b, h, q, k: s * np.sin(q), TypeError, "is traced .* NumPy: use jax.numpy"),
    ("score_mod", lambda s, b, h, q, k: s + [1.0, 2.0][h], TypeError, "is traced .* the index of a list"),
    ("score_mod", lambda s, b, h, q, k: s + TABLE[TABLE > s].sum(), TypeError, "is traced .* a traced condition"),
    ("score_mod", lambda s, b, h, q, k: s + float(q), TypeError, "is traced .* int, float and range"),
    ("score_mod", lambda s, b, h, q, k: s + jnp.arange(q).sum(), TypeError, "is traced .* array shapes"),
]


@pytest.mark.parametrize(("name", "function", "error", "message"), WRONG)
def test_wrong_functions(name, function, error, message):
    """The same error occurs in a call and in `Problem.of`."""
    with pytest.raises(error) as raised:
        attend(**{name: function})
    assert re.search(f"{name} {message}", str(raised.value))
    shape = jax.ShapeDtypeStruct(QUERY.shape, QUERY.dtype)
    with pytest.raises(error, match=f"{name} {message}"):
        Problem.of(shape, shape, shape, **{name: function})


def test_other_kinds_of_functions():
    """Defaults, other parameter names, bound methods and callable objects are supported."""

    class Bias:
        def __call__(self, score, *where):
            return score + TABLE[where[-1]]

        def method(self, score, batch, head, query, key, rate=1.0):
            return score + rate * TABLE[key]

    expected = attend("xla", bias=TABLE)
    for function in (Bias(), Bias().method, jax.jit(Bias()), lambda s, b, h, q, k, table=TABLE: s + table[k]):
        np.testing.assert_allclose(attend("xla", score_mod=function), expected, rtol=1e-5, atol=1e-6)


def sorts(s, b, h, q, k):
    return s * jnp.sort(jnp.stack([q, k]))[0]


def loops(s, b, h, q, k):
    return lax.fori_loop(0, 3, lambda i, x: x + TABLE[k], s)


WIDE = jnp.asarray(np.random.default_rng(1).normal(size=(5, 513)) / 9, jnp.float32)
SMALL = jnp.ones(5, jnp.int8)
FOUR_BITS, EIGHT_BITS = jnp.ones(5, jnp.int4), jnp.ones(5, jnp.float8_e4m3fn)
DEEP = TABLE.reshape(1, 1, 1, 1, 1, 1, 1, 1, 5)
# Functions that the kernels do not support: the argument, the function, and the message with the line.
REFUSED = {
    "an unsupported primitive": ("score_mod", sorts, rf"score_mod has sort at .*{re.escape(__name__[-6:])}"),
    "a loop": ("score_mod", loops, "score_mod has (scan|while) at .*: the kernels do not support this operation"),
    "in a mask": ("mask_mod", lambda b, h, q, k: jnp.argmax(jnp.stack([q, k])) == 0, "mask_mod has argmax at "),
    "a long dot": (
        "score_mod",
        lambda s, b, h, q, k: s + jnp.dot(WIDE[q], WIDE[k]),
        r"score_mod has dot_general at .*: an array of \[513\]: a computed array may have at most 512 elements",
    ),
    "a large array": (
        "score_mod",
        lambda s, b, h, q, k: s + jnp.tanh(WIDE)[q, k],
        r"score_mod has an array of \[5, 513\]: .* at most 512 elements",
    ),
    "small integers": ("score_mod", lambda s, b, h, q, k: s * (SMALL[q] << 1), "score_mod has shift_left at .*int8"),
    "to small integers": ("score_mod", lambda s, b, h, q, k: s * q.astype("int8"), "from int32 to int8"),
    "signs of small integers": (
        "score_mod",
        lambda s, b, h, q, k: s * SMALL[q].astype("uint8"),
        "conversion from int8 to uint8",
    ),
    "four bits": (
        "score_mod",
        lambda s, b, h, q, k: s * FOUR_BITS[k].astype("float32"),
        "score_mod has a captured array of int4: use float16, .* or uint32",
    ),
    "eight bits": (
        "score_mod",
        lambda s, b, h, q, k: s * EIGHT_BITS[k].astype("float32"),
        "score_mod has a captured array of float8_e4m3fn: use",
    ),
    "many dims": (
        "score_mod",
        lambda s, b, h, q, k: s + DEEP.at[0, 0, 0, 0, 0, 0, 0, 0, k].get(),
        "use at most 8 dims",
    ),
    "a random number": (
        "score_mod",
        lambda s, b, h, q, k: s + jax.random.uniform(jax.random.fold_in(jax.random.key(0), q * 5 + k)),
        r"score_mod has .* at .*: key<fry> values: use bool, integers of at most 32 bits, or floats",
    ),
    "a raw random key": (
        "score_mod",
        lambda s, b, h, q, k: s * jax.random.bernoulli(jax.random.fold_in(jax.random.PRNGKey(0), q)),
        "score_mod has .* at .*: key<fry> values",
    ),
    "an empty array": ("score_mod", lambda s, b, h, q, k: s + EMPTY.sum(), r"a captured array of \[0\]"),
    "many instructions": (
        "score_mod",
        lambda s, b, h, q, k: s + sum(jnp.dot(WIDE[q, :400] + i, WIDE[k, :400]) for i in range(3)),
        "more than 4096 instructions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_operations(name):
    """ "flash" refuses them, and `choose_implementation` gives the reason."""
    mod, function, message = REFUSED[name]
    with pytest.raises(
        NotImplementedError, match=f'implementation="flash": .*{message}.*Use implementation=None or "xla"'
    ):
        attend("flash", **{mod: function})
    choice = jax_flash.choose_implementation(Problem.of(QUERY, QUERY, QUERY, **{mod: function}), "cpu")
    assert choice.implementation == "xla"
    assert re.search(message, choice.reason)


FALLBACKS = ["an unsupported primitive", "in a mask", "a long dot", "a random number", "an empty array"]


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback(name):
    """The default implementation warns once and uses "xla"."""
    mod, function, message = REFUSED[name]
    with pytest.warns(UserWarning, match=f'takes implementation="xla", which is slower: .*{message}') as warned:
        result = attend(**{mod: function})
    assert len(warned) == 1
    np.testing.assert_allclose(result, attend("xla", **{mod: function}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_many_arrays(implementation):
    """Captured arrays are packed into one operand per dtype. Each array has its gradient."""
    arrays = [jnp.full((1, 5), x / 50, "float32" if x % 3 else "bfloat16") for x in range(18)]
    marks = [jnp.arange(5) != x % 5 for x in range(17)]

    def attention(arrays, marks, implementation):
        def score_mod(s, b, h, q, k):
            return s + sum((i % 3) * x[0, k].astype(s.dtype) for i, x in enumerate(arrays))

        def mask_mod(b, h, q, k):
            return marks[3][q] | marks[4][k] | marks[16][h]

        return attend(implementation, score_mod=score_mod, mask_mod=mask_mod)

    def loss(arrays, implementation=implementation):
        return (attention(arrays, marks, implementation) ** 2).sum()

    def by_bias(arrays):
        bias = sum((i % 3) * x.astype("float32") for i, x in enumerate(arrays))
        q, k, h = jnp.arange(5)[:, None], jnp.arange(5), jnp.arange(2)[:, None, None]
        return (attend("xla", bias=bias, mask=marks[3][q] | marks[4][k] | marks[16][h]) ** 2).sum()

    results, expected = jax.value_and_grad(loss)(arrays), jax.value_and_grad(by_bias)(arrays)
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2**-7 if x.dtype == "bfloat16" else 1e-5, atol=1e-6, err_msg=str(x.dtype))


def test_gradients_with_fallback():
    """By default they are those of "xla", through the same two custom calls."""

    def loss(query, table, implementation):
        def score_mod(s, b, h, q, k):
            return jnp.sort(jnp.stack([s, table[q]]))[1] + s * TABLE[k]

        o = attend(implementation, query, score_mod=score_mod, mask_mod=lambda b, h, q, k: (q + 1) * (TABLE[k] + 1) > 2)
        return (o**2).sum()

    with pytest.warns(UserWarning, match="score_mod has sort"):
        results = jax.grad(loss, (0, 1))(QUERY, TABLE / 5, None)
    expected = jax.grad(loss, (0, 1))(QUERY, TABLE / 5, "xla")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), results, expected)


def test_refusal_names_the_users_line():
    """Even if a function of JAX was traced earlier from another line."""
    jnp.where(jnp.ones((), bool), jnp.int8(1), jnp.int8(2))

    def score_mod(s, b, h, q, k):
        return s * jnp.square(SMALL[q])  # this line

    reason = Problem.of(QUERY, QUERY, QUERY, score_mod=score_mod).score.score_mod.refusal
    lines = open(__file__).read().splitlines()
    number = int(re.search(r"test_score_programs_errors.py:(\d+)", reason)[1])
    assert lines[number - 1].endswith("# this line")


# --- 64 bits ---


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda table, whole: lambda s, b, h, q, k: s + table[k].astype("float32"), "float64 values with float32"),
        (lambda table, whole: lambda s, b, h, q, k: s + whole[k].astype("float32"), "a captured array of int64"),
        (lambda table, whole: lambda s, b, h, q, k: s + jnp.float32(jnp.arange(5).sum() * q), "int64 values"),
        (lambda table, whole: lambda s, b, h, q, k: s + table[q].astype("float32") @ jnp.ones(2, "float32"), "float64"),
    ],
)
def test_wide_values_of_float32(x64, function, message):
    table = jnp.ones((5, 2)) if "@" in message or message == "float64" else jnp.ones(5)
    mod = function(table, jnp.arange(5))
    with pytest.raises(NotImplementedError, match=message):
        attend("flash", score_mod=mod)
    assert attend("xla", score_mod=mod).dtype == jnp.float32


def test_numbers_of_float32_under_x64(x64):
    """Python numbers are weakly typed, whatever width JAX gives them."""

    def score_mod(s, b, h, q, k):
        return s + jnp.where(q > k, 0.5, 1.0) - (q // 2) % 3 + jnp.clip(k, 1, 3)

    problem = Problem.of(QUERY, QUERY, QUERY, score_mod=score_mod)
    assert problem.score.score_mod.refusal is None
    q, k = np.arange(5)[:, None], np.arange(5)
    bias = (np.where(q > k, 0.5, 1.0) - (q // 2) % 3 + np.clip(k, 1, 3)).astype(np.float32)
    np.testing.assert_allclose(attend("xla", score_mod=score_mod), attend("xla", bias=bias), rtol=1e-5, atol=1e-6)


def test_result_of_the_wrong_width_under_x64(x64):
    table = jnp.ones(5)
    with pytest.raises(TypeError, match=r"score_mod must return one float32 scalar, not float64\[\]"):
        attend(score_mod=lambda s, b, h, q, k: s + table[k])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend("xla", QUERY.astype("float64"), score_mod=lambda s, b, h, q, k: s + table[k]).dtype == "float64"


# --- long functions ---


def test_long_chain():
    """Every value depends on the previous one."""

    def score_mod(s, b, h, q, k):
        for _ in range(200):
            s = jnp.where(s > 100.0, s, s * 1.001)
        return s

    result = jax.value_and_grad(lambda query: (attend("flash", query, score_mod=score_mod) ** 2).sum())(QUERY)
    expected = jax.value_and_grad(lambda query: (attend("xla", query, scale=8**-0.5 * 1.001**200) ** 2).sum())(QUERY)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), result, expected)


def test_long_chain_of_arrays():
    """The error reports that there are too many instructions."""

    def score_mod(s, b, h, q, k):
        x = jnp.stack([s, s])
        for _ in range(700):
            x = x * 1.001
        return x.sum()

    with pytest.raises(
        NotImplementedError, match='"flash": score_mod has too many .* Use implementation=None or "xla"'
    ):
        attend("flash", score_mod=score_mod)

"""Shapes with symbolic batch and lengths (`jax.export.symbolic_shape`), which Keras and servers use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import by_numpy
from cases import Case, with_gradients
from jax import export

import jax_flash

EVERYTHING = Case(
    causal=True,
    window=(200, 4),
    bias="b1ts",
    mask="bn1s",
    sinks=1.0,
    lengths=True,
    segments=True,
    offset=True,
    soft_cap=1.5,
    dropout=0.2,
)


def described(tree, symbols):
    """Return the shapes and dtypes of arrays, with symbols in place of their sizes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct([symbols.get(size, size) for size in x.shape], x.dtype), tree)


@pytest.mark.filterwarnings("ignore:attention takes implementation")
@pytest.mark.parametrize(
    ("everything", "implementation"),
    [
        (EVERYTHING, None),
        (EVERYTHING, "xla"),
        (EVERYTHING, "reference"),
        (Case(causal=True, window=(200, 4), traced=True, lengths=True, offset=True), "xla"),
    ],
    ids=str,
)
def test_one_export_for_every_size(everything, implementation):
    """Forward and backward, with sizes above and below the block size and not multiples of 16."""

    def attention(arrays):
        o, statistics = jax_flash.attention_with_statistics(
            **arrays, **everything.options, implementation=implementation
        )
        return o, statistics.logsumexp

    def given(**sizes):
        case = dataclasses.replace(everything, **sizes)
        return case, case.arrays(), case.cotangents()

    case, *arguments = given(B=3, T=37, S=45)
    symbols = dict(zip((case.B, case.T, case.S), export.symbolic_shape("b, t, s"), strict=True))
    function = jax.jit(functools.partial(with_gradients, attention))
    exported = export.deserialize(export.export(function)(*described(arguments, symbols)).serialize())
    for sizes in ({"B": 3, "T": 37, "S": 45}, {"B": 1, "T": 261, "S": 290}):
        case, *arguments = given(**sizes)
        got, want = exported.call(*arguments), by_numpy(case, *arguments)
        for name, x in want.items():
            np.testing.assert_allclose(
                got[name], x, rtol=1e-4, atol=1e-4 * np.abs(x[np.isfinite(x)]).max(), err_msg=name
            )


@pytest.mark.filterwarnings("ignore:attention takes implementation")
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_score_and_mask_functions(implementation):
    slopes = jnp.arange(1.0, 4.0)
    attend = functools.partial(
        jax_flash.dot_product_attention,
        score_mod=lambda score, b, h, i, j: score - slopes[h] * jnp.abs(i - j),
        mask_mod=lambda b, h, i, j: (b + i + 2 * j) % 3 > 0,
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 3, 8)), jnp.float32)
    symbols = dict(zip(x.shape, export.symbolic_shape("b, t"), strict=False))
    exported = export.export(jax.jit(functools.partial(attend, implementation=implementation)))(
        *described([x, x, x], symbols)
    )
    np.testing.assert_allclose(exported.call(x, x, x), attend(x, x, x), rtol=1e-5, atol=1e-5)


def test_fused_calls_are_evaluated_but_not_lowered():
    b, t, s = export.symbolic_shape("b, t, s")
    query, key = (jax.ShapeDtypeStruct((b, size, 4, 8), "float32") for size in (t, s))
    attend = jax.jit(functools.partial(jax_flash.dot_product_attention, implementation="flash"))
    gradient = jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1))
    assert [x.shape for x in jax.eval_shape(gradient, query, key, key)] == [query.shape, key.shape]
    with pytest.raises(NotImplementedError, match='"flash": .* batch b, query length t, key/value length s'):
        export.export(attend)(query, key, key)
    problem = jax_flash.Problem.of(query, key, key)
    choice = jax_flash.choose_implementation(problem, "cuda")
    assert choice.implementation == "xla" and "query length t" in choice.reason
    with pytest.raises(ValueError, match="query length t"):
        jax_flash.explain(problem)


def test_fallback_warning_points_to_the_users_line():
    (t,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((2, t, 4, 8), "float32")
    with pytest.warns(UserWarning, match="these are symbolic: query length t, key/value length t") as warned:
        export.export(jax.jit(jax_flash.dot_product_attention))(x, x, x)
    assert warned[0].filename == __file__


def test_symbolic_heads_are_refused():
    (n,) = export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((2, 9, n, 8), "float32")
    with pytest.raises(NotImplementedError, match=r"heads and head dims must be numbers, .* query \(2, 9, n, 8\)"):
        jax.eval_shape(jax_flash.dot_product_attention, x, x, x)

"""How much time each class of operator takes in a training step with standard attention: a layer of GPT-2 medium.

The classes are from Ivanov et al. 2021, "Data movement is all you need" (arXiv 2007.00072). Each operator is compiled
separately, forward and backward. Otherwise XLA would fuse operators, and the time of a kernel could not be divided.
FLOPs are XLA's count for the operator's program before optimisation.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import measure

from .. import attentions, passes
from ..results import Results, Row

CONTRACTION, NORMALISATION, ELEMENTWISE = "tensor contraction", "statistical normalisation", "element-wise"


class Operator(NamedTuple):
    kind: str
    function: Callable[..., jax.Array]  # takes arrays, then a key
    shapes: tuple[tuple[int, ...], ...]
    times: int = 1  # number per layer


def operators(batch: int, length: int, heads: int, dim: int) -> dict[str, Operator]:
    """Return the operators of a layer with pre-normalisation and dropout, as in GPT-2."""
    width = heads * dim
    x, hidden = (batch, length, width), (batch, length, 4 * width)
    per_head, matrix = (batch, heads, length, dim), (batch, heads, length, length)

    def product(x: jax.Array, y: jax.Array, _: jax.Array) -> jax.Array:
        return x @ y

    def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, _: jax.Array) -> jax.Array:
        y = jax.nn.standardize(x.astype("float32"))
        return (y * scale + bias).astype(x.dtype)

    def masked(s: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.where(jnp.tri(length, dtype=bool), s * dim**-0.5, attentions.MASKED_SCORE)

    def add(x: jax.Array, y: jax.Array, _: jax.Array) -> jax.Array:
        return x + y

    return {
        "Q, K and V": Operator(CONTRACTION, product, (x, (width, 3 * width))),
        "S = Q Kᵀ": Operator(CONTRACTION, lambda q, k, _: q @ k.mT, (per_head, per_head)),
        "O = P V": Operator(CONTRACTION, product, (matrix, per_head)),
        "output projection": Operator(CONTRACTION, product, (x, (width, width))),
        "MLP, up": Operator(CONTRACTION, product, (x, (width, 4 * width))),
        "MLP, down": Operator(CONTRACTION, product, (hidden, (4 * width, width))),
        "softmax": Operator(NORMALISATION, lambda s, _: attentions.plain_softmax(s), (matrix,)),
        "layer norm": Operator(NORMALISATION, layer_norm, (x, (width,), (width,)), 2),
        "scale and mask of S": Operator(ELEMENTWISE, masked, (matrix,)),
        "dropout of P": Operator(ELEMENTWISE, attentions.apply_dropout, (matrix,)),
        "bias of Q, K and V": Operator(ELEMENTWISE, add, ((batch, length, 3 * width), (3 * width,))),
        "bias of width": Operator(ELEMENTWISE, add, (x, (width,)), 2),
        "bias of 4 x width": Operator(ELEMENTWISE, add, (hidden, (4 * width,))),
        "GELU": Operator(ELEMENTWISE, lambda x, _: jax.nn.gelu(x), (hidden,)),
        "dropout of the result": Operator(ELEMENTWISE, attentions.apply_dropout, (x,), 2),
        "residual sum": Operator(ELEMENTWISE, add, (x, x), 2),
    }


def run(results: Results, quick: bool) -> None:
    shape = (2, 64, 2, 16) if quick else (64, 1024, 16, 64)
    given = operators(*shape)

    def rows_of(operator: str) -> list[Row]:
        chosen = given[operator]
        call, flops = forward_and_backward(chosen)
        measure.finish(call())
        failures: dict[str, str] = {}
        seconds = passes.timed({operator: call}, failures)
        if failures:
            raise RuntimeError(f"{operator}: {failures[operator]}")
        return [
            {
                "class": chosen.kind,
                "times": chosen.times,
                "flops": chosen.times * flops,
                "milliseconds": 1e3 * chosen.times * seconds[operator],
            }
        ]

    results.begin(shape=list(shape))
    results.measure([{"operator": name} for name in given], rows_of)


def forward_and_backward(operator: Operator) -> tuple[measure.Call, float]:
    """Return the call and its FLOPs."""
    *keys, key = jax.random.split(jax.random.key(0), len(operator.shapes) + 1)
    arrays = [jax.random.normal(k, shape, "bfloat16") for k, shape in zip(keys, operator.shapes, strict=True)]
    mask_key = jax.random.key(1)
    do = jax.random.normal(key, jax.eval_shape(operator.function, *arrays, mask_key).shape, "bfloat16")

    def both(do: jax.Array, mask_key: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        o, pull = jax.vjp(lambda *x: operator.function(*x, mask_key), *arrays)
        return o, *(gradient for gradient in pull(do) if gradient is not do)  # `do` would be copied

    given = (do, mask_key, *arrays)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    with jax.default_device(jax.devices("cpu")[0]):  # on a GPU, JAX only counts FLOPs of compiled programs
        cost = jax.jit(both).lower(*shapes).cost_analysis()
    assert cost is not None
    return functools.partial(jax.jit(both).lower(*given).compile(), *given), cost["flops"]

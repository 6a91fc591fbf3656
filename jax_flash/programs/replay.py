"""Evaluation of a jaxpr in another context than the one in which it was traced, such as another mesh.

An equation keeps the mesh of its context, and its axes may be explicit there but not here. Inside `jax.shard_map`,
arrays vary over mesh axes that the traced arrays did not vary over. JAX marks varying values when it traces, but not
when it evaluates a jaxpr. So here all values are marked as varying over the same axes.

If an argument has a wider float dtype than its variable, the values that depend on it have this dtype as well. They are
computed in the wider dtype and rounded to the precision of their variable's dtype, as in the kernels. The derivative of
the rounding is 1. So the gradient of a value that entries share, which is a sum over these entries, is summed in the
wider dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jax_flash.programs import lowering
from jax_flash.programs.arrays import aval
from jax_flash.programs.operations import ARRAYS, ELEMENTWISE, INDEXING, PLACEMENTS
from jax_flash.varying import type_of_variable, varying_alike

# The primitives that are evaluated in a wider dtype. Other primitives, such as calls with custom rules, may depend on
# the dtype, so they are evaluated in the dtype of their variables.
WIDENED = {*ARRAYS, *ELEMENTWISE, *INDEXING, "cond", "scan", "while"}


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[jax.Array]:
    """Return the results of a jaxpr. Each varies over the mesh axes of all arguments together.

    If arguments have wider float dtypes than their variables, results may have wider dtypes as well.
    """
    like = list(map(jnp.asarray, (*consts, *args)))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), varying_alike(like, like), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [jnp.asarray(x.val, aval(x).dtype) if isinstance(x, Literal) else values[x] for x in eqn.invars]
        outputs = apply(jaxpr, eqn, varying_alike(inputs, like))
        values |= dict(zip(eqn.outvars, varying_alike(list(outputs), like), strict=True))
    results = [jnp.asarray(x.val, aval(x).dtype) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]
    return varying_alike(results, like)


def function_of(jaxpr: Jaxpr, eqn: JaxprEqn) -> tuple[list[Any], Any]:
    """Return the variables of one equation of a jaxpr, and the equation as a function of them."""
    variables = list(dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal)))
    names = jaxpr.debug_info.with_unknown_names()
    one = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn], debug_info=names)
    return variables, jaxpr_as_fun(ClosedJaxpr(one, ()))


def widened(x: jax.Array, wide: Any) -> jax.Array:
    """Return a float array in a wider dtype. Return other arrays unchanged, and all arrays if `wide` is None."""
    return x.astype(wide) if _is_wider(wide, x.dtype) else x


def _is_wider(wide: Any, dtype: Any) -> bool:
    if wide is None or not (jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)):
        return False
    return np.dtype(wide).itemsize > np.dtype(dtype).itemsize


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round to the precision of a narrower dtype. The derivative is 1."""
    return x.astype(dtype).astype(x.dtype)


_rounded.defjvp(lambda dtype, primals, tangents: (_rounded(*primals, dtype), *tangents))


def apply(jaxpr: Jaxpr, eqn: JaxprEqn, inputs: list[jax.Array]) -> Sequence[jax.Array]:
    """Return the results of one equation of a jaxpr."""
    inner = lowering.inlined(eqn)
    if eqn.primitive.name in PLACEMENTS:
        return inputs
    if inner and lowering.is_transparent(eqn):
        return evaluate(*inner, inputs)
    dtypes, result_dtypes = ([aval(x).dtype for x in variables] for variables in (eqn.invars, eqn.outvars))
    wide = next((x.dtype for x, dtype in zip(inputs, dtypes, strict=True) if _is_wider(x.dtype, dtype)), None)
    if wide is None:
        return _with_rule(jaxpr, eqn, inner, inputs) if inner else _bind(eqn, inputs)
    if eqn.primitive.name in WIDENED:
        results = _bind(eqn, [widened(x, wide) for x in inputs], wide)
        pairs = zip(results, result_dtypes, strict=True)
        return [_rounded(x, dtype) if _is_wider(x.dtype, dtype) else x for x, dtype in pairs]
    pairs = zip(inputs, dtypes, strict=True)
    inputs = [x.astype(dtype) if _is_wider(x.dtype, dtype) else x for x, dtype in pairs]
    results = _with_rule(jaxpr, eqn, inner, inputs) if inner else _bind(eqn, inputs)
    return [widened(x, wide) for x in results]


def _bind(eqn: JaxprEqn, inputs: list[jax.Array], wide: Any = None) -> Sequence[jax.Array]:
    """Apply the primitive of an equation. If `wide` is a dtype, widen the float dtypes among its parameters."""
    results = eqn.primitive.bind(*inputs, **jax.tree.map(functools.partial(_parameter, wide), eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _parameter(wide: Any, x: Any) -> Any:
    """Return a parameter of an equation. The jaxpr of a loop or a branch is traced again in this context."""
    if isinstance(x, np.dtype):
        return wide if _is_wider(wide, x) else x
    if not isinstance(x, ClosedJaxpr):
        return x
    types = [jax.ShapeDtypeStruct(of.shape, _parameter(wide, of.dtype)) for of in x.in_avals]
    return jax.make_jaxpr(lambda *args: [widened(y, wide) for y in evaluate(x.jaxpr, x.consts, args)])(*types)


def _with_rule(jaxpr: Jaxpr, eqn: JaxprEqn, inner: tuple[Jaxpr, Sequence[Any]], inputs: list[Any]) -> Any:
    """Evaluate a call of a function with a custom derivative. The jaxpr of this derivative is replayed as well."""
    variables, function = function_of(jaxpr, eqn)
    types, result_types = (list(map(type_of_variable, of)) for of in (variables, eqn.outvars))
    moving = [i for i, x in enumerate(types) if jnp.issubdtype(x.dtype, jnp.floating)]
    literals = {i: np.asarray(x.val, aval(x).dtype) for i, x in enumerate(eqn.invars) if isinstance(x, Literal)}
    places = [None if isinstance(x, Literal) else variables.index(x) for x in eqn.invars]

    def primal(*args: jax.Array) -> Any:
        return tuple(evaluate(*inner, [literals[i] if at is None else args[at] for i, at in enumerate(places)]))

    def of_floats(args: Sequence[Any]) -> Any:
        def moved(*floats: jax.Array) -> Any:
            given = dict(zip(moving, floats, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(args)))

        return moved, [args[i] for i in moving]

    def jvp(args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moved, floats = of_floats(args)
        return jax.jvp(moved, floats, list(tangents))

    def vjp(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        moved, floats = of_floats(args)
        return jax.vjp(moved, *floats)[1](list(cotangents))

    # The rule is traced with the types of the equation's variables, whose values may vary over mesh axes.
    def traced(rule: Any, other_types: Sequence[Any], args: Sequence[Any], others: Sequence[Any]) -> list[jax.Array]:
        closed = jax.make_jaxpr(rule)(types, other_types)
        return evaluate(closed.jaxpr, closed.consts, [*args, *others])

    args: list[Any] = [inputs[eqn.invars.index(x)] for x in variables]
    if eqn.primitive.name.startswith("custom_jvp"):

        def forward(args: Any, tangents: Any) -> Any:
            results = traced(jvp, [types[i] for i in moving], args, [tangents[i] for i in moving])
            return tuple(results[: len(eqn.outvars)]), tuple(results[len(eqn.outvars) :])

        with_jvp = jax.custom_jvp(primal)
        with_jvp.defjvp(forward)
        return with_jvp(*args)

    def backward(args: Any, cotangents: Any) -> Any:
        found = dict(zip(moving, traced(vjp, result_types, args, cotangents), strict=True))
        return tuple(found.get(i) for i in range(len(args)))

    with_vjp = jax.custom_vjp(primal)
    with_vjp.defvjp(lambda *args: (primal(*args), args), backward)
    return with_vjp(*args)

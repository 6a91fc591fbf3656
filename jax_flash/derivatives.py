"""The derivatives of the calls, of any mode and order.

A rule of a JAX primitive takes each call to its tangent, as `jax.jvp` wants it. The tangent is the other primitive,
`jax_flash_jvp`, which is linear in the tangents of the arrays. Its transpose is the gradient:

    forward     tangent: the tangent call, from q, k, v, O, l and m; transpose: the backward call
    any other   tangent: `jax.jvp` of plain JAX; transpose: `jax.vjp` of plain JAX, in linear memory

So `jax.grad` of a user's function has one forward and one backward call, and computes no tangent. A tangent has the
arrays of its call as operands, and nothing that depends on them: an unused derivative of a tangent costs nothing, and
`vmap` over tangents does not repeat the call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh

from jax_flash import bits, blockwise, custom_calls, padding, partitioning
from jax_flash.custom_calls import UNROUNDED_O, Call, batched, lead, over_leading_dims
from jax_flash.explicit import placed
from jax_flash.operands import CAPTURED, DIFFERENTIATED, SHARED_GRADIENTS, TANGENTS, Operands
from jax_flash.partitioning import Results, Types
from jax_flash.problem import Problem, result_types
from jax_flash.sequence import Arrays
from jax_flash.varying import varying_alike

# A remat policy that saves these by name, `jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)`, keeps the
# backward from running the forward again.
RESIDUAL_NAMES = ("jax_flash_o", "jax_flash_l", "jax_flash_m", "jax_flash_unrounded_o")

GRADIENTS = {name: gradient for gradient, name in DIFFERENTIATED.items()}  # by the operand


class Tangent(NamedTuple):
    """The static part of the tangents of a call's results, along tangents of some of its arrays."""

    of: Call | Tangent
    moving: tuple[str, ...]  # the arrays that have a tangent
    without_l: bool = False  # for a forward: the tangent of l is not a result

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of the call, its results if it is a forward, and the tangents."""
        results = ("o", "l", self.m_bits) if self.forward else ()
        unrounded = (UNROUNDED_O,) if self.takes_unrounded_o else ()
        return (*self.of.arrays, *results, *unrounded, *map(self.tangent_of, self.moving))

    @property
    def results(self) -> tuple[str, ...]:
        """The results of the call that have a tangent."""
        if self.forward:
            return ("o",) if self.without_l else ("o", "l")
        return self.of.results

    @property
    def problem(self) -> Problem:
        """The problem of the call."""
        return self.of.problem

    @property
    def forward(self) -> Call | None:
        """The call if it is a forward."""
        return self.of if isinstance(self.of, Call) and "o" in self.of.results else None

    @property
    def is_custom_call(self) -> bool:
        """Whether a custom call computes the tangents."""
        return self.forward is not None and self.forward.division is None

    @property
    def takes_unrounded_o(self) -> bool:
        """Whether the custom call takes O before it is rounded. Its transpose takes the rounded O."""
        return self.is_custom_call and self.problem.result_dtype("o") != self.problem.accumulation_dtype

    @property
    def m_bits(self) -> str:
        """The name of m in a forward's arrays, where jax_debug_infs must not see -inf."""
        return "m_bits64" if self.problem.accumulation_dtype == "float64" else "m_bits"

    @property
    def order(self) -> int:
        """The order of the derivative."""
        return 1 + (self.of.order if isinstance(self.of, Tangent) else 0)

    @property
    def target(self) -> str:
        """The name in error messages."""
        return primitive.name

    def tangent_of(self, name: str) -> str:
        """Return the name of an array's tangent."""
        return f"tangent {self.order} of {name}"

    def bind(self, arrays: Arrays) -> Results:
        """Compute the tangents of the results from the arrays with these names."""
        return _bind(self, [arrays[name] for name in self.arrays])


primitive = Primitive("jax_flash_jvp")
primitive.multiple_results = True


def _bind(call: Tangent, arrays: Iterable[jax.Array]) -> Results:
    """Bind the primitive with the jaxpr of zeros, where JAX finds the result types and `custom_partitioning`.

    The computation of the results is not traced, because most programs only transpose a tangent.
    """
    arrays, mesh = tuple(arrays), jax.sharding.get_abstract_mesh()
    return tuple(primitive.bind(*arrays, call=call, zeros=_zeros.trace(*arrays, call=call).jaxpr, mesh=mesh))


@functools.partial(jax.jit, static_argnames="call")
def _zeros(*arrays: jax.Array, call: Tangent) -> Results:
    if call.is_custom_call:
        return custom_calls.sharded(*_custom_call(call, arrays), zeros=True)
    return _placed(call, arrays, lambda named, types: tuple(jnp.zeros(x.shape, x.dtype) for x in types.values()))


@functools.partial(jax.jit, static_argnames="call")
def _evaluate(*arrays: jax.Array, call: Tangent) -> Results:
    if call.is_custom_call:
        return custom_calls.sharded(*_custom_call(call, arrays))
    return _placed(call, arrays, lambda named, _: over_leading_dims(functools.partial(_plain, call), named))


def _custom_call(call: Tangent, arrays: tuple[jax.Array, ...]) -> tuple[Call, Arrays]:
    """Return the custom call for the tangent of a forward, and its arrays."""
    forward, named = call.forward, dict(zip(call.arrays, arrays, strict=True))
    assert forward is not None
    o, l, m = _forward_results(call, named)
    given = {name: named[name] for name in forward.arrays} | {"o": o, "l": l, "m": m}
    for name in call.moving:
        dtype = call.problem.result_dtype("o") if name == "query" else named[name].dtype
        given[TANGENTS[name]] = named[call.tangent_of(name)].astype(dtype)
    problem = dataclasses.replace(call.problem, l_tangent="l" in call.results)
    results = tuple(f"{name}_tangent" for name in call.results)
    return Call(tuple(given), results, problem, fallback=True, moving=call.moving), given


def _forward_results(call: Tangent, arrays: Arrays) -> Results:
    o, l = arrays[UNROUNDED_O if call.takes_unrounded_o else "o"], arrays["l"]
    return o, l, bits.to(l.dtype, arrays[call.m_bits])


def _placed(call: Tangent, arrays: tuple[jax.Array, ...], function: Callable[[Arrays, Types], Results]) -> Results:
    named = dict(zip(call.arrays, arrays, strict=True))
    q_len, kv_len = named["query"].shape[-3], named["key"].shape[-3]  # this device's, if they are divided
    local = dataclasses.replace(call.problem, q_len=q_len, kv_len=kv_len)
    types = result_types(local, call.results, lead(named), named)

    def compute(named: Arrays) -> Results:
        return varying_alike(function(named, types), arrays)

    return partitioning.automatic(compute, call.problem, named, types)


def _plain(call: Call | Tangent, arrays: Arrays) -> Results:
    """A call, or its tangents, in plain JAX, for arrays without leading dims."""
    if isinstance(call, Call):
        return custom_calls.plain(call, arrays)
    at = {name: arrays[name] for name in call.moving}
    along = {name: arrays[call.tangent_of(name)] for name in call.moving}
    if call.is_custom_call:
        tangents = blockwise.tangent(call.problem, Operands.of(arrays), along, *_forward_results(call, arrays))
        return tangents[: len(call.results)]
    along = {name: x.astype(at[name].dtype) for name, x in along.items()}
    _, tangents = jax.jvp(lambda moved: _plain(call.of, arrays | moved), (at,), (along,))
    return tangents[: len(call.results)]


# --- the derivative of a forward or a backward ------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Call, jaxpr: ClosedJaxpr, rounded: ClosedJaxpr | None):
    arrays, moving = dict(zip(call.arrays, primals, strict=True)), _nonzero(call.arrays, tangents)
    if "o" in call.results:
        return _jvp_of_forward(call, arrays, moving)
    results = custom_calls.primitive.bind(*primals, call=call, jaxpr=jaxpr, rounded=rounded)
    tangent = Tangent(call, tuple(moving))
    return results, tangent.bind(arrays | {tangent.tangent_of(name): x for name, x in moving.items()})


def _jvp_of_forward(call: Call, arrays: Arrays, moving: Arrays) -> tuple[Any, Any]:
    """The tangent of the scale becomes a part of the tangent of the query: S = τ Q Kᵀ.

    Captured arrays of a mask_mod count as constants.
    """
    if call.problem.page:
        raise NotImplementedError(
            "paged attention has no gradient in the fused kernels, because they are for inference: "
            'use implementation="xla" or "reference"'
        )
    moving = {name: x for name, x in moving.items() if name not in CAPTURED or name in call.problem.scored}
    if not moving:
        results = custom_calls.bind(call, arrays.values())
        return results, tuple(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results)
    original, dscale = call, moving.pop("scale", None)
    call = call.without_unrounded_o
    if dscale is not None:
        # dS = P (dP - D) sums to zero over the keys, and D = dO · O. A rounded O shifts D, so each row of the scale's
        # gradient, Σ S dS, would err by the shift times the mean score of the row.
        call = call._replace(problem=call.problem.without_rounding)
    with_o = call.with_unrounded_o if Tangent(call, ()).takes_unrounded_o else call
    o, l, m, *unrounded = custom_calls.bind(with_o, arrays.values())
    o, l, m_bits, *unrounded = map(checkpoint_name, (o, l, bits.of(m), *unrounded), RESIDUAL_NAMES)
    m = bits.to(l.dtype, m_bits)
    if dscale is not None:
        along = _with_scale(call.problem, arrays, m, dscale)
        moving["query"] = along + moving["query"].astype(along.dtype) if "query" in moving else along
    tangent = Tangent(call, tuple(moving))
    tangents = {tangent.tangent_of(name): x for name, x in moving.items()}
    given = {"o": o, "l": l, tangent.m_bits: m_bits} | dict(zip((UNROUNDED_O,), unrounded, strict=False))
    do, dl = tangent.bind(arrays | given | tangents)
    dtype, dm = original.problem.result_dtype("o"), ad.Zero(jax.typeof(m).to_tangent_aval())
    if UNROUNDED_O not in original.results:
        return (o.astype(dtype), l, m), (do.astype(dtype), dl, dm)
    exact = unrounded[0] if unrounded else o
    return (o.astype(dtype), l, m, exact), (do.astype(dtype), dl, dm, do.astype(exact.dtype))


def _with_scale(problem: Problem, arrays: Arrays, m: jax.Array, dscale: jax.Array) -> jax.Array:
    """Return the tangent of the query that changes the scores as this tangent of the scale does: Q τ̇ / τ."""

    def scaled(query: jax.Array, live: jax.Array | None, factor: jax.Array) -> jax.Array:
        # The transpose is the sum of Q dQ, first over the head dim by a product: a CPU would sum one by one.
        by_row = jnp.broadcast_to(factor, query.shape[:-1])
        query = padding.zero_rows(live, query).astype(factor.dtype)
        return jnp.einsum("...d,...->...d", query, by_row, precision="highest")

    place = jax.typeof(arrays["query"]).sharding.spec
    return placed(scaled, place, arrays["query"], padding.live_rows(problem, m), dscale / arrays["scale"])


# --- the derivative of a tangent --------------------------------------------------------------------------------------


def _jvp_of_tangent(primals, tangents, *, call: Tangent, zeros: ClosedJaxpr, mesh: AbstractMesh):
    """It is linear in the tangents."""
    arrays, moving = dict(zip(call.arrays, primals, strict=True)), _nonzero(call.arrays, tangents)
    results = primitive.bind(*primals, call=call, zeros=zeros, mesh=mesh)
    terms = []
    along = set(map(call.tangent_of, call.moving))
    linear = tuple(name for name in call.moving if call.tangent_of(name) in moving)
    if linear:
        again = call._replace(moving=linear)
        terms.append(again.bind(arrays | {name: moving[name] for name in map(call.tangent_of, linear)}))
    others = tuple(name for name in call.arrays if name in moving and name not in along)
    if others:
        second = Tangent(call, others)
        terms.append(second.bind(arrays | {second.tangent_of(name): moving[name] for name in others}))
    return results, [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _nonzero(names: Iterable[str], tangents: Iterable[Any]) -> Arrays:
    """Return the tangents that are not zero, by name."""
    named = zip(names, tangents, strict=True)
    return {name: x for name, x in named if not isinstance(x, ad.Zero) and x.dtype != jax.dtypes.float0}


def _transpose(cotangents, *arrays, call: Tangent, zeros: ClosedJaxpr, mesh: AbstractMesh):
    named = dict(zip(call.arrays, arrays, strict=True))
    known = {name: x for name, x in named.items() if not ad.is_undefined_primal(x)}
    asked = tuple(name for name in call.moving if call.tangent_of(name) not in known)
    given = {name: x for name, x in zip(call.results, cotangents, strict=True) if not isinstance(x, ad.Zero)}
    like = {name: named[call.tangent_of(name)].aval for name in asked}
    if call.forward:
        # The gradient of an operand that examples share has the operand's shape, and here must have the tangent's.
        known |= {
            name: jnp.broadcast_to(known[name], x.shape)
            for name, x in like.items()
            if GRADIENTS[name] in SHARED_GRADIENTS
        }
        found = _gradients(call, call.forward, asked, known, given)
    else:
        found = _pulled_back(call, asked, known, given)
    gradients = {call.tangent_of(name): _summed(found[name], x) for name, x in like.items()}
    return [gradients.get(name) for name in call.arrays]


def _gradients(call: Tangent, forward: Call, asked: tuple[str, ...], arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients of a forward by the backward call, by the names of the operands."""
    o, l = arrays["o"], arrays["l"]
    do = cotangents["o"].astype(call.problem.dtype) if "o" in cotangents else jnp.zeros_like(o, call.problem.dtype)
    operands = {name: arrays[name] for name in forward.arrays}
    operands |= {"o": o, "l": l, "m": bits.to(l.dtype, arrays[call.m_bits]), "do": do}
    if "l" in cotangents:
        operands["dlogsumexp"] = jnp.where(l == 0, 0, cotangents["l"] * l)  # NaN may be where nothing is attended to
    asked_for = {GRADIENTS[name] for name in asked}
    problem = call.problem.differentiated(asked_for, dlogsumexp="dlogsumexp" in operands)
    backward = forward._replace(arrays=tuple(operands), results=problem.gradients, problem=problem)
    results = custom_calls.bind(backward, operands.values())
    return {DIFFERENTIATED[name]: x for name, x in zip(problem.gradients, results, strict=True)}


@functools.partial(jax.jit, static_argnames=("call", "asked"))
def _pulled_back(call: Tangent, asked: tuple[str, ...], arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients of any call in plain JAX, by the names of its arrays."""

    def pulled(arrays: Arrays) -> Results:
        def function(moved: Arrays) -> dict[str, jax.Array]:
            return dict(zip(call.results, _plain(call.of, arrays | moved), strict=True))

        results, pull = jax.vjp(function, {name: arrays[name] for name in asked})
        (found,) = pull({name: arrays.get(f"cotangent of {name}", jnp.zeros_like(x)) for name, x in results.items()})
        return tuple(found[name] for name in asked)

    given = arrays | {f"cotangent of {name}": x for name, x in cotangents.items()}
    places = tuple(jax.typeof(arrays[name]).sharding.spec for name in asked)
    results = placed(functools.partial(over_leading_dims, pulled), places, given)
    return dict(zip(asked, results, strict=True))


def _summed(x: jax.Array, like: Any) -> jax.Array:
    """Return a gradient summed over the leading dims that the array lacks or has only once, in the array's dtype."""
    x = x.sum(range(x.ndim - like.ndim))
    once = [i for i, size in enumerate(like.shape) if size == 1 and x.shape[i] > 1]
    return (x.sum(once, keepdims=True) if once else x).astype(like.dtype)


def _dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Eliminate dead code, as in custom_calls.py: few programs use the tangent of l, which costs the kernels a sum."""
    eqn: JaxprEqn = live_and_eqn[-1]
    call, zeros = eqn.params["call"], eqn.params["zeros"]
    if call.forward and used == [True, False]:
        zeros = zeros.replace(jaxpr=pe.dce_jaxpr(zeros.jaxpr, used, instantiate=True)[0])
        params = eqn.params | {"call": call._replace(without_l=True), "zeros": zeros}
        eqn = eqn.replace(outvars=eqn.outvars[:1], params=params)
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


def _lower(ctx, *arrays, call: Tangent, zeros: ClosedJaxpr, mesh: AbstractMesh):
    with jax.sharding.use_abstract_mesh(mesh):  # which tells shard_map's axes
        return mlir.lower_fun(functools.partial(_evaluate, call=call))(ctx, *arrays)


primitive.def_impl(
    lambda *arrays, call, zeros, mesh: custom_calls.eagerly(functools.partial(_evaluate, call=call), call, arrays)
)
primitive.def_abstract_eval(lambda *arrays, call, zeros, mesh: zeros.out_avals)
ad.primitive_jvps[custom_calls.primitive] = _jvp
ad.primitive_jvps[primitive] = _jvp_of_tangent
ad.primitive_transposes[primitive] = _transpose
pe.dce_rules[primitive] = _dce
batching.primitive_batchers[primitive] = lambda arrays, axes, *, call, zeros, mesh: batched(_bind, call, arrays, axes)
mlir.register_lowering(primitive, _lower)

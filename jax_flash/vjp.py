"""The custom_vjp that links the fused forward to the fused backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash import bits, custom_calls, padding, sequence
from jax_flash.explicit import placed
from jax_flash.operands import CAPTURED, DIFFERENTIATED, Operands
from jax_flash.problem import Problem
from jax_flash.sequence import Arrays, Division

# A remat policy that saves these by name, `jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)`, keeps the
# backward from running the forward again.
RESIDUAL_NAMES = ("jax_flash_o", "jax_flash_l", "jax_flash_m")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attention(problem: Problem, division: Division | None, fallback: bool, operands: Operands) -> tuple[jax.Array, ...]:
    """(o, l, m). Only what is asked for is differentiated; m counts as a constant: m + log l has its exact gradient.

    The operand `scale` must be positive. `division`: inside of `shard_map` the operands are a device's part of a
    sequence.
    """
    return _forward_calls(problem, division, fallback, operands)


def _forward_calls(
    problem: Problem, division: Division | None, fallback: bool, operands: Operands
) -> tuple[jax.Array, ...]:
    def compute(problem: Problem, arrays: Arrays) -> tuple[jax.Array, ...]:
        return custom_calls.forward(problem, fallback, Operands.of(arrays))

    arrays = operands.arrays()
    return compute(problem, arrays) if division is None else sequence.forward(compute, problem, division, arrays)


def _backward_calls(
    problem: Problem, division: Division | None, fallback: bool, operands: Operands, statistics: Arrays
) -> tuple[jax.Array, ...]:
    def compute(problem: Problem, arrays: Arrays) -> tuple[jax.Array, ...]:
        given = {name: arrays.pop(name) for name in statistics}
        return custom_calls.backward(problem, fallback, Operands.of(arrays), **given)

    arrays = operands.arrays() | statistics
    return compute(problem, arrays) if division is None else sequence.backward(compute, problem, division, arrays)


def _forward(problem, division, fallback, operands):
    if problem.page:
        raise NotImplementedError(
            "paged_attention has no gradient in the fused kernels, because they are for inference: "
            'use implementation="xla" or "reference"'
        )
    # The requested gradients are encoded in array shapes, because JAX caches static residuals across traces.
    named = operands.arrays()
    differentiated = {grad: named.get(name) for grad, name in (DIFFERENTIATED | {"dscale": "scale"}).items()}
    asked = {grad: jnp.zeros(int(x is not None and x.perturbed), bool) for grad, x in differentiated.items()}
    operands = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    unrounded = _unrounded(problem, asked["dscale"])
    o, l, m = _forward_calls(unrounded, division, fallback, operands)
    o, l, m_bits = map(checkpoint_name, (o, l, bits.of(m)), RESIDUAL_NAMES)
    return (o.astype(problem.dtype), l, bits.to(l.dtype, m_bits)), (asked, operands, o, l, m_bits)


def _backward(problem, division, fallback, residuals, cotangents):
    asked, operands, o, l, m_bits = residuals
    do, dl, _ = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(o, problem.dtype)
    statistics = {"o": o, "l": l, "m": bits.to(l.dtype, m_bits), "do": do}
    if not isinstance(dl, SymbolicZero):
        statistics["dlogsumexp"] = jnp.where(l == 0, 0, dl * l)  # where nothing is attended to, dl may be NaN
    problem = _unrounded(problem, asked["dscale"])
    asked = {grad for grad, x in asked.items() if x.size}
    needed = asked | ({"dq"} if "dscale" in asked else set())
    problem = problem.differentiated(needed, dlogsumexp="dlogsumexp" in statistics)
    results = _backward_calls(problem, division, fallback, operands, statistics)
    arrays = operands.arrays()
    grads: dict[str, Any] = dict.fromkeys(CAPTURED[: len(problem.captured)])
    names = [DIFFERENTIATED[grad] for grad in problem.gradients]
    grads |= dict(zip(names, results, strict=True))
    if "dscale" in asked:  # S = τ Q Kᵀ, so that τ dτ = Σ S dS = Σ Q dQ
        query, live = operands.query, padding.live_rows(problem, statistics["m"])
        if live is not None:
            query = placed(padding.zero_rows, jax.typeof(query).sharding.spec, live, query)
        query = query.astype(operands.scale.dtype)
        rows = jnp.einsum("btnd,btnd->btn", query, grads["query"], precision="highest")  # a CPU sums one by one
        grads["scale"] = rows.sum() / operands.scale
    grads = {name: x if x is None else x.astype(arrays[name].dtype) for name, x in grads.items()}
    return (Operands.of(grads),)


def _unrounded(problem: Problem, asked: jax.Array) -> Problem:
    """Return the problem of the calls, whose O and dQ are not rounded if the gradient of the scale is asked for.

    dS = P (dP - D) sums to zero over the keys, and D = dO · O. A rounded O shifts D, so each row of the scale's
    gradient, Σ S dS, would err by the shift times the mean score of the row.
    """
    return dataclasses.replace(problem, unrounded=asked.size > 0)


attention.defvjp(_forward, _backward, symbolic_zeros=True)

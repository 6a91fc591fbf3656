"""The two XLA custom calls, `jax_flash_forward` and `jax_flash_backward`, as JAX functions.

`forward` and `backward` take the arrays of a problem with any number of leading dims in place of the batch (`vmap` adds
one; each is full or 1). From the outside in, each is

    custom_jvp            derivatives of any order go through `blockwise.py`, the same algorithm in plain JAX
    custom_vmap           a mapped axis becomes one more leading dim
    custom_partitioning   every device computes its own leading dims and heads (`partitioning.py`)
    ffi_call              the leading dims become the batch of one `Problem`

Operands, results and formulas: docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jax_flash import _native, blockwise, partitioning
from jax_flash.partitioning import Arrays, Results
from jax_flash.problem import BLOCK_MASK, DIFFERENTIATED, DIMS, Extent, Operands, Problem, result_types
from jax_flash.varying import varying_alike

for _platform, _handlers in _native.registrations().items():
    for _target, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


def refusal(problem: Problem, platform: str) -> str | None:
    """Why a platform ("cpu", "cuda", …: lowering's names) has no fused kernels for a problem; None: it has."""
    if platform == "cpu":
        return None
    if platform == "cuda":
        return _native.cuda_refusal(problem.encode()) or None
    return f"no fused kernels for platform {platform!r} in this version"


class Call(NamedTuple):
    """What is static in a call."""

    results: tuple[str, ...]  # names in DIMS
    problem: Problem
    fallback: bool  # to `blockwise.py` on a platform that has no handler; otherwise XLA refuses to compile it there


def forward(problem: Problem, fallback: bool, operands: Operands) -> Results:
    """Algorithm 2 as one custom call: (o, l, m)."""
    return _differentiable(Call(("o", "l", "m"), problem, fallback), operands.arrays())


def backward(
    problem: Problem,
    fallback: bool,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None = None,
) -> Results:
    """Algorithm 4 as one custom call: those of (dq, dk, dv, dbias) that the problem asks for."""
    arrays = operands.arrays() | {"o": o, "l": l, "m": m, "do": do}
    if dlogsumexp is not None:
        arrays["dlogsumexp"] = dlogsumexp
    results = tuple(name for name in DIFFERENTIATED if getattr(problem, name))
    return _differentiable(Call(results, problem, fallback), arrays)


# --- custom_jvp -------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(call: Call, arrays: Arrays) -> Results:
    return _mappable(call)(arrays)


@_differentiable.defjvp
def _jvp(call: Call, primals, tangents):
    def plain(arrays: Arrays) -> Results:
        types = result_types(call.problem, call.results, (call.problem.batch,), arrays.get("bias"))
        return partitioning.automatic(functools.partial(_blockwise, call), call.problem, arrays, types)

    _, result_tangents = jax.jvp(plain, primals, tangents)
    return _differentiable(call, *primals), result_tangents


def _blockwise(call: Call, arrays: Arrays) -> Results:
    operands = Operands.of(arrays)
    if "o" in call.results:
        return blockwise.forward(call.problem, operands)
    o, l, m, do = (arrays[name] for name in ("o", "l", "m", "do"))
    return blockwise.backward(call.problem, operands, o, l, m, do, arrays.get("dlogsumexp"))


# --- custom_vmap ------------------------------------------------------------------------------------------------------


def _mappable(call: Call) -> Callable[[Arrays], Results]:
    mapped = custom_vmap(functools.partial(_sharded, call))

    @mapped.def_vmap
    def rule(axis_size, batched, arrays):
        (batched,) = batched
        if batched.get("head_id"):
            raise NotImplementedError("jax_flash: dropout_head_ids under vmap; they are the same for the whole batch")

        def leading(name: str, x: jax.Array) -> jax.Array:
            if batched[name] or name == "head_id":
                return x
            # A bias that all mapped examples share still has one gradient for each of them.
            size = axis_size if name == "bias" and "dbias" in call.results else 1
            return jnp.broadcast_to(x, (size, *x.shape))

        results = _mappable(call)({name: leading(name, x) for name, x in arrays.items()})
        return results, (True,) * len(results)

    return mapped


# --- custom_partitioning ----------------------------------------------------------------------------------------------


def _sharded(call: Call, arrays: Arrays) -> Results:
    types = result_types(call.problem, call.results, _lead(arrays), arrays.get("bias"))
    return partitioning.divided(functools.partial(_custom_call, call), call.problem, arrays, types)


def _lead(arrays: Arrays) -> tuple[int, ...]:
    """The leading dims of all arrays together."""
    return jnp.broadcast_shapes(
        *(x.shape[: x.ndim - len(DIMS[name])] for name, x in arrays.items() if name != "head_id")
    )


# --- ffi_call ---------------------------------------------------------------------------------------------------------


def _custom_call(call: Call, arrays: Arrays) -> Results:
    """One call on one device: the leading dims become its batch."""
    lead = _lead(arrays)
    batch = math.prod(lead)
    one_block_mask = all(math.prod(arrays[name].shape[: len(lead)]) == 1 for name in BLOCK_MASK if name in arrays)

    def fold(name: str, x: jax.Array) -> jax.Array:
        if name == "head_id":
            return x
        here, dims = x.shape[: len(lead)], x.shape[len(lead) :]
        if name in ("bias", "mask") and math.prod(here) == 1 or name in BLOCK_MASK and one_block_mask:
            return x.reshape(1, *dims)
        return jnp.broadcast_to(x, (*lead, *dims)).reshape(batch, *dims)

    def unfold(name: str, x: jax.Array) -> jax.Array:
        if name == "dbias" and x.shape[0] == 1:
            return x.reshape(arrays["bias"].shape)
        x = x.reshape(*lead, *x.shape[1:])
        shared = [i for i in range(len(lead)) if name == "dbias" and arrays["bias"].shape[i] == 1]
        return x.sum(shared, keepdims=True) if shared else x

    folded = {name: fold(name, arrays[name]) for name in DIMS if name in arrays}
    problem = dataclasses.replace(
        call.problem,
        batch=batch,
        q_heads=folded["query"].shape[2],
        kv_heads=folded["key"].shape[2],
        bias=Extent.of(folded["bias"]) if "bias" in folded else None,
        mask=Extent.of(folded["mask"]) if "mask" in folded else None,
        block_mask=Extent.of_blocks(folded["blocks"]) if "blocks" in folded else None,
    )
    types = result_types(problem, call.results, (batch,), folded.get("bias"))
    target = "jax_flash_forward" if "o" in call.results else "jax_flash_backward"

    def native(arrays: Arrays, scratch_bytes: int = 0) -> Results:
        """On a GPU what a call needs in between is its last result, so that XLA plans its memory."""
        scratch = [jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8)] if scratch_bytes else []
        operands = (arrays[name] for name in DIMS if name in arrays)
        results = jax.ffi.ffi_call(target, [*types.values(), *scratch])(*operands, problem=problem.encode())
        return varying_alike(tuple(results[: len(types)]), arrays)

    scratch_bytes = _native.cuda_scratch_bytes(problem.encode(), target == "jax_flash_backward")
    on_cuda = functools.partial(native, scratch_bytes=scratch_bytes)
    if call.fallback:
        plain = functools.partial(_blockwise, call._replace(problem=problem))
        platforms = {} if refusal(problem, "cuda") else {"cuda": on_cuda}
        results = lax.platform_dependent(folded, cpu=native, **platforms, default=plain)
    elif scratch_bytes:
        results = lax.platform_dependent(folded, cpu=native, cuda=on_cuda)
    else:
        results = native(folded)
    return tuple(map(unfold, call.results, results))

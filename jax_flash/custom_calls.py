"""The two XLA custom calls, `jax_flash_forward` and `jax_flash_backward`, as JAX functions.

`forward` and `backward` take the arrays of a problem with any number of leading dims in place of the batch (`vmap` adds
one; each is full or 1). From the outside in, each is

    custom_jvp            derivatives of any order go through `blockwise.py`, the same algorithm in plain JAX
    custom_vmap           a mapped axis becomes one more leading dim
    custom_partitioning   every device computes its own leading dims and heads
    ffi_call              the leading dims become the batch of one `Problem`

Operands, results and formulas: docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash import _native, blockwise
from jax_flash.problem import Extent, Operands, Problem
from jax_flash.varying import varying_alike

PLATFORMS = ("cpu",)  # that have handlers

for _target, _handler in _native.registrations().items():
    jax.ffi.register_ffi_target(_target, _handler, platform="cpu")

# The dims of every array after its leading dims: T and S lengths, N and K heads, D and E head dims.
_DIMS = {
    "query": "TND",
    "key": "SKD",
    "value": "SKE",
    "bias": "NTS",
    "mask": "NTS",
    "q_lengths": "",
    "kv_lengths": "",
    "q_segments": "T",
    "kv_segments": "S",
    "query_offset": "",
    "seed": "X",
    "batch_id": "",
    "head_id": "N",  # no leading dims: one id a head
    "o": "TNE",
    "l": "NT",
    "m": "NT",
    "do": "TNE",
    "dlogsumexp": "NT",
    "dq": "TND",
    "dk": "SKD",
    "dv": "SKE",
    "dbias": "NTS",
}
DIFFERENTIATED = {"dq": "query", "dk": "key", "dv": "value", "dbias": "bias"}

Arrays = dict[str, jax.Array]
Results = tuple[jax.Array, ...]


class Call(NamedTuple):
    """What is static in a call."""

    results: tuple[str, ...]  # names in _DIMS
    problem: Problem
    fallback: bool  # to `blockwise.py` on a platform that has no handler; otherwise XLA refuses to compile it there


def forward(problem: Problem, fallback: bool, operands: Operands) -> Results:
    """Algorithm 2 as one custom call: (o, l, m)."""
    return _differentiable(Call(("o", "l", "m"), problem, fallback), _present(operands._asdict()))


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
    arrays = operands._asdict() | {"o": o, "l": l, "m": m, "do": do, "dlogsumexp": dlogsumexp}
    results = tuple(name for name in DIFFERENTIATED if getattr(problem, name))
    return _differentiable(Call(results, problem, fallback), _present(arrays))


def _present(arrays: dict[str, jax.Array | None]) -> Arrays:
    return {name: x for name, x in arrays.items() if x is not None}


# --- custom_jvp -------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(call: Call, arrays: Arrays) -> Results:
    return _mappable(call)(arrays)


@_differentiable.defjvp
def _jvp(call: Call, primals, tangents):
    _, result_tangents = jax.jvp(functools.partial(_blockwise, call), primals, tangents)
    return _differentiable(call, *primals), result_tangents


def _blockwise(call: Call, arrays: Arrays) -> Results:
    operands = Operands(**{name: arrays.get(name) for name in Operands._fields})
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
    local = functools.partial(_custom_call, call)
    results = dict(zip(call.results, jax.eval_shape(local, arrays), strict=True))
    partitioned = custom_partitioning(local)
    partitioned.def_partition(
        partition=functools.partial(_partition, call),
        sharding_rule=_sharding_rule(call.problem, dict(sorted(arrays.items())), results),
    )
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return partitioned(arrays)
    axes = _axes(call.problem, mesh, {name: (x.shape, jax.typeof(x).sharding.spec) for name, x in arrays.items()})
    shardings = tuple(NamedSharding(mesh, _spec(axes, name, x.shape)) for name, x in results.items())
    return jax.sharding.auto_axes(partitioned, out_sharding=shardings)(arrays)


def _dims(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """A name for every dim: "b0", "b1", … for leading dims, then letters; "1" for what is broadcast."""
    lead = len(shape) - len(_DIMS[name])
    dims = (*(f"b{i}" for i in range(lead)), *_DIMS[name])
    return tuple("1" if size == 1 else dim for size, dim in zip(shape, dims, strict=True))


def _sharding_rule(problem: Problem, operands: Arrays, results: Arrays) -> SdyShardingRule:
    """Leading dims and heads may be divided, lengths and head dims are needed whole."""
    grouped = problem.kv_heads > 1 and problem.group > 1
    heads = CompoundFactor("K", "G") if grouped else "K" if problem.kv_heads > 1 else "G"
    ones = itertools.count()
    whole: set[str] = set()

    def factor(dim: str) -> str | CompoundFactor:
        if dim == "N":
            return heads
        name = f"one{next(ones)}" if dim == "1" else dim
        if dim != "K" and not dim.startswith("b"):
            whole.add(name)
        return name

    def mappings(arrays: Arrays) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(factor, _dims(name, x.shape))) for name, x in arrays.items())

    return SdyShardingRule(
        mappings(operands),
        mappings(results),
        need_replication_factors=tuple(sorted(whole)),
        **({"G": problem.group} if grouped else {}),
    )


Axes = dict[str, tuple[str, ...]]  # the mesh axes that divide a dim


def _axes(problem: Problem, mesh: Mesh | AbstractMesh, placed: Mapping[str, tuple[tuple[int, ...], PartitionSpec]]) -> Axes:
    """The mesh axes that divide the leading dims and the heads: those of the first array that is divided there."""

    def divides(dim: str, size: int, parts: int) -> bool:
        if dim == "N":  # whole groups to a device, or whole devices to a group
            size_kv, heads = problem.kv_heads, problem.q_heads // parts
            return size % parts == 0 and (size_kv % parts == 0 or problem.group % heads == 0)
        return (dim.startswith("b") or dim == "K") and size % parts == 0

    axes: Axes = {}
    taken: set[str] = set()
    for name in (name for name in _DIMS if name in placed):
        shape, spec = placed[name]
        for dim, size, entry in zip(_dims(name, shape), shape, spec, strict=False):
            here = (entry,) if isinstance(entry, str) else tuple(entry or ())
            parts = math.prod(mesh.shape[axis] for axis in here)
            dim = "N" if dim == "K" and divides(dim, size, parts) else dim
            if here and dim not in axes and not taken & set(here) and divides(dim, size, parts):
                axes[dim] = here
                taken |= set(here)
    if problem.kv_heads % math.prod(mesh.shape[axis] for axis in axes.get("N", ())) == 0:
        axes["K"] = axes.get("N", ())
    return axes


def _spec(axes: Axes, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) or None for dim in _dims(name, shape)))


def _partition(call: Call, mesh: Mesh, args, results):
    (arrays,) = args
    problem = call.problem
    axes = _axes(problem, mesh, {name: (x.shape, x.sharding.spec) for name, x in arrays.items()})
    head_axes = axes.get("N", ())
    local_heads = problem.q_heads // math.prod(mesh.shape[axis] for axis in head_axes)
    shared_kv_head = "K" not in axes  # a device's query heads all read one key/value head

    def kv_head() -> jax.Array:
        return lax.axis_index(head_axes) * local_heads // problem.group

    def local(arrays: Arrays) -> Results:
        if shared_kv_head:
            arrays = arrays | {
                name: lax.dynamic_slice_in_dim(arrays[name], kv_head(), 1, axis=-2) for name in ("key", "value")
            }
        return tuple(map(complete, call.results, _custom_call(call, arrays)))

    def complete(name: str, x: jax.Array) -> jax.Array:
        """Sums a gradient over the devices that hold other parts of it."""
        if name in ("dk", "dv") and shared_kv_head:
            zeros = jnp.zeros((*x.shape[:-2], problem.kv_heads, x.shape[-1]), x.dtype)
            return lax.psum(lax.dynamic_update_slice_in_dim(zeros, x, kv_head(), axis=-2), head_axes)
        if name == "dbias":
            whole = {dim: over for dim, over in axes.items() if dim not in _dims(name, x.shape) and dim != "K"}
            return lax.psum(x, tuple(axis for over in whole.values() for axis in over))
        return x

    arg_shardings = {name: NamedSharding(mesh, _spec(axes, name, x.shape)) for name, x in arrays.items()}
    shardings = tuple(NamedSharding(mesh, _spec(axes, name, x.shape)) for name, x in zip(call.results, results, strict=True))
    return mesh, local, shardings, (arg_shardings,)


# --- ffi_call ---------------------------------------------------------------------------------------------------------


def _custom_call(call: Call, arrays: Arrays) -> Results:
    """One call on one device: the leading dims become its batch."""
    lead = jnp.broadcast_shapes(*(x.shape[: x.ndim - len(_DIMS[n])] for n, x in arrays.items() if n != "head_id"))
    batch = math.prod(lead)

    def fold(name: str, x: jax.Array) -> jax.Array:
        if name == "head_id":
            return x
        here, dims = x.shape[: len(lead)], x.shape[len(lead) :]
        if name in ("bias", "mask") and math.prod(here) == 1:
            return x.reshape(1, *dims)
        return jnp.broadcast_to(x, (*lead, *dims)).reshape(batch, *dims)

    def unfold(name: str, x: jax.Array) -> jax.Array:
        if name != "dbias":
            return x.reshape(*lead, *x.shape[1:])
        ones = [i for i in range(len(lead)) if arrays["bias"].shape[i] == 1]
        return x.reshape(arrays["bias"].shape) if x.shape[0] == 1 else x.reshape(*lead, *x.shape[1:]).sum(ones, keepdims=True)

    arrays = varying_alike(arrays, arrays)
    folded = {name: fold(name, arrays[name]) for name in _DIMS if name in arrays}
    problem = dataclasses.replace(
        call.problem,
        batch=batch,
        q_heads=folded["query"].shape[2],
        kv_heads=folded["key"].shape[2],
        **{name: Extent.of(folded[name]) for name in ("bias", "mask") if name in folded},
    )
    shapes = {
        "o": (batch, problem.q_len, problem.q_heads, problem.v_dim),
        **dict.fromkeys(("l", "m"), (batch, problem.q_heads, problem.q_len)),
        **{grad: folded[name].shape for grad, name in DIFFERENTIATED.items() if name in folded},
    }
    dtypes = dict.fromkeys(("l", "m", "dbias"), problem.accumulation_dtype)
    types = [jax.ShapeDtypeStruct(shapes[name], dtypes.get(name, problem.dtype)) for name in call.results]
    target = "jax_flash_forward" if "o" in call.results else "jax_flash_backward"

    def native(arrays: Arrays) -> Results:
        operands = (arrays[name] for name in _DIMS if name in arrays)
        results = jax.ffi.ffi_call(target, types)(*operands, problem=problem.encode())
        return varying_alike(tuple(results), arrays)

    if call.fallback:
        plain = functools.partial(_blockwise, call._replace(problem=problem))
        results = lax.platform_dependent(folded, **dict.fromkeys(PLATFORMS, native), default=plain)
    else:
        results = native(folded)
    return tuple(map(unfold, call.results, results))

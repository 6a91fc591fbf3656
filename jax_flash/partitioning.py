"""Division of a call over the devices of a mesh: each device computes its own leading dims, heads and rows.

A sharded sequence either exchanges rows for heads by all-to-all, or passes keys and values around the devices
(`sequence.py`): whichever sends fewer bytes. Head dims, and sequences that cannot be divided, are gathered. The
gradient of an array that several devices share, such as the bias of a sharded batch, is summed over these devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_flash import sequence
from jax_flash.explicit import explicit_mesh, placed
from jax_flash.operands import DIFFERENTIATED, DIMS, SHARED_GRADIENTS
from jax_flash.problem import Problem
from jax_flash.sequence import Arrays, Compute, Division

Types = dict[str, jax.ShapeDtypeStruct]
Results = tuple[jax.Array, ...]
Function = Callable[[Arrays], Results]
Axes = dict[str, tuple[str, ...] | None]  # the mesh axes that divide each dim


def divided(compute: Compute, problem: Problem, arrays: Arrays, types: Types) -> Results:
    """Return the results of `compute(problem, arrays)`, with the work divided over the devices.

    Args:
      compute: function of a problem and of arrays by name, with any leading dims and any number of heads. It returns
        the results.
      problem: the whole problem.
      arrays, types: the arguments and the types of the results, by name (`operands.DIMS`).
    """
    function = functools.partial(compute, problem)
    if jax.sharding.get_abstract_mesh().manual_axes:  # inside shard_map, the arrays are local to this device
        return automatic(function, problem, arrays, types)
    call = custom_partitioning(function)
    call.def_partition(
        partition=functools.partial(_partition, compute, problem, tuple(types)),
        sharding_rule=_sharding_rule(problem, dict(sorted(arrays.items())), types),
        infer_sharding_from_operands=functools.partial(_infer, problem, tuple(types)),
    )
    return automatic(call, problem, arrays, types)


def automatic(function: Function, problem: Problem, arrays: Arrays, types: Types) -> Results:
    """Return `function(arrays)`. XLA chooses the shardings inside the function, even if mesh axes are explicit."""
    mesh = explicit_mesh(arrays["query"])
    if mesh is None:
        return function(arrays)
    specs = {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    axes = _axes(problem, mesh, {name: (x.shape, specs[name]) for name, x in arrays.items()})
    rows = specs["query"][-3]  # the rows of results are sharded like the rows of the query
    taken = set((rows,) if isinstance(rows, str) else rows or ())
    axes = {dim: over for dim, over in axes.items() if not taken & set(over or ())} | {"T": rows}
    places = [
        specs.get(DIFFERENTIATED.get(name, "")) or _spec(problem, axes, name, x.shape) for name, x in types.items()
    ]
    return placed(function, tuple(places), arrays)


def _dims(problem: Problem, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return a name for each dim of an array: "b0", "b1", … for leading dims, then letters, and "1" for size 1.

    The dim of keys is "T" if it is divided like the rows, and "S" if each device needs all keys.
    """
    lead = len(shape) - len(DIMS[name])
    dims = [*(f"b{i}" for i in range(lead)), *DIMS[name]]
    if problem.q_len == problem.kv_len and "T" not in dims:
        dims = ["T" if dim == "S" else dim for dim in dims]
    return tuple("1" if size == 1 else dim for size, dim in zip(shape, dims, strict=True))


def _sharding_rule(problem: Problem, operands: Arrays, results: Types) -> SdyShardingRule:
    """Return Shardy's rule. Leading dims and heads may be divided, and T together with S if they are equal."""
    ones = itertools.count()
    whole: dict[str, None] = {}  # an ordered set: Shardy wants the order of appearance

    divisible = {"N", "K"} | ({"T"} if problem.q_len == problem.kv_len else set())

    def factor(dim: str) -> str:
        if dim == "K" and problem.group == 1:
            return "N"
        name = f"one{next(ones)}" if dim == "1" else dim
        if dim not in divisible and not dim.startswith("b"):
            whole[name] = None
        return name

    def mappings(arrays: Arrays | Types) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(factor, _dims(problem, name, x.shape))) for name, x in arrays.items())

    return SdyShardingRule(
        mappings(operands),
        mappings(results),
        need_replication_factors=tuple(whole),
    )


def _axes(
    problem: Problem, mesh: Mesh | AbstractMesh, placed: Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
) -> Axes:
    """Return the mesh axes that divide the leading dims, the heads and the sequence ("T").

    If arrays differ, the first array that is divided in a dim decides.
    """

    def divides(dim: str, size: int, over: tuple[str, ...]) -> bool:
        parts = _parts(mesh, over)
        if dim == "T":
            return problem.q_len == problem.kv_len and Division.over(over, mesh.shape).refusal(problem) is None
        if dim == "N":  # each device has whole groups, or each group has whole devices
            size_kv, heads = problem.kv_heads, problem.q_heads // parts
            return size % parts == 0 and (size_kv % parts == 0 or problem.group % heads == 0)
        return (dim.startswith("b") or dim == "K") and size % parts == 0

    axes: Axes = {}
    taken: set[str] = set()
    for name in (name for name in DIMS if name in placed):
        shape, spec = placed[name]
        for dim, size, entry in zip(_dims(problem, name, shape), shape, spec, strict=False):
            here = (entry,) if isinstance(entry, str) else tuple(entry or ())
            if here and dim not in axes and not taken & set(here) and divides(dim, size, here):
                axes["N" if dim == "K" else dim] = here
                taken |= set(here)
    if problem.kv_heads % _parts(mesh, axes.get("N")) == 0:
        axes["K"] = axes.get("N")
    return axes


def _parts(mesh: Mesh | AbstractMesh, axes: tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[axis] for axis in axes or ())


def _rows(mesh: Mesh | AbstractMesh, axes: Axes) -> Division | None:
    """Return the division of the sequence, or None."""
    over = axes.get("T")
    return Division.over(over, mesh.shape) if over else None


def _spec(problem: Problem, axes: Axes, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) for dim in _dims(problem, name, shape)))


def _partition(compute: Compute, problem: Problem, names: tuple[str, ...], mesh: Mesh, args, results):
    if problem.dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "sharded float64 arrays need jax_enable_x64 for the whole process, because XLA partitions a program "
            'in another thread: call jax.config.update("jax_enable_x64", True) first'
        )
    (arrays,) = args
    mesh, axes = _placed(problem, mesh, arrays)
    axes = _by_heads(problem, mesh, axes)
    dims = {name: _dims(problem, name, x.shape) for name, x in zip(names, results, strict=True)}  # of global results
    head_axes = axes.get("N") or ()
    shared_kv_head = "K" not in axes  # all query heads of a device read one key/value head

    def kv_head() -> jax.Array:
        local_heads = problem.q_heads // _parts(mesh, head_axes)
        return lax.axis_index(head_axes) * local_heads // problem.group

    def local(arrays: Arrays) -> Results:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # local arrays are not sharded over the user's mesh
            if shared_kv_head:
                of_heads = (name for name in arrays if "K" in DIMS[name])
                kv = {name: lax.dynamic_slice_in_dim(arrays[name], kv_head(), 1, axis=-2) for name in of_heads}
                arrays = arrays | kv
            return tuple(map(complete, names, of_rows(arrays)))

    def of_rows(arrays: Arrays) -> Results:
        rows = _rows(mesh, axes)
        if rows is None:
            return compute(problem, arrays)
        if "o_tangent" in names:
            return sequence.tangent(compute, problem, rows, arrays)
        return (sequence.forward if "o" in names else sequence.backward)(compute, problem, rows, arrays)

    def complete(name: str, x: jax.Array) -> jax.Array:
        """Sum a gradient over the devices that have other contributions to it."""
        if name in ("dk", "dv") and shared_kv_head:
            zeros = jnp.zeros((*x.shape[:-2], problem.kv_heads, x.shape[-1]), x.dtype)
            return lax.psum(lax.dynamic_update_slice_in_dim(zeros, x, kv_head(), axis=-2), head_axes)
        if name in SHARED_GRADIENTS:
            shared = [over for dim, over in axes.items() if over and dim != "K" and dim not in dims[name]]
            return lax.psum(x, tuple(itertools.chain(*shared)))
        return x

    places = _shardings(problem, axes, mesh, dict(zip(names, results, strict=True)))
    return mesh, local, tuple(places.values()), (_shardings(problem, axes, mesh, arrays),)


def _infer(problem: Problem, names: tuple[str, ...], mesh: Mesh, args, results) -> tuple[NamedSharding, ...]:
    """Return the shardings of the results. GSPMD calls this function; Shardy uses the rule instead."""
    mesh, axes = _placed(problem, mesh, *args)
    return tuple(_shardings(problem, axes, mesh, dict(zip(names, results, strict=True))).values())


def _placed(problem: Problem, mesh: Mesh, arrays) -> tuple[Mesh, Axes]:
    """Return the mesh of a program, and the axes that divide a call on arrays with these shardings."""
    if mesh.empty:  # nothing in the program is sharded: all devices compute the same
        place = arrays["query"].sharding  # None if GSPMD calls before it has chosen one: then any one device will do
        mesh = Mesh(tuple(place.device_set if place else jax.local_devices()[:1]), ("devices",))
    specs = {name: getattr(x.sharding, "spec", PartitionSpec()) for name, x in arrays.items()}
    return mesh, _axes(problem, mesh, {name: (x.shape, specs[name]) for name, x in arrays.items()})


def _by_heads(problem: Problem, mesh: Mesh, axes: Axes) -> Axes:
    """Return axes that divide heads instead of rows, if this is possible and sends fewer bytes.

    XLA then exchanges rows for heads by all-to-all.
    """
    rows = _rows(mesh, axes)
    if rows is None:
        return axes
    heads = (*(axes.get("N") or ()), *rows.axes)
    if not sequence.by_heads(problem, rows, _parts(mesh, heads))[0]:
        return axes
    return {dim: over for dim, over in axes.items() if dim != "T"} | {"N": heads, "K": heads}


def _shardings(problem: Problem, axes: Axes, mesh: Mesh, arrays) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, _spec(problem, axes, name, x.shape)) for name, x in arrays.items()}

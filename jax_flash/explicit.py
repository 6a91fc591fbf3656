"""Calls of functions with arrays on a mesh with explicit axes. XLA places the arrays inside of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def explicit_mesh(*arrays: jax.Array) -> AbstractMesh | None:
    """Return the mesh with explicit axes of one of these arrays, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def first_axis(*arrays: jax.Array) -> Any:
    """Return the explicit mesh axis or axes that divide the first dim of one of these arrays, or None."""
    axes = (jax.typeof(x).sharding.spec[0] for x in arrays)
    return next((axis for axis in axes if axis is not None), None)


def placed(function: Callable[..., Tree], places: Any, *arrays: Any) -> Tree:
    """Call `function(*arrays)`. XLA places the arrays inside of the function.

    Args:
      function: the function to call.
      places: PartitionSpecs of the results, used if the arrays are on explicit axes. One may hold for several results.
      arrays: trees of arrays.
    """
    mesh = explicit_mesh(*jax.tree.leaves(arrays))
    if mesh is None:
        return function(*arrays)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), places, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    by_xla = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)
    with jax.sharding.use_abstract_mesh(mesh):  # a transformation may run outside of the user's context
        return by_xla(*arrays)


def on_first_axis(x: jax.Array, axis: Any) -> jax.Array:
    """Return `x` with its first dim divided over this explicit axis of its mesh. None means not divided."""
    return placed(lambda x: x, PartitionSpec(axis, *jax.typeof(x).sharding.spec[1:]), x)

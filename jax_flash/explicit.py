"""Functions whose arrays are on a mesh with explicit axes: what is inside is placed by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def explicit_mesh(*arrays: jax.Array) -> AbstractMesh | None:
    """The mesh with explicit axes that one of these arrays is on."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def first_axis(*arrays: jax.Array) -> Any:
    """The explicit mesh axis, or axes, that the first dim of one of these arrays is divided over; None: of none."""
    axes = (jax.typeof(x).sharding.spec[0] for x in arrays)
    return next((axis for axis in axes if axis is not None), None)


def placed(function: Callable[..., Tree], places: Any, *arrays: Any) -> Tree:
    """`function(*arrays)`, where XLA places what is inside. Of arrays on explicit axes the results are placed as given.

    Args:
      places: PartitionSpecs, of each result or of several together.
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
    """`x` with its first dim divided over this explicit axis of its mesh, or not at all."""
    return placed(lambda x: x, PartitionSpec(axis, *jax.typeof(x).sharding.spec[1:]), x)

"""Functions whose arrays are on a mesh with explicit axes: what is inside is placed by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType

Tree = TypeVar("Tree")


def explicit_mesh(*arrays: jax.Array) -> AbstractMesh | None:
    """The mesh with explicit axes that one of these arrays is on."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def placed(function: Callable[..., Tree], mesh: AbstractMesh, shardings: Any) -> Callable[..., Tree]:
    """The function where XLA places what is inside, for arrays on such a mesh. Its results are placed as given."""
    by_xla = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)

    def call(*args: Any) -> Tree:
        with jax.sharding.use_abstract_mesh(mesh):  # a transformation may run outside of the user's context
            return by_xla(*args)

    return call

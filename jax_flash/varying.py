"""Inside of `jax.shard_map` the type of an array names the mesh axes it varies over; loops want them alike."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def varying_alike(x: Tree, like: Any) -> Tree:
    """`x`, every array marked as varying over all the manual mesh axes that any array of `like` varies over.

    Outside of `jax.shard_map` it does nothing.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(like)))

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(axes - varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes that it varies over."""
    aval: Any = jax.typeof(x)  # jax 0.10 moved the attribute
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def type_varying_as(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The type of an array of this shape that has the dtype of `x` and varies over the same mesh axes."""
    return _type_of(jax.typeof(x), shape)


def type_of_variable(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a variable of a jaxpr, with the mesh axes that it varies over."""
    return _type_of(x.aval, x.aval.shape, sharding=x.aval.sharding)


def _type_of(aval: Any, shape: tuple[int, ...], **more: Any) -> jax.ShapeDtypeStruct:
    name = "vma" if hasattr(aval, "vma") else "manual_axis_type"
    return jax.ShapeDtypeStruct(shape, aval.dtype, **{name: getattr(aval, name)}, **more)

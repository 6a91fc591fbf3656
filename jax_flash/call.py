"""`Call`: the options of a call of a public function, as they pass from module to module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypedDict, TypeVar, cast

import jax
from jax import lax
from jax.typing import ArrayLike

from jax_flash import checks, layouts, windows
from jax_flash.block_sparse import BlockMask
from jax_flash.layouts import Layout, SequenceLayout
from jax_flash.sequence import Division
from jax_flash.windows import Window

Implementation = Literal["flash", "xla", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The options of a call, with the names, types and defaults in `dot_product_attention`.

    The constructor checks flags and the implementation, `window` and `division` check their options. The checks of the
    other options need the shapes and dtypes of the arrays, and are in `arguments.py`.
    """

    scale: float | ArrayLike | None = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: Window | None = None
    implementation: Implementation | None = None
    sinks: ArrayLike | None = None
    dropout_batch_ids: ArrayLike | None = None
    dropout_head_ids: ArrayLike | None = None
    query_segment_ids: ArrayLike | None = None
    key_value_segment_ids: ArrayLike | None = None
    logits_soft_cap: float | None = None
    query_offset: int | ArrayLike | None = None
    block_mask: BlockMask | None = None
    score_mod: Callable[..., jax.Array] | None = None
    mask_mod: Callable[..., jax.Array] | None = None
    sequence_axis: str | tuple[str, ...] | None = None
    sequence_layout: SequenceLayout | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    broadcast_dropout: bool = False
    precision: lax.PrecisionLike = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("is_causal", "broadcast_dropout", "deterministic"):
            object.__setattr__(self, name, checks.flag(name, getattr(self, name)))
        _check_implementation(self.implementation)

    @functools.cached_property
    def window(self) -> windows.Bounds:
        """The bounds of `local_window_size`."""
        return windows.checked(self.local_window_size)

    @functools.cached_property
    def division(self) -> Division | None:
        """The division of the sequence over devices that `sequence_axis` requests, or None."""
        axis, layout = self.sequence_axis, self.sequence_layout
        if axis is None:
            if layout is not None:
                raise ValueError("sequence_layout needs a sequence_axis: pass the mesh axis of the sequence")
            return None
        axes = (axis,) if isinstance(axis, str) else axis
        if not isinstance(axes, tuple) or not axes or not all(isinstance(name, str) for name in axes):
            wanted = "sequence_axis must be the name of a mesh axis or a tuple of them"
            raise TypeError(f"{wanted}, not {checks.described(axis)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"sequence_axis={axis!r} names an axis twice")
        named = isinstance(layout, str) and layout in ("contiguous", "zigzag")
        if not (layout is None or named or isinstance(layout, Layout)):
            raise ValueError(
                f'sequence_layout must be "contiguous", "zigzag" or a jax_flash.Layout, not {checks.described(layout)}'
            )
        mesh = jax.sharding.get_abstract_mesh()
        if not set(axes) <= set(mesh.manual_axes):
            raise ValueError(
                f"sequence_axis={axis!r} is no axis of an enclosing jax.shard_map: call inside jax.shard_map over this "
                "axis"
            )
        manual = {name: size for name, size in mesh.shape.items() if name in mesh.manual_axes}
        division = Division.over(axes, manual, layout or "contiguous")
        if isinstance(layout, Layout):
            layouts.check(layout, division.devices, axis)
        return division


class Options(TypedDict, total=False):
    """The fields of `Call`, for the overloads of `dot_product_attention` and for `Problem.of`."""

    scale: float | ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: Window | None
    implementation: Implementation | None
    sinks: ArrayLike | None
    dropout_batch_ids: ArrayLike | None
    dropout_head_ids: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    query_offset: int | ArrayLike | None
    block_mask: BlockMask | None
    score_mod: Callable[..., jax.Array] | None
    mask_mod: Callable[..., jax.Array] | None
    sequence_axis: str | tuple[str, ...] | None
    sequence_layout: SequenceLayout | None
    dropout_rate: float
    dropout_key: jax.Array | None
    broadcast_dropout: bool
    precision: lax.PrecisionLike
    deterministic: bool


# Names of options in other attention libraries, with the names here.
ELSEWHERE = {
    "causal": "is_causal",
    "window_size": "local_window_size",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "softcap": "logits_soft_cap",
    "dropout_p": "dropout_rate",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an unknown argument. Name the argument to use instead."""
    for name in given:
        if name not in known:
            meant = ELSEWHERE.get(name)
            hint = f"use {meant} instead" if meant in known else f"the arguments are {', '.join(known)}"
            raise TypeError(f"got an unexpected keyword argument {name!r}: {hint}")


def explains_names(function: Function) -> Function:
    """Return the function with the errors of `check_names` for unknown keyword arguments."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        check_names(given, known)
        return function(*args, **given)

    return cast(Function, checked)


def _check_implementation(x: Any) -> None:
    if isinstance(x, str) and x == "cudnn":
        raise ValueError(
            'implementation="cudnn" is only for jax.nn.dot_product_attention: use "flash" for the fused kernels here, '
            "or leave it out"
        )
    if x is not None and not (isinstance(x, str) and x in ("flash", "xla", "reference")):
        raise ValueError(f'implementation must be None, "flash", "xla" or "reference", not {checks.described(x)}')

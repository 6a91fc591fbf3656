"""Attention over a sequence that is divided over devices: keys and values go round (ring attention, arXiv 2310.01889).

Every device has rows of Q of its own and, at each visit, the keys and values of another one, which are on their way to
the next meanwhile. What it computes with them is an attention on arrays of its own, which is told by its lengths, its
query offset and its origin where in the whole it is. Results are merged by their statistics; the backward sends the
gradients of keys and values along with them.

Arrays are by name (`problem.DIMS`) and may have any leading dims. Those that have rows or keys, Q, K, V, what is like
them and segment ids, are those of this device; of a bias or a mask it has its own rows and all columns, in natural
order; a block mask is there as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import block_sparse, dropout
from jax_flash.problem import DCAPTURED, DIMS, Problem
from jax_flash.varying import varying_alike

Arrays = dict[str, jax.Array]
Rows = tuple[jax.Array, jax.Array, jax.Array]  # O, l and m
Compute = Callable[[Problem, Arrays], tuple[jax.Array, ...]]
Layout = Literal["contiguous", "zigzag"]

TRAVELLING = ("key", "value", "kv_segments")


class Division(NamedTuple):
    """How a sequence is divided."""

    axes: tuple[str, ...]  # the mesh axes that it is divided over
    devices: int  # along them
    layout: Layout = "contiguous"

    @property
    def parts(self) -> int:
        """Parts of the sequence that a device has. In the zigzag layout a short row's is beside a long one's."""
        return 2 if self.layout == "zigzag" else 1

    def part(self, length: int) -> int:
        """The rows, or keys, of a part."""
        return length // (self.devices * self.parts)

    def starts(self, device: Any, length: int) -> list[Any]:
        """The first row, or key, of each part of a device's."""
        numbers = [device] if self.parts == 1 else [device, 2 * self.devices - 1 - device]
        return [number * self.part(length) for number in numbers]

    def refusal(self, problem: Problem) -> str | None:
        """Why a problem cannot be divided so; None: it can."""
        whole = self.devices * self.parts
        parts = f"{whole} parts of {' x '.join(self.axes)} in the {self.layout} layout"
        if problem.q_len % whole or problem.kv_len % whole:
            return f"T = {problem.q_len} and S = {problem.kv_len} do not divide into {parts}"
        rows, keys = self.part(problem.q_len), self.part(problem.kv_len)
        if problem.drop_threshold and (rows % dropout.TILE or keys % dropout.TILE):
            return f"dropout wants parts of a multiple of {dropout.TILE}, and {parts} have {rows} rows and {keys} keys"
        if problem.block_mask and (rows % problem.q_block or keys % problem.kv_block):
            blocks = f"blocks of {problem.q_block} x {problem.kv_block}"
            return f"a block mask wants parts of whole {blocks}, and {parts} have {rows} rows and {keys} keys"
        return None


def zigzag(x: ArrayLike, devices: int, axis: int) -> jax.Array:
    """A sequence in the order in which `sequence_layout="zigzag"` has it, so that causal work is equal on all devices.

    Of 2·devices parts of the axis, device r gets the parts r and 2·devices - 1 - r: the axis is then to be sharded over
    the devices. `unzigzag` undoes it.

    Raises:
      ValueError: the axis does not divide into 2·devices parts.
    """
    return _reordered(x, devices, axis, _zigzag_order(devices))


def unzigzag(x: ArrayLike, devices: int, axis: int) -> jax.Array:
    """The inverse of `zigzag`, with the same arguments."""
    return _reordered(x, devices, axis, np.argsort(_zigzag_order(devices)))


def _zigzag_order(devices: int) -> np.ndarray:
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], 1).ravel()


def _reordered(x: ArrayLike, devices: int, axis: int, order: np.ndarray) -> jax.Array:
    x = jnp.asarray(x)
    axis %= x.ndim
    if x.shape[axis] % len(order):
        raise ValueError(f"axis {axis} of shape {x.shape} does not divide into 2 x {devices} parts")
    parts = x.reshape(*x.shape[:axis], len(order), -1, *x.shape[axis + 1 :])
    return jnp.take(parts, order, axis).reshape(x.shape)


class Visit(NamedTuple):
    """What a device does with the keys of the one that is `shift` before it."""

    shift: int
    pairs: tuple[tuple[int, int], ...]  # its parts of rows, each with a part of these keys


def visits(problem: Problem, division: Division) -> list[Visit]:
    """Those in which some device sees something, as far as causal masks and windows tell; the first of its own keys."""
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    devices = np.arange(division.devices)
    row_starts = division.starts(devices, problem.q_len)
    right = 0 if problem.causal else problem.window_right

    def visible(row_start: np.ndarray, key_start: np.ndarray) -> bool:
        if problem.query_offset:  # nobody knows it
            return True
        nearest, furthest = key_start - (row_start + rows - 1), key_start + keys - 1 - row_start  # of keys from rows
        seen = np.ones(len(devices), bool)
        if problem.window_left >= 0:
            seen &= furthest >= -problem.window_left
        if right >= 0:
            seen &= nearest <= right
        return bool(seen.any())

    found = []
    for shift in range(division.devices):
        key_starts = division.starts((devices - shift) % division.devices, problem.kv_len)
        pairs = tuple(
            (a, b)
            for a in range(division.parts)
            for b in range(division.parts)
            if visible(row_starts[a], key_starts[b]) or (shift == 0 and a == b)
        )
        if pairs:
            found.append(Visit(shift, pairs))
    return found


def merge(first: Rows, second: Rows) -> Rows:
    """O, l and m over the keys of two results of the same rows together: O in the dtype of the statistics.

    With m = max(m1, m2), l = e^(m1-m) l1 + e^(m2-m) l2 and O = (e^(m1-m) l1 O1 + e^(m2-m) l2 O2) / l (section 3.1 of
    arXiv 2205.14135). Rows that have seen nothing are l = 0, m = -inf and O = 0, and change nothing.

    Args:
      first, second: O [..., T, N, E], l and m [..., N, T].
    """
    (_, l1, m1), (_, l2, m2) = first, second
    m = lax.stop_gradient(jnp.maximum(m1, m2))
    finite = jnp.where(m == -jnp.inf, 0, m)
    l1, l2 = jnp.exp(m1 - finite) * l1, jnp.exp(m2 - finite) * l2
    l = l1 + l2
    share1, share2 = (jnp.swapaxes(x / jnp.where(l == 0, 1, l), -1, -2)[..., None] for x in (l1, l2))
    return share1 * first[0].astype(l.dtype) + share2 * second[0].astype(l.dtype), l, m


def forward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> Rows:
    """O, l and m of this device's rows.

    Args:
      compute: a forward on one device, of a problem and arrays by name.
      problem: the whole one.
    """
    rows: list[Rows | None] = [None] * division.parts
    for visit, visitors in _tour(problem, division, arrays):
        for a, b in visit.pairs:
            part = _part(problem, division, arrays | visitors, visit.shift, a, b)
            o, l, m = compute(*part)
            before = rows[a]
            rows[a] = (o, l, m) if before is None else merge(before, (o, l, m))
    o, l, m = (jnp.concatenate(parts, _axis(name)) for name, parts in zip("olm", zip(*rows, strict=True), strict=True))
    return o.astype(arrays["query"].dtype), l, m


def backward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> dict[str, jax.Array]:
    """The gradients that the problem asks for, of this device's arrays: those of a bias and of captured arrays are the
    part that its rows have in them.

    Args:
      compute: a backward on one device, likewise.
      arrays: the operands, with the o, l and m of the forward, do and dlogsumexp.
    """
    dtype = problem.accumulation_dtype
    own: dict[Any, Any] = {}  # dq by part of the rows, and what has no part
    travelled: dict[Any, Any] = {}  # dk and dv, by part of the keys
    shift = 0
    for visit, visitors in _tour(problem, division, arrays):
        travelled, shift = _sent(travelled, division, visit.shift - shift), visit.shift
        for a, b in visit.pairs:
            local, operands = _part(problem, division, arrays | visitors, visit.shift, a, b)
            for name, x in zip(problem.gradients, compute(local, operands), strict=True):
                x = x.astype(dtype)
                if name in ("dk", "dv"):
                    _add(travelled, (name, b), x)
                elif name == "dq":
                    _add(own, (name, a), x)
                elif name in DCAPTURED:
                    _add(own, name, x)
                else:
                    own[name] = _with_bias_part(problem, division, arrays, own.get(name), x, visit.shift, a, b)
    travelled = _sent(travelled, division, -shift)
    return {name: _whole(own | travelled, name, division).astype(_dtype(problem, name)) for name in problem.gradients}


def _tour(problem: Problem, division: Division, arrays: Arrays) -> Iterator[tuple[Visit, Arrays]]:
    """Every visit, and the keys that are there then. They are asked for before those of the visit before are used."""
    visitors = {name: arrays[name] for name in TRAVELLING if name in arrays}
    all_visits = visits(problem, division)
    for visit, after in zip(all_visits, [*all_visits[1:], None], strict=True):
        following = visitors if after is None else _sent(visitors, division, after.shift - visit.shift)
        yield visit, visitors
        visitors = following


def _sent(tree: Any, division: Division, shift: int) -> Any:
    """Every device's arrays, to the one that comes so many after it."""
    if shift % division.devices == 0:
        return tree
    pairs = [(i, (i + shift) % division.devices) for i in range(division.devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, division.axes, pairs), tree)


def _starts(problem: Problem, division: Division, shift: int, a: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The whole's numbers of the first row and key of a pair."""
    device = lax.axis_index(division.axes)
    source = (device - shift) % division.devices
    return division.starts(device, problem.q_len)[a], division.starts(source, problem.kv_len)[b]


def _part(problem: Problem, division: Division, arrays: Arrays, shift: int, a: int, b: int) -> tuple[Problem, Arrays]:
    """The attention of part a of the rows to part b of the keys that are there."""
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    row_start, key_start = _starts(problem, division, shift, a, b)
    part: Arrays = {}
    for name, x in arrays.items():
        if name in ("bias", "mask"):
            extent = getattr(problem, name)
            if extent.rows:
                x = lax.slice_in_dim(x, a * rows, (a + 1) * rows, axis=-2 % x.ndim)
            part[name] = lax.dynamic_slice_in_dim(x, key_start, keys, axis=-1) if extent.columns else x
        elif "T" in DIMS[name]:
            part[name] = lax.slice_in_dim(x, a * rows, (a + 1) * rows, axis=_axis(name) % x.ndim)
        elif "S" in DIMS[name]:
            part[name] = lax.slice_in_dim(x, b * keys, (b + 1) * keys, axis=_axis(name) % x.ndim)
        else:
            part[name] = x
    if "q_lengths" in part:
        part["q_lengths"] = (part["q_lengths"] - row_start).clip(0, rows)
    if "kv_lengths" in part:
        part["kv_lengths"] = (part["kv_lengths"] - key_start).clip(0, keys)
    changes: dict[str, Any] = {"q_len": rows, "kv_len": keys}
    if problem.causal or max(problem.window_left, problem.window_right) >= 0 or problem.programs:
        part["query_offset"] = _shifted(part, row_start - key_start, problem.q_len + problem.kv_len)
        changes["query_offset"] = True
    if problem.drop_threshold or problem.programs:
        part["origin"] = jnp.stack([row_start, key_start]).astype(jnp.int32)
        changes["origin"] = True
    if problem.block_mask:
        u, v = row_start // problem.q_block, key_start // problem.kv_block
        blocks = lax.dynamic_slice_in_dim(part["blocks"], u, rows // problem.q_block, axis=-2)
        blocks = lax.dynamic_slice_in_dim(blocks, v, keys // problem.kv_block, axis=-1)
        part |= {
            "blocks": blocks,
            "row_lists": block_sparse.block_lists(blocks),
            "column_lists": block_sparse.block_lists(jnp.swapaxes(blocks, -1, -2)),
        }
        changes |= {"row_list": part["row_lists"].shape[-1], "column_list": part["column_lists"].shape[-1]}
    return dataclasses.replace(problem, **changes), varying_alike(part, part)


def _shifted(arrays: Arrays, by: jax.Array, span: int) -> jax.Array:
    """The query offset of a part. One that is as far as int32 goes stays there: it is beyond all keys anyway."""
    if "query_offset" not in arrays:
        lead = arrays["query"].ndim - 3
        return by.astype(jnp.int32).reshape((1,) * lead)
    limits = np.iinfo(np.int32)
    return arrays["query_offset"].clip(limits.min + span, limits.max - span) + by.astype(jnp.int32)


def _with_bias_part(
    problem: Problem,
    division: Division,
    arrays: Arrays,
    total: jax.Array | None,
    x: jax.Array,
    shift: int,
    a: int,
    b: int,
) -> jax.Array:
    """The gradient of this device's part of the bias, with that of a pair."""
    bias, extent = arrays["bias"], problem.bias
    assert extent is not None
    if total is None:
        total = varying_alike(jnp.zeros((*x.shape[:-2], *bias.shape[-2:]), x.dtype), x)
    _, key_start = _starts(problem, division, shift, a, b)
    row = a * division.part(problem.q_len) if extent.rows else 0
    at = (*(0,) * (x.ndim - 2), row, key_start if extent.columns else 0)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, x.shape) + x, at)


def _add(sums: dict[Any, Any], to: Any, x: jax.Array) -> None:
    sums[to] = sums[to] + x if to in sums else x


def _whole(sums: dict[Any, Any], name: str, division: Division) -> jax.Array:
    """A gradient, put together of its parts."""
    if name in sums:
        return sums[name]
    return jnp.concatenate([sums[name, part] for part in range(division.parts)], _axis(name))


def _dtype(problem: Problem, name: str) -> str:
    return problem.dtype if name in ("dq", "dk", "dv") else problem.accumulation_dtype


def _axis(name: str) -> int:
    """Of rows, or keys, counted from the last."""
    dims = DIMS[name]
    return next(i for i in range(-len(dims), 0) if dims[i] in "TS")

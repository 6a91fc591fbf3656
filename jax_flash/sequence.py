"""Attention over a sequence that is sharded over devices (ring attention, arXiv 2310.01889).

Each device keeps its rows of Q. The keys and values of the other devices visit it one after the other. They travel to
the next device while this device computes. Each visit is an ordinary attention call on local arrays. Its lengths, query
offset and origin give its position in the full sequence. The results are merged by their statistics. In the backward,
the gradients of keys and values travel with them.

In some layouts devices would wait for each other. Under a causal mask and a contiguous layout, for example, the first
devices have less work than the last. The devices then first exchange halves of their arrays to get the other layout.

If several mesh axes divide the sequence, the devices along the last axis form an inner ring, and the inner rings form a
ring. On several hosts, most exchanges then stay within a host.

In a layout of chunks (`layouts.Layout`), a device has tokens from many places of the sequence, in increasing order. So
the keys of a visit that a row sees under positional masks are consecutive. Each visit is one call with ranges. If
devices share few chunks, only these take part in visits: rows and keys are gathered before, and results put back after.

Functions take arrays by name (`operands.DIMS`), with any leading dims. A device has its own part of each array with
rows or keys, such as Q, K, V and the segment ids. For a bias or a mask it has its own rows and all columns, in natural
order. A block mask is not divided.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from jax_flash import block_sparse, denominator, dropout, tile, windows
from jax_flash.layouts import (
    Layout,
    SequenceLayout,
    balance,
    chunks_of,
    document_entries,
    shared_chunks,
    zigzag_layout,
)
from jax_flash.masks import WindowSize
from jax_flash.operands import DIFFERENTIATED, DIMS, ONCE_A_ROW, PER_ROW, Operands
from jax_flash.problem import Problem
from jax_flash.varying import varying_alike

Arrays = dict[str, jax.Array]
Rows = tuple[jax.Array, jax.Array, jax.Array]  # O, l and m
Compute = Callable[[Problem, Arrays], tuple[jax.Array, ...]]
Order = Literal["contiguous", "zigzag", "chunks"]
Sums = dict[tuple[str, int], jax.Array]  # merged results or sums of gradients, by name and part of rows or keys
Use = Callable[["Visit", Arrays, Sums, Sums], tuple[Sums, Sums]]
Tree = TypeVar("Tree")

UNEQUAL = 1.1  # from this work of a ring's slowest devices over the mean on, equal work by heads is better
TRAVELLING = tuple(name for name in Operands._fields if {"S", "T"} & {*DIMS.get(name, "")} == {"S"})  # with the keys


class Division(NamedTuple):
    """The division of a sequence over devices."""

    axes: tuple[str, ...]  # the mesh axes that divide the sequence, major axis first
    devices: int  # number of devices along these axes
    layout: Order = "contiguous"
    mesh_axes: tuple[str, ...] = ()  # the axes in the mesh's order, if that order differs
    ranks: tuple[int, ...] = ()  # the number of each device in the mesh's order, if that order differs
    chunks: int = 0  # number of chunks of a device in a layout of chunks
    inner: int = 0  # number of devices of an inner ring, which is the last of several axes; 0 for one ring
    everywhere: tuple[str, ...] = ()  # all mesh axes of the program's manual devices

    @classmethod
    def over(cls, axes: tuple[str, ...], shape: Mapping[str, int], layout: SequenceLayout = "contiguous") -> Division:
        """Return the division over axes of a mesh of this shape."""
        if isinstance(layout, Layout):
            return cls.over(axes, shape)._replace(layout="chunks", chunks=layout.chunks.shape[1])
        everywhere = tuple(shape)
        sizes = {axis: size for axis, size in shape.items() if axis in axes}
        ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        ranks = ranks.transpose([list(sizes).index(axis) for axis in axes]).ravel()
        inner = shape[axes[-1]] if len(axes) > 1 else 0
        division = cls(axes, ranks.size, layout, everywhere=everywhere, inner=inner)
        if tuple(sizes) == axes:
            return division
        return division._replace(mesh_axes=tuple(sizes), ranks=tuple(ranks.tolist()))

    @property
    def parts(self) -> int:
        """The number of parts per device. In the zigzag layout one has short causal rows and the other long ones."""
        return 2 if self.layout == "zigzag" else 1

    def part(self, length: int) -> int:
        """Return the number of rows or keys in a part."""
        return length // (self.devices * self.parts)

    def numbers(self, device: Any) -> list[Any]:
        """Return the global indices of a device's parts."""
        return [device] if self.parts == 1 else [device, 2 * self.devices - 1 - device]

    def starts(self, device: Any, length: int) -> list[Any]:
        """Return the first row or key of each part of a device."""
        return [number * self.part(length) for number in self.numbers(device)]

    def positions(self, length: int, chunks: jax.Array | None) -> jax.Array:
        """Return the positions of this device's rows or keys, int32.

        Args:
          length: T or S.
          chunks: the chunks of all devices, in a layout of chunks.
        """
        device = self.device()
        size = length // (self.devices * (self.chunks or self.parts))
        own = jnp.stack(self.numbers(device)) if chunks is None else chunks[device]
        return (own.astype(jnp.int32)[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)

    def device_of(self, part: int) -> int:
        """Return the device that has the part with this global index."""
        return part if part < self.devices else 2 * self.devices - 1 - part

    def device(self) -> jax.Array:
        """Return the index of this device."""
        return lax.axis_index(self.axes)

    def permuted(self, x: jax.Array, to: Sequence[int]) -> jax.Array:
        """Send the array of device number i to device number to[i]."""
        # ppermute numbers devices in the mesh's order. Since jax 0.12 it refuses axes in another order.
        ranks = self.ranks or range(self.devices)
        pairs = [(ranks[device], ranks[other]) for device, other in enumerate(to)]
        return lax.ppermute(x, self.mesh_axes or self.axes, pairs)

    @property
    def ring(self) -> int:
        """The number of devices of an inner ring. Keys visit all devices of their inner ring before they leave it."""
        return self.inner or self.devices

    def source(self, device: Any, shift: Any) -> Any:
        """Return the device whose keys visit a device at a visit: `shift` places before it.

        The inner rings themselves form a ring. A shift counts visits, and ring visits in each inner ring. Then a place
        is a step in both rings: shift % ring places in the inner ring, and shift // ring inner rings.
        """
        inner_ring = (device // self.ring - shift // self.ring) % (self.devices // self.ring)
        return inner_ring * self.ring + (device - shift) % self.ring

    def step(self, before: int, after: int) -> int:
        """Return the shift by which keys travel between two visits, which are given as shifts."""
        return (after // self.ring - before // self.ring) * self.ring + (after - before) % self.ring

    def sent(self, arrays: Tree, shift: int) -> Tree:
        """Send each device's arrays to the device `shift` places after it."""
        leaves, structure = jax.tree.flatten(arrays)
        if shift % self.devices == 0 or not leaves:
            return arrays
        return jax.tree.unflatten(structure, _exchanged(self, shift, leaves))

    def refusal(self, problem: Problem) -> str | None:
        """Return why this problem cannot be divided, or None if it can."""
        if problem.page:
            return "a paged cache cannot be divided over devices"
        whole = self.devices * (self.chunks or self.parts)
        layout = f"in a layout of {self.chunks} chunks" if self.chunks else f"in the {self.layout} layout"
        parts = f"{whole} parts over {' x '.join(self.axes)} {layout}"
        if problem.q_len % whole or problem.kv_len % whole:
            return f"T = {problem.q_len} and S = {problem.kv_len} must be multiples of {whole}, for {parts}"
        rows, keys = problem.q_len // whole, problem.kv_len // whole
        if problem.drop_threshold and (rows % dropout.TILE or keys % dropout.TILE):
            return f"dropout needs a multiple of {dropout.TILE} rows and keys per part, not {rows} and {keys} ({parts})"
        refusal = problem.mask.refusal_of_part(rows, keys)
        return refusal and f"{refusal} ({parts})"


def _permuted(division: Division, shift: int, x: jax.Array) -> jax.Array:
    sources = [division.source(device, abs(shift)) for device in range(division.devices)]
    return division.permuted(x, sources if shift < 0 else np.argsort(sources).tolist())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _exchanged(division: Division, shift: int, arrays: list[jax.Array]) -> list[jax.Array]:
    """Send arrays as one array of words, because XLA overlaps only one exchange with kernels.

    Tangents are sent one by one.
    """
    if len(arrays) == 1:
        return [_permuted(division, shift, arrays[0])]
    words = [_words(x) for x in arrays]
    came = _permuted(division, shift, jnp.concatenate(words))
    parts = jnp.split(came, np.cumsum([x.size for x in words])[:-1])
    return [_of_words(part, x) for part, x in zip(parts, arrays, strict=True)]


@_exchanged.defjvp
def _exchanged_jvp(division, shift, primals, tangents):
    moved = [x if x.dtype == jax.dtypes.float0 else _permuted(division, shift, x) for x in tangents[0]]
    return _exchanged(division, shift, *primals), moved


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array in 32-bit words. Its elements have 2, 4 or 8 bytes."""
    x = x.ravel()
    if x.itemsize == 2:
        x = jnp.pad(x, (0, x.size % 2)).reshape(-1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32).ravel()


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Return the array with these bits and the shape and dtype of `like`."""
    if like.itemsize == 8:
        words = words.reshape(-1, 2)
    return lax.bitcast_convert_type(words, like.dtype).ravel()[: like.size].reshape(like.shape)


class Visit(NamedTuple):
    """One visit: a device attends to the keys of the device `shift` places before it."""

    shift: Any  # an int, may be traced
    step: int  # difference between this shift and the shift of the previous visit
    pairs: tuple[tuple[int, int], ...]  # pairs of a part of the device's rows and a part of the visiting keys


def entries(problem: Problem, division: Division) -> np.ndarray:
    """Count the entries visible under causal masks and windows: [shift, part of rows, part of keys, device]."""
    shifts, devices = np.ogrid[: division.devices, : division.devices]
    first_rows = np.stack(division.starts(devices, problem.q_len))[None, :, None, 0]
    first_keys = np.stack(division.starts(division.source(devices, shifts), problem.kv_len), 1)[:, None]
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    return problem.mask.count(rows, keys, first_rows - first_keys)


def visits(problem: Problem, division: Division) -> list[Visit]:
    """Return the visits in which some device sees a key, judged by causal masks and windows. Own keys come first."""
    if division.chunks:  # their positions are arrays
        pairs: list[tuple[tuple[int, int], ...]] = [((0, 0),)] * division.devices
    else:
        visible = entries(problem, division).max(-1) > 0
        visible[0] |= np.eye(division.parts, dtype=bool)
        pairs = [tuple((a, b) for a, b in np.argwhere(shown).tolist()) for shown in visible]
    shifts = [shift for shift, some in enumerate(pairs) if some]
    return [
        Visit(shift, division.step(before, shift), pairs[shift]) for before, shift in itertools.pairwise([0, *shifts])
    ]


def with_best_layout(problem: Problem, division: Division) -> Division:
    """Return the division with the layout and the rings to compute in.

    The other layout needs exchanges of halves, so it must save at least a tenth of the time. With a window, one ring of
    all devices may need fewer visits than inner rings.
    """
    if division.chunks:
        return division
    other = division._replace(layout="zigzag" if division.layout == "contiguous" else "contiguous")
    wins = other.refusal(problem) is None and _imbalance(problem, other) < 0.9 * _imbalance(problem, division)
    best = other if wins else division
    flat = best._replace(inner=0)
    return flat if len(visits(problem, flat)) < len(visits(problem, best)) else best


def _imbalance(problem: Problem, division: Division) -> float:
    """Return the entries of the slowest device of each visit, divided by the mean entries of all devices."""
    found = entries(problem, division).sum((1, 2))
    return float(found.max(-1).sum()) / max(float(found.sum()) / division.devices, 1.0)


def by_heads(problem: Problem, division: Division, parts: int) -> tuple[bool, str]:
    """Return whether to exchange rows for heads by all-to-all instead of a ring, and the reason.

    Args:
      parts: the number of devices that would divide the heads.
    """
    # Such an array has the rows of one device, and no heads to exchange for them.
    if any(of is not None and of.rows and not of.heads for of in problem.extents.values()):
        return False, "an operand with rows and without heads cannot exchange rows for heads"
    if problem.kv_heads % parts:
        return False, f"{problem.kv_heads} key/value heads cannot be divided over {parts} devices"
    over = with_best_layout(problem, division)
    once = problem.q_heads + problem.kv_heads  # Q and O, K and V
    count = len(visits(problem, over)) - 1
    ring = count * problem.kv_heads + (once if over.layout != division.layout else 0)
    heads = once * (division.devices - 1) / division.devices
    row = _megabytes(problem, problem.q_len / division.devices)
    halves = "" if over.layout == division.layout else ", and halves of all rows for equal causal work"
    sent = f"by heads, each device sends {heads * row:.3g} MB"
    reason = f"{sent}; as a ring {ring * row:.3g} MB, its keys and values {count} times{halves}"
    imbalance = _imbalance(problem, over)
    if imbalance > UNEQUAL:
        reason += f". The slowest device of each visit has {imbalance:.2f} times the mean work"
    return heads <= ring or imbalance > UNEQUAL, reason


def _megabytes(problem: Problem, rows: float) -> float:
    """Return the size of K and V, or Q and O, for this number of rows of one head."""
    return problem.batch * rows * (problem.qk_dim + problem.v_dim) * jnp.dtype(problem.dtype).itemsize / 1e6


def explained(problem: Problem, devices: int, cu_seqlens: ArrayLike | None = None) -> str:
    """Return how a call under `jit` divides a sequence over this number of devices, and why.

    Args:
      cu_seqlens: cumulative lengths of packed documents. The text then compares layouts for them.
    """
    division = Division(("devices",), devices)
    if problem.q_len != problem.kv_len:
        return "each device gathers all keys: queries and keys have different lengths"
    if refusal := division.refusal(problem):
        return f"each device gathers all keys: {refusal}"
    heads, reason = by_heads(problem, division, devices)
    over = with_best_layout(problem, division)
    way = "by heads, with two all-to-all exchanges" if heads else f"as a ring in the {over.layout} layout"
    text = f"{devices} devices divide the sequence {way}: {reason}"
    if cu_seqlens is None:
        return text
    tokens = problem.q_len
    ways = {
        "contiguous": Layout(np.arange(devices)[:, None]),
        "zigzag": zigzag_layout(devices),
        "balanced": balance(cu_seqlens, devices, tokens),
    }
    found = []
    for name, layout in ways.items():
        if tokens % layout.chunks.size == 0:
            share = travelling_share(layout, cu_seqlens, tokens) if name == "balanced" else 1
            counts = by_shift(document_entries(layout, cu_seqlens, tokens, problem.mask.reach.right == 0))
            row = _megabytes(problem, share * tokens / devices) * problem.kv_heads
            work = counts.max(1).sum() / max(float(counts.sum()) / devices, 1.0)
            last = max(shift for shift, most in enumerate(counts.max(1)) if most or shift == 0)
            found.append(f"{name} {work:.2f}, {last * row:.3g} MB")
    return (
        f"{text}. A ring with these documents has this work of the slowest devices over the mean, and each device "
        f"sends: {'; '.join(found)}"
    )


def by_shift(found: np.ndarray, inner: int = 0) -> np.ndarray:
    """Return the entries of each visit: [shift, device].

    Args:
      found: the entries by the device of the row and the device of the key.
      inner: number of devices of an inner ring, 0 for one ring of all devices.
    """
    devices = np.arange(len(found))
    return found[devices, Division((), len(found), inner=inner).source(devices, devices[:, None])]


def travelling_share(layout: Layout, cu_seqlens: ArrayLike, tokens: int) -> float:
    """Return the share of a device's tokens that takes part in visits of other devices' keys."""
    most = shared_chunks(layout, cu_seqlens, tokens).sum(1).max()
    count = layout.chunks.shape[1]
    return next(size for size in [0, *ring_sizes(count)] if size >= most) / count


def merge(first: Rows, second: Rows) -> Rows:
    """Merge O, l and m of the same rows over two disjoint sets of keys (section 3.1 of arXiv 2205.14135).

    With m = max(m1, m2), l = e^(m1-m) l1 + e^(m2-m) l2 and O = (e^(m1-m) l1 O1 + e^(m2-m) l2 O2) / l. A row that has
    seen no keys has l = 0, m = -inf and O = 0, and does not change the other side.

    Args:
      first, second: O [..., T, N, E], l and m [..., N, T].

    Returns:
      The merged O in the dtype of the statistics, l and m.
    """
    (_, l1, m1), (_, l2, m2) = first, second
    m = lax.stop_gradient(jnp.maximum(m1, m2))
    l1, l2 = tile.exp_minus(m1, m) * l1, tile.exp_minus(m2, m) * l2
    l = l1 + l2
    # If one side saw no keys, the other side's weight is exactly 1. On a GPU x / x may differ from 1.
    shares = (jnp.where(y == 0, jnp.sign(x), tile.divide(x, l)) for x, y in ((l1, l2), (l2, l1)))
    share1, share2 = (jnp.swapaxes(x, -1, -2)[..., None] for x in shares)
    return share1 * first[0].astype(l.dtype) + share2 * second[0].astype(l.dtype), l, m


def forward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Return (o, l, m) of this device's rows.

    Args:
      compute: function of a problem and arrays by name that computes the forward on one device.
      problem: the problem of the full sequence.
    """
    division, given = with_best_layout(problem, division), division
    arrays = {name: _relaid(problem, name, x, given, division) for name, x in arrays.items()}
    problem, arrays = _with_ranges(problem, division, arrays)
    # They join each row once, after its last keys.
    at_end = {name: arrays.pop(name) for name in ONCE_A_ROW if name in arrays}
    without: dict[str, Any] = dict.fromkeys(ONCE_A_ROW)
    problem = dataclasses.replace(problem, **without)

    def attend(visit: Visit, arrays: Arrays, rows: Sums, none: Sums) -> tuple[Sums, Sums]:
        for a, b in visit.pairs:
            o, l, m = compute(*_part(problem, division, arrays, visit.shift, a, b))
            found = (o.astype(l.dtype), l, m)
            if ("o", a) in rows:
                found = merge((rows["o", a], rows["l", a], rows["m", a]), (o, l, m))
            rows |= {(name, a): x for name, x in zip("olm", found, strict=True)}
        return rows, none

    rows, _ = _tour(problem, division, arrays, attend)
    results = {
        name: jnp.concatenate([rows[name, a] for a in range(division.parts)], _axis(name)) for name in ("o", "l", "m")
    }
    if at_end:
        l = results["l"][..., None]
        share = denominator.normalized(Operands.of(arrays | at_end), l, results["l"], results["m"])
        results["o"] *= jnp.swapaxes(share, -2, -3)
    results["o"] = results["o"].astype(problem.result_dtype("o"))
    return tuple(_relaid(problem, name, x, division, given) for name, x in results.items())


def backward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Return the requested gradients of this device's arrays.

    A bias and captured arrays are not divided. Their gradients are the contribution of this device's rows.

    Args:
      compute: function of a problem and arrays by name that computes the backward on one device.
      arrays: the operands, with o, l and m of the forward, do and dlogsumexp.
    """
    division, given = with_best_layout(problem, division), division
    arrays = {name: _relaid(problem, name, x, given, division) for name, x in arrays.items()}
    problem, arrays = _with_ranges(problem, division, arrays)
    dtype = problem.accumulation_dtype
    again = tuple(name for name in problem.requested if name not in PER_ROW)

    def propagate(visit: Visit, arrays: Arrays, own: Sums, travelled: Sums) -> tuple[Sums, Sums]:
        for a, b in visit.pairs:
            local, operands = _part(problem, division, arrays, visit.shift, a, b)
            if visit.step or a != b:  # each row contributes to these gradients once
                local = dataclasses.replace(local, requested=again)
                if not local.gradients:
                    continue
            for name, x in zip(local.gradients, compute(local, operands), strict=True):
                if name in ("dk", "dv"):
                    _add(travelled, (name, b), x.astype(dtype))
                elif name == "dq":
                    _add(own, (name, a), x.astype(dtype))
                elif name == "dbias":
                    own[name, 0] = _with_bias_part(problem, division, arrays, own.get((name, 0)), x, visit.shift, a, b)
                else:
                    _add(own, (name, 0), x)
        return own, travelled

    own, returned = _tour(problem, division, arrays, propagate)
    own |= returned

    def result(name: str) -> jax.Array:
        if name not in ("dq", "dk", "dv"):
            return own[name, 0]
        x = jnp.concatenate([own[name, part] for part in range(division.parts)], _axis(name))
        return x.astype(problem.result_dtype(name))

    return tuple(_relaid(problem, name, result(name), division, given) for name in problem.gradients)


def tangent(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Return the tangents of o and l of this device's rows.

    Each device gathers all keys, since a visit's tangent would need the statistics of this visit.

    Args:
      compute: function of a problem and arrays by name that computes the tangent on one device.
      division: in the contiguous layout.
      arrays: the operands, with o, l and m of the forward, and the tangents.
    """

    def gathered(name: str, x: jax.Array) -> jax.Array:
        of_keys = {"S", "T"} & {*DIMS[name]} == {"S"}
        return lax.all_gather(x, division.axes, axis=_axis(name) % x.ndim, tiled=True) if of_keys else x

    rows = division.part(problem.q_len)
    starts = division.device() * rows, jnp.int32(0)
    arrays = {name: gathered(name, x) for name, x in arrays.items()}
    return compute(*_with_positions(problem, (rows, problem.kv_len), starts, arrays))


def _relaid(problem: Problem, name: str, x: jax.Array, before: Division, after: Division) -> jax.Array:
    """Move this device's part of an array from one layout to the other.

    Each device sends both of its halves. In the contiguous layout they have the global indices 2 d and 2 d + 1. In the
    zigzag layout one of the indices is even and the other odd. So the devices exchange the even halves, then the odd.
    """
    axis = _divided_axis(problem, name, x)
    if axis is None or before.layout == after.layout:
        return x
    odd = before.device() % 2 == 1
    to_zigzag = [[before.device_of(2 * d + i) for d in range(before.devices)] for i in range(2)]

    def swapped_if_odd(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Swap the halves on odd devices: in the zigzag layout the first half has the index of the device."""
        return jnp.where(odd, second, first), jnp.where(odd, first, second)

    halves = jnp.split(x, 2, axis)
    if after.layout == "zigzag":
        came = [before.permuted(half, to) for half, to in zip(halves, to_zigzag, strict=True)]
        return jnp.concatenate(swapped_if_odd(*came), axis)
    back = [np.argsort(to).tolist() for to in to_zigzag]
    came = [before.permuted(half, to) for half, to in zip(swapped_if_odd(*halves), back, strict=True)]
    return jnp.concatenate(came, axis)


def _tour(problem: Problem, division: Division, arrays: Arrays, use: Use) -> tuple[Sums, Sums]:
    """Return results of this device's rows, and sums for its own keys, after all visits.

    If arrays decide which visits are needed, the devices first find out what they need from each other. They all take
    the same branch of a conditional, because they exchange arrays inside of the branches.

    Args:
      use: function of a visit, the arrays of this visit, and the results and the sums so far. It returns the new ones.
        The sums travel with the keys.
    """
    tour = visits(problem, division)
    seen = _seen(problem, division, arrays) if len(tour) > 1 else None
    if seen is None:
        return _ring(problem, division, arrays, use, tour)
    needed = _needed(seen, division, [visit.shift for visit in tour])

    def alone() -> tuple[Sums, Sums]:
        return use(tour[0], arrays, {}, {})

    if not division.chunks:
        return lax.cond(needed[1][0], lambda: _ring(problem, division, arrays, use, tour, needed), alone)
    shared = _shared_chunks(seen, division)
    sizes = ring_sizes(division.chunks)
    if problem.programs:  # they receive indices in the order of the whole layout
        sizes = sizes[-1:]
    order = jnp.argsort(~shared, axis=1, stable=True)
    rings = [
        functools.partial(_ring, problem, division, arrays, use, tour, needed, jnp.sort(order[:, :size], axis=1))
        for size in sizes
    ]
    exceeds = shared.sum(1, dtype=jnp.int32).max() > jnp.asarray([0, *sizes[:-1]], jnp.int32)
    exceeded = lax.psum(exceeds.astype(jnp.int32), division.everywhere or division.axes) > 0
    return lax.switch(exceeded.sum(dtype=jnp.int32), [alone, *rings])


def _ring(
    problem: Problem,
    division: Division,
    arrays: Arrays,
    use: Use,
    tour: list[Visit],
    needed: tuple[()] | tuple[jax.Array, jax.Array] = (),
    places: jax.Array | None = None,
) -> tuple[Sums, Sums]:
    """Return results of this device's rows, and sums for its own keys, after all visits.

    The keys of the next visit and the sums of this visit are sent while the current keys are used. They are sent
    together if both go equally far.

    Equal visits become a loop. The program then does not grow with the number of devices, and XLA cannot prefetch all
    keys. A visit that no device needs computes nothing, and nothing is sent after the last needed visit.

    Args:
      needed: the result of `_needed`, if arrays decide which visits are needed. Some later visit than the first is.
      places: int32 [devices, count], increasing indices of the chunks of each device, in a layout of chunks. Only
        these chunks take part in visits of other devices' keys. Default: all.
    """
    some = arrays
    if places is not None and places.shape[1] < division.chunks:
        chosen = places[division.device()]
        some = {name: _chunks_taken(problem, division, name, x, chosen) for name, x in arrays.items()}
        some["origin"] = jnp.take_along_axis(arrays["origin"], places, axis=1)

    def step(
        visit: Visit, ahead: int, computes: bool, sends: bool, shift: ArrayLike, carry: tuple[Arrays, Sums, Sums]
    ) -> tuple[Arrays, Sums, Sums]:
        packed, results, sums = carry
        here = unpack(packed)
        if sends and ahead == visit.step:
            packed, sums = division.sent((packed, sums), ahead)
        else:
            packed, sums = division.sent(packed, ahead if sends else 0), division.sent(sums, visit.step)
        if computes:
            results, sums = use(visit._replace(shift=shift), some | here, results, sums)
        return packed, results, sums

    def at(
        visit: Visit, ahead: int, carry: tuple[Arrays, Sums, Sums], given: tuple[ArrayLike, ...]
    ) -> tuple[tuple[Arrays, Sums, Sums], None]:
        shift, *flags = given
        does = functools.partial(step, visit, ahead)
        if not flags:
            return does(True, True, shift, carry), None
        here, later = flags
        last, passes, full = (
            functools.partial(does, *how, shift) for how in ((True, False), (False, True), (True, True))
        )
        return lax.switch(here + 2 * later, [lambda same: same, last, passes, full], carry), None

    packed, unpack = _packed({name: some[name] for name in TRAVELLING if name in some})
    steps_ahead = [*(visit.step for visit in tour[1:]), 0]
    packed = division.sent(packed, steps_ahead[0])
    all_results, all_sums = use(tour[0], arrays, {}, {})
    results, sums = all_results, all_sums
    if some is not arrays:
        results, sums = (
            {key: _chunks_taken(problem, division, key[0], x, chosen) for key, x in of.items()}
            for of in (results, sums)
        )
    carry = packed, results, sums
    kinds = [(visit._replace(shift=0), ahead) for visit, ahead in zip(tour, steps_ahead, strict=True)]
    given = np.array([visit.shift for visit in tour], np.int32), *needed

    def through(
        carry: tuple[Arrays, Sums, Sums], kinds: Sequence[tuple[Visit, int]], given: Sequence[Any]
    ) -> tuple[Arrays, Sums, Sums]:
        """Make some visits, equal ones in a loop."""
        done = 0
        for (visit, ahead), group in itertools.groupby(kinds):
            count = len([*group])
            now = tuple(x[done : done + count] for x in given)
            done += count
            body = functools.partial(at, visit, ahead)
            carry, _ = lax.scan(body, carry, now) if count > 1 else body(carry, tuple(x[0] for x in now))
        return carry

    ring = division.ring
    head = ring if ring < len(tour) else 3 if needed and len(tour) > 4 else len(tour)

    def others(carry: tuple[Arrays, Sums, Sums]) -> tuple[Arrays, Sums, Sums]:
        """Make the visits after the first ones. Equal inner rings become a loop, except for the last."""
        begin, block = head, kinds[head : head + ring]
        count = (len(tour) - 1 - head) // ring
        if count > 1 and kinds[head : head + count * ring] == block * count:
            begin += count * ring
            blocks = tuple(x[head:begin].reshape(count, ring) for x in given)
            carry, _ = lax.scan(lambda carry, now: (through(carry, block, now), None), carry, blocks)
        return through(carry, kinds[begin:], tuple(x[begin:] for x in given))

    carry = through(carry, kinds[1:head], tuple(x[1:head] for x in given))
    if needed and head < len(tour):  # one condition in place of many, because on a GPU the host waits for each
        carry = lax.cond(needed[1][head - 1], others, lambda same: same, carry)
    else:
        carry = others(carry)
    _, results, sums = carry
    if not needed:
        return results, division.sent(sums, -tour[-1].shift)
    here, later = needed
    last = jnp.asarray([visit.shift for visit in tour], jnp.int32)[jnp.argmax(here * (1 - later))]
    for steps, unit, size in ((last % ring, 1, ring), (last // ring, ring, division.devices // ring)):
        for bit in range((size - 1).bit_length() if sums else 0):
            back = functools.partial(division.sent, shift=-(unit << bit))
            sums = lax.cond(steps >> bit & 1, back, lambda same: same, sums)
    if some is arrays:
        return results, sums
    replaced = functools.partial(_chunks_replaced, problem, division)
    results, sums = (
        {key: replaced(key[0], of[key], chosen, x) for key, x in new.items()}
        for of, new in ((all_results, results), (all_sums, sums))
    )
    return results, sums


def ring_sizes(chunks: int) -> list[int]:
    """Return how many of a device's chunks may take part in visits. A program has a ring for each number."""
    return sorted({-(-chunks // share) for share in ((16, 2, 1) if chunks >= 8 else (1,))})


def _seen(problem: Problem, division: Division, arrays: Arrays) -> jax.Array | None:
    """Return which keys the rows of this device may see: bool [blocks of rows, devices, blocks of a device's keys].

    Positions, segment ids and blocks decide. Rows and keys are compared in blocks, which are the chunks in a layout of
    chunks. The result is None if no array decides, because `visits` then lists only needed visits.
    """
    mask = problem.mask
    lengths = mask.query_seq_lengths, mask.key_value_seq_lengths, mask.query_offset and max(mask.reach) >= 0
    if not (mask.ranges or mask.segment_ids or mask.block_mask is not None or any(lengths)):
        return None
    parts = division.chunks or division.parts
    counts = [
        division.chunks
        or parts * (1 if mask.block_mask is not None else chunks_of(length // (division.devices * parts)))
        for length in problem.lengths
    ]
    sizes = [
        max(length // (division.devices * count), 1) for length, count in zip(problem.lengths, counts, strict=True)
    ]
    rows, keys = (
        _block_starts(problem, division, arrays, length, count)
        for length, count in zip(problem.lengths, counts, strict=True)
    )
    rows, all_keys = rows[division.device()], keys.reshape(-1)
    visible = _blocks_meet(problem, arrays, rows, all_keys, sizes)
    if mask.segment_ids:
        own, visiting = (
            _extremes(arrays[name], size)
            for name, size in zip(("query_segment_ids", "key_value_segment_ids"), sizes, strict=True)
        )
        of_all = jnp.zeros((division.devices, *visiting.shape), visiting.dtype).at[division.device()].set(visiting)
        visiting = jnp.moveaxis(lax.psum(of_all, division.axes), 0, -3)
        visiting = visiting.reshape(*visiting.shape[:-3], -1, 2)
        own, visiting = own[..., :, None, :], visiting[..., None, :, :]
        visible &= (own[..., 0] <= visiting[..., 1]) & (visiting[..., 0] <= own[..., 1])
    if mask.block_mask is not None:
        kinds = arrays["blocks"] != block_sparse.EMPTY
        for axis, size, block in ((-1, sizes[1], mask.kv_block), (-2, sizes[0], mask.q_block)):
            kinds = _by_chunks(kinds, axis, kinds.shape[axis] * block // size).any(axis)
        some = kinds.any(range(kinds.ndim - 2))
        some = some[rows // sizes[0]][:, all_keys // sizes[1]]
        visible &= jnp.expand_dims(some, range(visible.ndim - 2))
    return visible.any(range(visible.ndim - 2)).reshape(len(rows), division.devices, -1)


def _needed(seen: jax.Array, division: Division, shifts: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return whether each visit is needed, and whether a later visit is: int32 [visits], equal on all devices.

    A visit is needed if a row of some device may see a visiting key. The first visit always counts as needed.
    """
    device = division.device()
    asked = seen.any((0, 2))[division.source(device, jnp.asarray(shifts, jnp.int32))].at[0].set(True)
    here = (lax.psum(asked.astype(jnp.int32), division.everywhere or division.axes) > 0).astype(jnp.int32)
    later = lax.cummax(here[::-1])[::-1]
    return here, jnp.append(later[1:], jnp.zeros_like(here[:1]))


def _shared_chunks(seen: jax.Array, division: Division) -> jax.Array:
    """Return which chunks see keys of another device, or have keys that it sees: bool [devices, chunks of a device]."""
    device = division.device()
    of_others = seen.at[:, device].set(False)
    found = of_others.any(0).at[device].set(of_others.any((1, 2)))
    return lax.psum(found.astype(jnp.int32), division.axes) > 0


def _block_starts(problem: Problem, division: Division, arrays: Arrays, length: int, count: int) -> jax.Array:
    """Return the positions of the first tokens of the blocks of each device: int32 [devices, count]."""
    size = length // (division.devices * count)
    if division.chunks:
        return arrays["origin"].astype(jnp.int32) * size
    starts = np.stack([division.starts(device, length) for device in range(division.devices)])
    return jnp.asarray(
        (starts[..., None] + size * np.arange(count // division.parts)).reshape(len(starts), -1), jnp.int32
    )


def _blocks_meet(problem: Problem, arrays: Arrays, rows: jax.Array, keys: jax.Array, sizes: list[int]) -> jax.Array:
    """Return whether blocks of rows may see blocks of keys by positions: bool [..., blocks of rows, blocks of keys]."""
    if problem.mask.ranges:
        pairs = arrays["keys_of_rows"]
        begin, end = pairs[..., :: sizes[0], 0], pairs[..., sizes[0] - 1 :: sizes[0], 1]
    else:
        bounds = windows.Bounds(*problem.mask.reach)
        first, last = (
            windows.ranges_at(bounds, problem.lengths, arrays, at, keys)["keys_of_rows"]
            for at in (rows, rows + sizes[0] - 1)
        )
        begin, end = first[..., 0], last[..., 1]
    begin, end = begin[..., None], end[..., None]
    keys = jnp.expand_dims(keys, range(begin.ndim - 1))
    return (keys < end) & (begin < keys + sizes[1]) & (begin < end)


def _extremes(ids: jax.Array, size: int) -> jax.Array:
    """Return the smallest and the largest id of each block: int32 [..., blocks, 2]."""
    blocks = ids.reshape(*ids.shape[:-1], -1, size)
    return jnp.stack([blocks.min(-1), blocks.max(-1)], -1)


def _packed(arrays: Arrays) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """Concatenate the arrays of each dtype. Return the results and a function that splits them."""
    dtypes = {x.dtype for x in arrays.values()}
    raveled = {
        dtype.name: ravel_pytree({name: x for name, x in arrays.items() if x.dtype == dtype}) for dtype in dtypes
    }

    def unpack(packed: Arrays) -> Arrays:
        return {name: x for dtype, (_, unravel) in raveled.items() for name, x in unravel(packed[dtype]).items()}

    return {dtype: flat for dtype, (flat, _) in raveled.items()}, unpack


def _starts(problem: Problem, division: Division, shift: int, a: int, b: int) -> tuple[jax.Array, jax.Array]:
    """Return the global indices of the first row and the first key of a pair."""
    device = division.device()
    source = division.source(device, shift)
    return division.starts(device, problem.q_len)[a], division.starts(source, problem.kv_len)[b]


def _part(problem: Problem, division: Division, arrays: Arrays, shift: int, a: int, b: int) -> tuple[Problem, Arrays]:
    """Return the problem and the arrays for part a of the rows and part b of the visiting keys."""
    if division.chunks:
        return _part_of_chunks(problem, division, arrays, shift)
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    row_start, key_start = _starts(problem, division, shift, a, b)
    part: Arrays = {}
    for name, x in arrays.items():
        axis = _divided_axis(problem, name, x)
        if axis is not None:
            number, size = (a, rows) if "T" in DIMS[name] else (b, keys)
            x = lax.slice_in_dim(x, number * size, (number + 1) * size, axis=axis)
        extent = problem.extents.get(name)
        if extent is not None and extent.columns:
            x = lax.dynamic_slice_in_dim(x, key_start, keys, axis=-1)
        part[name] = x
    return _with_positions(problem, (rows, keys), (row_start, key_start), part)


def _with_ranges(problem: Problem, division: Division, arrays: Arrays) -> tuple[Problem, Arrays]:
    """Return the problem and the arrays with ranges of positions in place of all positional masks, if in chunks."""
    mask, chunks = problem.mask, arrays.get("origin")
    if not division.chunks or chunks is None:
        return problem, arrays
    masks_positions = max(mask.reach) >= 0 or mask.query_seq_lengths or mask.key_value_seq_lengths
    if masks_positions and not mask.ranges:
        places = (division.positions(length, chunks) for length in problem.lengths)
        arrays = arrays | windows.ranges_at(windows.Bounds(*mask.reach), problem.lengths, arrays, *places)
        mask = dataclasses.replace(
            mask,
            is_causal=False,
            local_window_size=WindowSize(),
            query_seq_lengths=False,
            key_value_seq_lengths=True,
            ranges=True,
        )
    arrays = {name: x for name, x in arrays.items() if name not in ("query_seq_lengths", "query_offset")}
    return dataclasses.replace(problem, mask=dataclasses.replace(mask, query_offset=False)), arrays


def _part_of_chunks(problem: Problem, division: Division, arrays: Arrays, shift: Any) -> tuple[Problem, Arrays]:
    """Return the problem and the arrays for a visit in a layout of chunks."""
    part = dict(arrays)
    chunks, device = part.pop("origin"), division.device()
    source = division.source(device, shift)
    mask, whole = problem.mask, division.devices * division.chunks
    rows, keys = (chunks.shape[1] * (length // whole) for length in problem.lengths)
    into = {"keys_of_rows": (source, keys), "rows_of_keys": (device, rows), "key_value_seq_lengths": (source, keys)}
    for name in into.keys() & part.keys():
        owner, length = into[name]
        part[name] = _in_own_chunks(part[name], chunks[owner], length // chunks.shape[1], whole)
    for name, extent in problem.extents.items():
        if extent is not None and extent.columns:
            part[name] = _taken(part[name], -1, whole, chunks[source])
    if "blocks" in part:
        blocks = _taken(part["blocks"], -2, whole, chunks[device])
        mask, part = mask.with_blocks(_taken(blocks, -1, whole, chunks[source]), part)
    changes: dict[str, Any] = {"q_len": rows, "kv_len": keys}
    if problem.drop_threshold:
        for name, owner, length in (("row_tiles", device, problem.q_len), ("key_tiles", source, problem.kv_len)):
            tiles = length // (whole * dropout.TILE)  # of a chunk
            starts = chunks[owner].astype(jnp.int32)[:, None] * tiles
            part[name] = (starts + jnp.arange(tiles, dtype=jnp.int32)[None]).reshape(-1)
        changes["dropout_tiles"] = True
    if problem.programs:  # they receive indices in the order of the layout
        starts = jnp.stack([device * rows, source * keys]).astype(jnp.int32)
        part["origin"] = starts
        part["query_offset"] = jnp.broadcast_to(starts[0] - starts[1], part["query"].shape[:-3])
        mask = dataclasses.replace(mask, query_offset=True)
        changes["origin"] = True
    return dataclasses.replace(problem, mask=mask, **changes), varying_alike(part, part)


def _by_chunks(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return the array with this axis, counted from the last, as an axis of chunks and an axis of their elements."""
    axis += x.ndim
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


def _taken(x: jax.Array, axis: int, count: int, chunks: jax.Array) -> jax.Array:
    """Return the elements of these chunks along an axis, counted from the last, that has `count` chunks."""
    taken = jnp.take(_by_chunks(x, axis, count), chunks, axis=axis - 1)
    size = len(chunks) * (x.shape[axis] // count)
    return taken.reshape(*x.shape[: x.ndim + axis], size, *x.shape[x.ndim + axis + 1 :])


def _chunks_taken(problem: Problem, division: Division, name: str, x: jax.Array, places: jax.Array) -> jax.Array:
    """Return these chunks of this device's part of an array."""
    axis = _divided_axis(problem, name, x)
    return x if axis is None else _taken(x, axis - x.ndim, division.chunks, places)


def _chunks_replaced(
    problem: Problem, division: Division, name: str, x: jax.Array, places: jax.Array, new: jax.Array
) -> jax.Array:
    """Return this device's part of an array with new values for these chunks."""
    axis = _divided_axis(problem, name, x)
    if axis is None:
        return new
    chunks = _by_chunks(x, axis - x.ndim, division.chunks)
    at = (*(slice(None),) * axis, places)
    return chunks.at[at].set(_by_chunks(new, axis - x.ndim, len(places))).reshape(x.shape)


def _in_own_chunks(positions: jax.Array, chunks: jax.Array, size: int, count: int) -> jax.Array:
    """Return how many tokens of some chunks come before each position.

    Args:
      positions: int32, from 0 to the length of the sequence.
      chunks: the chunks.
      size: number of tokens of a chunk.
      count: number of chunks of the sequence.
    """
    owned = jnp.zeros(count + 1, jnp.int32).at[chunks].set(1)
    before = jnp.cumsum(owned, dtype=jnp.int32) - owned
    size = max(size, 1)
    chunk = positions // size
    return before[chunk] * size + owned[chunk] * (positions % size)


def _with_positions(
    problem: Problem, sizes: tuple[int, int], starts: tuple[jax.Array, jax.Array], part: Arrays
) -> tuple[Problem, Arrays]:
    """Return the problem and the arrays of a part of the score matrix. `starts` are its first row and key."""
    mask, part = problem.mask.part(problem.lengths, sizes, starts, part)
    changes: dict[str, Any] = {"q_len": sizes[0], "kv_len": sizes[1], "mask": mask}
    if problem.drop_threshold or problem.programs:
        part["origin"] = jnp.stack(starts).astype(jnp.int32)
        changes["origin"] = True
    return dataclasses.replace(problem, **changes), varying_alike(part, part)


def _add(sums: Sums, to: tuple[str, int], x: jax.Array) -> None:
    sums[to] = sums[to] + x if to in sums else x


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
    """Add the bias gradient of a pair to the bias gradient of this device."""
    bias, extent = arrays["bias"], problem.score.bias
    assert extent is not None
    if total is None:
        total = varying_alike(jnp.zeros((*x.shape[:-2], *bias.shape[-2:]), x.dtype), x)
    if division.chunks:
        if not extent.columns:
            return total + x
        chunks = arrays["origin"][division.source(division.device(), shift)]
        sums = _by_chunks(total, -1, division.devices * division.chunks)
        return sums.at[..., chunks, :].add(_by_chunks(x, -1, len(chunks))).reshape(total.shape)
    _, key_start = _starts(problem, division, shift, a, b)
    row = a * division.part(problem.q_len) if extent.rows else 0
    at = [jnp.asarray(i, jnp.int32) for i in (*(0,) * (x.ndim - 2), row, key_start if extent.columns else 0)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, x.shape) + x, at)


def _axis(name: str) -> int:
    """Return the axis of rows or keys, counted from the last."""
    dims = DIMS[name]
    return next(i for i in range(-len(dims), 0) if dims[i] in "TS")


def _divided_axis(problem: Problem, name: str, x: jax.Array) -> int | None:
    """Return the axis along which an array is divided over devices, or None if it is not divided."""
    operand = DIFFERENTIATED.get(name, name)
    extent = problem.extents.get(operand)
    broadcast = extent is not None and not extent.rows
    return None if broadcast or not {"T", "S"} & set(DIMS[name]) else _axis(name) % x.ndim

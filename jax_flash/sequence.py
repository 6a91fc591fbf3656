"""Attention over a sequence that is divided over devices: keys and values go round (ring attention, arXiv 2310.01889).

Every device has rows of Q of its own and, at each visit, the keys and values of another one, which are on their way to
the next meanwhile. What it computes with them is an attention on arrays of its own, which is told by its lengths, its
query offset and its origin where in the whole it is. Results are merged by their statistics; the backward sends the
gradients of keys and values along with them. Where devices would wait for each other in the layout that the arrays
have, as under a causal mask the first do for the last, they first exchange halves for the other layout.

Arrays are by name (`problem.DIMS`) and may have any leading dims. Those that have rows or keys, Q, K, V, what is like
them and segment ids, are those of this device; of a bias or a mask it has its own rows and all columns, in natural
order; a block mask is there as a whole.
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

from jax_flash import block_sparse, checks, dropout, reference, tile
from jax_flash.explicit import placed
from jax_flash.problem import DIFFERENTIATED, DIMS, Problem
from jax_flash.varying import varying_alike

Arrays = dict[str, jax.Array]
Rows = tuple[jax.Array, jax.Array, jax.Array]  # O, l and m
Compute = Callable[[Problem, Arrays], tuple[jax.Array, ...]]
Layout = Literal["contiguous", "zigzag"]
Sums = dict[tuple[str, int], jax.Array]  # sums of gradients, by the gradient's name and the part of rows or keys
State = TypeVar("State")
Tree = TypeVar("Tree")

TRAVELLING = ("key", "value", "kv_segments", "rows_of_keys")


class Division(NamedTuple):
    """How a sequence is divided."""

    axes: tuple[str, ...]  # the mesh axes that it is divided over, the first of them in the largest steps
    devices: int  # how many devices there are along these axes
    layout: Layout = "contiguous"
    mesh_axes: tuple[str, ...] = ()  # the axes in the mesh's order, if that order differs
    ranks: tuple[int, ...] = ()  # the number of each device in the mesh's order, if that order differs

    @classmethod
    def over(cls, axes: tuple[str, ...], shape: Mapping[str, int], layout: Layout = "contiguous") -> Division:
        """The division over axes of a mesh of this shape."""
        sizes = {axis: size for axis, size in shape.items() if axis in axes}
        ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        ranks = ranks.transpose([list(sizes).index(axis) for axis in axes]).ravel()
        if tuple(sizes) == axes:
            return cls(axes, ranks.size, layout)
        return cls(axes, ranks.size, layout, tuple(sizes), tuple(ranks.tolist()))

    @property
    def parts(self) -> int:
        """Parts of the sequence that a device has. In the zigzag layout a short row's is beside a long one's."""
        return 2 if self.layout == "zigzag" else 1

    def part(self, length: int) -> int:
        """The rows, or keys, of a part."""
        return length // (self.devices * self.parts)

    def numbers(self, device: Any) -> list[Any]:
        """Those of a device's parts in the whole."""
        return [device] if self.parts == 1 else [device, 2 * self.devices - 1 - device]

    def starts(self, device: Any, length: int) -> list[Any]:
        """The first row, or key, of each part of a device's."""
        return [number * self.part(length) for number in self.numbers(device)]

    def device_of(self, part: int) -> int:
        """The device that has a part of the whole."""
        return part if part < self.devices else 2 * self.devices - 1 - part

    def device(self) -> jax.Array:
        """The number of this one."""
        return lax.axis_index(self.axes)

    def permuted(self, x: jax.Array, to: Sequence[int]) -> jax.Array:
        """Send the array of device number i to device number to[i]."""
        # ppermute numbers devices in the mesh's order. Since jax 0.12 it refuses axes in another order.
        ranks = self.ranks or range(self.devices)
        pairs = [(ranks[device], ranks[other]) for device, other in enumerate(to)]
        return lax.ppermute(x, self.mesh_axes or self.axes, pairs)

    def sent(self, arrays: Tree, shift: int) -> Tree:
        """Every device's arrays, to the one that comes so many after it."""
        leaves, structure = jax.tree.flatten(arrays)
        if shift % self.devices == 0 or not leaves:
            return arrays
        return jax.tree.unflatten(structure, _exchanged(self, shift, leaves))

    def refusal(self, problem: Problem) -> str | None:
        """Why a problem cannot be divided so; None: it can."""
        if problem.page:
            return "keys are in pages"
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
      TypeError: devices or axis is no int.
      ValueError: there is no such axis, or it does not divide into 2·devices parts.
    """
    return _reordered(x, devices, axis, _zigzag_order(devices))


def unzigzag(x: ArrayLike, devices: int, axis: int) -> jax.Array:
    """The inverse of `zigzag`, with the same arguments."""
    return _reordered(x, devices, axis, np.argsort(_zigzag_order(devices)))


def _zigzag_order(devices: int) -> np.ndarray:
    devices = checks.integer("devices", devices, least=1)
    return np.stack(Division((), devices, "zigzag").numbers(np.arange(devices)), 1).ravel()


def _reordered(x: ArrayLike, devices: int, axis: int, order: np.ndarray) -> jax.Array:
    x = jnp.asarray(x)
    axis = checks.integer("axis", axis, least=-x.ndim)
    if axis >= x.ndim:
        raise ValueError(f"axis={axis}: the shape is {x.shape}")
    axis %= x.ndim
    if x.shape[axis] % len(order):
        raise ValueError(f"axis {axis} of shape {x.shape} does not divide into 2 x {devices} parts")

    def reordered(x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:axis], len(order), x.shape[axis] // len(order), *x.shape[axis + 1 :])
        return jnp.take(parts, order, axis).reshape(x.shape)

    return placed(reordered, jax.typeof(x).sharding.spec, x)


def _permuted(division: Division, shift: int, x: jax.Array) -> jax.Array:
    return division.permuted(x, [(device + shift) % division.devices for device in range(division.devices)])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _exchanged(division: Division, shift: int, arrays: list[jax.Array]) -> list[jax.Array]:
    """As one array of words: XLA lets one exchange at a time go on while kernels run. Tangents are sent one by one."""
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
    """The bits of an array whose elements have 2, 4 or 8 bytes, 32 a word."""
    x = x.ravel()
    if x.itemsize == 2:
        x = jnp.pad(x, (0, x.size % 2)).reshape(-1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32).ravel()


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The array of a shape and dtype that has these bits."""
    if like.itemsize == 8:
        words = words.reshape(-1, 2)
    return lax.bitcast_convert_type(words, like.dtype).ravel()[: like.size].reshape(like.shape)


class Visit(NamedTuple):
    """What a device does with the keys of the one that is `shift` before it."""

    shift: Any  # an int, or a traced one
    step: int  # by how much this shift is larger than that of the visit before
    pairs: tuple[tuple[int, int], ...]  # a part of the device's rows and a part of these keys, which meet


def entries(problem: Problem, division: Division) -> np.ndarray:
    """How many entries causal masks and windows leave: [shift, part of rows, part of keys, device], as in `Visit`."""
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    span = problem.q_len + problem.kv_len  # a window that is larger hides nothing
    left, right = (min(x, span) for x in (problem.window_left, 0 if problem.causal else problem.window_right))
    shifts, devices = np.ogrid[: division.devices, : division.devices]
    first_rows = np.stack(division.starts(devices, problem.q_len))[None, :, None, 0]
    first_keys = np.stack(division.starts((devices - shifts) % division.devices, problem.kv_len), 1)[:, None]
    everything = np.full((division.devices, division.parts, division.parts, division.devices), rows * keys)
    if problem.query_offset:  # whose values are not known when tracing
        return everything

    def up_to(n: np.ndarray) -> np.ndarray:
        """What y = ..., n - 1, n have of the keys 0 to y - 1, together."""
        n = n.clip(0)
        return np.where(n <= keys, n * (n + 1) // 2, keys * (keys + 1) // 2 + (n - keys) * keys)

    def at_most(distance: int) -> np.ndarray:
        """Entries whose key is so far to the right of their row, or less."""
        ahead = distance + first_rows - first_keys
        return up_to(ahead + rows) - up_to(ahead)

    return (at_most(right) if right >= 0 else everything) - (at_most(-left - 1) if left >= 0 else 0)


def visits(problem: Problem, division: Division) -> list[Visit]:
    """Those in which some device sees something, as far as causal masks and windows tell; the first of its own keys."""
    seen = entries(problem, division).max(-1) > 0
    seen[0] |= np.eye(division.parts, dtype=bool)
    pairs = [tuple((a, b) for a, b in np.argwhere(of).tolist()) for of in seen]
    shifts = [shift for shift, of in enumerate(pairs) if of]
    return [Visit(shift, shift - before, pairs[shift]) for before, shift in itertools.pairwise([0, *shifts])]


def balanced(problem: Problem, division: Division) -> Division:
    """The division in whose layout it is computed. To exchange halves for the other one must save a tenth."""

    def time(over: Division) -> int:
        return int(entries(problem, over).sum((1, 2)).max(-1).sum())  # at every visit all wait for the last

    other = division._replace(layout="zigzag" if division.layout == "contiguous" else "contiguous")
    wins = other.refusal(problem) is None and time(other) < 0.9 * time(division)
    return other if wins else division


def cheaper_by_heads(problem: Problem, division: Division) -> bool:
    """Whether fewer rows of heads are sent where every device gets all rows of some heads, by an all-to-all."""
    over = balanced(problem, division)
    once = problem.q_heads + problem.kv_heads  # Q and O, K and V
    ring = (len(visits(problem, over)) - 1) * problem.kv_heads + (once if over != division else 0)
    return once * (division.devices - 1) / division.devices <= ring


def merge(first: Rows, second: Rows) -> Rows:
    """O, l and m over the keys of two results of the same rows together: O in the dtype of the statistics.

    With m = max(m1, m2), l = e^(m1-m) l1 + e^(m2-m) l2 and O = (e^(m1-m) l1 O1 + e^(m2-m) l2 O2) / l (section 3.1 of
    arXiv 2205.14135). Rows that have seen nothing are l = 0, m = -inf and O = 0, and change nothing.

    Args:
      first, second: O [..., T, N, E], l and m [..., N, T].
    """
    (_, l1, m1), (_, l2, m2) = first, second
    m = lax.stop_gradient(jnp.maximum(m1, m2))
    l1, l2 = tile.exp_minus(m1, m) * l1, tile.exp_minus(m2, m) * l2
    l = l1 + l2
    # What is beside nothing has all, also where a GPU's division makes x / x not quite 1.
    shares = (jnp.where(y == 0, jnp.sign(x), tile.divide(x, l)) for x, y in ((l1, l2), (l2, l1)))
    share1, share2 = (jnp.swapaxes(x, -1, -2)[..., None] for x in shares)
    return share1 * first[0].astype(l.dtype) + share2 * second[0].astype(l.dtype), l, m


def forward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> tuple[jax.Array, ...]:
    """What `compute` returns, (o, l, m), of this device's rows.

    Args:
      compute: a forward on one device, of a problem and arrays by name.
      problem: the whole one.
    """
    division, given = balanced(problem, division), division
    arrays = {name: _relaid(problem, name, x, given, division) for name, x in arrays.items()}
    sinks, problem = arrays.pop("sinks", None), dataclasses.replace(problem, sinks=None)  # they join at last, once

    def attend(visit: Visit, visitors: Arrays, rows: dict[int, Rows], none: Sums) -> tuple[dict[int, Rows], Sums]:
        for a, b in visit.pairs:
            o, l, m = compute(*_part(problem, division, arrays | visitors, visit.shift, a, b))
            rows[a] = merge(rows[a], (o, l, m)) if a in rows else (o.astype(l.dtype), l, m)
        return rows, none

    nothing: dict[int, Rows] = {}
    rows, _ = _tour(problem, division, arrays, attend, nothing)
    parts = zip(*(rows[a] for a in range(division.parts)), strict=True)
    results = {name: jnp.concatenate(x, _axis(name)) for name, x in zip("olm", parts, strict=True)}
    if sinks is not None:
        l = results["l"][..., None]
        share = reference.normalized(sinks, l, results["l"], results["m"])  # that is left to the keys
        results["o"] *= jnp.swapaxes(share, -2, -3)
    results["o"] = results["o"].astype(problem.result_dtype("o"))
    return tuple(_relaid(problem, name, x, division, given) for name, x in results.items())


def backward(compute: Compute, problem: Problem, division: Division, arrays: Arrays) -> tuple[jax.Array, ...]:
    """What `compute` returns, the gradients that the problem asks for, of this device's arrays: those of what is there
    as a whole, a bias and captured arrays, are the part that its rows have in them.

    Args:
      compute: a backward on one device, likewise.
      arrays: the operands, with the o, l and m of the forward, do and dlogsumexp.
    """
    division, given = balanced(problem, division), division
    arrays = {name: _relaid(problem, name, x, given, division) for name, x in arrays.items()}
    dtype = problem.accumulation_dtype

    def propagate(visit: Visit, visitors: Arrays, own: Sums, travelled: Sums) -> tuple[Sums, Sums]:
        for a, b in visit.pairs:
            local, operands = _part(problem, division, arrays | visitors, visit.shift, a, b)
            if visit.step or a != b:  # what a row adds to the gradient of the sinks it adds once
                local = dataclasses.replace(local, dsinks=False)
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

    nothing: Sums = {}
    own, travelled = _tour(problem, division, arrays, propagate, nothing)
    own |= division.sent(travelled, -visits(problem, division)[-1].shift)

    def result(name: str) -> jax.Array:
        if name not in ("dq", "dk", "dv"):
            return own[name, 0]
        x = jnp.concatenate([own[name, part] for part in range(division.parts)], _axis(name))
        return x.astype(problem.result_dtype(name))

    return tuple(_relaid(problem, name, result(name), division, given) for name in problem.gradients)


def _relaid(problem: Problem, name: str, x: jax.Array, before: Division, after: Division) -> jax.Array:
    """This device's part of an array in one layout, of that in another: every device sends each of its halves away.

    In the contiguous layout they are the parts 2 d and 2 d + 1 of the whole, in the zigzag layout one of them is even,
    too: so the even ones of all devices are exchanged, then the odd ones.
    """
    axis = _divided_axis(problem, name, x)
    if axis is None or before == after:
        return x
    odd = before.device() % 2 == 1
    to_zigzag = [[before.device_of(2 * d + i) for d in range(before.devices)] for i in range(2)]

    def swapped_if_odd(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first half of a device's in the zigzag layout has the device's number."""
        return jnp.where(odd, second, first), jnp.where(odd, first, second)

    halves = jnp.split(x, 2, axis)
    if after.layout == "zigzag":
        came = [before.permuted(half, to) for half, to in zip(halves, to_zigzag, strict=True)]
        return jnp.concatenate(swapped_if_odd(*came), axis)
    back = [np.argsort(to).tolist() for to in to_zigzag]
    came = [before.permuted(half, to) for half, to in zip(swapped_if_odd(*halves), back, strict=True)]
    return jnp.concatenate(came, axis)


def _tour(
    problem: Problem,
    division: Division,
    arrays: Arrays,
    use: Callable[[Visit, Arrays, State, Sums], tuple[State, Sums]],
    state: State,
) -> tuple[State, Sums]:
    """What becomes of a state at all visits, and of sums that travel with the keys.

    The keys of the next visit, and the sums that this one adds to, are on their way while keys are used: together,
    where both are sent equally far.

    Visits that are alike are a loop: the program does not grow with the devices, and XLA cannot ask for all keys at
    once.
    """

    def at(
        visit: Visit, ahead: int, carry: tuple[Arrays, State, Sums], shift: ArrayLike
    ) -> tuple[tuple[Arrays, State, Sums], None]:
        packed, state, sums = carry
        here = unpack(packed)
        if ahead == visit.step:
            packed, sums = division.sent((packed, sums), ahead)
        else:
            packed, sums = division.sent(packed, ahead), division.sent(sums, visit.step)
        return (packed, *use(visit._replace(shift=shift), here, state, sums)), None

    packed, unpack = _packed({name: arrays[name] for name in TRAVELLING if name in arrays})
    carry: tuple[Arrays, State, Sums] = (packed, state, {})
    tour = visits(problem, division)
    steps_ahead = [*(visit.step for visit in tour[1:]), 0]
    alike = itertools.groupby(zip(tour, steps_ahead, strict=True), lambda item: (item[0]._replace(shift=0), item[1]))
    for (visit, ahead), group in alike:
        shifts = np.array([visit.shift for visit, _ in group], np.int32)
        step = functools.partial(at, visit, ahead)
        carry, _ = lax.scan(step, carry, shifts) if len(shifts) > 1 else step(carry, shifts[0])
    return carry[1:]


def _packed(arrays: Arrays) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """Those of a dtype as one array, and what takes them apart."""
    dtypes = {x.dtype for x in arrays.values()}
    raveled = {
        dtype.name: ravel_pytree({name: x for name, x in arrays.items() if x.dtype == dtype}) for dtype in dtypes
    }

    def unpack(packed: Arrays) -> Arrays:
        return {name: x for dtype, (_, apart) in raveled.items() for name, x in apart(packed[dtype]).items()}

    return {dtype: flat for dtype, (flat, _) in raveled.items()}, unpack


def _starts(problem: Problem, division: Division, shift: int, a: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The whole's numbers of the first row and key of a pair."""
    device = division.device()
    source = (device - shift) % division.devices
    return division.starts(device, problem.q_len)[a], division.starts(source, problem.kv_len)[b]


def _part(problem: Problem, division: Division, arrays: Arrays, shift: int, a: int, b: int) -> tuple[Problem, Arrays]:
    """The attention of part a of the rows to part b of the keys that are there."""
    rows, keys = division.part(problem.q_len), division.part(problem.kv_len)
    row_start, key_start = _starts(problem, division, shift, a, b)
    part: Arrays = {}
    for name, x in arrays.items():
        axis = _divided_axis(problem, name, x)
        if axis is not None:
            number, size = (a, rows) if "T" in DIMS[name] else (b, keys)
            x = lax.slice_in_dim(x, number * size, (number + 1) * size, axis=axis)
        if name in ("bias", "mask") and getattr(problem, name).columns:
            x = lax.dynamic_slice_in_dim(x, key_start, keys, axis=-1)
        part[name] = x
    if "q_lengths" in part:
        part["q_lengths"] = (part["q_lengths"] - row_start).clip(0, rows)
    if "kv_lengths" in part:
        part["kv_lengths"] = (part["kv_lengths"] - key_start).clip(0, keys)
    if "keys_of_rows" in part:
        part["keys_of_rows"] = (part["keys_of_rows"] - key_start).clip(0, keys)
        part["rows_of_keys"] = (part["rows_of_keys"] - row_start).clip(0, rows)
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
        return jnp.broadcast_to(by.astype(jnp.int32), arrays["query"].shape[:-3])
    limits = np.iinfo(np.int32)
    return arrays["query_offset"].clip(limits.min + span, limits.max - span) + by.astype(jnp.int32)


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
    """The gradient of this device's part of the bias, with that of a pair."""
    bias, extent = arrays["bias"], problem.bias
    assert extent is not None
    if total is None:
        total = varying_alike(jnp.zeros((*x.shape[:-2], *bias.shape[-2:]), x.dtype), x)
    _, key_start = _starts(problem, division, shift, a, b)
    row = a * division.part(problem.q_len) if extent.rows else 0
    at = [jnp.asarray(i, jnp.int32) for i in (*(0,) * (x.ndim - 2), row, key_start if extent.columns else 0)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, x.shape) + x, at)


def _axis(name: str) -> int:
    """Of rows, or keys, counted from the last."""
    dims = DIMS[name]
    return next(i for i in range(-len(dims), 0) if dims[i] in "TS")


def _divided_axis(problem: Problem, name: str, x: jax.Array) -> int | None:
    """Of what this device has of an array's rows or keys; None: it is there as a whole."""
    operand = DIFFERENTIATED.get(name, name)
    broadcast = operand in ("bias", "mask", "sinks") and not getattr(problem, operand).rows
    return None if broadcast or not {"T", "S"} & set(DIMS[name]) else _axis(name) % x.ndim

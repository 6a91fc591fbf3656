"""The order of a sequence over devices: `Layout`, `balance` for packed documents, and `zigzag` for one sequence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import checks
from jax_flash.explicit import placed

Tree = TypeVar("Tree")

CHUNK = 128  # the fewest tokens of a chunk: the rows of a tile of the kernels, and a multiple of `dropout.TILE`
LIMIT = 1.08  # the work of a device over the mean that needs no improvement
ALIGNMENT = 16  # a chunk has a multiple of this many tokens if possible: dropout needs it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The order of a sequence over devices, for the argument `sequence_layout`. Create one with `balance`.

    The sequence consists of chunks of equal size. Each device has equally many chunks. A layout is a pytree of one
    array, so it may be an argument of `jax.jit` and `jax.shard_map`, and new values need no compilation.
    """

    chunks: Any  #: int32 array [devices, chunks of a device], the indices of its chunks, which increase

    def permute(self, x: Tree, axis: int) -> Tree:
        """Return arrays in the order of this layout. Shard the axis of the result over the devices.

        Reorder everything with one entry for each token: tokens, positions, targets, weights and segment ids.

        Args:
          x: array or pytree of arrays with a sequence axis.
          axis: the sequence axis. Its size must be a multiple of the number of chunks.

        Returns:
          Arrays with the same shapes and dtypes. A NumPy array stays one if the layout is not traced.

        Raises:
          TypeError: if axis is not an int.
          ValueError: if the axis does not exist, or its size is not a multiple of the number of chunks.
        """
        order = self.chunks.reshape(-1)
        return jax.tree.map(lambda x: _reordered(x, axis, order), x)

    def inverse(self, x: Tree, axis: int) -> Tree:
        """Return arrays in the natural order: the inverse of `permute`, with the same arguments and errors."""
        order = self.chunks.reshape(-1)
        order = np.argsort(order) if isinstance(order, np.ndarray) else jnp.argsort(order)
        return jax.tree.map(lambda x: _reordered(x, axis, order), x)


def check(layout: Layout, devices: int, axis: Any) -> None:
    """Raise an error if a layout is for another number of devices, or if its chunks are known and not in order."""
    chunks = layout.chunks
    if chunks.shape[0] != devices:
        raise ValueError(
            f"sequence_layout has {chunks.shape[0]} devices, but sequence_axis={axis!r} has {devices}: call balance "
            "with this number"
        )
    if not isinstance(chunks, np.ndarray):
        return
    if (np.diff(chunks) <= 0).any() or (np.sort(chunks, None) != np.arange(chunks.size)).any():
        raise ValueError(
            f"the chunks of sequence_layout must be the numbers 0 to {chunks.size - 1} once each, and increase on each "
            "device: create the layout with balance"
        )


SequenceLayout = Literal["contiguous", "zigzag"] | Layout  # the argument `sequence_layout`


def balance(cu_seqlens: ArrayLike, devices: int, tokens: int | None = None) -> Layout:
    """Return a layout that balances causal attention of packed documents over devices.

    Each device gets equally many tokens, and about equally many visible entries of the score matrix. Documents of more
    than a device's tokens are divided over all devices, and shorter ones down to half of that if the work needs it. A
    few others are divided to fill the devices. The function runs on the host, in NumPy. The shape of the result depends
    only on `devices` and `tokens`.

    ::

        layout = jax_flash.balance(cu_seqlens, devices=8, tokens=tokens.shape[1])
        tokens, targets, positions = layout.permute((tokens, targets, positions), axis=1)

    Pass the layout as `sequence_layout`. A chunk has 128 tokens if each device has a multiple of 128. Otherwise it has
    more, or all tokens of a device. Start documents at multiples of 128 tokens, and count the padding before them as
    the end of the previous document. Otherwise documents share chunks, and devices have to exchange keys for them.

    Args:
      cu_seqlens: integer array [B + 1], the cumulative lengths of the documents, as in `varlen_attention`. Documents
        may be empty.
      devices: number of devices that will share the sequence.
      tokens: length of the sequence with padding, a multiple of devices. Default: the last value of cu_seqlens.

    Raises:
      TypeError: if an argument has a wrong type, or cu_seqlens is traced.
      ValueError: if cu_seqlens does not start with 0, decreases or ends beyond `tokens`, or if devices does not divide
        `tokens`.
    """
    devices = checks.integer("devices", devices, least=1)
    if isinstance(cu_seqlens, jax.core.Tracer):
        raise TypeError(
            "cu_seqlens must be concrete, not traced: call balance outside of jax.jit, where the documents are packed, "
            "and pass the layout to your function"
        )
    edges = np.asarray(checks.integers("cu_seqlens", cu_seqlens), np.int64)
    if edges.ndim != 1 or not edges.size:
        raise ValueError(f"cu_seqlens must have shape [B + 1] for B sequences, not {edges.shape}")
    size = int(edges[-1]) if tokens is None else checks.integer("tokens", tokens)
    if edges[0] != 0 or (edges[1:] < edges[:-1]).any() or edges[-1] > size:
        raise ValueError(f"cu_seqlens must begin with 0, never decrease, and be at most {size}, not {edges.tolist()}")
    if size % devices:
        raise ValueError(f"tokens must be a multiple of the {devices} devices, not {size}: pad the sequence")
    count = chunks_of(size // devices)
    boundaries = np.linspace(0, size, devices * count + 1).astype(np.int64)
    document = np.searchsorted(edges, boundaries, side="right") - 1
    lengths = np.append(np.diff(edges), 0)  # tokens beyond the last document see nothing
    inside = np.minimum(boundaries - edges[document], lengths[document])  # tokens of this document before the boundary
    before = np.append(0, np.cumsum(lengths * (lengths + 1) // 2))[document] + inside * (inside + 1) // 2
    divides = (0 < inside) & (inside < lengths[document])
    middle = np.searchsorted(edges, (boundaries[:-1] + boundaries[1:]) // 2, side="right")
    return Layout(_dealt(np.diff(before), middle, divides[:-1], devices))


def chunks_of(share: int) -> int:
    """Return the number of chunks into which a device's tokens are divided."""
    counts = [n for n in range(max(share // CHUNK, 1), 0, -1) if share % n == 0]
    return next((n for n in counts if share // n % ALIGNMENT == 0), counts[0])


def _dealt(work: np.ndarray, document: np.ndarray, divides: np.ndarray, devices: int) -> np.ndarray:
    """Deal chunks to devices: int32 [devices, chunks of a device].

    Args:
      work: the visible entries of the rows of each chunk.
      document: the document in the middle of each chunk.
      divides: whether an edge before each chunk would divide a document.
    """
    share = len(work) // devices
    deals: list[np.ndarray] = []
    for deal in (
        *(functools.partial(_documents, work, document, devices, whole) for whole in (share, share // 2)),
        *(functools.partial(_windows, work, divides, devices, tolerance) for tolerance in (0.05, 0.02, 0.0)),
    ):
        deals.append(deal())
        if work[deals[-1]].sum(1).max() <= LIMIT * work.sum() / devices:
            return deals[-1]
    return _levelled(work, min(deals, key=lambda deal: work[deal].sum(1).max()))


def _documents(work: np.ndarray, document: np.ndarray, devices: int, whole: int) -> np.ndarray:
    """Deal whole documents, those with the most work first, each to the device with the least work that has room.

    Longer documents are dealt to all devices like `zigzag`. So each visit of the ring has equal work on all devices,
    because these documents make up the visits. Documents that fit nowhere are divided.

    Args:
      whole: the most chunks of a document that one device gets.
    """
    owner, loads = np.full(len(work), -1), np.zeros(devices)
    room = np.full(devices, len(work) // devices)
    before = np.append(0, np.cumsum(work))
    edges = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist(), len(work)]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        part = (end - begin) // (2 * devices) if end - begin > whole else 0
        if part:
            parts = np.arange(begin, begin + 2 * devices * part).reshape(2, devices, part)
            both = np.concatenate([parts[0], parts[1, ::-1]], 1)  # [devices, chunks]
            owner[both] = np.arange(devices)[:, None]
            loads += work[both].sum(1)
            room -= 2 * part
        begin += 2 * devices * part
        pieces.append((before[end] - before[begin], begin, end))
    for entries, begin, end in sorted(pieces, key=lambda piece: -piece[0]):
        device = np.argmin(np.where(room >= end - begin, loads, np.inf))
        if room[device] >= end - begin:
            owner[begin:end] = device
            loads[device] += entries
            room[device] -= end - begin
    owner[owner < 0] = np.repeat(np.arange(devices), room)
    deal = np.argsort(owner, kind="stable").reshape(devices, -1).astype(np.int32)
    return deal[np.argsort(room == 0, kind="stable")]  # devices that divide a document become neighbours


def _windows(work: np.ndarray, divides: np.ndarray, devices: int, tolerance: float) -> np.ndarray:
    """Deal to one device after the other a window of the remaining chunks, which form a circle.

    The windows of all starts have the mean work on average, and neighbouring windows differ by two chunks. So some
    window is close to the mean. Among the windows within the tolerance, one that divides the fewest documents is taken.
    One causal sequence is dealt like `zigzag`, with the devices in another order.
    """
    count = len(work) // devices
    left = np.arange(len(work))
    dealt = []
    for _ in range(devices - 1):
        sums = np.cumsum(np.append(0, work[np.append(left, left[:count])]))
        sums = sums[count:-1] - sums[: -count - 1]  # of the windows that begin at each remaining chunk
        distance = abs(sums - sums.mean())
        close = distance <= max(tolerance * sums.mean(), distance.min())
        edges = divides[left] & (left - np.roll(left, 1) == 1)
        begin = np.lexsort((distance, edges.astype(int) + np.roll(edges, -count), ~close))[0]
        window = (begin + np.arange(count)) % len(left)
        dealt.append(np.sort(left[window]))
        left = np.delete(left, window)
    return np.stack([*dealt, left]).astype(np.int32)


def _levelled(work: np.ndarray, deal: np.ndarray) -> np.ndarray:
    """Swap chunks of the devices with the most and the least work, until they are within the limit or no swap helps."""
    deal = deal.copy()
    while True:
        loads = work[deal].sum(1)
        most, least = loads.argmax(), loads.argmin()
        gap = loads[most] - loads[least]
        moved = work[deal[most]][:, None] - work[deal[least]]  # by each swap
        i, j = np.unravel_index(abs(moved - gap / 2).argmin(), moved.shape)
        if loads[most] <= LIMIT * loads.mean() or not 0 < moved[i, j] < gap:
            return np.sort(deal, axis=1)
        deal[most, i], deal[least, j] = deal[least, j], deal[most, i]


def zigzag(x: ArrayLike, devices: int, axis: int) -> jax.Array:
    """Reorder a sequence for `sequence_layout="zigzag"`, which balances causal attention over devices.

    The axis is split into 2·devices parts. Device r gets parts r and 2·devices - 1 - r. Reorder the inputs, shard the
    axis of the result over the devices, and call `unzigzag` on the output.

    Args:
      x: array with a sequence axis.
      devices: number of devices that will share the sequence.
      axis: the sequence axis. Its size must be a multiple of 2·devices.

    Returns:
      Array with the shape and dtype of x.

    Raises:
      TypeError: if devices or axis is not an int.
      ValueError: if the axis does not exist, or its size is not a multiple of 2·devices.
    """
    return zigzag_layout(devices).permute(jnp.asarray(x), axis)


def unzigzag(x: ArrayLike, devices: int, axis: int) -> jax.Array:
    """Restore the natural order of a sequence: the inverse of `zigzag`, with the same arguments and errors."""
    return zigzag_layout(devices).inverse(jnp.asarray(x), axis)


def zigzag_layout(devices: int) -> Layout:
    """Return the layout of `zigzag`."""
    first = np.arange(checks.integer("devices", devices, least=1))
    return Layout(np.stack([first, 2 * devices - 1 - first], 1))


def document_entries(layout: Layout, cu_seqlens: ArrayLike, tokens: int, causal: bool) -> np.ndarray:
    """Return the visible entries of packed documents, by the device of the row and the device of the key: int64."""
    owner, devices = _owners(layout, tokens), len(layout.chunks)
    found = np.zeros((devices, devices), np.int64)
    for begin, end in itertools.pairwise(np.asarray(cu_seqlens).tolist()):
        of_document = owner[begin:end]
        for source in np.unique(of_document):
            of_source = of_document == source
            keys = np.cumsum(of_source) if causal else np.full(end - begin, of_source.sum())
            found[:, source] += np.bincount(of_document, keys, devices).astype(np.int64)
    return found


def shared_chunks(layout: Layout, cu_seqlens: ArrayLike, tokens: int) -> np.ndarray:
    """Return which chunks have a part of a document that several devices have: bool [devices, chunks of a device]."""
    owner = _owners(layout, tokens)
    size = max(tokens // layout.chunks.size, 1)
    shared = np.zeros(layout.chunks.size, bool)
    for begin, end in itertools.pairwise(np.asarray(cu_seqlens).tolist()):
        if len(np.unique(owner[begin:end])) > 1:
            shared[begin // size : -(-end // size)] = True
    return shared[layout.chunks]


def _owners(layout: Layout, tokens: int) -> np.ndarray:
    """Return the device of each token."""
    devices = len(layout.chunks)
    return layout.inverse(np.repeat(np.arange(devices), tokens // devices), 0)


def _reordered(x: Any, axis: int, order: Any) -> Any:
    """Return the array with the chunks of this axis in this order."""
    on_host = isinstance(x, np.ndarray) and isinstance(order, np.ndarray)
    x = x if on_host else jnp.asarray(x)
    axis = checks.integer("axis", axis, least=-x.ndim)
    if axis >= x.ndim:
        raise ValueError(f"axis must be below {x.ndim} for shape {x.shape}, not {axis}")
    axis %= x.ndim
    if x.shape[axis] % len(order):
        raise ValueError(f"axis {axis} must be divisible by the {len(order)} chunks, but the shape is {x.shape}")

    def reordered(x: Any, take: Callable[..., Any] = jnp.take) -> Any:
        chunks = x.reshape(*x.shape[:axis], len(order), x.shape[axis] // len(order), *x.shape[axis + 1 :])
        return take(chunks, order, axis).reshape(x.shape)

    return reordered(x, np.take) if on_host else placed(reordered, jax.typeof(x).sharding.spec, x)

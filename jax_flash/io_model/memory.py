"""The two memories of the paper: HBM, large and slow, every access counted; SRAM, fast, of a limited size.

The unit is one element of an array, whatever its dtype. An algorithm moves blocks with
`sram.K = hbm["K", rows]` and `hbm["O", rows] = sram.O`, and computes on nothing but what `sram` holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


class HBM:
    """Slow memory: named arrays, and how many of their elements were read and written.

    Attributes:
      arrays: what lies in HBM now, by name; looking at it is free, so it is for inputs and results only.
      reads: elements moved to SRAM.
      writes: elements moved from SRAM.
      allocated: elements that were added to the inputs.
    """

    def __init__(self, **inputs: Array) -> None:
        self.arrays = {name: np.array(x, subok=True) for name, x in inputs.items()}
        self.reads = self.writes = self.allocated = 0

    def allocate(self, **shapes: tuple[int, ...]) -> None:
        """Makes room for arrays; nothing is written yet, and what is read before it is written is NaN."""
        for name, shape in shapes.items():
            self.arrays[name] = np.full(shape, np.nan)
            self.allocated += self.arrays[name].size

    def initialize(self, **arrays: Array) -> None:
        """Makes room for arrays and writes their first values."""
        for name, x in arrays.items():
            self.arrays[name] = x.copy()
            self.allocated += x.size
            self.writes += x.size

    def __getitem__(self, key: tuple[Any, ...]) -> Array:
        """`hbm["Q", rows]` reads those rows of Q, `hbm["S", rows, columns]` a block of S."""
        name, *block = key
        x = self.arrays[name][tuple(block)].copy()
        self.reads += x.size
        return x

    def __setitem__(self, key: tuple[Any, ...], value: ArrayLike) -> None:
        """`hbm["O", rows] = x` writes those rows of O."""
        name, *block = key
        self.arrays[name][tuple(block)] = value
        self.writes += self.arrays[name][tuple(block)].size


class SRAM:
    """Fast memory: its attributes are the arrays it holds, each in a buffer of its own until it is assigned anew.

    An expression is evaluated in place, entry by entry: what it assigns counts, its temporaries do not.

    Attributes:
      size: elements that fit.
      peak: the most elements that it held at a time.

    Raises:
      MemoryError: an assignment would exceed `size`.
      AttributeError: what is asked for is not held.
    """

    size: int
    peak: int

    def __init__(self, size: int) -> None:
        vars(self).update(size=size, peak=0)

    @property
    def held(self) -> dict[str, int]:
        """Elements of each array that is held now."""
        return {name: x.size for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    def clear(self) -> None:
        """Frees all buffers."""
        for name in self.held:
            del vars(self)[name]

    def __setattr__(self, name: str, value: ArrayLike) -> None:
        x = np.asanyarray(value)
        held = self.held | {name: x.size}
        elements = sum(held.values())
        if elements > self.size:
            raise MemoryError(f"SRAM of {self.size} elements cannot hold {elements}: {held}")
        vars(self).update({name: x, "peak": max(self.peak, elements)})

    def __getattr__(self, name: str) -> Array:
        raise AttributeError(f"{name} is not in SRAM")


class Run(NamedTuple):
    """What an algorithm returned, and the memories it ran on."""

    outputs: tuple[Array, ...]  #: what the algorithm returns
    hbm: HBM  #: which has counted what was read and written
    sram: SRAM  #: which knows how much it held at most


def shape(*matrices: Array) -> tuple[int, int]:
    """N and d of the matrices of one head: Q, K, V and all that have their shape.

    Raises:
      ValueError: they are not all [N, d], or there are no rows.
    """
    shapes = [x.shape for x in matrices]
    if len(shapes[0]) != 2 or not shapes[0][0] or len(set(shapes)) > 1:
        raise ValueError(f"Q, K, V, O and dO must all be [N, d], N positive, not {', '.join(map(str, shapes))}")
    return shapes[0]


def blocks(length: int, size: int) -> list[slice]:
    """Divides `length` rows into ⌈length / size⌉ blocks of `size`; the last one has what is left."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]

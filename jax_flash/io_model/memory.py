"""The two memories of the paper: HBM is large and slow and counts accesses. SRAM is fast and has a limited size.

Counts are in array elements of any dtype. An algorithm moves blocks with `sram.K = hbm["K", rows]` and
`hbm["O", rows] = sram.O`. It computes only on arrays in `sram`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


class HBM:
    """Slow memory: named arrays, and counts of the elements read and written.

    Attributes:
      arrays: the arrays in HBM, by name. Access through this attribute is not counted. Use it for inputs and results.
      reads: elements moved to SRAM.
      writes: elements moved from SRAM.
      allocated: elements allocated in addition to the inputs.
    """

    def __init__(self, **inputs: Array) -> None:
        self.arrays = {name: np.array(x, subok=True) for name, x in inputs.items()}
        self.reads = self.writes = self.allocated = 0

    def allocate(self, **shapes: tuple[int, ...]) -> None:
        """Allocate arrays without writing them. Elements are NaN until written."""
        for name, shape in shapes.items():
            self.arrays[name] = np.full(shape, np.nan)
            self.allocated += self.arrays[name].size

    def initialize(self, **arrays: Array) -> None:
        """Allocate arrays and write their initial values."""
        for name, x in arrays.items():
            self.arrays[name] = x.copy()
            self.allocated += x.size
            self.writes += x.size

    def __getitem__(self, key: tuple[Any, ...]) -> Array:
        """Read a block: `hbm["Q", rows]` for rows of Q, `hbm["S", rows, columns]` for a block of S."""
        name, *block = key
        x = self.arrays[name][tuple(block)].copy()
        self.reads += x.size
        return x

    def __setitem__(self, key: tuple[Any, ...], value: ArrayLike) -> None:
        """Write a block: `hbm["O", rows] = x` for rows of O."""
        name, *block = key
        self.arrays[name][tuple(block)] = value
        self.writes += self.arrays[name][tuple(block)].size


class SRAM:
    """Fast memory: each attribute is an array with its own buffer, until the attribute is assigned again.

    Assigned arrays count. Temporaries of an expression do not, because it can be evaluated entry by entry.

    Attributes:
      size: capacity in elements.
      peak: largest number of elements held at one time.

    Raises:
      MemoryError: if an assignment would exceed `size`.
      AttributeError: if an array is read that SRAM does not hold.
    """

    size: int
    peak: int

    def __init__(self, size: int) -> None:
        vars(self).update(size=size, peak=0)

    @property
    def held(self) -> dict[str, int]:
        """The number of elements of each array in SRAM, by name."""
        return {name: x.size for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    def clear(self) -> None:
        """Free all buffers."""
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
    """The results of an algorithm, and the memories that it used."""

    outputs: tuple[Array, ...]  #: the results of the algorithm
    hbm: HBM  #: the HBM, with its counts of reads and writes
    sram: SRAM  #: the SRAM, with its peak size


def shape(*matrices: Array) -> tuple[int, int]:
    """Return N and d of the matrices of one head, which all have the shape [N, d].

    Raises:
      ValueError: if the shapes differ or N is 0.
    """
    shapes = [x.shape for x in matrices]
    if len(shapes[0]) != 2 or not shapes[0][0] or len(set(shapes)) > 1:
        raise ValueError(f"Q, K, V, O and dO must all be [N, d] with N positive, not {', '.join(map(str, shapes))}")
    return shapes[0]


def blocks(length: int, size: int) -> list[slice]:
    """Split `length` rows into ⌈length / size⌉ blocks of `size`. The last block may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]

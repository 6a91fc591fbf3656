"""Static descriptions: frozen dataclasses of plain values, and their text for the custom calls and for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Extent(NamedTuple):
    """The dimensions of a [B, N, T, S] operand that have full size. The others have size 1 and are broadcast."""

    batch: bool
    heads: bool
    rows: bool
    columns: bool

    @classmethod
    def of(cls, x: jax.Array) -> Extent:
        return cls(*(size != 1 for size in x.shape))

    @classmethod
    def of_blocks(cls, blocks: jax.Array | jax.ShapeDtypeStruct) -> Extent:
        """Return the extent of a block mask, which always has rows and columns."""
        return cls(blocks.shape[0] != 1, blocks.shape[1] != 1, True, True)

    def __str__(self) -> str:
        return "".join(name if there else "1" for name, there in zip("bnts", self, strict=True))


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """The base of `Problem`, `Mask` and `Score`. Every field has a default, except for sizes and the dtype."""

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults: a jaxpr prints its problem several times."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        shown = ", ".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
        return f"{type(self).__name__}({shown})"

    def texts(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each field. The names of nested fields have a prefix, as in "mask.ranges"."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Description):
                yield from value.texts(f"{field.name}.")
            else:
                yield prefix + field.name, _text(value)


def _text(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple) and not isinstance(value, Extent):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)

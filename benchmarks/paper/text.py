"""Real text that is on every machine: the Python sources of the standard library and of the installed packages."""

import functools
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

VOCABULARY = 256  # bytes; a multiple of 128 already
HELD_OUT = 10  # one file of so many is not trained on


class Source(NamedTuple):
    package: str
    content: bytes
    held_out: bool


@functools.cache
def sources(most: int | None = None) -> list[Source]:
    """The first so many files of each folder, or all. A file that has copies counts once.

    Their order follows from what is in them, so that the first files that are held out are of all packages.
    """
    paths = sysconfig.get_paths()
    # jax need not be where this interpreter would install it.
    installed = dict.fromkeys([Path(paths["purelib"]), Path(paths["platlib"]), Path(jax.__file__).parents[1]])
    found: dict[bytes, Source] = {}
    for root in (Path(paths["stdlib"]), *installed):
        for path in sorted(root.rglob("*.py"))[:most]:
            within = path.relative_to(root).parts
            if root not in installed and within[0] in ("site-packages", "dist-packages"):
                continue  # of another root
            if "jax_flash" in within[0]:
                continue  # so that the text stays the same while this library changes
            content = path.read_bytes()
            package = within[0] if root in installed else "the standard library"
            found.setdefault(content, Source(package, content, zlib.crc32(content) % HELD_OUT == 0))
    return sorted(found.values(), key=lambda file: zlib.crc32(file.content))


def tokens(files: list[Source], held_out: bool) -> np.ndarray:
    """Uint8 [bytes]: the files that are held out or the others, in one piece, each ended by a zero."""
    return np.frombuffer(b"".join(file.content + b"\0" for file in files if file.held_out == held_out), np.uint8)


def windows(text: np.ndarray, batch: int, length: int, seed: int | Sequence[int]) -> Iterator[np.ndarray]:
    """Int32 [batch, length], each row from a random place."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(len(text) - length, size=(batch, 1))
        yield text[starts + np.arange(length)].astype(np.int32)


def stretches(text: np.ndarray, batch: int, length: int, count: int) -> Iterator[np.ndarray]:
    """Int32 [batch, length + 1]: the first `count` tokens but the very first are predicted once each, whatever the
    length, since a row begins with the token that the row before ends with."""
    starts = np.arange(0, min(count, len(text) - 1) // (batch * length) * batch * length, length)
    for rows in starts.reshape(-1, batch, 1):
        yield text[rows + np.arange(length + 1)].astype(np.int32)

"""Real text available on every machine: the Python sources of the standard library and of the installed packages."""

import functools
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

VOCABULARY = 256  # bytes; already a multiple of 128
HELD_OUT = 10  # one in this many files is not used for training


class Source(NamedTuple):
    package: str
    content: bytes
    held_out: bool


@functools.cache
def sources(most: int | None = None) -> list[Source]:
    """Return the first `most` files of each folder, or all files, without duplicates.

    They are sorted by a checksum, so the first held-out files come from all packages.
    """
    paths = sysconfig.get_paths()
    # jax may be installed outside this interpreter's folders.
    installed = dict.fromkeys([Path(paths["purelib"]), Path(paths["platlib"]), Path(jax.__file__).parents[1]])
    found: dict[bytes, Source] = {}
    for root in (Path(paths["stdlib"]), *installed):
        for path in sorted(root.rglob("*.py"))[:most]:
            within = path.relative_to(root).parts
            if root not in installed and within[0] in ("site-packages", "dist-packages"):
                continue  # belongs to another root
            if "jax_flash" in within[0]:
                continue  # otherwise the text would change with this library
            content = path.read_bytes()
            package = within[0] if root in installed else "the standard library"
            found.setdefault(content, Source(package, content, zlib.crc32(content) % HELD_OUT == 0))
    return sorted(found.values(), key=lambda file: zlib.crc32(file.content))


def tokens(files: list[Source], held_out: bool) -> np.ndarray:
    """Return the held-out files or the others as one uint8 array. Each file ends with a zero."""
    return np.frombuffer(b"".join(file.content + b"\0" for file in files if file.held_out == held_out), np.uint8)


def training_and_held_out(quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to train with, and the held-out tokens."""
    files = sources(200 if quick else None)
    return tokens(files, False), tokens(files, True)


def windows(text: np.ndarray, batch: int, length: int, seed: int | Sequence[int]) -> Iterator[np.ndarray]:
    """Yield int32 [batch, length]. Each row starts at a random position."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(len(text) - length, size=(batch, 1))
        yield text[starts + np.arange(length)].astype(np.int32)


def stretches(text: np.ndarray, batch: int, length: int, count: int) -> Iterator[np.ndarray]:
    """Yield int32 [batch, length + 1], which cover the first `count` tokens.

    A row begins with the last token of the row before, so each token except the first is predicted once.
    """
    starts = np.arange(0, min(count, len(text) - 1) // (batch * length) * batch * length, length)
    for rows in starts.reshape(-1, batch, 1):
        yield text[rows + np.arange(length + 1)].astype(np.int32)

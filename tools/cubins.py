"""The machine code of the kernels that the tests compile, before and after a change that should not change it.

    python tools/cubins.py save before.json       # minutes; --every 20 for one kernel in 20
    python tools/cubins.py compare before.json    # with another build: its code for the same problems

A kernel is known by a problem that it is for (`kernel_variants.planned`), not by files and fields: they may change.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import struct
import sys
from collections.abc import Iterator

from kernel_variants import Variant, cover, planned, singles, tested
from rich.console import Console
from rich.progress import track
from rich.table import Table

# Two cubins that run alike can differ in the names and numbers of symbols. The sources' constants are such symbols,
# though no kernel reads them: they are in .nv.global.init, and their addresses in .nv.constant4.
CODE = (".text.", ".nv.constant0.", ".nv.constant2.", ".nv.constant3", ".nv.shared.", ".nv.info")
# Attributes of a kernel that are symbols' numbers: where its parameters are, what it has from outside.
PARAM_CBANK, EXTERNS = 0x0A, 0x0F
# LDC and ULDC read a constant bank, which on Hopper holds the addresses of symbols at bank 4. The lower 64 of their
# 128 bits have the opcode, the offset and the bank.
OPCODE, LOADS, OFFSET, BANK, ADDRESSES = 0xFFF, (0xB82, 0xAB9), 0xFFFF << 38, 0x1F << 54, 4 << 54


def sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, size and content, which what is only reserved has none of."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        at = headers[names][4] + name
        content = b"" if kind == 8 else elf[offset : offset + length]  # SHT_NOBITS
        yield elf[at : elf.index(b"\0", at)].decode(), length, content


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Of a section .nv.info: registers, stack, launch bounds, clusters, barriers, parameters."""
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        payload = info[at + 4 : at + 4 + value] if form == 4 else info[at + 2 : at + 4]
        yield attribute, payload
        at += 4 + (len(payload) if form == 4 else 0)


def instructions(text: bytes) -> bytes:
    """A section .text without the offsets of symbols' addresses, which other symbols shift."""
    words = [word for (word,) in struct.iter_unpack("<Q", text)]
    for i, word in enumerate(words[::2]):
        if word & OPCODE in LOADS and word & BANK == ADDRESSES:
            words[2 * i] = word & ~OFFSET
    return struct.pack(f"<{len(words)}Q", *words)


def code_hash(cubin: bytes) -> str:
    """The SHA-256 of what runs: instructions, constants, shared memory and what the driver is told of the kernels."""
    parts = []
    for name, size, content in sections(cubin):
        if name == ".nv.info":  # of all kernels, each attribute after the number of a kernel's symbol
            parts.append(repr((name, sorted((attribute, value[4:]) for attribute, value in attributes(content)))))
        elif name.startswith(".nv.info."):
            known = [(x, value) for x, value in attributes(content) if x not in (PARAM_CBANK, EXTERNS)]
            parts.append(repr((name, known)))
        elif name.startswith(".text."):
            parts.append(repr((name, instructions(content))))
        elif name.startswith(CODE):
            parts.append(repr((name, size, content)))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def compiled(chosen: dict[str, Variant]) -> dict[str, str]:
    """The hash of each kernel file; NVRTC compiles without the GIL, so threads do."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = pool.map(lambda variant: code_hash(variant.compile()[0]), chosen.values())
        hashes = track(hashes, f"Compiling {len(chosen)} files", total=len(chosen))
        return dict(zip(chosen, hashes, strict=True))


def save(path: pathlib.Path, every: int) -> int:
    places: dict[Variant, str] = {}
    for place, variant in planned(itertools.chain(singles(), cover())):
        places.setdefault(variant, place)
    hashes = compiled({places[variant]: variant for variant in tested()[::every]})
    path.write_text(json.dumps(hashes, indent=0))
    return 0


def compare(path: pathlib.Path, every: int) -> int:
    before = dict(list(json.loads(path.read_text()).items())[::every])
    now = dict(planned(itertools.chain(singles(), cover())))
    hashes = compiled({place: now[place] for place in before if place in now})
    table = Table("kernel file", "now")
    for place, hash_ in before.items():
        if hashes.get(place) != hash_:
            table.add_row(place, "another" if place in hashes else "none")
    print(f"{len(before) - table.row_count} of {len(before)} kernel files are equal")
    if table.row_count:
        Console().print(table)
    return int(table.row_count > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("save", "compare"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one kernel in N")
    args = parser.parse_args(argv)
    return {"save": save, "compare": compare}[args.command](args.file, args.every)


if __name__ == "__main__":
    sys.exit(main())

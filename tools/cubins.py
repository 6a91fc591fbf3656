"""Compare the machine code of the tested kernels before and after a change that should not affect it.

    python tools/cubins.py save before.json       # minutes; --every 20 for one kernel in 20
    python tools/cubins.py compare before.json    # compiles the same problems with another build

A kernel is identified by a problem that uses it (`kernel_variants.planned`), because files and fields may change.
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

# Equal code may have different names and numbers of symbols. Constants of the sources are symbols, even if no kernel
# reads them: they are in .nv.global.init, and their addresses in .nv.constant4.
CODE = (".text.", ".nv.constant0.", ".nv.constant2.", ".nv.constant3", ".nv.shared.", ".nv.info")
# Attributes of a kernel that contain symbol numbers: the constant bank of its parameters, and external symbols.
PARAM_CBANK, EXTERNS = 0x0A, 0x0F
# LDC and ULDC read a constant bank. On Hopper, bank 4 holds the addresses of symbols. The lower 64 of the 128 bits have
# the opcode, the offset and the bank.
OPCODE, LOADS, OFFSET, BANK, ADDRESSES = 0xFFF, (0xB82, 0xAB9), 0xFFFF << 38, 0x1F << 54, 4 << 54


def sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, size and content of each section. Sections that only reserve memory have no content."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        begin = headers[names][4] + name
        content = b"" if kind == 8 else elf[offset : offset + length]  # SHT_NOBITS
        yield elf[begin : elf.index(b"\0", begin)].decode(), length, content


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a section .nv.info: registers, stack, launch bounds, clusters, barriers, parameters."""
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        payload = info[at + 4 : at + 4 + value] if form == 4 else info[at + 2 : at + 4]
        yield attribute, payload
        at += 4 + (len(payload) if form == 4 else 0)


def instructions(text: bytes) -> bytes:
    """Return a section .text without the offsets of symbol addresses, which other symbols shift."""
    words = [word for (word,) in struct.iter_unpack("<Q", text)]
    for i, word in enumerate(words[::2]):
        if word & OPCODE in LOADS and word & BANK == ADDRESSES:
            words[2 * i] = word & ~OFFSET
    return struct.pack(f"<{len(words)}Q", *words)


def code_hash(cubin: bytes) -> str:
    """Return the SHA-256 of instructions, constants, shared memory and the launch attributes of the kernels."""
    parts = []
    for name, size, content in sections(cubin):
        if name == ".nv.info":  # attributes of all kernels, each with the number of the kernel's symbol
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
    """Return the hash of each kernel file. NVRTC compiles without the GIL, so threads run in parallel."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = pool.map(lambda variant: code_hash(variant.compile()[0]), chosen.values())
        hashes = track(hashes, f"Compiling {len(chosen)} files", total=len(chosen))
        return dict(zip(chosen, hashes, strict=True))


def save(path: pathlib.Path, every: int) -> int:
    names: dict[Variant, str] = {}
    for name, variant in planned(itertools.chain(singles(), cover())):
        names.setdefault(variant, name)
    hashes = compiled({names[variant]: variant for variant in tested()[::every]})
    path.write_text(json.dumps(hashes, indent=0))
    return 0


def compare(path: pathlib.Path, every: int) -> int:
    before = dict(list(json.loads(path.read_text()).items())[::every])
    now = dict(planned(itertools.chain(singles(), cover())))
    hashes = compiled({name: now[name] for name in before if name in now})
    table = Table("kernel file", "now")
    for name, hash_ in before.items():
        if hashes.get(name) != hash_:
            table.add_row(name, "different" if name in hashes else "missing")
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

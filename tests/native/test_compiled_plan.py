"""Choice of tiles if the compiler runs out of registers. A library in place of NVRTC reports the spills."""

import pathlib

import compiling
import fake_nvrtc
import pytest
from plans import GRADIENTS, portable_scratch, problem, scratch

from jax_flash import _native

FORWARD = problem(qk_dim=128, v_dim=128).encode()
TILES = [f"128 x {cols}" for cols in (128, 96, 64, 48, 32, 16)]  # of the forward, in the order of preference


class Compiler:
    """A library in place of NVRTC, and a cache directory. `reports` are the C expressions of `fake_nvrtc.build`."""

    def __init__(self, folder: pathlib.Path, **reports: str):
        self.library, self.log = folder / "libnvrtc.so", folder / "compiled"
        self.cache = folder / "cache"
        fake_nvrtc.build(self.library, **reports)

    def plan(self, text: str = FORWARD, backward: bool = False) -> tuple[str, list[str], list[str]]:
        """Plan in a new process. Return the chosen tiles, the reasons, and the tiles that the process compiled.

        `file` becomes the kernel file with the chosen tiles.
        """
        self.log.write_text("")
        environment = {"JAX_FLASH_CACHE_DIR": str(self.cache), "COMPILED": str(self.log)}
        launches, reasons = compiling.plan(self.library, environment, text, backward, "sm_90a")
        mains = ("jax_flash_forward", "jax_flash_backward")
        self.file, fields = next((file, fields) for file, name, fields in launches if name in mains)
        return f"{fields['rows']} x {fields['cols']}", reasons, self.log.read_text().splitlines()


def test_next_tiles_are_used_and_cached(tmp_path):
    compiler = Compiler(tmp_path, spilled="cols > 96 ? 40 : 0")
    tiles, reasons, compiled = compiler.plan()
    assert tiles == TILES[1] and compiled == TILES[:2]
    assert reasons == ["Hopper tiles of 128 x 128 are not used: the compiler has too few registers for them"]
    assert compiler.plan() == (tiles, reasons, [])
    # A damaged file is not believed: its tiles are compiled again.
    refused = next(path for path in compiler.cache.iterdir() if b"\nspilled 40\n" in path.read_bytes())
    for damaged in (refused.read_bytes().replace(b"spilled 40", b"spilled 0"), b""):
        refused.write_bytes(damaged)
        assert compiler.plan() == (tiles, reasons, TILES[:1])


@pytest.mark.parametrize("spilled", [0, _native.TOLERATED_SPILL])
def test_tiles_that_spill_little_compile_once(tmp_path, spilled):
    assert Compiler(tmp_path, spilled=str(spilled)).plan() == (TILES[0], [], TILES[:1])


def test_without_cache_directory_every_process_compiles(tmp_path):
    compiler = Compiler(tmp_path, spilled="cols > 96 ? 40 : 0")
    compiler.cache = pathlib.Path("/dev/null/cache")
    for _ in range(2):
        tiles, _, compiled = compiler.plan()
        assert tiles == TILES[1] and compiled == TILES[:2]


@pytest.mark.parametrize(
    ("reports", "chosen", "reason"),
    [
        ({"spilled": "cols > 96 ? 40 : cols == 64 ? 36 : 44"}, "128 x 64", "36 bytes of registers would be spilled"),
        ({"spilled": "40"}, "128 x 128", "40 bytes of registers would be spilled"),  # the first, as all spill equally
        ({"spilled": "cols < 128 ? 1000 : 0", "serialized": "cols == 128"}, "128 x 96", "1000 bytes"),
        ({"serialized": "1"}, "128 x 128", "wgmmas would wait for each other"),
    ],
)
def test_least_spilling_tiles(tmp_path, reports, chosen, reason):
    tiles, reasons, compiled = Compiler(tmp_path, **reports).plan()
    assert tiles == chosen
    assert list(dict.fromkeys(compiled)) == TILES
    assert reason in reasons[-1]


def test_heads_are_not_interleaved_if_that_spills(tmp_path):
    grouped = problem(q_heads=64, kv_heads=8, is_causal=True, q_len=2048, kv_len=2048, **GRADIENTS).encode()
    tiles, reasons, compiled = Compiler(tmp_path, spilled="interleaved_heads ? 40 : 0").plan(grouped, backward=True)
    assert compiled[0] == tiles == compiled[1]  # with and without interleaved heads; the log has only the sizes
    assert "128 x 128, with the heads of a group interleaved, are not used" in reasons[0]


def test_backward_falls_back_to_ampere(tmp_path):
    """The plan uses Ampere's kernels and reserves scratch for either family."""
    options = GRADIENTS | {"qk_dim": 128, "v_dim": 128, "logits_soft_cap": 2.0}
    compiler = Compiler(tmp_path, serialized="hopper")
    tiles, reasons, _ = compiler.plan(problem(**options).encode(), backward=True)
    assert (compiler.file, tiles) == ("ampere/backward.cuh", "64 x 128")
    assert reasons == ["Hopper tiles of 64 x 128 are not used: the compiler has too few registers for them"]
    ampere, both = (scratch(arch, backward=True, **options) for arch in ("sm_80", "sm_90a"))
    assert ampere <= both <= portable_scratch(backward=True, **options)

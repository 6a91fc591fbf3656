"""The CPU kernels with every instruction set that this processor supports."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jax_flash import _native

ORDER = ("portable", "avx2", "avx512")
TESTS = (
    "test_head_dim or test_feature_in_f64 or test_large_scores or instructions or test_masked_entries or test_masks"
    " or test_relative_tables or test_flash"
)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ORDER)
def test_instruction_set(isa):
    if ORDER.index(isa) > ORDER.index(_native.cpu_isa()):
        pytest.skip(f"this processor has {_native.cpu_isa()}, not {isa}")
    if isa == _native.cpu_isa():
        pytest.skip("the other tests use this one")
    environment = os.environ | {"JAX_FLASH_CPU_ISA": isa}
    chosen = "from jax_flash import _native; print(_native.cpu_isa())"
    assert subprocess.check_output([sys.executable, "-c", chosen], env=environment, text=True).split() == [isa]
    native = ("test_program.py", "test_program_attention.py", "test_ranges.py")
    files = ["numerics/test_accuracy.py", "numerics/test_padding.py", *(f"native/{name}" for name in native)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", TESTS]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]


OBJECTS = sorted(Path(sys.prefix, "build").glob("CMakeFiles/kernels_*.dir/cpu_src/*.o"))


def shared_functions(file: Path, isa: str) -> list[str]:
    """Return the weak symbols of an object file that do not belong to this instruction set's namespace."""
    symbols = subprocess.check_output(["nm", "--demangle", "--defined-only", file], text=True)
    weak = re.findall(r"^[0-9a-f]+ [WVu] (?!DW\.ref\.)(.*)$", symbols, re.MULTILINE)
    return [name for name in weak if f"jax_flash::{isa}::" not in name]


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils are not installed")
@pytest.mark.skipif(not OBJECTS, reason="this environment was not made by make, which keeps the object files")
def test_kernels_share_no_inline_functions():
    """The linker keeps one copy of such a function for the whole module, compiled for any of the instruction sets."""
    isas = [file.parts[-3].removeprefix("kernels_").removesuffix(".dir") for file in OBJECTS]
    assert set(isas) <= set(ORDER)
    assert [name for file, isa in zip(OBJECTS, isas, strict=True) for name in shared_functions(file, isa)] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils are not installed")
def test_shared_inline_function_is_found(tmp_path):
    source, file = tmp_path / "kernel.cc", tmp_path / "kernel.o"
    function = "inline long Shared(long x) {{ return x; }} long (*{name})(long) = Shared;"
    source.write_text(f"{function.format(name='f')} namespace jax_flash::avx2 {{ {function.format(name='g')} }}")
    subprocess.run(["c++", "-std=c++17", "-c", source, "-o", file], check=True)
    assert shared_functions(file, "avx2") == ["Shared(long)"]

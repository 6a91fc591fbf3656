"""Every instruction set that the CPU kernels are compiled for, as far as this processor has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_flash import _native

ORDER = ("portable", "avx2", "avx512")
TESTS = (
    "test_head_dim or test_feature_in_f64 or test_large_scores or instructions or test_hidden_entries or test_masks"
    " or test_relative_tables"
)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ORDER)
def test_instruction_set(isa):
    if ORDER.index(isa) > ORDER.index(_native.cpu_isa()):
        pytest.skip(f"this processor has {_native.cpu_isa()}, not {isa}")
    if isa == _native.cpu_isa():
        pytest.skip("all the other tests are for this one")
    environment = os.environ | {"JAX_FLASH_CPU_ISA": isa}
    chosen = "from jax_flash import _native; print(_native.cpu_isa())"
    assert subprocess.check_output([sys.executable, "-c", chosen], env=environment, text=True).split() == [isa]
    native = ("test_program.py", "test_program_attention.py", "test_ranges.py")
    files = ["numerics/test_accuracy.py", *(f"native/{name}" for name in native)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", TESTS]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]

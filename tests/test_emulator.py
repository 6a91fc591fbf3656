"""The CUDA kernels on this CPU: a few cases of each family. `make emulate` runs every feature."""

import os
import pathlib
import subprocess
import sys

import emulator
import pytest


@pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())
@pytest.mark.parametrize("arch", emulator.ARCHS)
def test_kernels(arch):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "emulator/checks.py", "-m", "not gpu"]
    environment = os.environ | {"JAX_FLASH_EMULATE": arch}
    result = subprocess.run(command, env=environment, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]

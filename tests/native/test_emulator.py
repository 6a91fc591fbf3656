"""A few cases of the CUDA kernels of each family in the emulator. `make emulate` runs every feature."""

import os
import pathlib
import re
import subprocess
import sys

import emulator
import pytest

FOLDER = pathlib.Path(__file__).parent
PARTS = 4
# glibc keeps freed memory, so that Linux need not clear the pages of each large array.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33)}

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())


def run_checks(*arguments, **environment):
    """Run tests in a new process with an emulated GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *arguments]
    result = subprocess.run(command, env=os.environ | MALLOC | environment, cwd=FOLDER, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@pytest.mark.parametrize("arch", emulator.ARCHS)
def test_kernels(arch):
    run_checks("emulator_checks.py::test_case", JAX_FLASH_EMULATE=arch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", emulator.ARCHS)
def test_all_kernels(arch, part):
    """Run every test but `test_case`, in parts of similar length that can run at the same time."""
    names = re.findall(r"^def (test_\w+)", (FOLDER / "emulator_checks.py").read_text(), re.MULTILINE)
    names.remove("test_case")
    run_checks(*(f"emulator_checks.py::{name}" for name in names[part::PARTS]), JAX_FLASH_EMULATE=arch)


def test_odd_number_of_multiprocessors():
    """Hopper's grids contain only whole clusters, so one SM stays idle."""
    case = "emulator_checks.py::test_random_schedule[cpu-clusters]"
    run_checks(case, JAX_FLASH_EMULATE="sm_90", JAX_FLASH_EMULATE_MULTIPROCESSORS="3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiprocessors", "options"), [("1", ""), ("3", ""), ("2", "-DJAX_FLASH_RACECHECK")], ids=["1", "3", "racecheck"]
)
def test_tiles_of_256_queries(multiprocessors, options):
    run_checks(
        "emulator_checks.py",
        *("-k", "tiles_of_256_queries"),
        JAX_FLASH_EMULATE="sm_90",
        JAX_FLASH_EMULATE_MULTIPROCESSORS=multiprocessors,
        JAX_FLASH_NVRTC_OPTIONS=options,
    )


@pytest.mark.slow
def test_kernels_for_racecheck():
    """With JAX_FLASH_RACECHECK all lanes arrive at mbarriers, and the barriers' counts include them."""
    names = ("causal", "three kernels", "clusters", "wide heads", "TF32", "TF32 of 128 dims", "block mask", "dbias")
    cases = [f"emulator_checks.py::test_random_schedule[cpu-{name}]" for name in names]
    run_checks(*cases, JAX_FLASH_EMULATE="sm_90", JAX_FLASH_NVRTC_OPTIONS="-DJAX_FLASH_RACECHECK")

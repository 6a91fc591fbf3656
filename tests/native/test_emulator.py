"""A few cases of the CUDA kernels of each family in the emulator. `make emulate` runs every feature."""

import os
import pathlib
import subprocess
import sys

import emulator
import pytest

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())


def run_checks(*arguments, **environment):
    """Run tests in a new process with an emulated GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *arguments]
    folder = pathlib.Path(__file__).parent
    result = subprocess.run(command, env=os.environ | environment, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@pytest.mark.parametrize("arch", emulator.ARCHS)
def test_kernels(arch):
    run_checks("emulator_checks.py::test_case", JAX_FLASH_EMULATE=arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", emulator.ARCHS)
def test_all_kernels(arch):
    run_checks("emulator_checks.py", "-k", "not test_case", JAX_FLASH_EMULATE=arch)


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

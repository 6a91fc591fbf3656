"""Eight virtual CPU devices for the whole suite, and what decides whether a test can run here."""

import os
import shutil

# Before jax starts its backends. Most of the suite's time is LLVM's, for programs that run once on small arrays.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="no NVIDIA GPU here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def x64():
    """64-bit JAX types for one test."""
    with jax.enable_x64(True):
        yield

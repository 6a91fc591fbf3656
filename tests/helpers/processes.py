"""The environment of Python programs that tests run."""

import os


def one_device(**changes: str) -> dict[str, str]:
    """Return the environment, without the virtual devices of the tests but with their flags for fast compilation."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = " ".join(flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count"))
    return os.environ | {"XLA_FLAGS": kept} | changes

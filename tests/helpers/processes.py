"""The environment of Python subprocesses in tests."""

import os


def one_device(**changes: str) -> dict[str, str]:
    """Return this process's environment without the tests' virtual devices. Flags for fast compilation stay."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = " ".join(flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count"))
    return os.environ | {"XLA_FLAGS": kept} | changes

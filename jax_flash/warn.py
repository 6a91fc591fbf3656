"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings

# A call goes through these packages on its way from the user's line to the place of a warning.
LIBRARIES = ("jax_flash", "jax", "flax", "keras", "equinox", "haiku", "contextlib", "functools")


def warn(message: str) -> None:
    """Warn at the innermost line that is in none of the `LIBRARIES`."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)

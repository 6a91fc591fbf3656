"""Location of the CUDA libraries. This module is imported only when a kernel must be compiled."""

from __future__ import annotations

from cuda import pathfinder


def find_nvrtc() -> str:
    """Return the path of libnvrtc from NVIDIA's Python packages (`jax[cuda13]`), conda, a CUDA toolkit or the system.

    If the library is not found, the error of the pathfinder lists the places that it searched.
    """
    library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    assert library.abs_path is not None, library
    return library.abs_path

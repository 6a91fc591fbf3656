"""Where the CUDA libraries are. Imported when a kernel has to be compiled, not before."""

from __future__ import annotations

from cuda import pathfinder


def find_nvrtc() -> str:
    """The path of libnvrtc: of NVIDIA's Python packages (`jax[cuda13]`), conda, a CUDA toolkit or the system.

    Raises what the pathfinder raises, which says where it looked.
    """
    library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    assert library.abs_path is not None, library
    return library.abs_path

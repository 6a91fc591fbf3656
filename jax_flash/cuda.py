"""Where the CUDA libraries are. Nothing here is imported before a kernel has to be compiled."""

from __future__ import annotations


def find_nvrtc() -> str:
    """The path of libnvrtc: of NVIDIA's Python packages (`jax[cuda13]`), conda, a CUDA toolkit or the system.

    Raises:
      RuntimeError: there is none; the message says where it was looked for.
    """
    from cuda import pathfinder

    library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    if library.abs_path is None:
        raise RuntimeError("cuda.pathfinder: libnvrtc is loaded, but from where is not known")
    return library.abs_path

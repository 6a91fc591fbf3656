"""Processes that compile kernels into a cache directory. They are forked from a server that has imported jax_flash."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["jax_flash", "pytest"])  # pytest is the main module, which each process imports


def start(directory: object, problem: str, arch: str, umask: int = -1, file_size: int = -1) -> BaseProcess:
    """Start a process that compiles the forward of a problem. It inherits the environment of this process.

    Args:
      umask: the umask of the process; -1 keeps the inherited one.
      file_size: limit of the size of files in bytes; -1 means no limit.
    """
    environment = os.environ | {"JAX_FLASH_CACHE_DIR": str(directory)}
    process = _CONTEXT.Process(target=_compile, args=(dict(environment), problem, arch, umask, file_size))
    process.start()
    return process


def _compile(environment: dict[str, str], problem: str, arch: str, umask: int, file_size: int) -> None:
    from jax_flash import _native

    os.environ.clear()
    os.environ.update(environment)
    if umask >= 0:
        os.umask(umask)
    if file_size >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    _native.cuda_cache(problem, False, arch)


def plan(library: pathlib.Path, environment: dict[str, str], *call: Any) -> tuple[list[Any], list[str]]:
    """Plan a pass in a new process with a library in place of NVRTC. Return the launches and the reasons."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(_plan, library, environment, *call).result()


def _plan(library: pathlib.Path, environment: dict[str, str], *call: Any) -> tuple[list[Any], list[str]]:
    import jax_flash.cuda
    from jax_flash import _native

    os.environ.update(environment)
    jax_flash.cuda.find_nvrtc = lambda: str(library)
    return _native.cuda_plan(*call, compiled=True), _native.cuda_explain(*call, compiled=True)[2]

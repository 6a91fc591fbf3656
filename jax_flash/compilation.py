"""Compilation of the CUDA kernels of a call, in parallel with XLA's compilation of the rest of the program."""

from __future__ import annotations

import contextlib
import functools
import os
import threading

from jax_flash import _native

_free = threading.Semaphore(os.cpu_count() or 1)  # threads that may still start


@functools.lru_cache(maxsize=1024)
def start(problem: str, backward: bool) -> None:
    """Start to compile the kernels of a pass for the GPUs of this process.

    XLA requests kernels only at the end of its own compilation, and one call at a time. By then the kernels are ready,
    or XLA waits for the thread that compiles them. If no thread is free, or an error occurs, XLA's request compiles the
    kernels or raises the error.

    Args:
      problem: text of the problem (`Problem.encode`).
      backward: whether the pass is the backward.
    """
    with contextlib.suppress(Exception):
        capabilities = {(major, minor) for major, minor, _ in _native.cuda_devices() if major >= 8}
        for arch in {_native.cuda_arch(*capability) for capability in capabilities}:
            if _free.acquire(blocking=False):
                _start_thread(problem, backward, arch)


def _start_thread(problem: str, backward: bool, arch: str) -> None:
    try:
        threading.Thread(target=_compile, args=(problem, backward, arch), name="jax_flash compiler").start()
    except RuntimeError:  # the system has no thread left
        _free.release()


def _compile(problem: str, backward: bool, arch: str) -> None:
    try:
        with contextlib.suppress(Exception):
            _native.cuda_cache(problem, backward, arch)
    finally:
        _free.release()

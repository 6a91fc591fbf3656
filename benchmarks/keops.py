"""KeOps, for kernel_sums.py: the same sums in a process of its own, because KeOps and JAX crash in one process.

The process reads one question a line, as JSON: ["prepare", points, dim, pass, on a GPU?] or ["time", calls]. It answers
each with a line: the error of the sums, or the seconds of a call. It ends if KeOps does not compile.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SUM, GRADIENT = "sum", "gradient"
CHECKED = 64  # sums compared with float64
Arrays = list[Any]


def points(count: int, dim: int) -> tuple[Arrays, float]:
    """Return x, y, the weights and the cotangents of the sums; and the length scale."""
    rng = np.random.default_rng(0)
    shapes = (count, dim), (count, dim), (count, 1), (count, 1)
    return [rng.standard_normal(shape, np.float32) for shape in shapes], math.sqrt(dim)


def error(sums: Any, count: int, dim: int) -> float:
    """Return the largest error of the first sums, relative to the largest of them."""
    (x, y, weights, _), length_scale = points(count, dim)
    x, y, weights = (array.astype(np.float64) for array in (x[:CHECKED], y, weights))
    d2 = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    expected = np.exp(-d2 / (2 * length_scale**2)) @ weights
    return float(abs(np.asarray(sums[:CHECKED], np.float64) - expected).max() / abs(expected).max())


def call_of(count: int, dim: int, pass_: str, gpu: bool) -> Callable[[], Any]:
    """Return a call that computes the sums, or on a GPU a pair of the sums and the gradients."""
    (x, y, weights, cotangent), length_scale = points(count, dim)
    formula = "Exp(-g * SqDist(x, y)) * b", ["g = Pm(1)", f"x = Vi({dim})", f"y = Vj({dim})", "b = Vj(1)"]
    factor = np.array([0.5 / length_scale**2], np.float32)
    if not gpu:
        from pykeops.numpy import Genred as NumpyGenred

        on_cpu = NumpyGenred(*formula, reduction_op="Sum", axis=1)
        return lambda: on_cpu(factor, x, y, weights, backend="CPU")

    import torch
    from pykeops.torch import Genred

    sums = Genred(*formula, reduction_op="Sum", axis=1)
    on_gpu = [torch.tensor(array, device="cuda") for array in (factor, x, y, weights, cotangent)]
    if pass_ == SUM:
        return lambda: sums(*on_gpu[:4], backend="GPU")
    moving = [array.requires_grad_() for array in on_gpu[1:4]]

    def gradient() -> Any:
        out = sums(on_gpu[0], *moving, backend="GPU")
        return out, torch.autograd.grad(out, moving, on_gpu[4])

    return gradient


class Process:
    """A process with KeOps. `None` for an answer: it has ended."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *question: Any) -> float | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what KeOps prints
    call: Callable[[], Any] = lambda: None  # noqa: E731
    wait: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        match json.loads(line):
            case ["prepare", count, dim, pass_, gpu]:
                call = call_of(count, dim, pass_, gpu)
                result = call()
                sums = result[0] if isinstance(result, tuple) else result
                answer = error(sums.detach().cpu() if gpu else sums, count, dim)
                if gpu:
                    import torch

                    wait = torch.cuda.synchronize
            case ["time", calls]:
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                wait()
                answer = (time.perf_counter() - begin) / calls
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()

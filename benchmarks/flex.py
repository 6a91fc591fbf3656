"""PyTorch's FlexAttention with the score_mods of score_programs.py, on each backend that supports them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import measure

BACKENDS = ("TRITON", "FLASH")  # FLASH needs FlashAttention-4


def relative(table: Any) -> Callable[..., Any]:
    last = table.shape[1] // 2
    return lambda score, batch, head, query, key: score + table[head, query - key + last]


def alibi(slopes: Any) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: score + slopes[head] * (key - query)


def capped(cap: Any) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: 30 * (score / 30).tanh()


def biased(bias: Any) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: score + bias[0, head, query, key]


# By name of a row: the score_mod as a function of an array, the array's shape, and whether it has a gradient.
# N: heads, T: length.
MODS: dict[str, tuple[Callable[[Any], Any], Callable[[int, int], tuple[int, ...]], bool]] = {
    "soft cap": (capped, lambda N, T: (), False),
    "ALiBi": (alibi, lambda N, T: (N,), False),
    "relative table": (relative, lambda N, T: (N, 2 * T - 1), False),
    "table's gradient": (relative, lambda N, T: (N, 2 * T - 1), True),
    "bias [1, N, T, S]": (biased, lambda N, T: (1, N, T, T), False),
    "bias and its gradient": (biased, lambda N, T: (1, N, T, T), True),
}


def calls(name: str, batch: int, heads: int, length: int, dim: int) -> Iterator[tuple[str, str, measure.Call]]:
    """Yield (pass, backend, call) for every backend that compiles without error. Needs PyTorch and a GPU."""
    import torch
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    if name not in MODS:
        return
    config.donated_buffer = False  # otherwise a backward can run only once
    torch.compiler.reset()
    make, shape, differentiated = MODS[name]
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    inputs = [normal(batch, heads, length, dim).requires_grad_() for _ in range(3)]
    d_o, captured = normal(batch, heads, length, dim), normal(shape(heads, length), dtype=torch.float32)
    if "bias" in name:
        captured = captured.to(torch.bfloat16)
    attend = functools.partial(torch.compile(flex_attention, dynamic=False), *inputs, score_mod=make(captured))
    if differentiated:
        inputs.append(captured.requires_grad_())
    for backend in BACKENDS:
        forward = functools.partial(attend, kernel_options={"BACKEND": backend})
        try:
            o = forward()
            backward = functools.partial(torch.autograd.grad, o, inputs, d_o, retain_graph=True)
            for pass_, call in (("forward", torch.no_grad()(forward)), ("backward", backward)):
                measure.finish(call())
                yield pass_, f"Flex {backend}", call
        except Exception as error:  # the compiler raises many types
            print(f"FlexAttention with {backend} does not support {name}: {str(error).splitlines()[0][:160]}")

"""PyTorch's FlexAttention with the same functions as score_programs.py, by each backend that does them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import measure

try:
    import torch
    from torch.nn.attention.flex_attention import flex_attention
except ImportError:
    torch = None

BACKENDS = ("TRITON", "FLASH")  # FLASH needs FlashAttention-4


def relative(table: Any) -> Callable[..., Any]:
    last = table.shape[1] // 2
    return lambda score, batch, head, query, key: score + table[head, query - key + last]


def alibi(slopes: Any) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: score - slopes[head] * (query - key).abs()


def capped(_: None) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: 30 * torch.tanh(score / 30)


def biased(bias: Any) -> Callable[..., Any]:
    return lambda score, batch, head, query, key: score + bias[0, head, query, key]


def slopes(heads: int, length: int) -> Any:
    return 2.0 ** -torch.linspace(1, 8, heads, device="cuda")


def table(heads: int, length: int) -> Any:
    return torch.randn(heads, 2 * length - 1, device="cuda")


def bias(heads: int, length: int) -> Any:
    return torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16)


# By the name of a row: its function of an array, the array, and whether this has a gradient.
MODS: dict[str, tuple[Callable[[Any], Any], Callable[[int, int], Any], bool]] = {
    "soft cap": (capped, lambda heads, length: None, False),
    "ALiBi": (alibi, slopes, False),
    "relative table": (relative, table, False),
    "table's gradient": (relative, table, True),
    "bias [1, N, T, S]": (biased, bias, False),
    "bias and its gradient": (biased, bias, True),
}


def calls(name: str, batch: int, heads: int, length: int, dim: int) -> Iterator[tuple[str, str, measure.Call]]:
    """(pass, name of the backend, call) where PyTorch sees a GPU, of those that end without an error."""
    if torch is None or not torch.cuda.is_available() or name not in MODS:
        return
    make, array, differentiated = MODS[name]
    captured = array(heads, length)
    inputs = [torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *moving, d_o = inputs
    moving = [x.requires_grad_() for x in moving]
    if differentiated:
        moving.append(captured.requires_grad_())
    for backend in BACKENDS:
        torch.compiler.reset()
        attend = torch.compile(flex_attention, dynamic=False)

        def forward(attend=attend, backend=backend):
            return attend(*inputs[:3], score_mod=make(captured), kernel_options={"BACKEND": backend})

        def inference(forward=forward):
            with torch.no_grad():
                return forward()

        try:
            o = forward()
            gradients = functools.partial(torch.autograd.grad, o, moving, d_o, retain_graph=True)
            passes: dict[str, measure.Call] = {"forward": inference, "backward": gradients}
            for call in passes.values():
                measure.finish(call())
        except Exception as error:  # of the compiler, of many kinds
            print(f"FlexAttention's {backend} does not do {name}: {str(error).splitlines()[0][:160]}")
            continue
        yield from ((pass_, f"Flex {backend}", call) for pass_, call in passes.items())

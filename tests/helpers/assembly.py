"""An assembler for the text of score programs, and direct calls of the custom calls with such programs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from plans import changed

from jax_flash.problem import Problem
from jax_flash.programs.program import Captured, Program

FLOAT = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "pow", "atan2"), "ff"),
    **dict.fromkeys("neg abs sign exp exp2 log log1p expm1 tanh logistic erf erfc sin cos sqrt rsqrt".split(), "f"),
    **dict.fromkeys(("floor", "ceil", "round", "rint"), "f"),
}
INTEGER = {
    **dict.fromkeys("add sub mul div rem min max and or xor shl shr".split(), 2),
    **dict.fromkeys("neg abs sign not popcount clz".split(), 1),
}
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
OPS = {  # the types of the operands and of the result
    **{f"{op}.f": (operands, "f") for op, operands in FLOAT.items()},
    **{f"{op}.{t}": (t * count, t) for op, count in INTEGER.items() for t in "iu"},
    **{f"{op}.{t}": (t * 2, "b") for op in COMPARE for t in "fiu"},
    **{f"{op}.b": ("bb", "b") for op in ("and", "or", "xor", "eq", "ne")},
    **{f"select.{t}": ("b" + t * 2, t) for t in "fiub"},
    **{f"cast.{a}.{b}": (a, b) for a in "fiub" for b in "fiub" if a != b},
    **{f"round_to.{dtype}": ("f", "f") for dtype in ("bfloat16", "float16", "float32")},
    "not.b": ("b", "b"),
    "finite.f": ("f", "b"),
}


class Assembly(list):
    """A program under construction. Each instruction is identified by its index."""

    def __call__(self, op: str, *fields: Any) -> int:
        self.append(",".join(map(str, (op, *fields))))
        return len(self) - 1

    def result(self, value: int) -> Program:
        return Program(";".join([*self, f"result,{value}"]))


def captured(x: np.ndarray, batch: bool = False, gradient: bool = False) -> Captured:
    return Captured(x.dtype.name, batch, x.shape[batch:], gradient)


def call(described: Problem, operands: Any, arrays: Any, cotangents: Any = None) -> list[np.ndarray]:
    """Run one custom call on the CPU.

    Without cotangents this is the forward: return o, l and m. With cotangents (o, l, m, do, dlogsumexp) it is the
    backward: return dq, dk, dv, dbias and the gradients of captured arrays, as far as the problem enables them.
    """
    B, T, S, N, K = described.batch, described.q_len, described.kv_len, described.q_heads, described.kv_heads
    D, E, accumulated = described.qk_dim, described.v_dim, described.accumulation_dtype
    flat = [x.reshape(x.shape[0] if a.batch else 1, -1) for a, x in zip(described.captured, arrays, strict=True)]
    if cotangents is None:
        without = tuple(a._replace(gradient=False) for a in described.captured)
        described = changed(described, score_grad=None, captured=without)
        types = [((B, T, N, E), described.dtype), ((B, N, T), accumulated), ((B, N, T), accumulated)]
    else:
        types = [((B, T, N, D), described.dtype), ((B, S, K, D), described.dtype), ((B, S, K, E), described.dtype)]
        named = zip(("dq", "dk", "dv"), types, strict=True)
        types = [type_ for name, type_ in named if name in described.requested]
        if "dbias" in described.requested:
            types.append((operands["bias"].shape, accumulated))
        types += [(x.shape, accumulated) for a, x in zip(described.captured, flat, strict=True) if a.gradient]
    name = "jax_flash_forward" if cotangents is None else "jax_flash_backward"
    with jax.enable_x64(True):
        function = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(*t) for t in types])
        given = [*operands.values(), *flat, *(() if cotangents is None else cotangents)]
        return [np.asarray(x) for x in jax.jit(lambda *given: function(*given, problem=described.encode()))(*given)]


def with_ids(described: Problem, operands: dict[str, Any]) -> dict[str, Any]:
    ids = {"program_batch": np.arange(described.batch, dtype=np.int32)}
    return operands | ids | {"program_head": np.arange(described.q_heads, dtype=np.int32)}

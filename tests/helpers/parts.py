"""Calls of a part of the rows and keys of a whole call, as the devices of a divided sequence make them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plans
from cases import Case

from jax_flash import arguments, custom_calls, sequence
from jax_flash.call import Call

ROWS, KEYS = ("query", "query_segment_ids", "o", "do"), ("key", "value", "key_value_segment_ids")


def check(case: Case, dtype: str, tolerance: float, **mods: Any) -> None:
    """Parts with an origin, put together, are the whole: the last half of the rows, with the keys in two halves."""
    arrays, (do, _) = case.arrays(dtype), case.cotangents(dtype)
    bias, mask = arrays.pop("bias", None), arrays.pop("mask", None)
    qkv = [jnp.asarray(arrays.pop(name)) for name in ("query", "key", "value")]
    problem, operands = arguments.problem_and_operands(*qkv, bias, mask, Call(**arrays, **case.options, **mods))
    T, S = case.T // 2, case.S // 2
    do = jnp.asarray(do).at[:, :T].set(0)

    @jax.jit
    def whole(operands):
        o, l, m = custom_calls.forward(problem, False, operands)
        asked = problem.differentiated({"dq", "dk", "dv"})
        return o, l, m, custom_calls.backward(asked, False, operands, o, l, m, do)

    @jax.jit
    def parts(operands, o, l, m):
        of_rows = {name: x[:, T:] for name, x in {**operands.arrays(), "o": o, "do": do}.items() if name in ROWS}
        statistics = {"o": of_rows.pop("o"), "l": l[:, :, T:], "m": m[:, :, T:], "do": of_rows.pop("do")}
        offset = operands.query_offset if problem.mask.query_offset else jnp.zeros(case.B, jnp.int32)
        rows, gradients = None, []
        for start in (0, S):
            of_keys = {name: x[:, start : start + S] for name, x in operands.arrays().items() if name in KEYS}
            of_part = {"origin": jnp.asarray([T, start], jnp.int32), "query_offset": offset + T - start}
            part = operands.replaced({**of_rows, **of_keys, **of_part})
            small = plans.changed(problem, q_len=T, kv_len=S, origin=True, query_offset=True)
            found = custom_calls.forward(small, False, part)
            rows = found if rows is None else sequence.merge(rows, found)
            asked = small.differentiated({"dq", "dk", "dv"})
            gradients.append(custom_calls.backward(asked, False, part, **statistics))
        (dq, dk, dv), (dq2, dk2, dv2) = gradients
        return rows[0], dq + dq2, jnp.concatenate([dk, dk2], 1), jnp.concatenate([dv, dv2], 1)

    o, l, m, (dq, dk, dv) = whole(operands)
    expected = dict(zip(("o", "dq", "dk", "dv"), (o[:, T:], dq[:, T:], dk, dv), strict=True))
    for (name, x), ours in zip(expected.items(), parts(operands, o, l, m), strict=True):
        x, ours = (np.asarray(y, np.float64) for y in (x, ours))
        error, largest = np.abs(ours - x).max(), np.abs(x).max()
        assert error <= tolerance * largest, f"{name}: {error:.3g} of {largest:.3g}"

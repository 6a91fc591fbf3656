"""Calls with a part of the rows and keys of a larger call, as the devices of a sharded sequence make them."""

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
    """Check that the last half of the rows, computed with the keys in two halves and merged, equals the full call."""
    arrays, (do, _) = case.arrays(dtype), case.cotangents(dtype)
    bias, mask = arrays.pop("bias", None), arrays.pop("mask", None)
    qkv = [jnp.asarray(arrays.pop(name)) for name in ("query", "key", "value")]
    problem, operands = arguments.problem_and_operands(*qkv, bias, mask, Call(**arrays, **case.options, **mods))
    T, S = case.T // 2, case.S // 2
    do = jnp.asarray(do).at[:, :T].set(0)

    @jax.jit
    def full(operands):
        o, l, m = custom_calls.forward(problem, False, operands)
        differentiated = problem.differentiated({"dq", "dk", "dv"})
        return o, l, m, custom_calls.backward(differentiated, False, operands, o, l, m, do)

    @jax.jit
    def parts(operands, o, l, m):
        row_arrays = {name: x[:, T:] for name, x in {**operands.arrays(), "o": o, "do": do}.items() if name in ROWS}
        statistics = {"o": row_arrays.pop("o"), "l": l[:, :, T:], "m": m[:, :, T:], "do": row_arrays.pop("do")}
        offset = operands.query_offset if problem.mask.query_offset else jnp.zeros(case.B, jnp.int32)
        rows, gradients = None, []
        for start in (0, S):
            key_arrays = {name: x[:, start : start + S] for name, x in operands.arrays().items() if name in KEYS}
            position = {"origin": jnp.asarray([T, start], jnp.int32), "query_offset": offset + T - start}
            part = operands.replaced({**row_arrays, **key_arrays, **position})
            part_problem = plans.changed(problem, q_len=T, kv_len=S, origin=True, query_offset=True)
            found = custom_calls.forward(part_problem, False, part)
            rows = found if rows is None else sequence.merge(rows, found)
            differentiated = part_problem.differentiated({"dq", "dk", "dv"})
            gradients.append(custom_calls.backward(differentiated, False, part, **statistics))
        (dq, dk, dv), (dq2, dk2, dv2) = gradients
        return rows[0], dq + dq2, jnp.concatenate([dk, dk2], 1), jnp.concatenate([dv, dv2], 1)

    o, l, m, (dq, dk, dv) = full(operands)
    expected = dict(zip(("o", "dq", "dk", "dv"), (o[:, T:], dq[:, T:], dk, dv), strict=True))
    for (name, x), actual in zip(expected.items(), parts(operands, o, l, m), strict=True):
        x, actual = (np.asarray(y, np.float64) for y in (x, actual))
        error, largest = np.abs(actual - x).max(), np.abs(x).max()
        assert error <= tolerance * largest, f"{name}: {error:.3g} of {largest:.3g}"

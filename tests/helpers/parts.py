"""Calls with a part of the rows and keys of a larger call, as the devices of a sharded sequence make them."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plans
from cases import Case

from jax_flash import arguments, custom_calls, sequence, windows
from jax_flash.call import Call
from jax_flash.masks import WindowSize

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
    assert_equal(parts(operands, o, l, m), expected, tolerance)


def check_chunks(case: Case, dtype: str, tolerance: float) -> None:
    """Check a call on some chunks of the rows and some of the keys, as in a layout of chunks.

    It equals those rows of the full call with a mask that hides the other keys. Ranges replace positional masks, and
    the dropout mask has tables of tiles.
    """
    arrays, (do, _) = case.arrays(dtype), case.cotangents(dtype)
    qkv = [jnp.asarray(arrays.pop(name)) for name in ("query", "key", "value")]
    row_tiles, key_tiles = np.flatnonzero(np.arange(case.T // 16) % 5 < 3), np.flatnonzero(np.arange(case.S // 16) % 4)
    rows, keys = ((tiles[:, None] * 16 + np.arange(16)).ravel() for tiles in (row_tiles, key_tiles))
    mask = np.isin(np.arange(case.S), keys)
    problem, operands = arguments.problem_and_operands(*qkv, None, mask, Call(**arrays, **case.options))
    do = jnp.zeros_like(do).at[:, rows].set(do[:, rows])

    def results(problem, operands, do):
        o, l, m = custom_calls.forward(problem, False, operands)
        differentiated = problem.differentiated({"dq", "dk", "dv"})
        return o, *custom_calls.backward(differentiated, False, operands, o, l, m, do)

    o, dq, dk, dv = jax.jit(functools.partial(results, problem))(operands, do)
    expected = {"o": o[:, rows], "dq": dq[:, rows], "dk": dk[:, keys], "dv": dv[:, keys]}

    places = (jnp.asarray(x, jnp.int32) for x in (rows, keys))
    ranges = windows.ranges_at(windows.Bounds(*problem.mask.reach), problem.lengths, operands.arrays(), *places)
    own = {"keys_of_rows": keys, "rows_of_keys": rows, "key_value_seq_lengths": keys}
    part = {name: jnp.searchsorted(own[name], x).astype(jnp.int32) for name, x in ranges.items()}
    part |= {name: x[:, rows] for name, x in operands.arrays().items() if name in ROWS}
    part |= {name: x[:, keys] for name, x in operands.arrays().items() if name in KEYS}
    changes = {"q_len": len(rows), "kv_len": len(keys), "dropout_tiles": problem.drop_threshold > 0}
    if problem.drop_threshold:
        part |= {name: jnp.asarray(x, jnp.int32) for name, x in (("row_tiles", row_tiles), ("key_tiles", key_tiles))}
    masks = {"is_causal": False, "local_window_size": WindowSize(), "key_value_seq_lengths": True, "ranges": True}
    local = plans.changed(problem, **changes, **masks, array=None)
    part_operands = operands._replace(mask=None).replaced(part)
    found = jax.jit(functools.partial(results, local))(part_operands, do[:, rows])
    assert_equal(found, expected, tolerance)


def assert_equal(found: Iterable[Any], expected: dict[str, Any], tolerance: float) -> None:
    """Check that no error is larger than the tolerance times the largest expected number."""
    for (name, x), actual in zip(expected.items(), found, strict=True):
        x, actual = (np.asarray(y, np.float64) for y in (x, actual))
        error, largest = np.abs(actual - x).max(), np.abs(x).max()
        assert error <= tolerance * largest, f"{name}: {error:.3g} of {largest:.3g}"

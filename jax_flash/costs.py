"""The cost of one pass of a problem: floating point operations, and bytes of its operands and results."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jax_flash import checks
from jax_flash.problem import BLOCK_MASK, CAPTURED, DIFFERENTIATED, DIMS, ONE_A_CALL, SHARED_GRADIENTS, Problem

# The products of a pass, as multiples of 2 T S: by D (S, dQ, dK), and by E (O, or dP and dV).
FORWARD, BACKWARD = (1, 1), (3, 2)


def flops(problem: Problem, backward: bool) -> int:
    """See `Problem.flops`."""
    _check("flops", problem, backward)
    by_d, by_e = BACKWARD if backward else FORWARD
    each = 2 * visible(problem) * (by_d * problem.qk_dim + by_e * problem.v_dim)
    return problem.batch * problem.q_heads * each


def visible(problem: Problem) -> int:
    """Return the number of visible entries of one head, from the sizes, the causal mask and the local window.

    Lengths, segments, ranges, offsets and masks are arrays or functions. Their contents are unknown here, so they count
    as hiding nothing.
    """
    T, S = problem.q_len, problem.kv_len
    if problem.query_offset:
        return T * S
    left, right = (min(x, T + S) if x >= 0 else T + S for x in (problem.window_left, problem.window_right))
    i = np.arange(T)
    first, end = np.maximum(i - left, 0), np.minimum(i + (0 if problem.causal else right) + 1, S)
    return int(np.maximum(end - first, 0).sum())


def bytes_moved(problem: Problem, backward: bool) -> int:
    """See `Problem.bytes`."""
    _check("bytes", problem, backward)
    names = [*_operands(problem), "o", "l", "m"]
    if backward:
        asked = problem.gradients or ("dq", "dk", "dv")
        # Each row writes its own part of the sinks' gradient.
        names += ["do", *(["dlogsumexp"] if problem.dlogsumexp else []), *("l" if x == "dsinks" else x for x in asked)]
    return sum(_elements(problem, name) * _itemsize(problem, name) for name in names)


def _check(name: str, problem: Problem, backward: bool) -> None:
    if checks.flag("backward", backward) and not problem.differentiable:
        raise ValueError("paged_attention is for inference and has no backward kernels: leave out backward=True")
    if problem.symbolic:
        sizes = ", ".join(f"{size} {symbol}" for size, symbol in problem.symbolic.items())
        raise ValueError(f"{name} needs a problem with concrete sizes, but these are symbolic: {sizes}")


def _operands(problem: Problem) -> list[str]:
    """Return the names of the operands of both passes."""
    groups = {
        ("query", "scale"): True,
        ("key", "value"): not problem.page,
        ("key_pages", "value_pages", "page_table"): problem.page,
        ("q_segments", "kv_segments"): problem.segments,
        ("keys_of_rows", "rows_of_keys"): problem.ranges,
        ("blocks", "row_lists", "column_lists"): problem.block_mask,
        ("element_masks",): problem.element_masks,
        ("seed", "batch_id", "head_id"): problem.drop_threshold,
        ("program_batch", "program_head"): problem.programs,
        CAPTURED[: len(problem.captured)]: True,
    }
    alone = ("bias", "mask", "sinks", "q_lengths", "kv_lengths", "query_offset", "origin")
    groups |= {(name,): getattr(problem, name) for name in alone}
    return [name for names, there in groups.items() if there for name in names]


def _elements(problem: Problem, name: str) -> int:
    """Return the number of elements of an array."""
    name = DIFFERENTIATED.get(name, name)
    if name in CAPTURED:
        captured = problem.captured[CAPTURED.index(name)]
        return math.prod((problem.batch if captured.batch else 1, *captured.shape))
    sizes = {"T": problem.q_len, "S": problem.kv_len, "N": problem.q_heads, "K": problem.kv_heads}
    sizes |= {"D": problem.qk_dim, "E": problem.v_dim, "X": 2}
    if problem.page:
        sizes |= {"G": problem.pages, "A": problem.page, "M": problem.kv_len // problem.page}
    if problem.block_mask:
        sizes |= {"U": -(-problem.q_len // problem.q_block), "V": -(-problem.kv_len // problem.kv_block)}
        sizes |= {"R": problem.row_list, "C": problem.column_list}
        sizes |= {"P": problem.element_masks, "Q": problem.q_block, "W": -(-problem.kv_block // 32)}
    batch = 1 if name in ONE_A_CALL else problem.batch
    extent = problem.block_mask if name in BLOCK_MASK else getattr(problem, name, None)
    if isinstance(extent, tuple):  # what is broadcast has size 1
        batch = batch if extent[0] else 1
        sizes |= {dim: 1 for dim, there in zip("NTS", extent[1:], strict=True) if not there}
    return batch * math.prod(sizes[dim] for dim in DIMS[name])


def _itemsize(problem: Problem, name: str) -> int:
    """Return the bytes per element of an array."""
    dtype = "int32"
    if name in CAPTURED:
        dtype = problem.captured[CAPTURED.index(name)].dtype
    elif name in ("scale", "sinks", "l", "m", "dlogsumexp", *SHARED_GRADIENTS):
        dtype = problem.accumulation_dtype
    elif name in ("query", "key", "value", "key_pages", "value_pages", "o", "do", "dq", "dk", "dv"):
        dtype = problem.dtype
    elif name in ("bias", "mask"):
        dtype = problem.bias_dtype if name == "bias" else "bool"
    return jnp.dtype(dtype).itemsize

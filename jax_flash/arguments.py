"""The checks of a call's arguments, and the conversion to a `Problem` and its arrays."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import checks, dropout, windows
from jax_flash.block_sparse import BlockMask, MaskOfFunction
from jax_flash.call import Call, Options, check_names
from jax_flash.description import Extent
from jax_flash.layouts import Layout, SequenceLayout
from jax_flash.masks import Mask, WindowSize
from jax_flash.operands import Operands
from jax_flash.problem import CALL_CHECKS, Problem
from jax_flash.programs import features, program
from jax_flash.scores import Score

Checked = TypeVar("Checked", bound=Callable[..., tuple[Problem, Operands]])


def creates_problems(method: str, options: type) -> Callable[[Checked], Checked]:
    """Return a decorator for a function of arrays and a `Call`. A method of `Problem` then calls this function.

    The method takes the options that the TypedDict `options` lists.
    """

    def decorate(function: Checked) -> Checked:
        def problem(*arrays: Any, **given: Any) -> Problem:
            check_names(given, options.__annotations__)
            return function(*arrays, Call(**given))[0]

        CALL_CHECKS[method] = problem
        return function

    return decorate


@creates_problems("of", Options)
def problem_and_operands(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    call: Call,
    page_table: jax.Array | None = None,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `dot_product_attention`. Return its problem and its arrays with a batch dim.

    With a page table, key and value are the pages of all batch entries: [pages, page, K, D] and [pages, page, K, E].
    """
    division = call.division
    devices = 1 if division is None else division.devices
    q, k, v = _inputs(query, key, value, page_table)
    kv_len = k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]
    operands = _operands(q, k, v, bias, mask, call, kv_len, devices, unbatched=np.ndim(query) == 3)
    problem = _problem(operands, call, devices * q.shape[1], devices * kv_len)
    problem, operands = _with_dropout(problem, operands, call)
    problem, operands = _with_masks_and_programs(problem, operands, call, page_table is None and division is None)
    if division is not None and (refusal := division.refusal(problem)):
        raise ValueError(f"sequence_axis={call.sequence_axis!r}: {refusal}")
    if isinstance(call.sequence_layout, Layout):
        operands = operands._replace(origin=jnp.asarray(call.sequence_layout.chunks, jnp.int32))
    return (problem, operands) if page_table is None else _in_pages(problem, operands, page_table)


def _inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, page_table: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the query, key and value with a batch dim, or the query and the pages of keys and values."""
    names = ("query", "key", "value") if page_table is None else ("query", "key_pages", "value_pages")
    query, key, value = map(checks.floats, names, (query, key, value))
    for name, x in zip(names, (query, key, value), strict=True):
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} must have shape [length, heads, dim] or [B, length, heads, dim], not {x.shape}")
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype}, but query has {query.dtype}: cast one of them, such as "
                f"{name}.astype(query.dtype)"
            )
    shapes = query.shape, key.shape, value.shape
    checks.heads_known(**dict(zip(names, shapes, strict=True)))
    batch = "" if query.ndim == 3 else "B, "
    query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    batches_fit = page_table is not None or query.shape[0] == value.shape[0]
    if key.shape != (*value.shape[:3], query.shape[3]) or not batches_fit:
        raise ValueError(
            f"query [{batch}T, N, D], key [{batch}S, K, D] and value [{batch}S, K, E] do not fit together: "
            "their shapes are " + ", ".join(map(str, shapes))
        )
    N, K = query.shape[2], key.shape[2]
    if K == 0 or N % K:
        of_keys = " and ".join(names[1:])
        raise ValueError(f"query has {N} heads, which must be a multiple of the {K} heads in {of_keys}")
    return query, key, value


def _operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    call: Call,
    kv_len: int,
    devices: int,
    unbatched: bool,
) -> Operands:
    """Return the checked arrays of a call, without the arrays of dropout, block masks and programs.

    Each device has kv_len keys, and all columns of the bias and the mask.
    """
    B, T, N, D = query.shape
    scores = B, N, T, devices * kv_len
    query, scale = _scaled(query, 1 / math.sqrt(max(D, 1)) if call.scale is None else call.scale)
    operands = Operands(
        query,
        key,
        value,
        scale,
        bias=checks.broadcastable("bias", bias, scores, checks.biases),
        mask=checks.broadcastable("mask", mask, scores, checks.booleans),
        sinks=_sinks(call.sinks, N, scale.dtype),
        query_seq_lengths=checks.lengths("query_seq_lengths", call.query_seq_lengths, B),
        key_value_seq_lengths=checks.lengths("key_value_seq_lengths", call.key_value_seq_lengths, B),
        query_segment_ids=checks.ids("query_segment_ids", call.query_segment_ids, (B, T), unbatched),
        key_value_segment_ids=checks.ids("key_value_segment_ids", call.key_value_segment_ids, (B, kv_len), unbatched),
        query_offset=_offsets("query_offset", call.query_offset, B),
    )
    if (operands.query_segment_ids is None) != (operands.key_value_segment_ids is None):
        raise ValueError("query_segment_ids and key_value_segment_ids must be given together")
    return operands


def _xla_is_deterministic() -> bool:
    """Return whether XLA_FLAGS requires GPU programs to give the same bits in every run."""
    values = {}  # the last value of a flag counts
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        values[name] = (value or "true").lower() in ("true", "1")
    names = "--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops"
    return any(values.get(name) for name in names)


def _problem(operands: Operands, call: Call, q_len: int, kv_len: int) -> Problem:
    """Return the problem of a call without dropout, block masks and programs, for a sequence of these lengths."""
    mask = Mask(
        is_causal=call.is_causal,
        local_window_size=call.window.static,
        query_seq_lengths=operands.query_seq_lengths is not None,
        key_value_seq_lengths=operands.key_value_seq_lengths is not None,
        query_offset=operands.query_offset is not None,
        segment_ids=operands.query_segment_ids is not None,
    )
    return Problem(
        batch=operands.query.shape[0],
        q_len=q_len,
        kv_len=kv_len,
        q_heads=operands.query.shape[2],
        kv_heads=operands.value.shape[2],
        qk_dim=operands.query.shape[3],
        v_dim=operands.value.shape[3],
        dtype=operands.query.dtype.name,
        mask=mask.simplified((q_len, kv_len)),
        score=Score(
            logits_soft_cap=_soft_cap(call.logits_soft_cap, _largest(operands.query.dtype)),
            bias_dtype="none" if operands.bias is None else operands.bias.dtype.name,
        ),
        full_precision=full_precision(call.precision),
        deterministic=call.deterministic or _xla_is_deterministic(),
    ).with_arrays(operands.arrays())


def _with_dropout(problem: Problem, operands: Operands, call: Call) -> tuple[Problem, Operands]:
    """Return the problem and the operands with the dropout of a call."""
    threshold = dropout.threshold(call.dropout_rate)
    key = None if call.dropout_key is None else dropout.checked_key(call.dropout_key)
    batch_ids = checks.ids("dropout_batch_ids", call.dropout_batch_ids, (problem.batch,))
    head_ids = checks.ids("dropout_head_ids", call.dropout_head_ids, (problem.q_heads,))
    if not threshold:
        return problem, operands
    if key is None:
        raise ValueError(f"dropout_rate={call.dropout_rate} needs a dropout_key: pass a JAX PRNG key")
    if threshold == dropout.EVERYTHING:  # equals a call without dropout whose values are 0
        return problem, operands.replaced({"value": jnp.zeros_like(operands.value)})
    drawn = dropout.operands(key, call.broadcast_dropout, batch_ids, head_ids, problem.batch, problem.q_heads)
    return dataclasses.replace(problem, drop_threshold=threshold), operands.replaced(drawn)


def _with_masks_and_programs(
    problem: Problem, operands: Operands, call: Call, in_one_piece: bool
) -> tuple[Problem, Operands]:
    """Return the problem and the operands with the traced window, the block mask and the functions of a call.

    Args:
      in_one_piece: whether the keys are contiguous and on one device: neither in pages nor divided.
    """
    block_mask, mask_mod, window = call.block_mask, call.mask_mod, call.window
    if block_mask is not None:
        _check_block_mask(block_mask, problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    if isinstance(block_mask, MaskOfFunction):
        mask_mod, block_mask = _both(problem, mask_mod, _mod_of_mask(operands, block_mask)), None
    # Ranges are faster than a mask_mod, but were not measured together with these.
    others = (block_mask, operands.mask, operands.query_segment_ids)
    takes_ranges = window.is_traced and in_one_piece and all(x is None for x in others)
    if window.is_traced and not takes_ranges:
        mask_mod = _both(problem, mask_mod, windows.mask_mod(window.traced))
    problem, operands = _with_programs(problem, operands, call.score_mod, mask_mod, call.sequence_layout)
    if takes_ranges:
        problem, operands = windows.as_ranges(problem, operands, window.traced)
    if block_mask is not None:
        operands = operands.replaced({name: jnp.asarray(x) for name, x in block_mask.arrays().items()})
        blocks = Mask.of_blocks(operands.arrays(), block_mask.shape.q_block, block_mask.shape.kv_block)
        problem = dataclasses.replace(problem, mask=problem.mask & blocks)
    return problem, operands


def _in_pages(problem: Problem, operands: Operands, page_table: jax.Array) -> tuple[Problem, Operands]:
    """Return the problem and the operands of a call with keys and values in pages."""
    arrays = operands.arrays()
    pages, page = arrays["value"].shape[:2]
    paged = {"key_pages": arrays.pop("key"), "value_pages": arrays.pop("value"), "page_table": page_table}
    return dataclasses.replace(problem, pages=pages, page=page), Operands.of(arrays | paged)


def _largest(dtype: Any) -> float:
    """Return the largest number of the dtype in which scores of inputs of this dtype are computed."""
    return float(np.finfo(np.float64 if dtype == np.float64 else np.float32).max)


def _scaled(query: jax.Array, scale: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return the query times the sign of τ, and |τ|, because the kernels take the row maximum before they scale.

    If τ is 0, or so small that a gradient times τ underflows, the query is multiplied by τ instead.
    """
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    least = 2.0**-14 if query.dtype == np.float16 else 2.0**-100
    if isinstance(scale, jax.core.Tracer):
        if not checks.is_real(scale):
            raise TypeError(f"scale must be a real number, not {scale.dtype}{list(scale.shape)}")
    else:
        scale = checks.finite("scale", scale, _largest(query.dtype))
        if scale >= least:
            return query, jnp.asarray(scale, dtype)
    scale = jnp.asarray(scale, dtype)
    small = jnp.abs(scale) < least
    factor = jnp.where(small, scale, jnp.sign(scale))
    # The gradient of the factor takes finite entries only: padding may be NaN.
    value = lax.stop_gradient(factor)
    scaled = query * value + jnp.where(jnp.isfinite(query), query, 0) * (factor - value)
    return scaled.astype(query.dtype), jnp.where(small, 1, jnp.abs(scale))


def _sinks(sinks: ArrayLike | None, heads: int, dtype: Any) -> jax.Array | None:
    """Return the sinks as [1, N, 1, 1] of this dtype. +inf becomes the largest number, which makes no NaN."""
    if sinks is None:
        return None
    given = checks.shaped("sinks", checks.floats("sinks", sinks), (heads,)).astype(dtype)
    return jnp.minimum(given, jnp.finfo(dtype).max)[None, :, None, None]


def _soft_cap(cap: float | None, largest: float) -> float:
    """Return the cap, or 0 for None. The limits keep score / cap and the cap itself from underflowing to 0."""
    if cap is None:
        return 0.0
    least, most = _caps(largest)
    cap = checks.number("logits_soft_cap", cap)
    if cap == 0:
        raise ValueError("logits_soft_cap must not be 0: leave it out or pass None to turn it off")
    if not least <= cap <= most:
        raise ValueError(f"logits_soft_cap must be from {least:.3g} to {most:.3g}, not {cap}")
    return cap


def _caps(largest: float) -> tuple[float, float]:
    """Return the smallest and the largest soft cap."""
    return 1e8 / largest, largest / 1e8


# Values of jax_default_matmul_precision that need more than TF32. It may also name a dot algorithm.
_FULL_PRECISIONS = (
    "highest",
    "float32",
    "F32_F32_F32",
    "F64_F64_F64",
    "TF32_TF32_F32_X3",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
)


def full_precision(precision: Any) -> bool:
    """Return whether float32 products need full float32 precision."""
    if precision is None:
        return jax.config.jax_default_matmul_precision in _FULL_PRECISIONS  # type: ignore[attr-defined, unused-ignore]
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        left, right = map(full_precision, precision)
        return left or right
    name = getattr(precision, "name", precision)
    if isinstance(name, str) and name in lax.DotAlgorithmPreset.__members__:
        return name in _FULL_PRECISIONS
    try:
        return lax.Precision(precision) == lax.Precision.HIGHEST
    except (TypeError, ValueError):
        raise ValueError(
            "precision must be a jax.lax.Precision or DotAlgorithmPreset, the name of one, or a pair of them, "
            f"not {checks.described(precision)}"
        ) from None


def _offsets(name: str, x: int | ArrayLike | None, batch: int) -> jax.Array | None:
    """Return int32 [B], or None for None and 0."""
    if x is None or type(x) is int and x == 0:
        return None
    given = checks.integers(name, x)
    if isinstance(given, np.ndarray) and given.size and not (given.min() >= -(2**31) and given.max() < 2**31):
        raise ValueError(f"{name} must fit in int32, but ranges from {given.min()} to {given.max()}")
    if given.ndim == 0:
        return jnp.broadcast_to(checks.saturated(given), (batch,))
    return checks.saturated(checks.shaped(name, given, (batch,)))


def _with_programs(
    problem: Problem, operands: Operands, score_mod: Any, mask_mod: Any, layout: SequenceLayout | None = None
) -> tuple[Problem, Operands]:
    """Return the problem and the operands with the user's score_mod and mask_mod, and the arrays that they capture."""
    arrays: list[jax.Array] = []
    programs: dict[str, Any] = {}
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            dtype = problem.accumulation_dtype
            traced, captured = program.trace(name, function, dtype, problem.sizes, len(arrays))
            if name == "score_mod":
                found = _with_feature(problem, operands, traced, captured)
                if found is not None:
                    problem, operands = found
                    continue
            elif (bounds := features.window_of(traced)) is not None:
                mask = problem.mask & Mask(local_window_size=WindowSize(*bounds))
                problem = dataclasses.replace(problem, mask=mask.simplified(problem.lengths))
                continue
            if not traced.changes_nothing:
                if isinstance(layout, Layout):
                    function = _in_layout(problem, operands, function, layout)
                    traced, captured = program.trace(name, function, dtype, problem.sizes, len(arrays))
                programs[name] = traced
                arrays += captured
    if not programs:
        return problem, operands
    shapes = tuple(program.Captured(x.dtype.name, False, x.shape) for x in arrays)
    operands = operands._replace(
        program_batch=jnp.arange(problem.batch, dtype=jnp.int32),
        program_head=jnp.arange(problem.q_heads, dtype=jnp.int32),
        captured=tuple(x.ravel()[None] for x in arrays),  # which axes of an ensemble's mesh allow
    )
    mask = problem.mask & Mask(mask_mod=programs.get("mask_mod"))
    score = dataclasses.replace(problem.score, score_mod=programs.get("score_mod"))
    return dataclasses.replace(problem, mask=mask, score=score, captured=shapes), operands


def _in_layout(
    problem: Problem, operands: Operands, mod: Callable[..., jax.Array], layout: Layout
) -> Callable[..., jax.Array]:
    """Return a function of indices in the order of a layout for a score_mod or mask_mod."""
    chunks = jnp.asarray(layout.chunks, jnp.int32).reshape(-1)

    def place(index: jax.Array, length: int) -> jax.Array:
        size = max(length // len(chunks), 1)
        return chunks[index // size] * size + index % size

    def in_layout(*given: jax.Array) -> jax.Array:
        *others, query, key = given
        position = place(query, problem.q_len)
        if operands.query_offset is not None:
            position += operands.query_offset[others[-2]]
        return mod(*others, position, place(key, problem.kv_len))

    return in_layout


def _with_feature(
    problem: Problem, operands: Operands, score_mod: program.Program, captured: list[jax.Array]
) -> tuple[Problem, Operands] | None:
    """Return the problem and the operands with a score_mod replaced by an equal soft cap or bias, or None.

    The kernels cap scores before they add a bias, and have one of each. The rows of a bias do not include query_offset.
    """
    score = problem.score
    if score.bias is not None:
        return None
    dtype = problem.accumulation_dtype
    cap, bias = features.feature_of(score_mod, captured, dtype, problem.sizes)
    if bias is not None:
        extent = Extent.of(bias)
        if extent.rows and operands.query.shape[1] < problem.q_len:
            return None  # on a divided sequence, a device has its own rows of a bias, but full captured arrays
        score = dataclasses.replace(score, bias=extent, bias_dtype=bias.dtype.name)
        return dataclasses.replace(problem, score=score), operands._replace(bias=bias)
    least, most = _caps(float(jnp.finfo(dtype).max))
    if score.logits_soft_cap or not least <= cap <= most:
        return None
    return dataclasses.replace(problem, score=dataclasses.replace(score, logits_soft_cap=cap)), operands


def _both(problem: Problem, mask_mod: Any, other: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the conjunction of the user's mask_mod, if present, and another mask_mod."""
    if mask_mod is None:
        return other
    traced, captured = program.trace("mask_mod", mask_mod, problem.accumulation_dtype, problem.sizes, 0)
    return lambda *place: other(*place) & traced(captured, *place)


def _mod_of_mask(operands: Operands, mask: MaskOfFunction) -> Callable[..., jax.Array]:
    """Return a mask_mod that equals a mask of a function. The rows of the mask are array rows."""

    def mod(batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        row = query if operands.query_offset is None else query - jnp.asarray(operands.query_offset)[batch]
        return mask.may_attend(batch, head, row, key)

    return mod


def _check_block_mask(mask: BlockMask, B: int, N: int, T: int, S: int) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask must be a jax_flash.BlockMask, not {type(mask).__name__}: "
            "BlockMask.from_mask and BlockMask.from_dense convert arrays"
        )
    if (mask.shape.q_len, mask.shape.kv_len) != (T, S):
        raise ValueError(
            f"block_mask must have T x S = {T} x {S} entries, not {mask.shape.q_len} x {mask.shape.kv_len}"
        )
    if mask.is_stack:
        raise ValueError(
            "block_mask is a stack of masks, one for each layer: pass the mask of one layer, "
            "which jax.lax.scan or jax.vmap over the stack gives"
        )
    if isinstance(mask, MaskOfFunction):
        if mask.batch not in (1, B) or mask.heads not in (1, N):
            raise ValueError(
                f"block_mask must have 1 or B = {B} batch entries and 1 or N = {N} heads, "
                f"not {mask.batch} and {mask.heads}"
            )
    elif mask.blocks.ndim != 4 or mask.blocks.shape[0] not in (1, B) or mask.blocks.shape[1] not in (1, N):
        raise ValueError(
            f"block_mask must have blocks [B|1, N|1, U, V] with B = {B} and N = {N}, not shape {mask.blocks.shape}"
        )

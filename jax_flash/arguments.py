"""The arguments of the public functions: their list, their checks, and the conversion to a `Problem` and its arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import checks, dropout, windows
from jax_flash.block_sparse import BlockMask, MaskOfFunction
from jax_flash.operands import Operands
from jax_flash.problem import CALL_CHECKS, Extent, Problem
from jax_flash.programs import features, program
from jax_flash.sequence import Division, Layout
from jax_flash.windows import Window

Implementation = Literal["flash", "xla", "reference"]


class SharedOptions(TypedDict, total=False):
    """Options of the public functions that the modules for other libraries accept under the same names."""

    scale: float | ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: Window | None
    implementation: Implementation | None
    sinks: ArrayLike | None
    dropout_batch_ids: ArrayLike | None
    dropout_head_ids: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    query_offset: int | ArrayLike | None
    block_mask: BlockMask | None
    score_mod: Callable[..., jax.Array] | None
    mask_mod: Callable[..., jax.Array] | None
    sequence_axis: str | tuple[str, ...] | None
    sequence_layout: Layout | None


class Options(SharedOptions, total=False):
    """The keyword arguments of the public functions, described in `dot_product_attention`.

    An option that may be None is None by default. A flag is False by default, and a number is 0.
    """

    dropout_rate: float
    dropout_key: jax.Array | None
    broadcast_dropout: bool
    precision: lax.PrecisionLike
    deterministic: bool


# The arrays with one entry per example, and the number of dims of an entry.
PER_EXAMPLE = {
    "query_seq_lengths": 0,
    "key_value_seq_lengths": 0,
    "dropout_batch_ids": 0,
    "query_segment_ids": 1,
    "key_value_segment_ids": 1,
    "query_offset": 0,
}

# Names of options in other attention libraries, with the names here.
ELSEWHERE = {
    "causal": "is_causal",
    "window_size": "local_window_size",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "softcap": "logits_soft_cap",
    "dropout_p": "dropout_rate",
}

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of the options in a class, by name."""
    return {name: hint() if hint in (bool, float) else None for name, hint in get_type_hints(kind).items()}


def complete(options: Mapping[str, Any], kind: type = Options) -> dict[str, Any]:
    """Return every option of a class, as given or by default. Raise TypeError for an unknown option."""
    for name in options:
        if name not in defaults(kind):
            meant = ELSEWHERE.get(name)
            hint = f"use {meant} instead" if meant in defaults(kind) else f"the options are {', '.join(defaults(kind))}"
            raise TypeError(f"got an unexpected keyword argument {name!r}: {hint}")
    return {**defaults(kind), **options}


def lists_options(kind: type, like: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Return a decorator that shows the options of a class instead of `**options` in `help` and `inspect.signature`.

    The other arguments are the arguments of the decorated function, or of `like`.
    """

    def decorate(function: Function) -> Function:
        own, result = inspect.signature(like or function), inspect.signature(function).return_annotation
        parameters = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for name, default in defaults(kind).items():
            hint = kind.__annotations__[name]
            hint = getattr(hint, "__forward_arg__", hint)  # a TypedDict's, as it is written
            option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            parameters.setdefault(name, option)
        signature = own.replace(parameters=[*parameters.values()], return_annotation=result)
        setattr(function, "__signature__", signature)  # noqa: B010  # no attribute that types know of
        return function

    return decorate


def checks_call(method: str, kind: type) -> Callable[[Function], Function]:
    """Return a decorator for the checks of a public function's arguments, which a method of `Problem` calls.

    The method then shows the options of this class in its signature.
    """

    def decorate(function: Function) -> Function:
        lists_options(kind)(vars(Problem)[method].__func__)
        CALL_CHECKS[method] = function
        return function

    return decorate


@checks_call("of", Options)
def problem_and_operands(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    options: Mapping[str, Any],
    page_table: jax.Array | None = None,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `dot_product_attention`. Return its problem and its arrays with a batch dim.

    With a page table, key and value are the pages of all batch entries: [pages, page, K, D] and [pages, page, K, E].
    """
    given = complete(options)
    _check_implementation(given["implementation"])
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
    unbatched = query.ndim == 3
    query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    B, T, N, D = query.shape
    entries, S, K, E = value.shape
    if page_table is not None:
        entries, S = B, S * page_table.shape[1]
    divided = division(given)
    whole = 1 if divided is None else divided.devices
    if key.shape != (*value.shape[:3], D) or entries != B:
        batch = "" if unbatched else "B, "
        raise ValueError(
            f"query [{batch}T, N, D], key [{batch}S, K, D] and value [{batch}S, K, E] do not fit together: "
            "their shapes are " + ", ".join(map(str, shapes))
        )
    if K == 0 or N % K:
        of_keys = " and ".join(names[1:])
        raise ValueError(f"query has {N} heads, which must be a multiple of the {K} heads in {of_keys}")

    largest = float(np.finfo(np.float64 if query.dtype == np.float64 else np.float32).max)
    query, scale = _scaled(query, 1 / math.sqrt(max(D, 1)) if given["scale"] is None else given["scale"], largest)
    window = windows.checked(given["local_window_size"])
    operands = Operands(
        query,
        key,
        value,
        scale,
        bias=checks.broadcastable("bias", bias, (B, N, T, whole * S), checks.biases),
        mask=checks.broadcastable("mask", mask, (B, N, T, whole * S), checks.booleans),
        sinks=_sinks(given["sinks"], N, scale.dtype),
        q_lengths=checks.lengths("query_seq_lengths", given["query_seq_lengths"], B),
        kv_lengths=checks.lengths("key_value_seq_lengths", given["key_value_seq_lengths"], B),
        q_segments=checks.ids("query_segment_ids", given["query_segment_ids"], (B, T), unbatched),
        kv_segments=checks.ids("key_value_segment_ids", given["key_value_segment_ids"], (B, S), unbatched),
        query_offset=_offsets("query_offset", given["query_offset"], B),
    )
    if (operands.q_segments is None) != (operands.kv_segments is None):
        raise ValueError("query_segment_ids and key_value_segment_ids must be given together")
    drop_threshold = dropout.threshold(given["dropout_rate"])
    broadcast_dropout = checks.flag("broadcast_dropout", given["broadcast_dropout"])
    dropout_key = None if given["dropout_key"] is None else dropout.checked_key(given["dropout_key"])
    batch_ids = checks.ids("dropout_batch_ids", given["dropout_batch_ids"], (B,))
    head_ids = checks.ids("dropout_head_ids", given["dropout_head_ids"], (N,))
    if drop_threshold:
        if dropout_key is None:
            raise ValueError(f"dropout_rate={given['dropout_rate']} needs a dropout_key: pass a JAX PRNG key")
        drawn = dropout.operands(dropout_key, broadcast_dropout, batch_ids, head_ids, B, N)
        if drop_threshold == dropout.EVERYTHING:  # the same as without dropout and with values of 0
            drop_threshold, drawn = 0, {"value": jnp.zeros_like(value)}
        operands = operands.replaced(drawn)
    problem = Problem(
        batch=B,
        q_len=whole * T,
        kv_len=whole * S,
        q_heads=N,
        kv_heads=K,
        qk_dim=D,
        v_dim=E,
        dtype=query.dtype.name,
        soft_cap=_soft_cap(given["logits_soft_cap"], largest),
        causal=checks.flag("is_causal", given["is_causal"]),
        window_left=window.numbers[0],
        window_right=window.numbers[1],
        bias_dtype="none" if operands.bias is None else operands.bias.dtype.name,
        q_lengths=operands.q_lengths is not None,
        kv_lengths=operands.kv_lengths is not None,
        segments=operands.q_segments is not None,
        query_offset=operands.query_offset is not None,
        drop_threshold=drop_threshold,
        full_precision=_full_precision(given["precision"]),
        deterministic=checks.flag("deterministic", given["deterministic"]),
    ).with_arrays(operands.arrays())
    block_mask, mask_mod = given["block_mask"], given["mask_mod"]
    if block_mask is not None:
        _check_block_mask(block_mask, B, N, problem.q_len, problem.kv_len)
    if isinstance(block_mask, MaskOfFunction):
        mask_mod, block_mask = _both(problem, mask_mod, _mod_of_mask(operands, block_mask)), None
    # Ranges are faster than a mask_mod, but the kernels do not combine them with these.
    beside = (block_mask, page_table, divided, operands.mask, operands.q_segments)
    takes_ranges = window.is_traced and all(x is None for x in beside)
    if window.is_traced and not takes_ranges:
        mask_mod = _both(problem, mask_mod, windows.mask_mod(window.traced))
    problem, operands = _with_programs(problem, operands, given["score_mod"], mask_mod)
    if takes_ranges:
        problem, operands = windows.as_ranges(problem, operands, window.traced)
    if block_mask is not None:
        operands = operands.replaced({name: jnp.asarray(x) for name, x in block_mask.arrays().items()})
        problem = problem.with_block_mask(operands.arrays(), block_mask.shape.q_block, block_mask.shape.kv_block)
    if divided is not None and (refusal := divided.refusal(problem)):
        raise ValueError(f"sequence_axis={given['sequence_axis']!r}: {refusal}")
    if page_table is not None:
        pages, page = value.shape[:2]
        problem = dataclasses.replace(problem, pages=pages, page=page)
        arrays = operands.arrays()
        paged = {"key_pages": arrays.pop("key"), "value_pages": arrays.pop("value"), "page_table": page_table}
        operands = Operands.of(arrays | paged)
    return problem, operands


def division(options: Mapping[str, Any]) -> Division | None:
    """Return the division of the sequence over devices that these options request, or None."""
    axis, layout = options.get("sequence_axis"), options.get("sequence_layout")
    if axis is None:
        if layout is not None:
            raise ValueError(f"sequence_layout={layout!r} needs a sequence_axis: pass the mesh axis of the sequence")
        return None
    axes = (axis,) if isinstance(axis, str) else axis
    if not isinstance(axes, tuple) or not axes or not all(isinstance(name, str) for name in axes):
        wanted = "sequence_axis must be the name of a mesh axis or a tuple of them"
        raise TypeError(f"{wanted}, not {checks.described(axis)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"sequence_axis={axis!r} names an axis twice")
    if layout not in (None, *get_args(Layout)):
        raise ValueError(f'sequence_layout must be "contiguous" or "zigzag", not {checks.described(layout)}')
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        raise ValueError(
            f"sequence_axis={axis!r} is no axis of an enclosing jax.shard_map: call inside jax.shard_map over this axis"
        )
    return Division.over(axes, mesh.shape, layout or "contiguous")


def _check_implementation(x: Any) -> None:
    if isinstance(x, str) and x == "cudnn":
        raise ValueError(
            'implementation="cudnn" is only for jax.nn.dot_product_attention: use "flash" for the fused kernels here, '
            "or leave it out"
        )
    if x is not None and not (isinstance(x, str) and x in ("flash", "xla", "reference")):
        raise ValueError(f'implementation must be None, "flash", "xla" or "reference", not {checks.described(x)}')


def _scaled(query: jax.Array, scale: ArrayLike, largest: float) -> tuple[jax.Array, jax.Array]:
    """Return the query times the sign of τ, and |τ|, because the kernels take the row maximum before they scale.

    If τ is 0, or so small that a gradient times τ underflows, the query is multiplied by τ instead.
    """
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    least = 2.0**-14 if query.dtype == np.float16 else 2.0**-100
    if isinstance(scale, jax.core.Tracer):
        if not checks.is_real(scale):
            raise TypeError(f"scale must be a real number, not {scale.dtype}{list(scale.shape)}")
    else:
        scale = checks.finite("scale", scale, largest)
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


def _full_precision(precision: Any) -> bool:
    """Return whether float32 products need full float32 precision."""
    if precision is None:
        return jax.config.jax_default_matmul_precision in _FULL_PRECISIONS  # type: ignore[attr-defined, unused-ignore]
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        left, right = map(_full_precision, precision)
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


def _with_programs(problem: Problem, operands: Operands, score_mod: Any, mask_mod: Any) -> tuple[Problem, Operands]:
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
                problem = _with_window(problem, *bounds)
                continue
            if not traced.changes_nothing:
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
    return dataclasses.replace(problem, captured=shapes, **programs), operands


def _with_feature(
    problem: Problem, operands: Operands, score_mod: program.Program, captured: list[jax.Array]
) -> tuple[Problem, Operands] | None:
    """Return the problem and the operands with a score_mod replaced by an equal soft cap or bias, or None.

    The kernels cap scores before they add a bias, and have one of each. The rows of a bias do not include query_offset.
    """
    if problem.bias is not None:
        return None
    dtype = problem.accumulation_dtype
    cap, bias = features.feature_of(score_mod, captured, dtype, problem.sizes)
    if bias is not None:
        extent = Extent.of(bias)
        if extent.rows and operands.query.shape[1] < problem.q_len:
            return None  # on a divided sequence, a device has its own rows of a bias, but full captured arrays
        described = dataclasses.replace(problem, bias_dtype=bias.dtype.name, bias=extent)
        return described, operands._replace(bias=bias)
    least, most = _caps(float(jnp.finfo(dtype).max))
    if problem.soft_cap or not least <= cap <= most:
        return None
    return dataclasses.replace(problem, soft_cap=cap), operands


def _with_window(problem: Problem, left: int, right: int) -> Problem:
    """Return the problem restricted to this window. -1 means no bound."""
    return dataclasses.replace(
        problem,
        causal=problem.causal or right == 0,
        window_left=windows.narrower(problem.window_left, left),
        window_right=problem.window_right if right == 0 else windows.narrower(problem.window_right, right),
    )


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

"""The XLA custom calls `jax_flash_forward`, `jax_flash_backward` and `jax_flash_tangent` as JAX functions.

`forward` and `backward` take the arrays of a problem with any number of leading dims instead of the batch. `vmap` adds
one, and each has full size or size 1. Each call has these layers, from the outside in:

    jax_flash             a JAX primitive: `derivatives.py` has its derivatives of any order, and a mapped axis becomes
                          one more leading dim. With a division, it makes the calls of all visits (`sequence.py`)
    custom_partitioning   each device computes its own leading dims, heads and rows (`partitioning.py`)
    jax_flash_call        the leading dims become the batch of one `Problem`, and the platform selects the next layer
    jax_flash_forward     the custom call on a CPU, or on a GPU with scratch memory; `blockwise.py` on other platforms.
                          Profiles show this name, or jax_flash_backward or jax_flash_tangent

The primitive of a tangent is in `derivatives.py`. Its layers from `custom_partitioning` on are these.

Operands, results and formulas: docs/contract.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from jax_flash import _native, blockwise, compilation, denominator, explicit, partitioning, sequence
from jax_flash.operands import (
    DIFFERENTIATED,
    DIMS,
    PER_ROW,
    SHARED_GRADIENTS,
    SHARED_IN_BATCH,
    TANGENTS,
    UNBATCHED,
    Operands,
    array_of,
)
from jax_flash.partitioning import Results, Types
from jax_flash.problem import Problem, result_types
from jax_flash.programs.code import Unsupported
from jax_flash.sequence import Arrays, Division
from jax_flash.varying import varying_alike
from jax_flash.warn import warn

for _platform, _handlers in _native.registrations().items():
    for _target, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


TARGETS = ("jax_flash_forward", "jax_flash_backward", "jax_flash_tangent")

# The last result of a forward of which a tangent is taken: O in the accumulation dtype. A tangent needs its digits.
UNROUNDED_O = "unrounded o"


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the `disabled_checks` that `jax.export.export` needs for programs with fused attention.

    By default JAX exports only its own custom calls, and jax_flash has three others. If a later version changes them,
    an older exported program raises an error: export it again.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]


def refusal(problem: Problem, platform: str, moving: tuple[str, ...] = ()) -> str | None:
    """Return why a platform ("cpu", "cuda", …) has no fused kernels for a problem, or None if it has.

    Args:
      moving: the names of the operands with a tangent, or none for the forward and the backward.
    """
    if problem.symbolic:
        sizes = ", ".join(f"{name} {size}" for name, size in problem.symbolic.items())
        return f"fused kernels need concrete sizes, but these are symbolic: {sizes}"
    for program in problem.programs:
        if program.refusal:
            return program.refusal
    try:
        text = _text(problem, moving)
    except Unsupported as e:
        return str(e)
    if platform == "cpu":
        return None
    if platform == "cuda":
        return _native.cuda_refusal(text) or None
    return f"no fused kernels for platform {platform!r} in this version"


@functools.lru_cache(maxsize=1024)
def _text(problem: Problem, moving: tuple[str, ...]) -> str:
    """Return the attribute of a custom call."""
    return (problem.along(moving) if moving else problem).encode()


class Call(NamedTuple):
    """The static part of a call."""

    arrays: tuple[str, ...]  # names of the operands in DIMS
    results: tuple[str, ...]  # names of the results in DIMS
    problem: Problem
    fallback: bool  # whether platforms without handlers use `blockwise.py`; otherwise XLA raises an error there
    division: Division | None = None  # inside `shard_map`: the arrays are one device's part of a sequence
    moving: tuple[str, ...] = ()  # in a tangent: the operands that have tangents

    @property
    def target(self) -> str:
        """The name of the custom call."""
        if self.moving:
            return "jax_flash_tangent"
        return "jax_flash_forward" if "o" in self.results else "jax_flash_backward"

    @property
    def with_unrounded_o(self) -> Call:
        """A forward that also returns `UNROUNDED_O`."""
        return self._replace(results=("o", "l", "m", UNROUNDED_O))

    @property
    def without_unrounded_o(self) -> Call:
        """The same call without `UNROUNDED_O`."""
        return self._replace(results=tuple(name for name in self.results if name != UNROUNDED_O))

    def part(self, problem: Problem) -> Call:
        """Return the same call for a part of its arrays, which has this problem."""
        backward = self.target == "jax_flash_backward"
        return self._replace(problem=problem, results=problem.gradients if backward else self.results)


def forward(problem: Problem, fallback: bool, operands: Operands, division: Division | None = None) -> Results:
    """Compute (o, l, m) with Algorithm 2 as one custom call, or with a division as one for each visit.

    The operand `scale` must be positive. m counts as a constant, so m + log l has its exact gradient.
    """
    arrays = operands.arrays()
    return bind(Call(tuple(arrays), ("o", "l", "m"), problem, fallback, division), arrays.values())


def backward(
    problem: Problem,
    fallback: bool,
    operands: Operands,
    o: jax.Array,
    l: jax.Array,
    m: jax.Array,
    do: jax.Array,
    dlogsumexp: jax.Array | None = None,
) -> Results:
    """Compute the gradients that the problem requests with Algorithm 4 as one custom call."""
    arrays = operands.arrays() | {"o": o, "l": l, "m": m, "do": do}
    if dlogsumexp is not None:
        arrays["dlogsumexp"] = dlogsumexp
    return bind(Call(tuple(arrays), problem.gradients, problem, fallback), arrays.values())


# --- the primitive ----------------------------------------------------------------------------------------------------

# custom_jvp, custom_vjp and custom_vmap do not suffice. Partial evaluation, for example of a scan's body, drops the
# rule of a custom_jvp. A custom_vjp has no forward mode. A custom_vmap binds primals and tangents together, and reverse
# mode cannot split them.
primitive = Primitive("jax_flash")
primitive.multiple_results = True


def bind(call: Call, arrays: Iterable[jax.Array]) -> Results:
    """Bind the primitive with the jaxpr of its lowering, where JAX finds result types and `custom_partitioning`.

    A call with `UNROUNDED_O` also has the jaxpr of the call without it, for dead-code elimination.
    """
    arrays = tuple(arrays)
    jaxpr, rounded = _evaluate.trace(*arrays, call=call).jaxpr, None
    if UNROUNDED_O in call.results:
        rounded = _evaluate.trace(*arrays, call=call.without_unrounded_o).jaxpr
    return tuple(primitive.bind(*arrays, call=call, jaxpr=jaxpr, rounded=rounded))


@functools.partial(jax.jit, static_argnames="call")
def _evaluate(*arrays: jax.Array, call: Call) -> Results:
    named = dict(zip(call.arrays, arrays, strict=True))
    if UNROUNDED_O in call.results:
        o, l, m = sharded(call.without_unrounded_o._replace(problem=call.problem.without_rounding), named)
        return o.astype(call.problem.result_dtype("o")), l, m, o
    if call.division is not None:
        return _divided(call, call.division, named)
    return sharded(call, named)


def batched(
    bind: Callable[[Any, Iterable[jax.Array]], Results], call: Any, arrays: Iterable[jax.Array], axes: Iterable[Any]
) -> tuple[Results, tuple[int, ...]]:
    """Bind a call, mapped over these axes of its arrays. Return the results and their mapped axes."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    arrays = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    mapped = {name: x for name, x, axis in zip(call.arrays, arrays, axes, strict=True) if axis is not None}
    if any(map(is_unbatched, mapped)):  # such an array cannot get a leading dim, so each example is a call
        shared = dict(zip(call.arrays, arrays, strict=True))
        axis = explicit.first_axis(*mapped.values())
        everywhere = {name: explicit.on_first_axis(x, None) for name, x in mapped.items()}
        results = jax.lax.map(lambda one: bind(call, (shared | one).values()), everywhere)
        return tuple(explicit.on_first_axis(x, axis) for x in results), (0,) * len(results)

    gradients = {DIFFERENTIATED[name] for name in call.results if name in SHARED_GRADIENTS}

    def leading(name: str, x: jax.Array) -> jax.Array:
        if name in mapped or is_unbatched(name):
            return x
        # If all mapped examples share a bias or a captured array, each example still has its own gradient of it.
        return jnp.broadcast_to(x, (size if name in gradients else 1, *x.shape))

    results = bind(call, map(leading, call.arrays, arrays))
    return results, (0,) * len(results)


def _batch(arrays, axes, *, call: Call, jaxpr: ClosedJaxpr, rounded: ClosedJaxpr | None):
    return batched(bind, call, arrays, axes)


def is_unbatched(name: str) -> bool:
    """Return whether an array, or the array of this tangent, has no leading dims."""
    return array_of(name) in UNBATCHED


def _dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Eliminate dead code: without a tangent, as in reverse mode, O is not needed before it is rounded.

    Newer versions of JAX pass which inputs are live before the equation.
    """
    eqn: JaxprEqn = live_and_eqn[-1]
    call = eqn.params["call"]
    if UNROUNDED_O in call.results and any(used) and not used[-1]:
        params = eqn.params | {"call": call.without_unrounded_o, "jaxpr": eqn.params["rounded"]}
        eqn = eqn.replace(outvars=eqn.outvars[:-1], params=params)
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


def _lower(ctx, *arrays, call: Call, jaxpr: ClosedJaxpr, rounded: ClosedJaxpr | None):
    if call.problem.symbolic:
        _refuse_or_warn_of_symbols(call)
    for platform in ctx.platforms or ctx.module_context.platforms:
        if not call.fallback and platform not in ("cpu", "cuda"):
            raise NotImplementedError(
                f'implementation="flash": {refusal(call.problem, platform)}. '
                'Use implementation=None or "xla", which run on any platform'
            )
    return mlir.lower_fun(jaxpr_as_fun(jaxpr))(ctx, *arrays)


def _refuse_or_warn_of_symbols(call: Call) -> None:
    """Raise an error if "flash" was requested with symbolic sizes. Warn if plain JAX is used instead."""
    reason = refusal(call.problem, "cpu")
    if not call.fallback:
        raise NotImplementedError(
            f'implementation="flash": {reason}. '
            'Use implementation=None, "xla" or "reference", which accept symbolic sizes'
        )
    warn(f'attention takes implementation="xla", which is slower: {reason}')


def _eager(*arrays: jax.Array, call: Call, jaxpr: ClosedJaxpr, rounded: ClosedJaxpr | None) -> Results:
    return eagerly(functools.partial(_evaluate, call=call), call, arrays)


def eagerly(evaluate: Callable[..., Results], call: Any, arrays: Iterable[jax.Array]) -> Results:
    """Evaluate a call outside `jax.jit`.

    This happens under jax.disable_jit(), and when JAX searches for the operation that made a NaN or an infinity
    (jax_debug_nans, jax_debug_infs). JAX would report the -inf in m, or search inside the call. So the results are
    checked here.
    """
    unwanted = [kind for kind in ("nan", "inf") if getattr(jax.config, f"jax_debug_{kind}s")]
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = evaluate(*arrays)
        for name, x in zip(call.results, results, strict=True):
            for kind in unwanted:
                if name != "m" and getattr(jnp, f"is{kind}")(x).any():
                    raise FloatingPointError(f"invalid value ({kind}) in result {name} of {call.target}")
    return results


primitive.def_impl(_eager)
primitive.def_abstract_eval(lambda *arrays, call, jaxpr, rounded: jaxpr.out_avals)
pe.dce_rules[primitive] = _dce
batching.primitive_batchers[primitive] = _batch
mlir.register_lowering(primitive, _lower)


def _divided(call: Call, division: Division, arrays: Arrays) -> Results:
    """Compute a divided sequence, with one call for each visit of another device's keys."""

    def compute(problem: Problem, arrays: Arrays) -> Results:
        return bind(call.part(problem)._replace(arrays=tuple(arrays), division=None), arrays.values())

    function = sequence.forward if "o" in call.results else sequence.backward
    return function(compute, call.problem, division, {name: arrays[name] for name in call.arrays})


def _plain(call: Call, arrays: Arrays) -> Results:
    """Compute a call in plain JAX, for arrays with leading dims."""
    types = types_of(call, arrays)
    function = functools.partial(over_leading_dims, functools.partial(plain, call))
    return partitioning.automatic(function, call.problem, arrays, types)


def over_leading_dims(function: Callable[[Arrays], Results], arrays: Arrays) -> Results:
    """Map a function over all leading dims except the last, which is the batch of the problem."""
    size, *inner = lead(arrays)
    if not inner:
        return function(arrays)
    axes = {name: 0 if not is_unbatched(name) and x.shape[0] == size else None for name, x in arrays.items()}
    one = {name: x if is_unbatched(name) or axes[name] == 0 else x[0] for name, x in arrays.items()}
    return jax.vmap(functools.partial(over_leading_dims, function), in_axes=(axes,))(one)


def plain(call: Call, arrays: Arrays) -> Results:
    """Compute a call in plain JAX, for arrays without leading dims.

    With a division, each visit is a fused call, and only the derivatives of a visit are in plain JAX.
    """
    if call.division is not None:
        return _divided(call, call.division, arrays)
    operands = Operands.of(arrays)
    if "o" in call.results:
        return blockwise.forward(call.problem, operands)
    if call.moving:
        moving = {name: arrays[TANGENTS[name]] for name in call.moving}
        tangents = blockwise.tangent(call.problem, operands, moving, *(arrays[name] for name in "olm"))
        return tangents[: len(call.results)]
    o, l, m, do = (arrays[name] for name in ("o", "l", "m", "do"))
    return blockwise.backward(call.problem, operands, o, l, m, do, arrays.get("dlogsumexp"))


# --- custom_partitioning ----------------------------------------------------------------------------------------------


def types_of(call: Call, arrays: Arrays) -> Types:
    """Return the types of a call's results."""
    return result_types(call.problem, call.results, lead(arrays), arrays)


def sharded(call: Call, arrays: Arrays, zeros: bool = False) -> Results:
    """Make a call on every device, with the arrays of this device. `zeros`: compute zeros instead, sharded alike."""
    if call.problem.symbolic:
        return _plain(call, arrays)

    def compute(problem: Problem, arrays: Arrays) -> Results:
        part = call.part(problem)
        if zeros:
            results = tuple(jnp.zeros(x.shape, x.dtype) for x in types_of(part, arrays).values())
            return varying_alike(results, arrays)
        return _custom_call(part, arrays)

    types = types_of(call, arrays)
    return partitioning.divided(compute, call.problem, arrays, types)


def lead(arrays: Arrays) -> tuple[int, ...]:
    """Return the leading dims to which all arrays broadcast."""
    return jnp.broadcast_shapes(
        *(x.shape[: x.ndim - len(DIMS[array_of(name)])] for name, x in arrays.items() if not is_unbatched(name))
    )


# --- one device -------------------------------------------------------------------------------------------------------


def _custom_call(call: Call, arrays: Arrays) -> Results:
    """Make one call on one device. The leading dims become its batch."""
    leading = lead(arrays)
    batch = math.prod(leading)
    ones = {name for name, x in arrays.items() if math.prod(x.shape[: len(leading)]) == 1}
    shared = {name for group in SHARED_IN_BATCH if ones.issuperset(arrays.keys() & group) for name in group}

    def fold(name: str, x: jax.Array) -> jax.Array:
        if name in UNBATCHED:
            return x
        dims = x.shape[len(leading) :]
        if name in shared:
            return x.reshape(1, *dims)
        return jnp.broadcast_to(x, (*leading, *dims)).reshape(batch, *dims)

    def unfold(name: str, x: jax.Array) -> jax.Array:
        if name not in SHARED_GRADIENTS:
            return x.reshape(*leading, *x.shape[1:])
        operand = arrays[DIFFERENTIATED[name]]
        if x.shape[0] == 1:
            return x.reshape(operand.shape)
        x = x.reshape(*leading, *x.shape[1:])
        shared = [i for i in range(len(leading)) if operand.shape[i] == 1]
        return x.sum(shared, keepdims=True) if shared else x

    folded = {name: fold(name, arrays[name]) for name in DIMS if name in arrays}
    problem = call.problem.with_arrays(folded)
    results = _on_each_platform(call._replace(problem=problem, arrays=tuple(folded)), tuple(folded.values()))
    return tuple(map(unfold, call.results, results))


# --- the lowering for each platform -----------------------------------------------------------------------------------

# This is a primitive, because lax.platform_dependent cannot tell whether a program is lowered for the GPUs of this
# process or for export. The size of the scratch memory depends on it.
_platforms = Primitive("jax_flash_call")
_platforms.multiple_results = True


def _on_each_platform(call: Call, arrays: tuple[jax.Array, ...]) -> Results:
    without_text = call.moving and refusal(call.problem, "cpu", call.moving)
    function = _plain_call if without_text else _ffi_call
    return tuple(_platforms.bind(*arrays, call=call, jaxpr=function.trace(*arrays, call=call).jaxpr))


def _ffi_primitive(target: str) -> Primitive:
    """Return a primitive for an FFI call, named after its target. Profiles show this name instead of "ffi_call"."""
    primitive, lowering = Primitive(target), jax.ffi.ffi_lowering(target)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *arrays, types, problem: [jax.core.ShapedArray(x.shape, x.dtype) for x in types])
    mlir.register_lowering(primitive, lambda ctx, *arrays, types, problem: lowering(ctx, *arrays, problem=problem))
    return primitive


_ffi = {name: _ffi_primitive(name) for name in TARGETS}


@functools.partial(jax.jit, static_argnames=("call", "scratch_bytes", "gpu"))
def _ffi_call(*arrays: jax.Array, call: Call, scratch_bytes: int = 0, gpu: bool = False) -> Results:
    """Make the FFI call.

    On a GPU, scratch memory is the last result, so XLA plans it. The gradient of a 16-bit bias has 16 bits there, so
    XLA does not have to convert it. The contributions of rows to gradients in PER_ROW are summed here, in the same
    order in every run.
    """
    lead, named = (call.problem.batch,), dict(zip(call.arrays, arrays, strict=True))
    types = result_types(call.problem, call.results, lead, named)
    written = dict(types)
    if gpu and "dbias" in types and named["bias"].dtype.itemsize == 2:
        written["dbias"] = jax.ShapeDtypeStruct(types["dbias"].shape, named["bias"].dtype)
    per_row = [name for name in PER_ROW if name in types]
    written |= {name: jax.ShapeDtypeStruct(named["l"].shape, named["l"].dtype) for name in per_row}
    scratch = [jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8)] if scratch_bytes else []
    returned = _ffi[call.target].bind(
        *arrays, types=(*written.values(), *scratch), problem=_text(call.problem, call.moving)
    )
    results = dict(zip(types, returned, strict=False))
    for name in per_row:
        results[name] = denominator.summed_over_rows(results[name], named[DIFFERENTIATED[name]])
    return varying_alike(tuple(x.astype(types[name].dtype) for name, x in results.items()), arrays)


def _call_kernels(*arrays: jax.Array, call: Call, latent: bool, **options: Any) -> Results:
    """Call the kernels, with `latent` without the value, which they read from the latent."""
    named = dict(zip(call.arrays, arrays, strict=True))
    if latent:
        named = {name: x for name, x in named.items() if name not in ("value", "value_pages")}
    return _ffi_call(*named.values(), call=call._replace(arrays=tuple(named)), **options)


@functools.partial(jax.jit, static_argnames="call")
def _plain_call(*arrays: jax.Array, call: Call) -> Results:
    return plain(call, dict(zip(call.arrays, arrays, strict=True)))


def _falls_back(call: Call, platform: str) -> bool:
    """Return whether a call is plain JAX on a platform. Warn if only the gradient or the tangent is."""
    reason = refusal(call.problem, platform, call.moving) if call.fallback else None
    if reason and call.target != "jax_flash_forward" and refusal(call.problem.differentiated(()), platform) is None:
        derivative = "tangent" if call.moving else "gradient"
        warn(f"the {derivative} of attention is computed in plain JAX, which is slower: {reason}")
    return reason is not None


def _lower_cpu(ctx, *arrays, call: Call, jaxpr: ClosedJaxpr):
    if _falls_back(call, "cpu"):
        return _lower_elsewhere(ctx, *arrays, call=call, jaxpr=jaxpr)

    latent = call.problem.latent and call.target == "jax_flash_forward"
    return mlir.lower_fun(functools.partial(_call_kernels, call=call, latent=latent))(ctx, *arrays)


def _lower_cuda(ctx, *arrays, call: Call, jaxpr: ClosedJaxpr):
    if _falls_back(call, "cuda"):
        return _lower_elsewhere(ctx, *arrays, call=call, jaxpr=jaxpr)
    latent = call.target == "jax_flash_forward" and _native.cuda_reads_latent(call.problem.encode())
    call = call._replace(problem=dataclasses.replace(call.problem, latent=latent))
    exported = ctx.module_context.lowering_parameters.for_export
    problem, backward = _text(call.problem, call.moving), call.target == "jax_flash_backward"
    if not exported:
        compilation.start(problem, backward)
    scratch_bytes = _native.cuda_scratch_bytes(problem, backward, exported)
    kernels = functools.partial(_call_kernels, call=call, latent=latent, scratch_bytes=scratch_bytes, gpu=True)
    return mlir.lower_fun(kernels)(ctx, *arrays)


def _lower_elsewhere(ctx, *arrays, call: Call, jaxpr: ClosedJaxpr):
    return mlir.lower_fun(functools.partial(_plain_call if call.fallback else _ffi_call, call=call))(ctx, *arrays)


_platforms.def_abstract_eval(lambda *arrays, call, jaxpr: jaxpr.out_avals)
mlir.register_lowering(_platforms, _lower_elsewhere)
mlir.register_lowering(_platforms, _lower_cpu, platform="cpu")
mlir.register_lowering(_platforms, _lower_cuda, platform="cuda")

"""Score programs: functions of one entry of the score matrix, which the user writes in `jnp`.

A function is traced on scalars. The arrays that it captures become operands. The kernels run its code and the code of
its derivative (`jax.vjp` of the function). Plain JAX runs the function itself, mapped over a tile.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jax_flash import _native
from jax_flash.programs import arrays as elements
from jax_flash.programs import lowering, replay
from jax_flash.programs.arrays import Array, View, aval
from jax_flash.programs.code import Code, Unsupported
from jax_flash.programs.lowering import Lowering
from jax_flash.programs.operations import PLACEMENTS
from jax_flash.programs.structure import Structure, without_constants

INDICES = ("batch", "head", "query", "key")
SAME_SCORE, SAME_COTANGENT, ALWAYS = "score;result,0", "cotangent;result,0", "const.b,1;result,0"
# Why a function cannot be traced, by the error that JAX raises. The last error is a base class of others.
NEEDS_VALUES = {
    jax.errors.TracerBoolConversionError: "must not branch on a traced value: write jnp.where(condition, x, y) for if, "
    "and &, | and ~ for and, or and not",
    jax.errors.TracerArrayConversionError: "must not pass a traced value to NumPy: use jax.numpy, and convert a NumPy "
    "array before you index it, as in jnp.asarray(table)[key]",
    jax.errors.TracerIntegerConversionError: "must not use a traced value as a Python integer, such as the index of a "
    "list: index an array instead, as in jnp.asarray(values)[key]",
    jax.errors.NonConcreteBooleanIndexError: "must not select elements by a traced condition: write "
    "jnp.where(condition, x, y)",
    jax.errors.ConcretizationTypeError: "must not convert a traced value to a Python number, as int, float and range "
    "do, and array shapes: use jax.numpy",
}


class Sizes(NamedTuple):
    """The number of values of each index. None means unknown during tracing: query positions, symbolic sizes."""

    batch: int | None
    head: int
    query: int | None
    key: int | None


class Captured(NamedTuple):
    """The description of an array that programs read."""

    dtype: str
    batch: bool  # whether each batch entry has its own array
    shape: tuple[int, ...]  # without the batch dim
    gradient: bool = False  # in a backward: whether its gradient is requested

    def __str__(self) -> str:
        lead, dims = "b" if self.batch else "1", "x".join(map(str, self.shape))
        return f"{self.dtype}:{lead}:{dims}:{int(self.gradient)}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of captured arrays, a score (only in a score_mod), and the indices batch, head, query and key.

    Two programs are equal if they compute the same, even if they were traced from different functions.
    """

    text: str  # the code, or the text of the jaxpr if the kernels do not support it
    refusal: str | None = None  # why the kernels do not support it
    derivative: str | None = None  # the code of a score_mod's derivative; with custom rules, its jaxpr as well
    constants: tuple[Any, ...] = ()  # bytes of arrays, and Python functions, which the jaxpr has but not its text
    first: int = 0  # the number of its first captured array
    count: int = 0  # the number of its captured arrays
    jaxpr: Any = dataclasses.field(default=None, compare=False, repr=False)  # a Jaxpr; None for a derivative

    def __str__(self) -> str:
        return self.text

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Return the program itself: it is immutable, and jaxprs cannot be copied."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a traced score_mod, mask_mod or mask_fn is a jaxpr, which JAX cannot pickle: pickle what the function is "
            "made from instead"
        )

    @property
    def has_rules(self) -> bool:
        """Whether it has custom derivative rules or stop_gradient, so its code does not determine its derivatives."""
        return _has_rules(self.jaxpr)

    @property
    def changes_nothing(self) -> bool:
        """Whether the program is the identity, with the derivative of the identity."""
        return (self.text, self.derivative) in ((SAME_SCORE, SAME_COTANGENT), (ALWAYS, None))

    def __call__(self, arrays: Sequence[jax.Array], *scalars: jax.Array) -> jax.Array:
        """Evaluate one entry. `arrays` are the captured arrays of all programs of the call."""
        (result,) = replay.evaluate(self.jaxpr, self._own(arrays), scalars)
        return result

    def on_tile(
        self,
        arrays: Sequence[jax.Array],
        score: jax.Array | None,
        batch: jax.Array,
        head: jax.Array,
        query: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        """Evaluate every entry of a tile: [B, N, R, C].

        Args:
          arrays: captured arrays of all programs of the call, each with a leading dim of B or 1.
          score: [B, N, R, C], or None for a mask.
          batch, head, query, key: int32 [B], [N], [B, R] and [C], or [B, N, R, C] each.
        """
        scores = () if score is None else (score,)
        score_axes = (0,) * len(scores)
        shared = [x.shape[0] == 1 for x in arrays]
        by_dim = ((0, None, 0, None), (None, 0, None, None), (None, None, 0, None), (None, None, None, 0))
        by_batch, *by_other = ((0, 0, 0, 0),) * 4 if key.ndim == 4 else by_dim  # of batch, head, query, key
        mapped: Callable[..., jax.Array] = self
        for axes in reversed(by_other):
            mapped = jax.vmap(mapped, (None, *score_axes, *axes))
        mapped = jax.vmap(mapped, ([None if one else 0 for one in shared], *score_axes, *by_batch))
        arrays = [x[0] if one else x for x, one in zip(arrays, shared, strict=True)]
        return mapped(arrays, *scores, batch, head, query, key)

    def gradient(self, captured: Sequence[Captured], dtype: str, sizes: Sizes) -> Program:
        """Return the code of the derivative.

        From the cotangent of the result it computes the cotangent of the score, and adds to the gradients of captured
        arrays.
        """
        code = Code(dtype, sizes._asdict())
        arrays, scalars, forward = self._arrays(code, captured), _inputs(code, dtype), Lowering(code)
        leaves = _leaves(forward, self.jaxpr, arrays, scalars)
        constants = [x for x in arrays if not isinstance(x, View)]
        args = [*constants, *scalars, elements.scalar(code.input("cotangent"), dtype), *leaves]
        closed = _derivative(self.jaxpr, len(constants), args)
        try:
            dscore, *dleaves = Lowering(code).run(closed.jaxpr, forward.constants(closed.consts), args)
        except Unsupported as e:  # an operation of the derivative, which the user did not write
            raise Unsupported(f"a derivative with {e}") from None
        for leaf, dleaf in zip(leaves, dleaves, strict=True):
            for index in elements.positions(code, leaf.shape) if captured[leaf.array].gradient else ():
                x = dleaf.element(*index)
                place, inside = leaf.place(index)
                if inside is not None:
                    x = code.select(inside, x, code.constant("f", 0.0))
                if code.known(x) != 0:
                    code.accumulate(leaf.array, place, x)
        return Program(code.text(dscore.element()))

    def tangent(self, captured: Sequence[Captured], moving: Mapping[int, int], dtype: str, sizes: Sizes) -> Program:
        """Return the code of the tangent of the score that it returns, from the tangent of the score that it gets.

        Args:
          captured: captured arrays of all programs of the call, and tangents.
          moving: the numbers of captured arrays that have a tangent, with the numbers of the tangents.
        """
        code = Code(dtype, sizes._asdict())
        arrays, scalars, forward = self._arrays(code, captured), _inputs(code, dtype), Lowering(code)
        leaves = _leaves(forward, self.jaxpr, arrays, scalars)
        constants = [x for x in arrays if not isinstance(x, View)]
        moved = [elements.at_same_places(x, moving[x.array]) for x in leaves if x.array in moving]
        args = [*constants, *scalars, elements.scalar(code.input("tangent"), dtype), *leaves, *moved]
        closed = _tangent(self.jaxpr, len(constants), [x.array in moving for x in leaves], args)
        try:
            (result,) = Lowering(code).run(closed.jaxpr, forward.constants(closed.consts), args)
        except Unsupported as e:  # which the user did not write
            raise Unsupported(f"score_mod has a derivative with {e}") from None
        return Program(code.text(result.element()))

    def _own(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays[self.first : self.first + self.count])

    def _arrays(self, code: Code, captured: Sequence[Captured]) -> list[Array]:
        own = self._own(list(enumerate(captured)))
        return [elements.captured(code, number, x.shape, x.dtype) for number, x in own]


def trace(name: str, function: Any, dtype: str, sizes: Sizes, first: int) -> tuple[Program, list[jax.Array]]:
    """Trace a user's `score_mod` or `mask_mod`. Return the program and the arrays that it captures.

    Args:
      name: name of the argument, for error messages.
      function: the user's function.
      dtype: dtype of the scores.
      sizes: number of values of each index.
      first: number of the first captured array.

    Raises:
      TypeError, ValueError: if the function breaks a rule of docs/score-programs.md. The message names the argument.
    """
    closed = traced(name, function, dtype)
    for x in closed.consts:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} captures an array of dtype {x.dtype}: captured arrays must be floats, integers or bools"
            )
    if len(closed.consts) > _native.MAX_CAPTURED // 2:
        closed = _packed(closed)
    arrays, jaxpr = [jnp.asarray(x) for x in closed.consts], without_constants(closed)
    constants = (*(np.asarray(x).tobytes() for x in _constants_of_calls(jaxpr)), *_callbacks(jaxpr))
    program = Program("", first=first, count=len(arrays), constants=constants, jaxpr=jaxpr)
    captured = (*[Captured("", False, ())] * first, *(Captured(x.dtype.name, False, x.shape) for x in arrays))
    scored, has_rules = name == "score_mod", _has_rules(jaxpr)
    second = _second_derivative(name, closed) if scored and has_rules else ""
    given = (first, captured, dtype, sizes, scored, jax.config.read("jax_enable_x64"))
    refusal = None
    try:
        # Rules are Python functions that may read changed values, so their results are not cached.
        text, derivative = _lower(jaxpr, *given) if has_rules else _lowered(Structure.of(jaxpr), *given)
        derivative += second
    except (Unsupported, RecursionError) as e:
        reason = e if isinstance(e, Unsupported) else "too many nested operations on small arrays"
        refusal = f"{name} has {reason}"
        text, derivative = str(jaxpr), second or (_second_derivative(name, closed) if scored else "")
    derived = derivative if scored else None
    return dataclasses.replace(program, text=text, refusal=refusal, derivative=derived), arrays


@functools.lru_cache(maxsize=256)
def _lowered(structure: Structure, *given: Any) -> tuple[str, str]:
    """Cache `_lower` by the structure of the jaxpr. Errors are not cached, because they name the user's line."""
    return _lower(structure.jaxpr, *given)


def _lower(
    jaxpr: Jaxpr, first: int, captured: tuple[Captured, ...], dtype: str, sizes: Sizes, scored: bool, x64: bool
) -> tuple[str, str]:
    """Return the code of a function, and of its derivative for a score_mod.

    The derivative is lowered now, so that an unsupported derivative is known before the forward is chosen.
    """
    with jax.enable_x64(x64):
        program = Program("", first=first, count=len(captured) - first, jaxpr=jaxpr)
        code = Code(dtype, sizes._asdict())
        inputs = _inputs(code, dtype)[0 if scored else 1 :]
        (result,) = Lowering(code).run(jaxpr, program._arrays(code, captured), inputs)
        text = code.text(result.element())
        if not scored:
            return text, ""
        own = (x._replace(gradient=jnp.issubdtype(x.dtype, jnp.floating)) for x in captured[first:])
        return text, program.gradient((*captured[:first], *own), dtype, sizes).text


def traced(name: str, function: Any, dtype: str) -> ClosedJaxpr:
    """Return the jaxpr of a user's function. Its constants are the captured arrays. See `trace` for the arguments."""
    scored = name == "score_mod"
    names = ("score", *INDICES) if scored else INDICES
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(names)}), not {type(function).__name__}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        raise TypeError(f"{name} must take {len(names)} arguments: {', '.join(names)}") from None
    except ValueError:  # the callable has no signature
        pass
    integer, expected = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((), dtype if scored else "bool")
    wrong_types: list[str] = []  # not the results themselves: jax_check_tracer_leaks would report a leak

    def fresh(*args: jax.Array) -> Any:  # JAX caches traces by function, and this function may have changed since
        result = function(*args)
        if not isinstance(result, jax.Array):
            wrong_types.append(type(result).__name__)
        return result

    try:
        closed, result = jax.make_jaxpr(fresh, return_shape=True)(*[expected] * scored, *[integer] * len(INDICES))
    except Exception as error:
        for kind, reason in NEEDS_VALUES.items():
            if isinstance(error, kind):
                raise TypeError(f"{name} is traced on scalars, and {reason}") from error
        if wrong_types:  # JAX cannot convert the result to an array either
            raise TypeError(f"{name} must return one {expected.dtype.name} scalar, not {wrong_types[0]}") from error
        error.add_note(f"{name} is traced on scalars: see docs/score-programs.md for its rules")
        if type(error).__name__ == "ShardingTypeError":  # JAX does not export this class
            error.add_note("captured arrays must be replicated: use jax.sharding.reshard(x, jax.P())")
        raise
    if not jax.tree_util.all_leaves([result]) or result.shape or result.dtype != expected.dtype:
        found = jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", result)
        raise TypeError(f"{name} must return one {expected.dtype.name} scalar, not {found}")
    effects: Iterable[Any] = closed.effects  # their classes are not exported by JAX
    axes = [x.name for x in effects if type(x).__name__ == "NamedAxisEffect"]
    if axes:
        raise ValueError(
            f"{name} must not use a named axis, but uses {', '.join(map(repr, axes))}: call jax.lax.axis_index or "
            "jax.lax.psum outside of the function, and let it capture the result"
        )
    if closed.effects:
        raise ValueError(
            f"{name} must not have side effects, but has {', '.join(map(str, closed.effects))}: remove them, "
            "such as jax.debug.print"
        )
    return _with_constants_of_calls(closed)


def _inputs(code: Code, dtype: str) -> list[Array]:
    indices = [elements.scalar(code.input(name), "int32") for name in INDICES]
    return [elements.scalar(code.input("score"), dtype), *indices]


def _leaves(forward: Lowering, jaxpr: Jaxpr, arrays: list[Array], scalars: list[Array]) -> list[View]:
    """Return the views of captured float arrays that the function reads."""
    for result in forward.run(jaxpr, arrays, scalars):
        forward.use(result)
    return forward.leaves


def _with_constants_of_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function with the arrays that inner functions under jax.jit capture among its own constants."""
    if not list(_constants_of_calls(closed.jaxpr)):
        return closed
    return jax.make_jaxpr(lambda *args: _Tracing(()).run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _packed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function with its captured arrays concatenated into one array for each dtype."""
    arrays = [jnp.asarray(x) for x in closed.consts]
    dtypes = dict.fromkeys(x.dtype for x in arrays)
    packed = {dtype: jnp.concatenate([x.ravel() for x in arrays if x.dtype == dtype]) for dtype in dtypes}

    def function(*scalars: jax.Array) -> list[jax.Array]:
        ends, parts = dict.fromkeys(dtypes, 0), []
        for x in arrays:
            start, ends[x.dtype] = ends[x.dtype], ends[x.dtype] + x.size
            parts.append(jax.lax.slice(packed[x.dtype], (start,), (start + x.size,)).reshape(x.shape))
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, parts))(*scalars)

    return jax.make_jaxpr(function)(*closed.in_avals)


def _constants_of_calls(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the constants of all inner jaxprs of a jaxpr."""
    for eqn in _equations(jaxpr):
        for x in _parts(eqn.params.values()):
            if isinstance(x, ClosedJaxpr):
                yield from x.consts


def _callbacks(jaxpr: Jaxpr) -> list[Any]:
    """Return the Python functions that a jaxpr calls at run time."""
    return [eqn.params["callback"] for eqn in _equations(jaxpr) if "callback" in eqn.params]


def _has_rules(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has custom derivative rules or stop_gradient."""
    return any(eqn.primitive.name.startswith(("custom_", "stop_gradient")) for eqn in _equations(jaxpr))


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and of all its inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for x in _parts(eqn.params.values()):
            if isinstance(x, (Jaxpr, ClosedJaxpr)):
                yield from _equations(x.jaxpr if isinstance(x, ClosedJaxpr) else x)


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters of an equation. Some are tuples of jaxprs, which are flattened."""
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from _parts(x)
        else:
            yield x


# --- the derivative ---------------------------------------------------------------------------------------------------


class _TracedView(NamedTuple):
    """A stand-in for a `lowering.View` while the function is traced."""

    shape: tuple[int, ...]
    dtype: Any


def _derivative(jaxpr: Jaxpr, constants: int, args: Sequence[Array]) -> ClosedJaxpr:
    """Return the jaxpr of jax.vjp of the function, with respect to the score and the leaves.

    Args:
      jaxpr: the function.
      constants: the number of arrays at the start of `args` that are not floats.
      args: these arrays, the score, the indices, the cotangent, and the leaves.
    """

    def derivative(*args: jax.Array) -> list[jax.Array]:
        function, score, (cotangent, *leaves) = _of_score_and_leaves(jaxpr, constants, args)
        _, vjp = jax.vjp(function, score, leaves)
        dscore, dleaves = vjp(cotangent)
        return [dscore, *dleaves]

    return jax.make_jaxpr(derivative)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))


def _tangent(jaxpr: Jaxpr, constants: int, moving: Sequence[bool], args: Sequence[Array]) -> ClosedJaxpr:
    """jax.jvp of the function along tangents of the score and of the moving leaves, as a jaxpr.

    Args: constants, score and indices, tangent of the score, leaves, tangents of the moving leaves.
    """

    def tangent(*args: jax.Array) -> jax.Array:
        function, score, (dscore, *others) = _of_score_and_leaves(jaxpr, constants, args)
        leaves, moved = others[: len(moving)], iter(others[len(moving) :])
        dleaves = [next(moved) if there else jnp.zeros_like(x) for x, there in zip(leaves, moving, strict=True)]
        return jax.jvp(function, (score, leaves), (dscore, dleaves))[1]

    return jax.make_jaxpr(tangent)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))


def _of_score_and_leaves(
    jaxpr: Jaxpr, constants: int, args: Sequence[jax.Array]
) -> tuple[Callable[[jax.Array, list[jax.Array]], jax.Array], jax.Array, Sequence[jax.Array]]:
    """The function of the score and of the leaves; the score; the arguments that follow score and indices."""
    known = iter(args[:constants])
    floats = [jnp.issubdtype(aval(x).dtype, jnp.floating) for x in jaxpr.constvars]
    consts = [
        _TracedView(aval(x).shape, aval(x).dtype) if there else next(known)
        for x, there in zip(jaxpr.constvars, floats, strict=True)
    ]
    scalars = constants + 1 + len(INDICES)
    score, *indices = args[constants:scalars]

    def function(score: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        tracing = _Tracing(leaves)
        (result,) = tracing.run(jaxpr, consts, [score, *indices])
        return tracing.use(result)

    return function, score, args[scalars:]


def _second_derivative(name: str, closed: ClosedJaxpr) -> str:
    """Return the text of jax.vjp of jax.vjp, as far as it exists. It distinguishes functions with custom rules."""

    def function(arrays: Sequence[jax.Array], *scalars: jax.Array) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, arrays))(*scalars)

    def first(args: list[Any], cotangents: Any) -> Any:
        return _floats(jax.vjp(function, *args)[1](cotangents))

    def second(args: list[Any], cotangents: Any, of_first: Any) -> Any:
        return _floats(jax.vjp(first, args, cotangents)[1](of_first))

    args: list[Any] = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.consts], *closed.in_avals]
    given: list[Any] = [args, closed.out_avals, _floats(args)]
    for derivative in (second, first):
        try:
            found = jax.make_jaxpr(derivative)(*given)
        except Exception:  # a user's rule may raise anything, and does so again when it is differentiated
            given.pop()
            continue
        constants = [*found.consts, *_constants_of_calls(found.jaxpr)]
        if any(isinstance(x, jax.core.Tracer) for x in constants):
            raise TypeError(
                f"{name} calls a function with a custom derivative rule that captures a traced array: pass the array "
                "to the function as an argument"
            )
        return " ".join([str(found), *(np.asarray(x).tobytes().hex() for x in constants)])
    return ""


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


class _Tracing:
    """Evaluates a jaxpr in the order of `Lowering`. So it finds the same leaves, and reads them from arguments."""

    def __init__(self, leaves: Sequence[jax.Array]):
        self._unused = iter(leaves)
        self._used: list[tuple[_TracedView, jax.Array]] = []

    def use(self, x: Any) -> Any:
        if not isinstance(x, _TracedView):
            return x
        for view, leaf in self._used:
            if view is x:
                return leaf
        self._used.append((x, next(self._unused)))
        return self._used[-1][1]

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for eqn in jaxpr.eqns:
            values |= dict(zip(eqn.outvars, self._apply(jaxpr, eqn, [read(x) for x in eqn.invars]), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _apply(self, jaxpr: Jaxpr, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        inner = lowering.inlined(eqn)
        if eqn.primitive.name in PLACEMENTS:  # without effect here
            return inputs
        if lowering.keeps_views(eqn) and isinstance(inputs[0], _TracedView):
            return [_TracedView(aval(x).shape, aval(x).dtype) for x in eqn.outvars]
        if inner and lowering.is_transparent(eqn):
            return self.run(inner[0], inner[1], inputs)
        used = [
            value if isinstance(x, Literal) else self.use(value) for x, value in zip(eqn.invars, inputs, strict=True)
        ]
        if inner:  # with a custom rule
            return list(replay.apply(jaxpr, eqn, used))
        variables, function = replay.function_of(jaxpr, eqn)
        return function(*(used[eqn.invars.index(x)] for x in variables))

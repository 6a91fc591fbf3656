"""A pass of attention: its operands, its compiled program and memory, and its time."""

import functools
import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from measure import Call

PADDING = 20  # maximum number of padding tokens, as in the paper's benchmark, so little work is on padding
LONG = 2.0  # seconds of samples, after which a call is not timed again
SHORT, REPEATS = 1024, 20  # a pass over sequences shorter than SHORT is repeated REPEATS times in a timed program
FAILURES = (ValueError, NotImplementedError, RuntimeError)  # raised by programs that cannot run here
THREEFRY = "threefry2x32"  # JAX's default generator
FORWARD, BOTH = "forward", "forward + backward"


class Operands(NamedTuple):
    q: jax.Array  # [B, N, heads, d], like k, v and do
    k: jax.Array
    v: jax.Array
    do: jax.Array
    lengths: jax.Array | None  # int32 [B], the lengths of the sequences without their padding
    key: jax.Array | None  # for the dropout mask


def operands(shape: tuple[int, int, int, int], mask: bool, dropout: bool, generator: str = THREEFRY) -> Operands:
    """Return random bfloat16 operands. `generator` is the random generator for the dropout mask."""
    q, k, v, do = [jax.random.normal(key, shape, "bfloat16") for key in jax.random.split(jax.random.key(0), 4)]
    lengths = shape[1] - np.random.default_rng(0).integers(0, PADDING, shape[0], dtype=np.int32)
    key = jax.random.key(1, impl=generator)
    return Operands(q, k, v, do, jnp.asarray(lengths) if mask else None, key if dropout else None)


class Program(NamedTuple):
    call: Call
    repeats: int  # number of passes in a call
    bytes: int  # arguments, results and temporaries of a pass
    temporaries: int  # bytes of the temporaries only
    cost: dict[str, float]  # XLA's "flops" and "bytes accessed", which do not include custom calls


def program(attend: Callable[..., jax.Array], pass_: str, given: Operands, **more: Any) -> Program:
    """Compile a pass. `more` has other keyword arguments of the function."""

    def forward(given: Operands, more: dict[str, Any]) -> tuple[jax.Array, ...]:
        return (attend(given.q, given.k, given.v, given.lengths, given.key, **more),)

    def both(given: Operands, more: dict[str, Any]) -> tuple[jax.Array, ...]:
        o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, given.lengths, given.key, **more), *given[:3])
        return o, *pull(given.do)

    function = forward if pass_ == FORWARD else both
    more = jax.device_put(more)
    compiled: Any = jax.jit(function).lower(given, more).compile()
    planned, temporaries = planned_bytes(compiled), compiled.memory_analysis().temp_size_in_bytes
    cost = dict(compiled.cost_analysis() or {})
    repeats = REPEATS if given.q.shape[1] < SHORT else 1
    if repeats > 1:
        compiled = jax.jit(functools.partial(repeated, function, repeats)).lower(given, more).compile()
    return Program(functools.partial(compiled, given, more), repeats, planned, temporaries, cost)


def repeated(
    function: Callable[..., tuple[jax.Array, ...]], repeats: int, given: Operands, more: dict[str, Any]
) -> tuple[jax.Array, ...]:
    """Run several passes one after the other in one program. Return the results of the last one.

    A pass over short sequences takes less time than Python needs to start it. XLA cannot move anything out of the loop:
    one entry of Q, K and V comes from the previous pass, and each pass has a different dropout mask.
    """

    def step(i: jax.Array, carry: tuple[Operands, tuple[jax.Array, ...]]) -> tuple[Operands, tuple[jax.Array, ...]]:
        before, (o, *_) = carry
        q, k, v = (x.at[0, 0, 0, 0].set(o[0, 0, 0, 0]) for x in before[:3])
        changed = before._replace(q=q, k=k, v=v)
        return changed, function(changed._replace(key=key_plus(given.key, i)), more)

    return jax.lax.fori_loop(1, repeats, step, (given, function(given, more)))[1]


def key_plus(key: jax.Array | None, i: jax.Array) -> jax.Array | None:
    """Return a different key for each number, by an addition, which is cheaper than `jax.random.fold_in`."""
    if key is None:
        return None
    return jax.random.wrap_key_data(jax.random.key_data(key) + i.astype("uint32"), impl=jax.random.key_impl(key))


def planned_bytes(compiled: Any) -> int:
    """Return the bytes that XLA plans for a program: arguments, results that do not alias them, and temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def failure(error: Exception) -> str:
    """Return a one-line reason why something could not be measured."""
    return (str(error) or repr(error)).splitlines()[0][:200]


class Measured(NamedTuple):
    program: Program | None
    milliseconds: float | None  # per pass
    failure: str | None  # the reason if there is no time


def measured(makers: Mapping[Any, Callable[[], Program]]) -> dict[Any, Measured]:
    """Compile the programs and time them in turn. The failure of one does not affect the others."""
    programs: dict[Any, Program] = {}
    failures: dict[Any, str] = {}
    for name, make in makers.items():
        try:
            programs[name] = make()
            measure.finish(programs[name].call())
        except FAILURES as error:
            failures[name] = failure(error)
        gc.collect()  # frees the arrays of a failed program
    seconds = timed({name: program.call for name, program in programs.items() if name not in failures}, failures)
    times = {name: 1e3 * x / programs[name].repeats for name, x in seconds.items()}
    return {name: Measured(programs.get(name), times.get(name), failures.get(name)) for name in makers}


def timed(calls: Mapping[Any, Call], failures: dict[Any, str]) -> dict[Any, float]:
    """Return seconds: medians of samples, which are taken in turn. A call of many seconds has a single sample.

    All calls must have run before. Failing calls are omitted, and their reasons are added to `failures`.
    """
    once: dict[Any, float] = {}
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(measure.SAMPLES):
        for name, call in calls.items():
            try:
                if turn == 0:
                    once[name] = measure.sample(call, 1)
                if name not in failures and turn * once[name] < LONG:
                    samples[name].append(measure.sample(call, measure.calls_per_sample(once[name])))
            except FAILURES as error:
                failures[name] = failure(error)
    return {name: statistics.median(x) for name, x in samples.items() if name not in failures}

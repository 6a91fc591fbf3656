"""A pass of attention: its operands, its program with the memory that it takes, and its time."""

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from measure import Call

PADDING = 20  # tokens at most: as the paper's own benchmark has it, so that hardly any work is on padding
LONG = 2.0  # seconds of samples, after which a call is not timed again
FORWARD, BOTH = "forward", "forward + backward"


class Operands(NamedTuple):
    q: jax.Array  # [B, N, heads, d], as k, v and do
    k: jax.Array
    v: jax.Array
    do: jax.Array
    lengths: jax.Array | None  # int32 [B], of the sequences without their padding
    key: jax.Array | None  # of the dropout mask


def operands(shape: tuple[int, int, int, int], mask: bool, dropout: bool) -> Operands:
    """Random ones in bfloat16.

    The key is of XLA's own generator (`rbg`), on a GPU the faster of JAX's two, for what draws its mask with JAX.
    """
    q, k, v, do = [jax.random.normal(key, shape, "bfloat16") for key in jax.random.split(jax.random.key(0), 4)]
    lengths = shape[1] - np.random.default_rng(0).integers(0, PADDING, shape[0], dtype=np.int32)
    key = jax.random.key(1, impl="rbg")
    return Operands(q, k, v, do, jnp.asarray(lengths) if mask else None, key if dropout else None)


class Program(NamedTuple):
    call: Call
    bytes: int  # of arguments, results and temporaries
    temporaries: int  # bytes of them alone
    cost: dict[str, float]  # as XLA counts it: "flops", "bytes accessed"; of custom calls it knows nothing


def program(attend: Callable[..., jax.Array], pass_: str, given: Operands, **more: Any) -> Program:
    """A pass, compiled. `more`: what else the function is given by name."""

    def forward(given: Operands, more: dict[str, Any]) -> jax.Array:
        return attend(given.q, given.k, given.v, given.lengths, given.key, **more)

    def both(given: Operands, more: dict[str, Any]) -> tuple[jax.Array, ...]:
        o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, given.lengths, given.key, **more), *given[:3])
        return o, *pull(given.do)

    function: Callable[..., object] = forward if pass_ == FORWARD else both
    more = jax.device_put(more)
    compiled: Any = jax.jit(function).lower(given, more).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    cost = dict(compiled.cost_analysis() or {})
    return Program(functools.partial(compiled, given, more), planned_bytes(compiled), temporaries, cost)


def planned_bytes(compiled: Any) -> int:
    """What XLA plans for a program: arguments, results that do not take their place, and temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def reason(error: Exception) -> str:
    """Why something could not be measured, in a line."""
    return (str(error) or repr(error)).splitlines()[0][:200]


def milliseconds(calls: Mapping[Any, Call]) -> dict[Any, float]:
    """Medians of samples that are taken in turn; a call of many seconds has a single one. All calls have run before."""
    once = {name: measure.sample(call, 1) for name, call in calls.items()}
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(measure.SAMPLES):
        for name, call in calls.items():
            if turn * once[name] < LONG:
                times[name].append(measure.sample(call, measure.calls_of_a_sample(once[name])))
    return {name: 1e3 * statistics.median(x) for name, x in times.items()}

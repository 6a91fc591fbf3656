"""The paper's figure 3: time and memory of forward + backward against the sequence length, with padding and dropout.

B = 16, 8 heads of d = 64, bfloat16. Memory is what XLA plans for the compiled program: arguments, results and
temporaries (`memory` compares it with the allocator's count). After a method runs out of memory, longer sequences are
not tried. `jax.nn` has no dropout, so its two methods are without. `without_dropout` is jax_flash for comparison with
them. Passes over sequences below 1024 are repeated within a program (see `passes.repeated`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_flash import patterns

from .. import attentions, passes
from ..results import Results, Row
from ..tables import out_of_memory

MOST = 256  # tokens: maximum projected length of Linformer, and block of local attention; at most an eighth of N
WINDOW, GLOBAL = 512, 64  # tokens of Longformer


class Method(NamedTuple):
    attend: Callable[..., jax.Array]
    dropout: bool = True
    more: Callable[[int], dict[str, Any]] = lambda length: {}  # other keyword arguments of the function, by length


def compressed(length: int) -> int:
    """Return the length after projection, as in the paper (E.6)."""
    return min(MOST, length // 8)


def projection(length: int) -> dict[str, Any]:
    shape = (length, compressed(length))
    return {"projection": jax.random.normal(jax.random.key(2), shape, "bfloat16") * length**-0.5}


def local(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
    return attentions.local(q, k, v, lengths, key, size=compressed(q.shape[1]))


METHODS = {
    "standard": Method(attentions.standard),
    "xla": Method(attentions.xla, dropout=False),
    "chunked": Method(attentions.chunked),
    "cudnn": Method(attentions.cudnn, dropout=False),
    "jax_flash": Method(attentions.flash),
    "without_dropout": Method(attentions.flash, dropout=False),
    "butterfly": Method(attentions.flash, more=lambda n: {"blocks": patterns.butterfly(n, n)}),
    "bigbird": Method(attentions.flash, more=lambda n: {"blocks": patterns.bigbird(n, n)}),
    "longformer": Method(
        attentions.flash,
        more=lambda n: {"blocks": patterns.longformer(n, n, WINDOW, global_tokens=range(min(n, GLOBAL)))},
    ),
    "linformer": Method(attentions.linformer, more=projection),
    "local": Method(local),
}


def run(results: Results, quick: bool) -> None:
    lengths = [128] if quick else [2**i for i in range(7, 17)]
    compare(results, METHODS, lengths, *((1, 2) if quick else (16, 8)))


def compare(
    results: Results, methods: dict[str, Method], lengths: Sequence[int], batch: int, heads: int, dim: int = 64
) -> None:
    """Measure rows of milliseconds and bytes. If a method fails, they are None, and the row has the reason."""

    def rows_of(length: int) -> list[Row]:
        given = passes.operands((batch, length, heads, dim), True, True)
        shorter = [row for row in results.rows if row["length"] < length and out_of_memory(row)]
        failed = {row["method"]: row["failure"] for row in shorter}

        def maker(method: Method) -> passes.Program:
            shared = given if method.dropout else given._replace(key=None)
            return passes.program(method.attend, passes.BOTH, shared, **method.more(length))

        tried = {name: functools.partial(maker, method) for name, method in methods.items() if name not in failed}
        found = passes.measured(tried)
        rows = []
        for name in methods:
            program, milliseconds, failure = found.get(name, (None, None, failed.get(name)))
            size = None if program is None else program.bytes
            rows.append({"method": name, "milliseconds": milliseconds, "bytes": size, "failure": failure})
        jax.clear_caches()
        return rows

    results.begin(shape=[batch, heads, dim], methods=list(methods))
    results.measure([{"length": length} for length in lengths], rows_of)

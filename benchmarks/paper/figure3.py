"""The paper's figure 3: time and memory of forward + backward against the sequence length, with padding and dropout.

B = 16, 8 heads of d = 64, bfloat16. Memory is what XLA plans for the compiled program: arguments, results and
temporaries (`memory` compares that with what the allocator counts). A method that has run out of memory is not tried at
longer sequences. cuDNN is without dropout, which `jax.nn` does not hand on to it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import measure
from rich.progress import track

from jax_flash import patterns

from . import attentions, passes

LOCAL = 256  # tokens: the projected length of Linformer, and the blocks of local attention
WINDOW, GLOBAL = 512, 64  # tokens of Longformer


class Method(NamedTuple):
    attend: Callable[..., jax.Array]
    dropout: bool = True
    more: Callable[[int], dict[str, Any]] = lambda length: {}  # what else the function is given, of a length


def projection(length: int) -> dict[str, Any]:
    return {"projection": jax.random.normal(jax.random.key(2), (length, LOCAL), "bfloat16") * length**-0.5}


METHODS = {
    "standard": Method(attentions.standard),
    "chunked": Method(attentions.chunked),
    "cudnn": Method(attentions.cudnn, dropout=False),
    "jax_flash": Method(attentions.flash),
    "butterfly": Method(attentions.flash, more=lambda n: {"blocks": patterns.butterfly(n, n)}),
    "bigbird": Method(attentions.flash, more=lambda n: {"blocks": patterns.bigbird(n, n)}),
    "longformer": Method(
        attentions.flash,
        more=lambda n: {"blocks": patterns.longformer(n, n, WINDOW, global_tokens=range(min(n, GLOBAL)))},
    ),
    "linformer": Method(attentions.linformer, more=projection),
    "local": Method(attentions.local),
}


def run(quick: bool) -> dict[str, Any]:
    lengths = [128] if quick else [2**i for i in range(7, 17)]
    return compare(METHODS, lengths, *((1, 2) if quick else (16, 8)))


def compare(methods: dict[str, Method], lengths: Sequence[int], batch: int, heads: int, dim: int = 64) -> Any:
    """Rows of milliseconds and bytes, None where a method fails, with the reason."""
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for length in track(lengths, "Measuring lengths"):
        programs: dict[str, passes.Program] = {}
        given = passes.operands((batch, length, heads, dim), True, True)
        for name, method in methods.items():
            if name in failed:
                continue
            shared = given if method.dropout else given._replace(key=None)
            try:
                programs[name] = passes.program(method.attend, passes.BOTH, shared, **method.more(length))
                measure.finish(programs[name].call())
            except (ValueError, NotImplementedError, RuntimeError) as error:
                failed[name] = passes.reason(error)
        running = {name: program.call for name, program in programs.items() if name not in failed}
        times = passes.milliseconds(running)
        for name in methods:
            rows.append(
                {
                    "length": length,
                    "method": name,
                    "milliseconds": times.get(name),
                    "bytes": programs[name].bytes if name in programs else None,
                    "failure": failed.get(name),
                }
            )
    return {"rows": rows, "shape": [batch, heads, dim]}

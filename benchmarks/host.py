"""Host overhead with an NVIDIA GPU: the first compilation of a forward and backward, and the time per call.

    python benchmarks/host.py

Compilation, in seconds: from tracing to the first results, in a fresh process that has already used the GPU. It is
measured with an empty kernel cache, then with the cache of the previous run. Also measured, both with an empty cache:
a score_mod (a table of relative positions) and a mask_mod (documents). For comparison, the same program with
implementation "xla" of `jax.nn` gives the share of XLA itself.

A call, in microseconds: the additional time of a chain of calls for each additional call. The arrays are so small that
the GPU waits for the host. Calls are launched one by one, or captured into a CUDA graph. cuDNN is measured, too.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import measure
from rich.console import Console
from rich.table import Table

import jax_flash

SHAPE = (2, 1024, 8, 128)
SMALL = (1, 64, 1, 64)
CHAINS = (20, 120)  # number of calls
PROGRAMS: dict[str, dict[str, Any]] = {
    "score_mod": {"score_mod": lambda score, batch, head, query, key: score + jnp.ones(2048)[query - key + 1023]},
    "mask_mod": {"mask_mod": lambda batch, head, query, key: jnp.arange(1024)[query] // 128 == key // 128},
}
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


def attention(name: str):
    """Return `jax_flash`, possibly with a score_mod or mask_mod, or an implementation of jax.nn."""
    if name in ("jax_flash", *PROGRAMS):
        return functools.partial(jax_flash.dot_product_attention, implementation="flash", **PROGRAMS.get(name, {}))
    return functools.partial(jax.nn.dot_product_attention, implementation=name)


def first(name: str) -> float:
    """Return the seconds until a new program has given its first results."""
    x = jnp.ones(SHAPE, jnp.bfloat16)
    jax.block_until_ready(x + 1)

    @jax.jit
    def step(q, k, v):
        o, pull = jax.vjp(functools.partial(attention(name), is_causal=True), q, k, v)
        return o, *pull(o)

    start = time.perf_counter()
    jax.block_until_ready(step(x, x, x))
    return time.perf_counter() - start


def each(name: str) -> float:
    """Return the microseconds for each additional call in a chain."""
    x = jax.random.normal(jax.random.key(0), SMALL, jnp.bfloat16)
    attend = attention(name)

    def chain(calls: int):
        def run(q, k, v):
            for _ in range(calls):
                q = attend(q, k, v)
            return q

        return jax.jit(run).lower(x, x, x).compile()

    programs: dict[str, measure.Call] = {str(calls): functools.partial(chain(calls), x, x, x) for calls in CHAINS}
    few, many = map(statistics.median, measure.interleave_enqueued(programs).values())
    return 1e6 * (many - few) / (CHAINS[1] - CHAINS[0])


MEASURES = {"first": first, "each": each}


def in_process(what: str, name: str, **environment: str) -> float:
    command = [sys.executable, __file__, "--one", what, name]
    result = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=measure.RESULTS / "host.json")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "NAME"), help="measure one number, in this process")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("no NVIDIA GPU here, or jax is installed without CUDA")
    if args.one:
        what, name = args.one
        print(json.dumps(MEASURES[what](name)))
        return

    flags = os.environ.get("XLA_FLAGS", "")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for case in ("cold", "warm"):
            seconds = in_process("first", "jax_flash", JAX_FLASH_CACHE_DIR=cache)
            rows.append({"what": f"first forward and backward, {case}, s", "jax_flash": seconds})
    rows[-1]["xla"] = in_process("first", "xla")
    for program in PROGRAMS:
        with tempfile.TemporaryDirectory() as cache:
            seconds = in_process("first", program, JAX_FLASH_CACHE_DIR=cache)
        rows.append({"what": f"first forward and backward with a {program}, cold, s", "jax_flash": seconds})
    for case, given in (("a call, launched, us", f"{flags} {NO_GRAPHS}"), ("a call in a CUDA graph, us", flags)):
        names = ("jax_flash", "cudnn")
        rows.append({"what": case} | {name: in_process("each", name, XLA_FLAGS=given) for name in names})
    packages = ["jax-flash", "jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"]
    measure.save(args.output, {"environment": measure.environment(packages), "rows": rows})
    table = Table("", "jax_flash", "cudnn", "xla", title="On the host")
    for row in rows:
        table.add_row(row["what"], *(f"{row[x]:.3g}" if x in row else "" for x in ("jax_flash", "cudnn", "xla")))
    Console().print(table)


if __name__ == "__main__":
    main()

"""What a program pays on the host of an NVIDIA GPU: the first compilation of a forward and backward, and each call.

    python benchmarks/host.py

Compilation, seconds: from tracing to the first results, in a fresh process that has used the GPU already; with an empty
cache of kernels, then with what the run before has left there; and with an empty one beside a score_mod with a table
of relative positions, and a mask_mod of documents. Beside it the same program with `jax.nn`'s implementation "xla",
which is what XLA itself takes.

A call, microseconds: what a program of a chain of calls takes longer for each call more, on arrays so small that the
GPU is waiting for the host; launched one by one, and captured into a CUDA graph. Beside it the same of cuDNN's.
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
CHAINS = (20, 120)  # calls
PROGRAMS: dict[str, dict[str, Any]] = {
    "score_mod": {"score_mod": lambda score, batch, head, query, key: score + jnp.ones(2048)[query - key + 1023]},
    "mask_mod": {"mask_mod": lambda batch, head, query, key: jnp.arange(1024)[query] // 128 == key // 128},
}
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


def attention(name: str):
    """`jax_flash`, maybe with a program, or an implementation of jax.nn."""
    if name in ("jax_flash", *PROGRAMS):
        return functools.partial(jax_flash.dot_product_attention, implementation="flash", **PROGRAMS.get(name, {}))
    return functools.partial(jax.nn.dot_product_attention, implementation=name)


def first(name: str) -> float:
    """Seconds until a new program has given its first results."""
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
    """Microseconds for each call more in a chain."""
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
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "NAME"), help="one figure, in this process")
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

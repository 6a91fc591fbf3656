"""Train on documents that are packed into one long sequence over all devices, in one process or in several.

    python examples/packed_sequence.py                      # eight virtual devices of a CPU, or all GPUs

The same training in two processes, for example on two hosts. Each command starts one of them:

    python examples/packed_sequence.py --coordinator localhost:9876 --processes 2 --process 0
    python examples/packed_sequence.py --coordinator localhost:9876 --processes 2 --process 1

Every step packs other documents: paragraphs of Python's standard library. `jax_flash.balance` deals them to the
devices, with equal tokens and about equal work in attention. The train step is compiled once.
`long_sequence.py` divides a sequence without documents, also over batch and heads, under `jit` and without `shard_map`.
"""

from __future__ import annotations

import argparse
import functools
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import Layout

Batch = dict[str, jax.Array]
AXES = ("processes", "devices")  # keys visit the devices of a process before they move to the next process


def parameters(args: argparse.Namespace) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * args.layers))
    width = args.width

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    blocks = [
        {"qkv": matrix(width, 3 * width), "out": matrix(width, width), "up": matrix(width, 4 * width)}
        | {"down": matrix(4 * width, width)}
        for _ in range(args.layers)
    ]
    return {"embed": matrix(256, width), "head": matrix(width, 256), "blocks": blocks}


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def loss_of_part(params: dict[str, Any], batch: Batch, cu_seqlens: jax.Array, layout: Layout, heads: int) -> jax.Array:
    """Return the mean loss of all tokens. A device computes its own tokens. Only attention needs other tokens."""
    angle = batch["position"][:, None] / 100 ** jnp.linspace(0, 1, params["embed"].shape[1] // 2)[None]
    x = params["embed"][batch["token"]] + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    for block in params["blocks"]:
        q, k, v = jnp.split((normalized(x) @ block["qkv"]).reshape(len(x), 3 * heads, -1), 3, axis=1)
        o = jax_flash.varlen_attention(q, k, v, cu_seqlens, is_causal=True, sequence_axis=AXES, sequence_layout=layout)
        x += o.reshape(x.shape) @ block["out"]
        x += jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["target"])
    total = jax.lax.psum(jnp.stack([(losses * batch["weight"]).sum(), batch["weight"].sum()]), AXES)
    return total[0] / total[1]


def packed(documents: list[bytes], tokens: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the arrays with an entry for each token, and the cumulative lengths of the documents that fit."""
    lengths: list[int] = []
    batch = {name: np.zeros(tokens, np.int32) for name in ("token", "target", "position")}
    batch["weight"] = np.zeros(tokens, np.float32)  # 0 for padding and the last token of a document
    for i in rng.permutation(len(documents)):
        begin, text = sum(lengths), np.frombuffer(documents[i], np.uint8)
        if begin + len(text) > tokens:
            break
        place = slice(begin, begin + len(text))
        batch["token"][place], batch["target"][place] = text, np.roll(text, -1)
        batch["position"][place], batch["weight"][place] = np.arange(len(text)), np.arange(len(text)) < len(text) - 1
        lengths.append(len(text))
    count = tokens // min(map(len, documents)) + 1  # of all steps alike: the shape of cu_seqlens. Others are empty
    return batch, np.cumsum([0, *lengths, *[0] * (count - len(lengths))], dtype=np.int32)


def train(args: argparse.Namespace, documents: list[bytes], devices: list[jax.Device]) -> tuple[list[float], float]:
    """Return the losses, and the tokens per second without the first step, which compiles."""
    shape = args.processes, len(devices) // args.processes
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=devices)
    whole, by_token = PartitionSpec(), PartitionSpec(AXES)
    loss_of = jax.shard_map(
        functools.partial(loss_of_part, heads=args.heads),
        mesh=mesh,
        in_specs=(whole, by_token, whole, whole),
        out_specs=whole,
    )
    optimizer = optax.adam(args.learning_rate)

    @jax.jit
    def train_step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    def put(x: Any, spec: PartitionSpec) -> jax.Array:
        """Return a global array. Each process provides the parts of its own devices."""
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    params = jax.tree.map(lambda x: put(x, whole), parameters(args))
    state = jax.tree.map(lambda x: put(x, whole), optimizer.init(parameters(args)))
    rng, losses = np.random.default_rng(0), []
    for step in range(args.steps):
        batch, cu_seqlens = packed(documents, args.tokens, rng)
        layout = jax_flash.balance(cu_seqlens, len(devices), tokens=args.tokens)
        arrays = {name: put(x, by_token) for name, x in layout.permute(batch, axis=0).items()}
        given = arrays, put(cu_seqlens, whole), jax.tree.map(lambda x: put(x, whole), layout)
        params, state, loss = train_step(params, state, *given)
        losses.append(float(loss))
        if step == 0:
            begin = time.perf_counter()
    return losses, args.tokens * (args.steps - 1) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the sequence, a multiple of the devices")
    parser.add_argument("--steps", type=int, default=10, help="number of steps, at least 2; the first compiles")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, if there are several processes"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="the number of this process")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8 // args.processes)  # has no effect on GPUs
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    paragraphs = b"\n".join(path.read_bytes() for path in files).split(b"\n\n")
    documents = [text[: args.tokens // 4] for text in paragraphs if len(text) > 32]
    ways = [jax.devices()] if args.processes > 1 else [jax.devices()[:1], jax.devices()]
    results = []
    for devices in ways:
        losses, rate = train(args, documents, devices)
        results.append(losses)
        print(f"{len(devices)} devices: losses {' '.join(f'{loss:.4f}' for loss in losses)}; {rate:.0f} tokens/s")
    if len(results) > 1:
        print(f"Largest difference of the losses: {np.abs(np.diff(results, axis=0)).max():.2g}")


if __name__ == "__main__":
    main()

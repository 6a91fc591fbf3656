"""Predicted speed-up of a sharded sequence, relative to one GPU, from kernel rates and link bandwidths.

    python benchmarks/predict_devices.py    # reads results/ranks.json, the output of `several_devices.py --alone`

The problem is causal attention in the zigzag layout, forward and backward together. Each of P devices has 1/P of the
work, at the measured rate of one rank.

The ring sends K and V to the next device at every visit. The backward also sends their gradients, in float32. Exchange
and kernels overlap, so a visit takes as long as the slower of the two. The last transfer of the gradients, back to
their owner, does not overlap. The result of a visit, O or dQ, is merged into a float32 sum.

All-to-all sends Q, K, V and O once in the forward, and twice as much in the backward. Nothing overlaps with it. Every
device then has different heads, so P is at most the number of key/value heads.

Hosts have eight GPUs, with links of NVLINK bytes per second in each direction. Between hosts, every GPU has a network
card with NETWORK bytes per second. The mesh has an axis of hosts and an axis of the GPUs of a host. So keys visit all
GPUs of a host before they move to the next host, and then all network cards send at the same time. The time to start
kernels and exchanges is ignored, and kernels are assumed to be as fast for short sequences as for long ones. So the
predictions for short sequences are optimistic.
"""

import argparse
import json
import pathlib
import statistics

import measure
from rich.console import Console
from rich.table import Table

NVLINK, NETWORK, HOST = 370e9, 45e9, 8  # bytes per second: 450 and 50, less protocol overhead; GPUs per host
MEMORY = 3e12  # bytes per second of elementwise kernels
HEADS, KV_HEADS, DIM = 32, 8, 128
BF16, F32 = 2, 4  # bytes
LENGTHS, DEVICES = (16384, 65536, 262144, 1048576, 4194304), (2, 4, 8, 32, 128, 512, 1024)


def kernel_rate(path: pathlib.Path) -> float:
    """Return the FLOP/s of the slowest rank, forward and backward together, at the first length that has both."""
    rows = json.loads(path.read_text())["rows"]
    length = next(row["length"] for row in rows if row["pass"] == "backward")
    slowest, flops = {"forward": 0.0, "backward": 0.0}, 0.0
    for row in (row for row in rows if row["length"] == length):
        if row["call"] == "whole":
            flops += row["flops"]
        else:
            slowest[row["pass"]] = max(slowest[row["pass"]], statistics.median(row["seconds"]))
    ranks = len({row["call"] for row in rows}) - 1
    return flops / ranks / sum(slowest.values())


def link_to(visit: int) -> float:
    """Return the bytes per second of the links by which keys travel to a visit."""
    return NVLINK if visit % HOST else NETWORK


def seconds(length: int, devices: int, rate: float) -> dict[str, float]:
    """Return seconds of a forward and backward for each kind of sharding, and the kernels' part of it ("kernels")."""
    kernels = measure.attention_flops(1, HEADS, length, DIM, causal=True, backward=True) / devices / rate
    link = NVLINK if devices <= HOST else NETWORK
    shard = length / devices * KV_HEADS * DIM * 2  # elements of K and V
    visits = devices - 1
    results = 3 / 2 * length / devices * HEADS * DIM  # elements of O: a visit has three pairs of halves
    merging = 2 * visits * results * (BF16 + 2 * F32) / MEMORY  # forward and backward
    ring = merging + shard * F32 / link
    for share, size in ((1 / 3.5, BF16), (2.5 / 3.5, BF16 + F32)):
        visit = kernels * share / devices
        ring += visit + sum(max(visit, shard * size / link_to(after)) for after in range(1, devices))
    found = {"kernels": kernels, "ring": ring}
    if devices <= KV_HEADS:
        elements = length / devices * DIM * (2 * HEADS + 2 * KV_HEADS)  # Q, O, K and V
        sent = (1 + 2) * elements * BF16 * (devices - 1) / devices
        found["all-to-all"] = kernels + sent / link
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=pathlib.Path, default=measure.RESULTS / "ranks.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    args = parser.parse_args()
    rate = kernel_rate(args.ranks)
    table = Table("N", *(f"P = {devices}" for devices in args.devices))
    for length in args.lengths:
        cells = []
        for devices in args.devices:
            found = seconds(length, devices, rate)
            cells.append(
                " / ".join(f"{found['kernels'] / found[way]:.2f}" for way in ("ring", "all-to-all") if way in found)
            )
        table.add_row(str(length), *cells)
    Console().print(f"Kernels: {rate / 1e12:.0f} TFLOP/s. Fraction of the time in kernels, ring / all-to-all:")
    Console().print(table)


if __name__ == "__main__":
    main()

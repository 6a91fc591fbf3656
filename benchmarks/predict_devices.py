"""How many times as fast as one GPU a divided sequence can be, from the rates of kernels and the bandwidths of links.

    python benchmarks/predict_devices.py    # reads results/ranks.json, which `several_devices.py --alone` has written

Causal attention in the zigzag layout, forward and backward together. Each of P devices has 1/P of the work, at the rate
that the work of a rank had. The ring sends K and V to the next device at every visit, in the backward their gradients
too, in float32; that goes on beside the kernels, so that a visit takes as long as the longer of both, and the way home
of the gradients is waited for. What a visit gives, O or dQ, is merged into a sum in float32. All-to-all sends Q, K, V
and O once, in the backward twice as much, and nothing goes on beside it; every device then has heads of its own, so P
is at most the number of key/value heads.

Eight GPUs are on one host, with links of NVLINK bytes a second in each direction; between hosts every GPU has a network
card of NETWORK. In a ring over hosts the slowest link is the network's. What it takes to start kernels and exchanges is
left out, and kernels are as fast for short sequences as for long ones: so the shorter ones are predicted too well.
"""

import argparse
import json
import pathlib
import statistics

import measure
from rich.console import Console
from rich.table import Table

NVLINK, NETWORK, HOST = 370e9, 45e9, 8  # bytes a second: 450 and 50 less what protocols take; GPUs of a host
MEMORY = 3e12  # bytes a second that elementwise kernels move
HEADS, KV_HEADS, DIM = 32, 8, 128
BF16, F32 = 2, 4  # bytes
LENGTHS, DEVICES = (16384, 65536, 262144, 1048576, 4194304), (2, 4, 8, 32, 128, 512, 1024)


def kernel_rate(path: pathlib.Path) -> float:
    """FLOP/s of the slowest rank, forward and backward together, at the first length that has both."""
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


def seconds(length: int, devices: int, rate: float) -> dict[str, float]:
    """Of a forward and backward, by how the sequence is divided, and what kernels take of it ("kernels")."""
    kernels = measure.attention_flops(1, HEADS, length, DIM, causal=True, backward=True) / devices / rate
    link = NVLINK if devices <= HOST else NETWORK
    shard = length / devices * KV_HEADS * DIM * 2  # elements of K and V
    visits = devices - 1
    results = 3 / 2 * length / devices * HEADS * DIM  # elements of O, of the three pairs of halves of a visit
    merging = 2 * visits * results * (BF16 + 2 * F32) / MEMORY  # in the forward and in the backward
    forward = max(kernels / 3.5 / devices, shard * BF16 / link) * visits + kernels / 3.5 / devices
    backward = max(kernels * 2.5 / 3.5 / devices, shard * (BF16 + F32) / link) * visits + kernels * 2.5 / 3.5 / devices
    found = {"kernels": kernels, "ring": forward + backward + merging + shard * F32 / link}
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
    Console().print(f"Kernels: {rate / 1e12:.0f} TFLOP/s. Share of the time that kernels run, ring / all-to-all:")
    Console().print(table)


if __name__ == "__main__":
    main()

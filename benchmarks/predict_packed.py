"""Predicted efficiency of packed documents on several devices, from counts of entries and bytes.

    python benchmarks/predict_packed.py    # reads results/ranks.json, the output of `several_devices.py --alone`

The documents are those of `packed_devices.py`. The script counts the visible entries of each device at each visit. A
visit that no device needs takes no time. Another one takes as long as its slowest device, or as long as the exchange of
keys and values if that is longer. Links, rates and the time to merge are those of `predict_devices.py`.

The efficiency is the time of an equal share of all entries, divided by this time, forward and backward together. It
includes neither the time to start kernels and exchanges, nor that tiles at the edges of documents are partly empty.
"""

import argparse
import pathlib

import measure
import numpy as np
import packed_devices
from predict_devices import BF16, DIM, F32, HEADS, HOST, KV_HEADS, MEMORY, NETWORK, NVLINK, kernel_rate
from rich.console import Console
from rich.table import Table

import jax_flash


def entries(owner: np.ndarray, cu_seqlens: np.ndarray, devices: int) -> np.ndarray:
    """Return the visible entries by the device of the row and the device of the key.

    Args:
      owner: the device of each token.
    """
    found = np.zeros((devices, devices), np.int64)
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        of_document = owner[begin:end]
        for source in np.unique(of_document):
            keys = np.cumsum(of_document == source)
            found[:, source] += np.bincount(of_document, keys, devices).astype(np.int64)
    return found


def seconds(found: np.ndarray, tokens: int, rate: float) -> float:
    """Return the seconds of a forward and a backward with these entries."""
    devices = len(found)
    link = NVLINK if devices <= HOST else NETWORK
    shard = tokens / devices * KV_HEADS * DIM * 2  # elements of K and V
    rows = np.arange(devices)
    visits = [found[rows, (rows - shift) % devices].max() for shift in range(devices)]
    last = max(shift for shift, most in enumerate(visits) if most or shift == 0)
    total = 0.0
    for flops, sent in ((2 * 2 * DIM, BF16), (2 * 5 * DIM, BF16 + F32)):
        times = [most * HEADS * flops / rate for most in visits[: last + 1]]
        total += times[-1] + sum(max(time, shard * sent / link) for time in times[:-1])
    merged = sum(most > 0 for most in visits[1:]) * tokens / devices * HEADS * DIM * (BF16 + 2 * F32)
    return total + 2 * merged / MEMORY + (shard * F32 / link if last else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=pathlib.Path, default=measure.RESULTS / "ranks.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144, 1048576])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 64])
    args = parser.parse_args()
    rate = kernel_rate(args.ranks)
    table = Table("tokens", "documents", *(f"P = {devices}: {way}" for devices in args.devices for way in WAYS))
    for tokens in args.lengths:
        for case in packed_devices.CASES:
            cu_seqlens = packed_devices.documents(case, tokens)
            cells = []
            for devices in args.devices:
                device = np.repeat(np.arange(devices), tokens // devices)
                orders = np.asarray(jax_flash.unzigzag(device, devices, 0)), jax_flash.balance(cu_seqlens, devices)
                for owner in (orders[0], orders[1].inverse(device, 0)):
                    found = entries(owner, cu_seqlens, devices)
                    ideal = found.sum() / devices * HEADS * 2 * 7 * DIM / rate
                    most = found.sum(1).max() / found.sum(1).mean()
                    cells.append(f"{ideal / seconds(found, tokens, rate):.2f} ({most:.2f})")
            table.add_row(str(tokens), case, *cells)
    Console(width=160).print(f"Kernels: {rate / 1e12:.0f} TFLOP/s. Efficiency (most entries of a device / mean):")
    Console(width=160).print(table)


WAYS = ("zigzag", "balance")

if __name__ == "__main__":
    main()

"""Predicted efficiency of packed documents on several devices, from counts of entries and bytes.

    python benchmarks/predict_packed.py    # reads results/ranks.json, the output of `several_devices.py --alone`

The documents are those of `packed_devices.py`. The script counts the visible entries of each device at each visit. A
visit that no device needs takes no time. Another one takes as long as its slowest device, or as long as the exchange of
keys and values if that is longer. In the balanced layout, only the chunks that devices share are exchanged and merged.
Links, rates and the time to merge are those of `predict_devices.py`.

The efficiency is the time of an equal share of all entries, divided by this time, forward and backward together. It
includes neither the time to start kernels and exchanges, nor that tiles at the edges of documents are partly empty.
"""

import argparse
import pathlib

import measure
import numpy as np
import packed_devices
from predict_devices import BF16, DIM, F32, HEADS, HOST, KV_HEADS, MEMORY, NETWORK, NVLINK, kernel_rate, link_to
from rich.console import Console
from rich.table import Table

import jax_flash
from jax_flash import layouts, sequence


def seconds(found: np.ndarray, share: float, tokens: int, rate: float) -> float:
    """Return the seconds of a forward and a backward.

    Args:
      found: the entries by the device of the row and the device of the key.
      share: the share of each device's tokens that takes part in visits.
    """
    devices = len(found)
    link = NVLINK if devices <= HOST else NETWORK
    shard = share * tokens / devices * KV_HEADS * DIM * 2  # elements of K and V
    visits = sequence.by_shift(found, min(HOST, devices)).max(1)
    last = max(shift for shift, most in enumerate(visits) if most or shift == 0)
    total = 0.0
    for flops, sent in ((2 * 2 * DIM, BF16), (2 * 5 * DIM, BF16 + F32)):
        times = [most * HEADS * flops / rate for most in visits[: last + 1]]
        total += times[-1] + sum(
            max(time, shard * sent / link_to(after)) for after, time in enumerate(times[:-1], start=1)
        )
    merged = sum(most > 0 for most in visits[1:]) * share * tokens / devices * HEADS * DIM * (BF16 + 2 * F32)
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
                balanced = jax_flash.balance(cu_seqlens, devices)
                share = sequence.travelling_share(balanced, cu_seqlens, tokens)
                for layout, travelling in ((layouts.zigzag_layout(devices), 1.0), (balanced, share)):
                    found = layouts.document_entries(layout, cu_seqlens, tokens, causal=True)
                    ideal = found.sum() / devices * HEADS * 2 * 7 * DIM / rate
                    most = found.sum(1).max() / found.sum(1).mean()
                    cells.append(f"{ideal / seconds(found, travelling, tokens, rate):.2f} ({most:.2f})")
            table.add_row(str(tokens), case, *cells)
    Console(width=160).print(f"Kernels: {rate / 1e12:.0f} TFLOP/s. Efficiency (most entries of a device / mean):")
    Console(width=160).print(table)


WAYS = ("zigzag", "balance")

if __name__ == "__main__":
    main()

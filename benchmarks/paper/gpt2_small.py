"""GPT-2 small, 124 M parameters: how fast it trains with each attention, with and without dropout."""

from typing import Any

from .gpt2 import speeds


def run(quick: bool) -> dict[str, Any]:
    return speeds("small", (0.1, 0.0), quick)

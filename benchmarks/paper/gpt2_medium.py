"""GPT-2 medium, 355 M parameters: how fast it trains with each attention."""

from typing import Any

from .gpt2 import speeds


def run(quick: bool) -> dict[str, Any]:
    return speeds("medium", (0.1,), quick)

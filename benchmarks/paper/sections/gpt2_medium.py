"""GPT-2 medium, 355 M parameters: training speed with each attention, with and without dropout."""

from ..gpt2_training import speeds
from ..results import Results


def run(results: Results, quick: bool) -> None:
    speeds(results, "medium", quick)

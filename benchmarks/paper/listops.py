"""ListOps (Nangia and Bowman 2018, arXiv 1804.06028), with the lengths of Long Range Arena: nested lists of digits.

    [MAX 4 [MED 1 5 8] 2] = 5

A token is an operator with its bracket, a digit, or a closing bracket. The class of a sequence is its value.
"""

import random
import statistics
from collections.abc import Callable

import numpy as np

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
TOKENS = ["", *"0123456789", *OPERATORS, "]"]  # indexed by token; 0 is padding
VOCABULARY = len(TOKENS)
CLASSES = 10
NESTED = 0.25  # probability that an argument is a list, above the maximum depth
MOST_ARGUMENTS, DEPTH = 10, 10


def examples(count: int, shortest: int, longest: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, uint8 [count, longest], zero-padded; their lengths, int32 [count]; and values, int32 [count]."""
    source = random.Random(seed)
    tokens = np.zeros((count, longest), np.uint8)
    lengths, values = np.zeros((2, count), np.int32)
    done = 0
    while done < count:
        written: list[int] = []
        value = write(source, written, 1, longest)
        if shortest <= len(written) <= longest:
            tokens[done, : len(written)], lengths[done], values[done] = written, len(written), value
            done += 1
    return tokens, lengths, values


def write(source: random.Random, written: list[int], depth: int, longest: int) -> int:
    """Append a list to `written` and return its value. Stop early if it exceeds the maximum length."""
    name = source.choice(list(OPERATORS))
    written.append(TOKENS.index(name))
    values = []
    for _ in range(source.randint(2, MOST_ARGUMENTS)):
        if len(written) > longest:
            break
        if depth < DEPTH and source.random() < NESTED:
            values.append(write(source, written, depth + 1, longest))
        else:
            values.append(source.randrange(10))
            written.append(TOKENS.index(str(values[-1])))
    written.append(TOKENS.index("]"))
    return OPERATORS[name](values) if values else 0

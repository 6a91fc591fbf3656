"""The result file of a section. It is written after every row, and the next run resumes from it.

    def run(results: Results, quick: bool) -> None:
        results.begin(shape=[16, 8, 64])
        results.measure([{"length": n} for n in (128, 256)], rows_of)  # rows_of(length=128), then rows_of(length=256)

Start an interrupted run, or one that reached its time limit, again to resume it.
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import measure

from . import START

Row = dict[str, Any]
SAME = ("devices", "python", "versions")  # fields of the environment that must match to resume from a file


class OutOfTime(Exception):
    """The time limit is reached. The text lists the remaining keys."""


class Results:
    def __init__(self, path: pathlib.Path, environment: dict[str, Any], minutes: float, fresh: bool):
        self.path, self.environment, self.minutes, self.fresh = path, environment, minutes, fresh
        self.rows: list[Row] = []
        self.fields: dict[str, Any] = {}

    def begin(self, **common: Any) -> None:
        """Set the fields that all rows share. Resume from the file if these fields and the environment match."""
        self.fields = measure.plain(common)
        if self.path.exists() and not self.fresh:
            found = json.loads(self.path.read_text())
            same = all(found["environment"].get(x) == measure.plain(self.environment)[x] for x in SAME)
            if same and all(found.get(name) == value for name, value in self.fields.items()):
                self.rows = found["rows"]

    def measure(self, keys: Sequence[Row], rows_of: Callable[..., Iterable[Row]]) -> None:
        """Call `rows_of(**key)` for every key that has no rows yet. Save its rows, together with the key.

        Raises `OutOfTime` before a call if the time limit, counted from the start of the process, is reached.
        """
        left = [key for key in keys if not any(key.items() <= row.items() for row in self.rows)]
        for i, key in enumerate(left):
            if self.seconds_left() <= 0:
                raise OutOfTime("; ".join(map(key_text, left[i:])))
            print(f"{self.path.stem}: {key_text(key)}, {i + 1} of {len(left)}", flush=True)
            self.rows += [key | measure.plain(row) for row in rows_of(**key)]
            self.save()

    def seconds_left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - START)

    def save(self, **fields: Any) -> None:
        """Write the file, with additional fields such as results from all rows."""
        self.fields |= measure.plain(fields)
        measure.save(self.path, {"environment": self.environment, **self.fields, "rows": self.rows})


def key_text(key: Row) -> str:
    return ", ".join(f"{name} = {value}" for name, value in key.items())

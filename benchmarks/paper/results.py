"""The file of a section: written after every row, and gone on with by the next run.

    def run(results: Results, quick: bool) -> None:
        results.begin(shape=[16, 8, 64])
        results.measure([{"length": n} for n in (128, 256)], rows_of)  # rows_of(length=128), then rows_of(length=256)

A run that is cut off, or that stops because its minutes are over, is given again and goes on.
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import measure

from . import START

Row = dict[str, Any]
SAME = ("devices", "python", "versions")  # of the environment, or the rows in the file are not gone on with


class OutOfTime(Exception):
    """The minutes are over. Its text says what is left."""


class Results:
    def __init__(self, path: pathlib.Path, environment: dict[str, Any], minutes: float, fresh: bool):
        self.path, self.environment, self.minutes, self.fresh = path, environment, minutes, fresh
        self.rows: list[Row] = []
        self.fields: dict[str, Any] = {}

    def begin(self, **common: Any) -> None:
        """What all rows have in common. Rows of a file that has the same, and the same environment, are taken over."""
        self.fields = measure.plain(common)
        if self.path.exists() and not self.fresh:
            found = json.loads(self.path.read_text())
            same = all(found["environment"].get(x) == measure.plain(self.environment)[x] for x in SAME)
            if same and all(found.get(name) == value for name, value in self.fields.items()):
                self.rows = found["rows"]

    def measure(self, keys: Sequence[Row], rows_of: Callable[..., Iterable[Row]]) -> None:
        """Calls `rows_of(**key)` for every key that no row has yet; its rows, and the key in each, are saved at once.

        It raises `OutOfTime` in place of a call when the minutes since the process began are over.
        """
        left = [key for key in keys if not any(key.items() <= row.items() for row in self.rows)]
        for i, key in enumerate(left):
            if self.seconds_left() <= 0:
                raise OutOfTime("; ".join(map(named, left[i:])))
            print(f"{self.path.stem}: {named(key)}, {i + 1} of {len(left)}", flush=True)
            self.rows += [key | measure.plain(row) for row in rows_of(**key)]
            self.save()

    def seconds_left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - START)

    def save(self, **fields: Any) -> None:
        """With more fields, such as what follows from all rows together."""
        self.fields |= measure.plain(fields)
        measure.save(self.path, {"environment": self.environment, **self.fields, "rows": self.rows})


def named(key: Row) -> str:
    return ", ".join(f"{name} = {value}" for name, value in key.items())

"""What all functions that make tables share: cells, rows, and the list of these functions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
Results = dict[str, Any]  # of a file: its `environment`, its `rows`, and what else it has
FILES: dict[str, Sequence[str]] = {}  # of the table of a name
TABLES: dict[str, Callable[..., str]] = {}


def shows(*files: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """The function makes the table of its name, of the results in these files."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        name = function.__name__.replace("_", " ")
        FILES[name], TABLES[name] = files, function
        return function

    return register


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}f}"


def counted(count: int, name: str) -> str:
    return name if count == 1 else f"{count} {name}"


def one(rows: Rows, **fields: Any) -> Row:
    """The row with these fields; `pass_` is the field "pass"."""
    wanted = {key.rstrip("_"): value for key, value in fields.items()}
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row

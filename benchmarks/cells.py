"""Building blocks of the tables: cells, rows, tables declared as data, and the registry of all tables."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
Results = dict[str, Any]  # contents of a file: `environment`, `rows`, and possibly more
FILES: dict[str, Sequence[str]] = {}  # result files by table name
TABLES: dict[str, Callable[..., str]] = {}


def shows(*files: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register a function that makes the table of its name from the results in these files."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        name = function.__name__.replace("_", " ")
        FILES[name], TABLES[name] = files, function
        return function

    return register


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


# --- tables as data ---------------------------------------------------------------------------------------------------

Cases = dict[str, Row]  # from the name of a line or column to the fields that its rows have
Cell = Callable[[Row], str]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A two-way table. Each cell shows the one row that has the fields of its line and of its column."""

    corner: str
    lines: Cases | Callable[[Rows], Cases]
    columns: Cases | Callable[[Rows], Cases]
    cell: Cell
    where: Row = dataclasses.field(default_factory=dict)  # fields that all rows have
    each: Sequence[Row] = ({},)  # fields of the rows that share a cell, separated by slashes

    def __call__(self, results: Results) -> str:
        rows = [row for row in results["rows"] if self.where.items() <= row.items()]
        lines, columns = (x(rows) if callable(x) else x for x in (self.lines, self.columns))

        def cells(line: Row) -> list[str]:
            found = ([one(rows, **line, **column, **more) for more in self.each] for column in columns.values())
            return [" / ".join(map(self.cell, some)) for some in found]

        return table([self.corner, *columns], ([name, *cells(line)] for name, line in lines.items()))


@dataclasses.dataclass(frozen=True)
class Listing:
    """A table with one line per row of a file. A column has a name and a function from the row to its cell."""

    columns: dict[str, Cell]

    def __call__(self, results: Results) -> str:
        return table(self.columns, ([cell(row) for cell in self.columns.values()] for row in results["rows"]))


def cases(name: str, field: str, *values: Any) -> Cases:
    """Return one case per value of a field. The name is a format string for the value."""
    return {name.format(value): {field: value} for value in values}


def product(*factors: Cases) -> Cases:
    """Return all combinations of cases. Their names are joined by commas."""
    first, *rest = factors
    if not rest:
        return first
    both = ((x, y) for x in first.items() for y in product(*rest).items())
    return {", ".join(filter(None, (a, b))): x | y for (a, x), (b, y) in both}


def named(name: Callable[[Row], str], *fields: str) -> Callable[[Rows], Cases]:
    """Return a function from rows to one case per distinct combination of these fields, in the order of the rows."""
    return lambda rows: {name(row): {field: row[field] for field in fields} for row in rows}


def declare(tables: dict[str, list[Any]]) -> None:
    """Register tables by name. Each list has the file, then a `Grid` or `Listing` for each part of the table."""
    for name, (file, *parts) in tables.items():
        FILES[name] = (file,)
        TABLES[name] = lambda results, parts=parts: "\n\n".join(part(results) for part in parts)


# --- cells ------------------------------------------------------------------------------------------------------------


def number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}f}"


def with_count(count: int, name: str) -> str:
    return name if count == 1 else f"{count} {name}"


def one(rows: Rows, **fields: Any) -> Row:
    """Return the row with these fields. `pass_` stands for the field "pass"."""
    wanted = {key.rstrip("_"): value for key, value in fields.items()}
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row

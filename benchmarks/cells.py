"""The parts of all tables: cells, rows, tables that are declared as data, and the list of all tables."""

import dataclasses
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


# --- tables as data ---------------------------------------------------------------------------------------------------

Cases = dict[str, Row]  # from the name of a line or column to the fields of its rows
Cell = Callable[[Row], str]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table of names by names. A cell shows the one row that has the fields of its line and of its column."""

    corner: str
    lines: Cases | Callable[[Rows], Cases]
    columns: Cases | Callable[[Rows], Cases]
    cell: Cell
    where: Row = dataclasses.field(default_factory=dict)  # fields of all rows
    each: Sequence[Row] = ({},)  # fields of the rows that share a cell, divided by slashes

    def __call__(self, results: Results) -> str:
        rows = [row for row in results["rows"] if self.where.items() <= row.items()]
        lines, columns = (x(rows) if callable(x) else x for x in (self.lines, self.columns))

        def cells(line: Row) -> list[str]:
            found = ([one(rows, **line, **column, **more) for more in self.each] for column in columns.values())
            return [" / ".join(map(self.cell, some)) for some in found]

        return table([self.corner, *columns], ([name, *cells(line)] for name, line in lines.items()))


@dataclasses.dataclass(frozen=True)
class Listing:
    """A table with a line for each row of a file. A column has a name and makes its cell from the row."""

    columns: dict[str, Cell]

    def __call__(self, results: Results) -> str:
        return table(self.columns, ([cell(row) for cell in self.columns.values()] for row in results["rows"]))


def cases(name: str, field: str, *values: Any) -> Cases:
    """Return a case for each value of a field. The name is a format of the value."""
    return {name.format(value): {field: value} for value in values}


def product(*factors: Cases) -> Cases:
    """Return all combinations of cases. Their names are joined by commas."""
    first, *rest = factors
    if not rest:
        return first
    both = ((x, y) for x in first.items() for y in product(*rest).items())
    return {", ".join(filter(None, (a, b))): x | y for (a, x), (b, y) in both}


def named(name: Callable[[Row], str], *fields: str) -> Callable[[Rows], Cases]:
    """Return a function from rows to a case for each distinct combination of these fields, in the order of the rows."""
    return lambda rows: {name(row): {field: row[field] for field in fields} for row in rows}


def declare(tables: dict[str, list[Any]]) -> None:
    """Add tables by their names. A list has the file, and a `Grid` or `Listing` for each part of the table."""
    for name, (file, *parts) in tables.items():
        FILES[name] = (file,)
        TABLES[name] = lambda results, parts=parts: "\n\n".join(part(results) for part in parts)


# --- cells ------------------------------------------------------------------------------------------------------------


def number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}f}"


def counted(count: int, name: str) -> str:
    return name if count == 1 else f"{count} {name}"


def one(rows: Rows, **fields: Any) -> Row:
    """The row with these fields; `pass_` is the field "pass"."""
    wanted = {key.rstrip("_"): value for key, value in fields.items()}
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row

"""Tables whose columns are declared: a title, what of a row it shows, and how that is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.console import fold, table

Row = dict[str, Any]
Rows = Mapping[str, Row]  # by the name of what was measured


class Column(NamedTuple):
    """
    Args:
        title (`str`): Heading of the column.
        value (`str` or `Callable`): Key of the row's value, or a function of the row and all rows of the table.
        form (`str`): Format of the value, such as "{:.2f}"; None leaves the cell empty.
        scale (`float`): Factor of the value.
    """

    title: str
    value: str | Callable[[Row, Rows], Any]
    form: str = "{}"
    scale: float = 1.0

    def text(self, row: Row, rows: Rows) -> str:
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row, rows)
        if value is None:
            return ""
        return self.form.format(value if self.scale == 1.0 else value * self.scale)


class Lines(NamedTuple):
    """A table as text; the first column is left-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def lines_of(title: str, first: str, columns: Sequence[Column], rows: Rows) -> Lines:
    """Return the table of all rows, whose names are the column `first`."""
    cells = [[name, *(column.text(row, rows) for column in columns)] for name, row in rows.items()]
    return Lines(title, [first, *(column.title for column in columns)], cells)


def print_lines(console: Console, lines: Lines, num_text: int = 1) -> None:
    """Print a table that has rows; long names go on in the next line."""
    if not lines.rows:
        return
    shown = table(escape(lines.title), *map(escape, lines.columns), num_text=num_text)
    for row in lines.rows:
        shown.add_row(*map(escape, row))
    fold(shown)
    console.print(shown)


def as_markdown(tables: Iterable[Lines]) -> str:
    """Return the tables for a page."""
    pages = []
    for lines in tables:
        head = "| " + " | ".join(lines.columns) + " |\n| --- |" + " ---: |" * (len(lines.columns) - 1)
        body = "\n".join("| " + " | ".join(row) + " |" for row in lines.rows)
        pages.append(f"{lines.title}\n\n{head}\n{body}\n")
    return "\n".join(pages)

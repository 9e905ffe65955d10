"""Tables and text on the terminal."""

import os

from rich import box
from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """Return a console for standard output, 100 columns wide where that is no terminal."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=100)


def table(title: str, *columns: str, num_text: int = 1) -> Table:
    """Return a table whose first `num_text` columns are text, the others numbers."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < num_text else "right", no_wrap=True)
    return result


def fold(lines: Table, *columns: int) -> None:
    """Wrap long names in these columns (default: the first), so that numbers are not cut."""
    for index in columns or (0,):
        lines.columns[index].no_wrap, lines.columns[index].overflow = False, "fold"

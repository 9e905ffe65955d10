"""Output on the terminal: consoles, tables, heads with the machine, and progress."""

import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from threading import Event, Thread
from typing import Any, ClassVar

import torch
import transformers
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils.logging import tqdm


def make_console() -> Console:
    """Return a console for standard output, 100 columns wide where that is no terminal."""
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_wide else 100, highlight=False)


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


_FIRST, _LONGEST = 5.0, 60.0  # seconds up to the first line, and between two of them; they come ever more seldom


def track(iterable: Iterable[Any] | None = None, *, desc: str, total: int | None = None, unit: str = "") -> Any:
    """
    Return a progress display on stderr with the methods of `tqdm` that commands need: an iterator, or a context manager
    with `update(n)` and `set_postfix_str(text)`.

    Args:
        iterable (*optional*): The items to iterate over.
        desc (`str`): The activity.
        total (`int`, *optional*): Number of steps, where the iterable has no length.
        unit (`str`): Unit of the steps.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, desc=desc, total=total, unit=unit or "it", disable=None, leave=False)
    return ProgressLines(iterable, desc, total, unit)


class ProgressLines:
    """
    Progress as lines on stderr, such as "serving 3 of 40, auction, 25 s", even while a single step takes long. A
    display that is opened within another one shares its lines.
    """

    _open: ClassVar[list["ProgressLines"]] = []

    def __init__(self, iterable: Iterable[Any] | None, desc: str, total: int | None, unit: str):
        self.iterable, self.desc, self.unit = iterable, desc, unit
        self.total = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self.num_done, self.note = 0, ""
        self._ended = Event()

    def __enter__(self) -> "ProgressLines":
        self._open.append(self)
        if self._open[0] is self:
            self._start = time.monotonic()
            Thread(target=self._report, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._open.remove(self)

    def __iter__(self) -> Iterator[Any]:
        assert self.iterable is not None, "there is something to go through"
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def update(self, num: int = 1) -> None:
        self.num_done += num

    def set_postfix_str(self, text: str) -> None:
        self.note = text

    def __str__(self) -> str:
        done = f" {self.num_done}" * bool(self.num_done) if self.total is None else f" {self.num_done} of {self.total}"
        return f"{self.desc}{done}{self.unit * bool(done)}{', ' * bool(self.note)}{self.note}"

    def _report(self) -> None:
        seconds = _FIRST
        while not self._ended.wait(seconds):
            seconds = min(1.5 * seconds, _LONGEST)
            parts = "; ".join(map(str, list(self._open)))
            print(f"{parts}, {time.monotonic() - self._start:.0f} s", file=sys.stderr, flush=True)


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """Return the machine and the versions that a measurement depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def print_head(console: Console, command: str, about: str, system: Mapping[str, Any], *lines: str) -> None:
    """Print the head of a command's output: its subject, further lines, and the machine."""
    versions = ", ".join(f"{package} {system[package]}" for package in ("torch", "transformers"))
    machine = f"{system['dtype']} on {system['device']}, {system['threads']} threads, {versions}"
    text = "\n".join(map(escape, [about, *lines, machine]))
    console.print(f"[bold]smartspec {command}[/bold] {text}\n")

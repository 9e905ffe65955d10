"""Progress of a command: a bar on a terminal, otherwise a line now and then."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from threading import Event, Thread
from typing import Any, ClassVar

from transformers.utils.logging import tqdm

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

"""A run of sections within a time: every measurement is kept at once, and what was not reached is named."""

import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_smartspec.commands.common.outputs import replace_json

_GRACE = 10.0  # seconds that a measurement may take beyond its section's end
_PARTS = ("results", "skipped", "failures")

Row = dict[str, Any]


class OutOfTimeError(BaseException):
    """A measurement was stopped. No `Exception`: nothing on its way takes it for a failure of its own."""


class Case(NamedTuple):
    """One measurement."""

    name: str
    measure: Callable[[], Row]


class Section(NamedTuple):
    """
    Measurements that belong together.

    Args:
        name (`str`): Under which its results are kept.
        share (`float`): Of the time of all sections, in any unit; what one leaves is the next one's.
        cases (`Callable`): Makes them, in order; what they need is made when they are measured.
        columns (sequence of `str`): Of the table that shows them.
        show (`Callable`): The texts of a line, from a row and all rows of the section.
        may_overrun (`bool`): Whether a measurement that has begun may end a little late.
    """

    name: str
    share: float
    cases: Callable[[], Iterable[Case]]
    columns: Sequence[str]
    show: Callable[[Row, dict[str, Row]], Sequence[str]]
    may_overrun: bool = True


class Session:
    """
    Args:
        path (`Path`): The JSON file that holds `report`, written anew after every measurement.
        report (`dict`): What is known already, and what will be: "results" by section and measurement, "skipped" and
            "failures" by "section: measurement".
        seconds (`float`): For everything.
    """

    def __init__(self, path: Path, report: dict[str, Any], seconds: float):
        self.path, self.report, self.seconds = path, report, seconds
        self.start = time.monotonic()
        for name in _PARTS:
            report.setdefault(name, {})

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def run(self, sections: Sequence[Section], done: Callable[[Section, dict[str, Row]], None]) -> None:
        """All of them, in order; `done` is told of each with its rows."""
        whole, until = sum(section.share for section in sections), 0.0
        gc.collect()
        gc.freeze()  # what is there already is not gone through after every measurement
        try:
            for section in sections:
                until += self.seconds * section.share / whole
                self._run_section(section, until)
                done(section, self.report["results"].get(section.name, {}))
        finally:
            gc.unfreeze()

    def _run_section(self, section: Section, until: float) -> None:
        try:
            for case in section.cases():
                self._run_case(section, case, until)
        except Exception:  # in making the cases; what was measured stays
            self.report["failures"][section.name] = traceback.format_exc()
            self.write()

    def _run_case(self, section: Section, case: Case, until: float) -> None:
        rows, key = self.report["results"].setdefault(section.name, {}), f"{section.name}: {case.name}"
        if case.name in rows:
            return
        for name in _PARTS[1:]:
            self.report[name].pop(key, None)
        begin = self.elapsed
        if begin >= until:
            self.report["skipped"][key] = f"the time of the section was over: {begin:.0f} of {until:.0f} s"
        else:
            try:
                with _stopping_after(until + _GRACE * section.may_overrun - begin):
                    row = case.measure()
                rows[case.name] = row | {"took": self.elapsed - begin}
            except OutOfTimeError:
                self.report["skipped"][key] = f"stopped after {self.elapsed - begin:.0f} s: no time was left"
            except Exception:  # of one measurement, whatever it is; the next may fare better
                self.report["failures"][key] = traceback.format_exc()
            _free_memory()
        self.write()

    def write(self) -> None:
        self.report["elapsed"] = self.elapsed
        replace_json(self.path, self.report)


@contextmanager
def _stopping_after(seconds: float) -> Iterator[None]:
    """Raises `OutOfTimeError` in the block as soon as Python runs again behind that time; main threads only can."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

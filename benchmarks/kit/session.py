"""A bench's run: sections of cases, kept as they are measured, shown and judged when a section ends."""

import argparse
import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.arguments import UsageError, command_of, usage_errors
from hf_smartspec.commands.common.console import environment, make_console, track
from hf_smartspec.commands.common.outputs import check_output, replace_json

from .claims import Claim, exit_status, print_claims
from .tables import Column, Row, Rows, lines_of, print_lines
from .time_limit import OutOfTimeError, stopping_after

_GRACE = 10.0  # seconds that a measurement may take beyond its section's end
_PARTS = ("results", "skipped", "failures")
_FREE = ("json", "resume", "seconds", "plot", "plots", "markdown")  # arguments that change no measurement


class Case(NamedTuple):
    """One measurement, a row of its section's table."""

    name: str
    measure: Callable[[], Row]


@dataclass(frozen=True)
class Section:
    """
    Measurements that belong together.

    Args:
        name (`str`): Key of its results.
        cases (`Callable`): Returns the measurements in order; models that they need are loaded when they are measured.
        columns (sequence of `Column`): Columns of its table.
        title, first (`str`): Title of the table, and heading of its column of names.
        share (`float`): Its share of the time of all sections, in any unit; unused time passes to the next section.
        may_overrun (`bool`): Whether a running measurement may end a little late.
        turns (`int`): How often each case is measured, in turns, so that a change of the machine's load meets all.
        summary (`Callable`): A case's row, from those of its turns.
        claims (`Callable`): Returns claims about the rows.
        show (`Callable`): Prints the rows in place of the table.
        note (`str`): Text below the table.
    """

    name: str
    cases: Callable[[], Iterable[Case]]
    columns: Sequence[Column] = ()
    title: str = ""
    first: str = ""
    share: float = 1.0
    may_overrun: bool = True
    turns: int = 1
    summary: Callable[[list[Row]], Row] = lambda runs: runs[-1]
    claims: Callable[[Rows], Iterable[Claim]] = lambda rows: ()
    show: Callable[[Console, Rows], None] | None = None
    note: str = ""


class Session:
    """
    Args:
        report (`dict`): Earlier results, to which new ones are added: "results" by section and case, "skipped" and
            "failures" by "section: case".
        path (`Path`, *optional*): A JSON file that holds the report, written anew after every measurement.
        seconds (`float`): Time limit of all sections.
    """

    def __init__(self, report: dict[str, Any], path: Path | None = None, seconds: float = math.inf):
        self.report, self.path, self.seconds = report, path, seconds
        self.start = time.monotonic()
        self._until = math.inf  # end of the section that is measured
        self._failed: set[str] = set()  # in this run; failures of an earlier one are tried again
        for name in _PARTS:
            report.setdefault(name, {})

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def has_time(self) -> bool:
        """Return whether the section that is measured has time for repeats."""
        return self.elapsed < self._until

    def rows(self, section: str) -> Rows:
        """Return what has been measured of a section."""
        found: Rows = self.report["results"].get(section, {})
        return found

    def run(self, sections: Sequence[Section], console: Console) -> int:
        """Measure, show and judge all sections in order; after Ctrl-C, what was measured of the last one too."""
        whole, until = sum(section.share for section in sections), 0.0
        claims: list[Claim] = []
        gc.collect()
        gc.freeze()  # collections after measurements skip the objects of now
        try:
            with track(desc="measuring", unit=" cases") as progress:
                for section in sections:
                    until += self.seconds * section.share / whole
                    self._until = until
                    try:
                        self._run_section(section, progress)
                    finally:
                        claims += self._show(section, console)
        finally:
            gc.unfreeze()
            self.write()
            self._show_end(console)
        return 1 if self.report["failures"] else exit_status(claims)

    def _run_section(self, section: Section, progress: Any) -> None:
        try:
            cases = section.cases() if section.turns == 1 else list(section.cases())
            for turn in range(section.turns):
                for case in cases if turn % 2 == 0 else reversed(list(cases)):  # back and forth
                    progress.set_postfix_str(f"{section.name}: {case.name}")
                    self._run_case(section, case)
                    progress.update()
        except UsageError:
            raise
        except Exception:  # raised by `cases`; measured rows are kept
            self.report["failures"][section.name] = traceback.format_exc()
            self.write()

    def _run_case(self, section: Section, case: Case) -> None:
        rows, key = self.report["results"].setdefault(section.name, {}), f"{section.name}: {case.name}"
        runs = rows.get(case.name, {}).get("runs", [])
        is_measured = case.name in rows if section.turns == 1 else len(runs) >= section.turns
        if is_measured or key in self._failed:
            return
        for name in _PARTS[1:]:
            self.report[name].pop(key, None)
        begin, until = self.elapsed, self._until
        if begin >= until:
            self.report["skipped"][key] = f"the time of the section was over: {begin:.0f} of {until:.0f} s"
        else:
            try:
                with stopping_after(until + _GRACE * section.may_overrun - begin):
                    row = case.measure()
                runs = [*runs, row]
                row = section.summary(runs) | ({"runs": runs} if section.turns > 1 else {})
                rows[case.name] = row | {"took": self.elapsed - begin}
            except OutOfTimeError:
                self.report["skipped"][key] = f"stopped after {self.elapsed - begin:.0f} s: no time was left"
            except UsageError:
                raise
            except Exception:  # of one measurement and of any kind: the others go on
                self.report["failures"][key] = traceback.format_exc()
                self._failed.add(key)
            _free_memory()
        self.write()

    def _show(self, section: Section, console: Console) -> list[Claim]:
        rows = self.rows(section.name)
        if not rows:
            return []
        if section.show is None:
            print_lines(console, lines_of(section.title or section.name, section.first, section.columns, rows))
        else:
            section.show(console, rows)
        claims = list(section.claims(rows))
        print_claims(claims, console)
        if section.note:
            console.print(f"[dim]{escape(section.note)}[/dim]\n", highlight=False)
        return claims

    def _show_end(self, console: Console) -> None:
        for name, trace in self.report["failures"].items():
            last = trace.strip().splitlines()[-1]
            console.print(f"[red]failed[/red]: {escape(name)}: {escape(last)}", highlight=False)
        if self.report["skipped"]:
            where = f", named with reasons in {escape(str(self.path))}" if self.path else ""
            console.print(f"skipped: {len(self.report['skipped'])}{where}", highlight=False)

    def write(self) -> None:
        self.report["elapsed"] = self.elapsed
        if self.path:
            replace_json(self.path, self.report)


def new_session(
    args: argparse.Namespace,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    about: Mapping[str, Any] | None = None,
    free: Sequence[str] = (),
    **known: Any,
) -> Session:
    """
    Return the session of a command, which goes on with the file of --json where it is asked to.

    Args:
        args (`Namespace`): The command's arguments, those of `add_session_arguments` among them.
        about (mapping, *optional*): Further conditions of the figures: runs under others cannot be resumed.
        free (sequence of `str`): Arguments that only choose measurements; a resumed run may have others.
        known: Further entries of a new report.
    """
    check_output(args.json)
    command = json.loads(json.dumps(command_of(args), default=str))  # as the file will have it
    conditions = {name: value for name, value in command.items() if name not in (*_FREE, *free)}
    system = environment(torch.device(device), dtype) | dict(about or {}) | {"conditions": conditions}
    report = {"command": command, "environment": system, "is_smoke": getattr(args, "smoke", False)} | known
    if args.resume and args.json is None:
        raise UsageError("--resume goes with --json")
    if args.resume and args.json.exists():
        report = resumed(args.json, report)
    return Session(report, args.json, args.seconds or math.inf)


def print_head(session: Session, name: str, about: str = "") -> Console:
    """Print what is measured, and on what; return the console."""
    console, system = make_console(), session.report["environment"]
    versions = ", ".join(f"{package} {system[package]}" for package in ("torch", "transformers"))
    console.print(f"[bold]benchmarks {name}[/bold] {escape(about)}", highlight=False)
    machine = f"{system['dtype']}, {system['threads']} threads on {system['device']}, {versions}"
    console.print(f"[dim]{escape(machine)}[/dim]\n", highlight=False)
    return console


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resumed(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """
    Return the report in a file, to which more is added.

    Args:
        report (`dict`): The new report; its "environment" and "is_smoke" must equal the file's, its "command" is kept.

    Raises:
        UsageError: if the file cannot be read, or was measured under other conditions.
    """
    kinds = (OSError, ValueError, KeyError, TypeError)
    with usage_errors(f"--resume: {str(path)!r} is no result of this command", *kinds, reason=repr):
        found: dict[str, Any] = json.loads(path.read_text())
        known = (found["environment"], found["is_smoke"])
    if known != (report["environment"], report["is_smoke"]):
        raise UsageError(f"--resume: {str(path)!r} was measured on another machine, or with other versions or options")
    return found | {"command": report["command"]}

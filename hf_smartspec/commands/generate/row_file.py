"""A file of results that grows row by row, and goes on where it was left."""

import contextlib
import json
import os
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any

from ..common.answering.speaker import new_seed
from ..common.arguments import UsageError
from ..common.outputs import json_safe, replace_json


class RowFile:
    """
    JSON lines, one behind another in the order of the rows. Each is written whole before the next begins, so that
    whatever ends the process leaves at most one torn line behind, the last one: it is cut off by who goes on.

    What rows were made with lies beside it, in `FILE.run.json`. A file of anything else is not touched.

    Args:
        path (`Path`): Made where it is missing.
        settings (`dict`): All that the rows depend on, as JSON knows it. A "seed" of None is that of the file, or a
            new one.
        is_new (`bool`): Whether what is there is thrown away.

    Raises:
        UsageError: if another process writes it, it holds something else, or cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any], is_new: bool = False):
        self.path, self.settings = path, json_safe(settings)
        self._beside = path.with_name(f"{path.name}.run.json")
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UsageError(f"cannot write {str(path)!r}: {error}") from error
        try:
            self._lock()
            if is_new:
                self._file.truncate(0)
            else:
                self._go_on()
            if self.settings.get("seed") is None:
                self.settings["seed"] = new_seed()
            self.rows = self._read()
            replace_json(self._beside, self.settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """The next row; it is the operating system's when this returns, so that nothing but that can lose it."""
        line = dumped(row) + "\n"
        self._file.write(line.encode("utf-8", "backslashreplace"))  # half a surrogate, as JSON writes it
        self._file.flush()

    def _lock(self) -> None:
        with contextlib.suppress(ImportError):  # Windows has none
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"{str(self.path)!r} is being written by another process") from error
            except OSError:
                pass  # file systems without locks

    def _go_on(self) -> None:
        """Compares what the file was made with."""
        if not os.path.getsize(self.path) and not self._beside.exists():
            return
        try:
            found = dict(json.loads(self._beside.read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{str(self.path)!r} is there and not of this command: --overwrite replaces it") from error
        if self.settings.get("seed") is None:
            self.settings["seed"] = found.get("seed")
        for name in self.settings.keys() | found.keys():
            if self.settings.get(name) != found.get(name):
                was, now = (textwrap.shorten(repr(item.get(name)), 60) for item in (found, self.settings))
                raise UsageError(f"{str(self.path)!r} was begun with {name} {was}, not {now}: --overwrite begins anew")

    def _read(self) -> list[dict[str, Any]]:
        """The rows that are there; the torn end of the file is cut off."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        self._file.seek(whole)
        try:
            return [json.loads(line) for line in content[:whole].splitlines()]
        except ValueError as error:
            raise UsageError(f"{str(self.path)!r} holds lines that are no JSON: --overwrite begins anew") from error


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row as it is read again."""
    found: dict[str, Any] = json.loads(dumped(row))
    return found


def dumped(row: dict[str, Any]) -> str:
    return json.dumps(json_safe(row), ensure_ascii=False, default=str)

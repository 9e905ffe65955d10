"""A file of results that is written row by row and can be continued."""

import contextlib
import json
import os
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any

from ..common.answering.speaker import new_seed
from ..common.arguments import UsageError, usage_errors
from ..common.outputs import json_safe, replace_json


class RowFile:
    """
    JSON lines in the order of the rows. A line is complete before the next begins, so that a process that is killed
    leaves at most one torn line, the last one, which is cut off when the file is continued.

    The settings of the rows are kept beside it, in `FILE.run.json`. A file with other settings is not changed.

    Args:
        path (`Path`): The file, created if missing.
        settings (`dict`): Everything that the rows depend on, for JSON. A "seed" of None stands for the file's, or a
            new one.
        is_new (`bool`): Whether to discard the file's rows.

    Raises:
        UsageError: if another process writes the file, it has other settings, or cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any], is_new: bool = False):
        self.path, self.settings = path, json_safe(settings)
        self._beside = path.with_name(f"{path.name}.run.json")
        with usage_errors(f"cannot write {str(path)!r}"):
            self._file = path.open("a+b")
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
        """Write the next row and flush it, so that it is kept if this process is killed."""
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
        """Raise `UsageError` if the file was begun with other settings; take over its seed."""
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
        """Return the file's rows; a torn line at its end is cut off."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        self._file.seek(whole)
        with usage_errors(f"{str(self.path)!r} holds lines that are no JSON, --overwrite begins anew", ValueError):
            return [json.loads(line) for line in content[:whole].splitlines()]


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row as it will be read from the file."""
    found: dict[str, Any] = json.loads(dumped(row))
    return found


def dumped(row: dict[str, Any]) -> str:
    return json.dumps(json_safe(row), ensure_ascii=False, default=str)

"""Files that commands write in addition to their printed output."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from .arguments import UsageError
from .figures import check_matplotlib


def check_output(path: Path | None) -> None:
    """Raise `UsageError` for a file that cannot be written, before any work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"cannot write {str(path)!r}: {'it is a folder' if path.is_dir() else 'no such folder'}")


def check_outputs(args: argparse.Namespace) -> None:
    """Check --json and --plot before any work."""
    check_output(args.json)
    check_output(args.plot)
    if args.plot:
        check_matplotlib(args.plot)


def json_safe(value: Any) -> Any:
    """Return the value with NaN as None and infinity as text, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def write_json(path: Path, report: Any) -> None:
    """
    Write a report as JSON, NaN as null.

    Raises:
        UsageError: if the file cannot be written.
    """
    try:
        path.write_text(json.dumps(json_safe(report), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error}") from error


def replace_json(path: Path, report: Any) -> None:
    """Write a report as JSON in one step: a run that is killed leaves the earlier file as it was."""
    part = path.with_name(path.name + ".part")
    write_json(part, report)
    os.replace(part, path)


def resumed(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """
    Return the report in a file, to which more is added.

    Args:
        report (`dict`): The new report; its "environment" and "is_smoke" must equal the file's, its "command" is kept.

    Raises:
        UsageError: if the file cannot be read, or was measured under other conditions.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        known = (found["environment"], found["is_smoke"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume: {str(path)!r} is no result of this command: {error!r}") from error
    if known != (report["environment"], report["is_smoke"]):
        raise UsageError(f"--resume: {str(path)!r} was measured on another machine, or with other versions or options")
    return found | {"command": report["command"]}

"""Files that commands write beside what they print."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from .figures import check_matplotlib
from .models import UsageError


def check_output(path: Path | None) -> None:
    """A file that cannot be written is refused before any work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"cannot write {str(path)!r}: {'it is a folder' if path.is_dir() else 'no such folder'}")


def check_outputs(args: argparse.Namespace) -> None:
    """What cannot be written is refused before any work."""
    check_output(args.json)
    check_output(args.plot)
    if args.plot:
        check_matplotlib(args.plot)


def json_safe(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they become null and text."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def write_json(path: Path, report: Any) -> None:
    """
    Writes what was found, NaN as null.

    Raises:
        UsageError: if the file cannot be written.
    """
    try:
        path.write_text(json.dumps(json_safe(report), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error}") from error

"""Python compiled to machine code, for what runs once per token or more."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Machine code for the function, kept on disk where there is a folder for it, that runs without Python's lock."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


def _drop_stale_code(folder: Path) -> None:
    """
    Deletes machine code that is older than one of the folder's sources. numba looks at the file of a function only, not
    at those of the functions that were compiled into it, so that an edit would otherwise go unnoticed.
    """
    newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
    for cached in (folder / "__pycache__").glob("*.nb[ic]"):
        with suppress(OSError):  # another process was faster, or nothing can be written here
            if cached.stat().st_mtime < newest:
                cached.unlink()


_drop_stale_code(Path(__file__).parent)

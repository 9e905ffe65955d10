"""Files that are there as a whole, or not at all."""

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_ABANDONED = 3600.0  # seconds after which nobody goes on with a file that is not complete


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    A new file that takes the place of `path` once it is complete and on the disk, and that vanishes on errors; with it
    go those of writers that died before.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # others sweep, too
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    # Opened by hand, since files of `tempfile` cannot be read by other users.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

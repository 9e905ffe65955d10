"""Files that appear complete or not at all, and the permissions of those that hold users' text."""

import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_ABANDONED = 3600.0  # seconds; an incomplete file that has not changed for longer was left by a writer that died


def private_mode(folder: str | Path) -> int:
    """
    Return the mode of a file with users' text in `folder`: for its owner alone, or for its group to read where the
    folder is the group's (its set-group-ID bit is set, as `chmod g+s` does).
    """
    return 0o640 if os.stat(folder).st_mode & stat.S_ISGID else 0o600


def private_file(path: str | Path) -> int:
    """
    Create an empty file of `private_mode` and return its descriptor, open for writing.

    Raises:
        FileExistsError: if the file exists.
    """
    mode = private_mode(Path(path).parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.chmod(path, mode)  # an umask of 077 would lock the folder's group out
    return descriptor


@contextmanager
def replacing(path: Path, is_private: bool = False) -> Iterator[BinaryIO]:
    """
    Open a new file that replaces `path` once it is complete and on the disk, and that is deleted on errors. Temporary
    files that earlier writers of `path` abandoned are deleted, too. Files with users' text are private
    (`private_mode`).
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may delete it first
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    # Opened by name, since other users could not read a file of `tempfile`.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(private_file(temporary) if is_private else temporary, "wb" if is_private else "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

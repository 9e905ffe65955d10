"""A folder that several replicas write to, on any file system of fsspec."""

import os
import posixpath
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ...files import private_file
from ...log import get_logger

_ABANDONED = 3600 * 10**9  # nanoseconds after which the writer of a temporary file is taken for dead
_SALT, _SALT_BYTES = "salt", 32


class SharedFolder:
    """
    A shared folder, in which files appear complete and are never changed. On a local file system only their owner can
    read them, and the folder if it is created here; in a folder of a group (`chmod g+s`), the group can, too.

    Args:
        url (`str`): A path, or an address of fsspec (`s3://bucket/folder`, `memory://folder`, ...), whose
            package is installed.

    Raises:
        ValueError: if the folder cannot be reached with what is installed.
    """

    def __init__(self, url: str):
        self.url = str(url)
        try:
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
            self._is_local = isinstance(self._fs, LocalFileSystem)
            if self._is_local:
                os.makedirs(self._root, mode=0o700, exist_ok=True)
            else:
                self._fs.makedirs(self._root, exist_ok=True)
        except Exception as error:  # of any file system
            raise ValueError(f"`url`: {self.url!r} cannot be reached: {error}") from error

    def names(self, suffix: str) -> list[str]:
        """Return the sorted names of files with a suffix, without those that are still being written."""
        return sorted(name for name in self._all() if name.endswith(suffix) and not name.startswith("."))

    def _all(self) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:  # object stores have no empty folders
            return []
        return [posixpath.basename(str(path).replace("\\", "/")) for path in paths]

    def read(self, name: str) -> bytes:
        """
        Return the contents of a file.

        Raises:
            FileNotFoundError: if it is gone.
            ValueError: if it is no regular file.
        """
        path = self._path(name)
        if not self._is_local:
            data: bytes = self._fs.cat_file(path)
            return data
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{name} is no file.")
            return file.read()

    def salt(self, first: bytes | None = None) -> bytes:
        """
        Return 32 random bytes that all users of the folder share. The first one creates them, or gives them as `first`.

        Raises:
            OSError: if they can be neither read nor created.
            ValueError: if the file that holds them is damaged.
        """
        found = self.known_salt()
        if found is None:
            self._create(self._path(_SALT), first or secrets.token_bytes(_SALT_BYTES))
            found = self.known_salt()
        if found is None:
            raise FileNotFoundError(f"{self._path(_SALT)} cannot be created.")
        return found

    def known_salt(self) -> bytes | None:
        """Return what `salt` returns, and raise its errors; None in a folder that has none yet."""
        path = self._path(_SALT)
        if not self._fs.exists(path):
            return None
        found = self.read(_SALT)
        if len(found) != _SALT_BYTES:
            raise ValueError(f"{path} must hold {_SALT_BYTES} bytes, got {len(found)}: remove it.")
        return found

    def _create(self, path: str, data: bytes) -> None:
        """Write a complete file, unless another process has written it first."""
        if not self._is_local:
            with suppress(FileExistsError):
                self._fs.pipe_file(path, data, mode="create")
            return
        temporary = self._path(f".{time.time_ns():020d}-{uuid4().hex}.tmp")
        try:
            with open(private_file(temporary), "wb") as file:
                file.write(data)
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file; an earlier one of the same name is replaced when the new one is complete."""
        temporary = self._path(f".{time.time_ns():020d}-{uuid4().hex}.tmp")
        try:
            if self._is_local:
                os.close(private_file(temporary))
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, self._path(name))
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm_file(temporary)
            raise

    def sweep(self) -> None:
        """Remove temporary files of writers that died."""
        now = time.time_ns()
        for name in self._all():
            begun = name[1:].split("-")[0]
            if name.startswith(".") and name.endswith(".tmp") and begun.isdigit() and now - int(begun) > _ABANDONED:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: opening a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


logger = get_logger(__name__)


@contextmanager
def exchanging(steps: Sequence[Callable[[], object]], interval: float, failed: str) -> Iterator[None]:
    """
    Call each of `steps` now, every `interval` seconds in a thread, and once more at the end. Errors are not raised: the
    first of a series is logged after the text `failed`.
    """
    failing = set[int]()

    def attempt() -> None:
        for place, step in enumerate(steps):
            try:
                step()
                failing.discard(place)
            except Exception as error:  # of any file system
                if place not in failing:
                    logger.warning(f"{failed}: {error!r}")
                failing.add(place)

    attempt()
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(interval):
            attempt()

    thread = threading.Thread(target=run, name="hf-smartspec sharing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        attempt()

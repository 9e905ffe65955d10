"""A folder that several replicas write to, on any file system of fsspec."""

import posixpath
import time
from uuid import uuid4

from fsspec.core import url_to_fs

_ABANDONED = 3600 * 10**9  # nanoseconds after which nobody writes on


class SharedFolder:
    """
    Files appear in it as a whole and are never changed.

    Args:
        url (`str`): A path, or an address that fsspec knows (`s3://bucket/folder`, `memory://folder`, ...), whose
            package is installed.

    Raises:
        ValueError: if the folder cannot be reached with what is installed.
    """

    def __init__(self, url: str):
        self.url = str(url)
        try:
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
            self._fs.makedirs(self._root, exist_ok=True)
        except Exception as error:  # of any file system
            raise ValueError(f"`url`: {self.url!r} cannot be reached: {error}") from error

    def names(self, suffix: str) -> list[str]:
        """Its files with names that end so, in their order; not those that are still being written."""
        return sorted(name for name in self._all() if name.endswith(suffix) and not name.startswith("."))

    def _all(self) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:  # object stores know no empty folders
            return []
        return [posixpath.basename(str(path).replace("\\", "/")) for path in paths]

    def read(self, name: str) -> bytes:
        """
        Raises:
            FileNotFoundError: if it is gone.
        """
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def write(self, name: str, data: bytes) -> None:
        """A file that takes the place of one of the same name, once it is complete."""
        temporary = self._path(f".{time.time_ns():020d}-{uuid4().hex}.tmp")
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, self._path(name))
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm_file(temporary)
            raise

    def sweep(self) -> None:
        """Removes what writers have left that died while they wrote."""
        now = time.time_ns()
        for name in self._all():
            begun = name[1:].split("-")[0]
            if name.startswith(".") and name.endswith(".tmp") and begun.isdigit() and now - int(begun) > _ABANDONED:
                self.remove(name)

    def remove(self, name: str) -> None:
        """One that is gone already is no error."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

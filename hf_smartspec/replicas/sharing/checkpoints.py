"""Sharing of drafters' checkpoints, from which new replicas begin."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np

from ...candidates.text.suffix.files import packed, unpacked
from ...files import replacing
from ...log import get_logger
from .folder import SharedFolder, exchanging

logger = get_logger(__name__)

_SUFFIX = ".checkpoint"
_KIND = "checkpoint"
_KEPT = 3  # checkpoints of each drafter: a replica may still be reading an older one


class _ChangedError(Exception):
    """Keeps a local file that has changed while another was to take its place."""


class SharedCheckpoints:
    """
    Checkpoints of `OnlineDistillation` that replicas publish to a folder, and begin from.

    A new replica takes every drafter's newest valid checkpoint, unless its own is newer, and learns on from there. One
    that runs takes it, too: its next update begins from the mean of its own weights and these, and is taken over only
    if it drafts no worse (with `shadow=0`, where nothing could tell, it keeps its own). `OnlineDistillation` checks
    that a checkpoint is of the same drafter.

    Args:
        url (`str`): A folder, on any file system of fsspec: a path, `s3://...`, `gs://...`.
        checkpoint (`str` or `Path`): The folder of `OnlineDistillation(checkpoint=...)`.
        interval (`float`): Seconds between two looks for changed checkpoints.

    Example:

        >>> with SharedCheckpoints("s3://bucket/drafters", "learnt").attached():
        ...     engine = Engine(model, assistant=draft, online=OnlineDistillation(checkpoint="learnt"))

    Raises:
        ValueError: if the folder cannot be reached with what is installed.
    """

    def __init__(self, url: str, checkpoint: str | Path, interval: float = 300.0):
        if not interval > 0:
            raise ValueError(f"`interval` must be positive, got {interval!r}.")
        self._folder = SharedFolder(url)
        self.interval = interval
        self._local, self._replica = Path(checkpoint), uuid4().hex
        self._published: dict[str, int] = {}  # by file in the shared folder: its time of modification here

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Take the shared checkpoints; exchange them every `interval` seconds, in a thread, and at the end."""
        failed = f"What drafters learn cannot be shared through {self._folder.url} at the moment"
        has_begun = False

        def exchange() -> None:
            nonlocal has_begun
            if not has_begun:
                self.pull()
                has_begun = True
            self.publish()
            self.pull()  # of others; what is newest here has been published

        with exchanging([exchange, self._folder.sweep], self.interval, failed):
            yield

    def pull(self) -> list[str]:
        """Take the newest valid version of every file, if it is newer than the local one; return the files' names."""
        taken = []
        for name, versions in self._versions().items():
            path = self._local / name
            changed = _changed_at(path)
            for when, remote in sorted(versions, reverse=True):
                if when <= changed:
                    break
                data = self._whole(remote)
                if data is not None:
                    self._local.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with suppress(_ChangedError):
                        with replacing(path, is_private=True) as file:
                            file.write(data)
                            file.flush()
                            os.utime(file.name, ns=(when, when))  # before it is moved, else it would seem newer
                            os.fsync(file.fileno())
                            moved = os.stat(file.name).st_mtime_ns  # file systems may round times
                            if _changed_at(path) != changed:  # a learner has saved newer weights meanwhile
                                raise _ChangedError
                        self._published[name] = moved
                        taken.append(name)
                    break
        return taken

    def publish(self) -> list[str]:
        """Publish the files that have changed; return their names."""
        found = []
        for path in sorted(self._local.iterdir()) if self._local.is_dir() else []:
            if path.name.startswith(".") or not path.is_file():
                continue
            changed = path.stat().st_mtime_ns
            if self._published.get(path.name) == changed:
                continue
            header = {"kind": _KIND, "name": path.name}
            content = packed(header, {"data": np.frombuffer(path.read_bytes(), np.uint8)})
            # The time of learning, not of copying, so that a newer one elsewhere stays newer.
            self._folder.write(f"{changed:020d}-{self._replica}-{path.name}{_SUFFIX}", content)
            self._published[path.name] = changed
            found.append(path.name)
            for _, old in sorted(self._versions()[path.name], reverse=True)[_KEPT:]:
                self._folder.remove(old)
        return found

    def _versions(self) -> dict[str, list[tuple[int, str]]]:
        """Return for each drafter's file the times of its versions, and their names in the folder."""
        found: dict[str, list[tuple[int, str]]] = {}
        for remote in self._folder.names(_SUFFIX):
            when, _, name = remote.removesuffix(_SUFFIX).split("-", 2) if remote.count("-") >= 2 else ("", "", "")
            if when.isdigit() and name and "/" not in name and not name.startswith("."):
                found.setdefault(name, []).append((int(when), remote))
        return found

    def _whole(self, remote: str) -> bytes | None:
        try:
            header, arrays = unpacked(self._folder.read(remote), remote)
            if header.get("kind") == _KIND:
                return arrays["data"].tobytes()
        except Exception as error:  # of any file system, or of a damaged file
            logger.warning_once(f"{self._folder.url}: {remote} is left alone: {error}")
        return None


def _changed_at(path: Path) -> int:
    """Return the time of a file's modification in nanoseconds, 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0

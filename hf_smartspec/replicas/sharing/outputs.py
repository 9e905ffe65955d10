"""Sharing of outputs, so that the suffix trees of each replica draft from what any of them has served."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from ...candidates.text.datastore.file import tokenizer_fingerprint
from ...candidates.text.suffix.files import making_sense, packed, unpacked
from ...candidates.text.suffix.source import SuffixTreeCandidates
from ...log import get_logger
from ...validate import check_positive
from .folder import SharedFolder, exchanging
from .snapshot import Key, SharedOutput, pack, unpack

logger = get_logger(__name__)

_OUTPUTS, _LEARNT = ".outputs", ".learnt"
_ATTEMPTS = 5  # at reading files that others merge meanwhile
_LEARNT_INTERVALS, _LEARNT_KEPT = 10, 3  # exchanges from one file of learnt acceptance to the next, and files kept


class SharedOutputs:
    """
    Outputs that replicas of a service publish to a folder, and take from there.

    Each replica writes its own outputs, in files that never change. Reading takes the union, in which every output
    counts once, however often it was written. A replica that has read many small files merges them into one, and then
    deletes them, so that no count is lost if it dies meanwhile. The acceptance that a source has learnt is published,
    too, for new replicas.

    Args:
        url (`str`): A folder, on any file system of fsspec: a path, `s3://...`, `gs://...`.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer; outputs of other vocabularies are ignored.
        interval (`float`): Seconds between two exchanges, see `attached`.
        max_tokens (`int`): Bound on the tokens in the folder; the oldest outputs are dropped when files are merged.
        max_files (`int`): Number of files above which they are merged.

    Example:

        >>> source = SuffixTreeCandidates()
        >>> with SharedOutputs("s3://bucket/trees", tokenizer).attached(source), Engine(model, source) as engine:
        ...     serve(engine)

    Raises:
        ValueError: if the folder cannot be reached with what is installed.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        interval: float = 30.0,
        max_tokens: int = 10_000_000,
        max_files: int = 32,
    ):
        for name, value in (("max_tokens", max_tokens), ("max_files", max_files)):
            check_positive(name, value)
        if not interval > 0:
            raise ValueError(f"`interval` must be positive, got {interval!r}.")
        self._folder = SharedFolder(url)
        self.interval, self.max_tokens, self.max_files = interval, max_tokens, max_files
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._replica = uuid4().hex  # new in each process, as are the numbers of outputs
        self._read: dict[str, frozenset[Key]] = {}  # outputs in each file that was read
        self._missing: set[str] = set()  # those of these files that were gone at the latest look
        self._reported: set[str] = set()  # files that are ignored
        self._published = 0  # the highest published number
        self._lock = threading.Lock()

    @contextmanager
    def attached(self, source: SuffixTreeCandidates) -> Iterator[SuffixTreeCandidates]:
        """
        Take all outputs in the folder, and exchange new ones every `interval` seconds, in a thread, and once more at
        the end. A folder that cannot be reached is reported once and tried again; requests never wait for it.
        """
        failed = f"Outputs cannot be shared through {self._folder.url} at the moment"
        steps = (lambda: self.pull(source), lambda: self.publish(source), self.merge, self._folder.sweep)
        with exchanging(steps, self.interval, failed):
            yield source

    def pull(self, source: SuffixTreeCandidates) -> int:
        """
        Take the new outputs of other replicas and, for a source without drafts so far, the learnt acceptance. Damaged
        or foreign files are ignored with a warning.

        Returns:
            `int`: The number of new outputs.
        """
        with self._lock:
            self._take_learnt(source)
            files = self._collect(lambda name: name not in self._read)
            known = set().union(*self._read.values()) if files else set[Key]()
            self._read |= {name: frozenset(item.key for item in outputs) for name, outputs in files.items()}
            new = {
                item.key: item
                for outputs in files.values()
                for item in outputs
                if item.replica != self._replica and item.key not in known
            }
            for item in sorted(new.values(), key=_age):
                source.add_outputs([item.tokens], item.namespace, progress=False)
            self._forget()
            return len(new)

    def publish(self, source: SuffixTreeCandidates) -> int:
        """Write the outputs that the source has kept of its own requests since; return their number."""
        with self._lock:
            kept, now = source.outputs(self._published, only_served=True), time.time_ns()
            own = [
                SharedOutput(self._replica, number, now, namespace, tokens)
                for number, namespace, tokens in kept
                if isinstance(namespace, str)
            ]
            if own:
                self._write(own)
            if kept:
                self._published = kept[-1][0]
            if own:
                self._publish_learnt(source)
            return len(own)

    def merge(self) -> bool:
        """Merge files into one, if more than `max_files` were read; return whether files were merged."""
        with self._lock:
            names = self._folder.names(self._suffix(_OUTPUTS))
            if sum(name in self._read for name in names) <= self.max_files:
                return False
            files = self._collect(lambda name: name in self._read)
            if len(files) <= self.max_files:  # others have merged them
                return False
            found = {item.key: item for outputs in files.values() for item in outputs}
            self._write(_newest(sorted(found.values(), key=_age), self.max_tokens))
            for old in files:  # if this replica dies before, outputs that are there twice still count once
                self._folder.remove(old)
            return True

    def _write(self, outputs: list[SharedOutput]) -> None:
        """Write a file of outputs that this replica has already."""
        name = self._new_name(_OUTPUTS)
        self._folder.write(name, pack(outputs, self._fingerprint))
        self._read[name] = frozenset(item.key for item in outputs)

    def _forget(self) -> None:
        """
        Drop the files that are gone at a second look. The file that they were merged into existed at the first, and has
        been read since; so `_read` does not grow beyond the folder.
        """
        missing = self._read.keys() - set(self._folder.names(self._suffix(_OUTPUTS)))
        for name in missing & self._missing:
            del self._read[name]
        self._missing = missing & self._read.keys()

    def _collect(self, is_wanted: Callable[[str], bool]) -> dict[str, list[SharedOutput]]:
        """
        Read the valid files among those that are wanted. Others may merge them meanwhile: the outputs of a file that is
        gone are in a newer one, so that all files are listed again.
        """
        gone: set[str] = set()
        for _ in range(_ATTEMPTS):
            names = [name for name in self._folder.names(self._suffix(_OUTPUTS)) if is_wanted(name)]
            dangling = gone & set(names)  # listed again and gone again: links to nowhere
            found, gone = {}, set()
            for name in names:
                try:
                    found[name] = self._outputs_of(name)
                except FileNotFoundError as error:
                    gone.add(name)
                    if name in dangling:
                        self._report(name, error)
            if gone <= dangling:
                return {name: outputs for name, outputs in found.items() if outputs is not None}
        raise TimeoutError("the files of the folder change faster than they can be read")

    def _outputs_of(self, name: str) -> list[SharedOutput] | None:
        try:
            return unpack(self._folder.read(name), self._fingerprint, name)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any file system, or of a damaged file: the others are taken
            self._report(name, error)
            return None

    def _report(self, name: str, error: Exception) -> None:
        """Warn once of a file that is ignored."""
        if name not in self._reported:
            self._reported.add(name)
            logger.warning(f"{self._folder.url}: {name} is left alone: {error}")

    def _suffix(self, kind: str) -> str:
        """Return the suffix of this vocabulary's files."""
        return f"-{self._fingerprint[:8]}{kind}"

    def _new_name(self, kind: str) -> str:
        """Return a file name that sorts after earlier ones."""
        return f"{time.time_ns():020d}-{uuid4().hex}{self._suffix(kind)}"

    # Learnt acceptance

    def _publish_learnt(self, source: SuffixTreeCandidates) -> None:
        """Publish the learnt acceptance, unless there is a recent file: it is large, 1 MB for each namespace."""
        names = self._folder.names(self._suffix(_LEARNT))
        age = time.time_ns() - max(map(_written, names), default=0)
        if abs(age) < _LEARNT_INTERVALS * self.interval * 1e9:
            return
        try:
            lines, arrays = source.learnt()
        except ValueError as error:  # a namespace that is no string
            logger.warning_once(f"What is learnt is not shared through {self._folder.url}: {error}")
            return
        header = {"kind": "learnt", "fingerprint": self._fingerprint, "lines": lines}
        self._folder.write(self._new_name(_LEARNT), packed(header, arrays))
        for old in names[: 1 - _LEARNT_KEPT]:
            self._folder.remove(old)

    def _take_learnt(self, source: SuffixTreeCandidates) -> None:
        """Take over the newest valid file of learnt acceptance, if the source has none of its own."""
        if source.has_learnt:
            return
        for name in reversed(self._folder.names(self._suffix(_LEARNT))):
            try:
                header, arrays = unpacked(self._folder.read(name), name)
                with making_sense(name):
                    if header["fingerprint"] == self._fingerprint and source.take_over(header["lines"], arrays):
                        return
            except Exception as error:  # of any file system, or of a damaged file
                self._report(name, error)


def _written(name: str) -> int:
    """Return the time in a file's name, in nanoseconds; 0 if there is none."""
    when = name.split("-")[0]
    return int(when) if when.isdigit() else 0


def _age(item: SharedOutput) -> tuple[int, str, int]:
    return item.time, *item.key


def _newest(outputs: list[SharedOutput], max_tokens: int) -> list[SharedOutput]:
    """Return as many of the last outputs as have `max_tokens` tokens together, at most."""
    total = first = 0
    for first in range(len(outputs), 0, -1):
        total += len(outputs[first - 1].tokens)
        if total > max_tokens:
            return outputs[first:]
    return outputs

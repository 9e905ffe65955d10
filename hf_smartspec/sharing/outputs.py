"""Suffix trees of several replicas that all draft from what any of them has served."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from ..candidates.datastore.file import tokenizer_fingerprint
from ..candidates.suffix.files import packed, unpacked
from ..candidates.suffix.source import SuffixTreeCandidates
from ..log import get_logger
from ..validate import check_positive
from .exchange import exchanging
from .folder import SharedFolder
from .snapshot import Key, SharedOutput, pack, unpack

logger = get_logger(__name__)

_OUTPUTS, _LEARNT = ".outputs", ".learnt"
_ATTEMPTS = 5  # at reading files that others merge meanwhile


class SharedOutputs:
    """
    Outputs that replicas of a service publish to a folder, and take from there.

    Each replica writes what it served itself, as files that never change. To read is to take the union, in which every
    output counts once, however often it was written; many small files are merged into one by whoever finds them, and
    deleted when that one is there. So no count is lost, whenever a replica dies. What a source has learnt of its
    drafts' acceptance is published, too, for replicas that begin.

    Args:
        url (`str`): A folder, on any file system of fsspec: a path, `s3://...`, `gs://...`.
        tokenizer (`PreTrainedTokenizerBase`): Outputs of other vocabularies are not seen.
        interval (`float`): Seconds between two exchanges, see `attached`.
        max_tokens (`int`): Bound on the tokens in the folder; the oldest outputs go first, whenever files are merged.
        max_files (`int`): More are merged into one.

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
        try:
            self._folder = SharedFolder(url)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"`url`: {url!r} cannot be reached: {error}") from error
        self.interval, self.max_tokens, self.max_files = interval, max_tokens, max_files
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._replica = uuid4().hex  # anew for each process: numbers begin anew, too
        self._read: set[str] = set()  # files whose outputs are known
        self._known: set[Key] = set()
        self._taken: set[int] = set()  # numbers of others' outputs in the source
        self._published = 0  # the highest number that was looked at
        self._lock = threading.Lock()

    @contextmanager
    def attached(self, source: SuffixTreeCandidates) -> Iterator[SuffixTreeCandidates]:
        """
        Takes all there is, and exchanges what is new every `interval` seconds, in a thread, and once more at the end. A
        folder that cannot be reached is reported once and tried again: nobody's request waits for it.
        """
        failed = f"Outputs cannot be shared through {self._folder.url} at the moment"
        with exchanging(lambda: self._exchange(source), self.interval, failed):
            yield source

    def _exchange(self, source: SuffixTreeCandidates) -> None:
        self.pull(source)
        self.publish(source)
        self.merge()

    def pull(self, source: SuffixTreeCandidates) -> int:
        """
        Takes what others have published since, and where the source has drafted nothing yet, what was learnt. Files
        that are damaged or foreign are left alone, with a warning.

        Returns:
            `int`: The outputs that are new here.
        """
        with self._lock:
            self._take_learnt(source)
            found = [item for item in self._collect(self._read) if item.replica != self._replica]
            new = sorted({item.key: item for item in found if item.key not in self._known}.values(), key=_age)
            for item in new:
                number, *_ = source.add_outputs([item.tokens], item.namespace, progress=False)
                self._known.add(item.key)
                if number is not None:
                    self._taken.add(number)
            return len(new)

    def publish(self, source: SuffixTreeCandidates) -> int:
        """Writes what the source has kept of its own requests since. Returns how many outputs that is."""
        with self._lock:
            kept = source.outputs(self._published)
            now = time.time_ns()
            own = [
                SharedOutput(self._replica, number, now, namespace, tokens)
                for number, namespace, tokens in kept
                if number not in self._taken and isinstance(namespace, str)
            ]
            if own:
                name = self._new_name()
                self._folder.write(name, pack(own, self._fingerprint))
                self._read.add(name)
                self._publish_learnt(source)
            if kept:
                self._published = kept[-1][0]
                self._taken = {number for number in self._taken if number > self._published}
            return len(own)

    def merge(self) -> bool:
        """Makes one file of many, if there are more than `max_files`; whether it did."""
        with self._lock:
            names = self._folder.names(_OUTPUTS)
            if len(names) <= self.max_files:
                return False
            merged: set[str] = set()
            found = {item.key: item for item in self._collect(merged)}
            kept = _newest(sorted(found.values(), key=_age), self.max_tokens)
            name = self._new_name()
            self._folder.write(name, pack(kept, self._fingerprint))
            if merged <= self._read:  # nothing in it is new here
                self._read.add(name)
            for old in merged:  # a replica that dies before has lost nothing: what is there twice counts once
                self._folder.remove(old)
            return True

    def _collect(self, read: set[str]) -> list[SharedOutput]:
        """What stands in files whose names are not in `read`, which then are. All of it, while others merge them."""
        for _ in range(_ATTEMPTS):
            found, names = [], [name for name in self._folder.names(_OUTPUTS) if name not in read]
            try:
                for name in names:
                    found.append((name, self._outputs_of(name)))
            except FileNotFoundError:  # it has been merged into another
                continue
            read.update(name for name, outputs in found if outputs is not None)
            return [item for _, outputs in found for item in outputs or ()]
        raise TimeoutError("the files of the folder change faster than they can be read")

    def _outputs_of(self, name: str) -> list[SharedOutput] | None:
        try:
            return unpack(self._folder.read(name), self._fingerprint, name)
        except (KeyError, ValueError, IndexError) as error:
            logger.warning_once(f"{self._folder.url}: {error}")
            return None

    def _new_name(self) -> str:
        """Behind those of before; of this vocabulary's files."""
        return f"{time.time_ns():020d}-{uuid4().hex}-{self._fingerprint[:8]}{_OUTPUTS}"

    # What is learnt of drafts

    def _publish_learnt(self, source: SuffixTreeCandidates) -> None:
        lines, arrays = source.learnt()
        header = {"kind": "learnt", "fingerprint": self._fingerprint, "lines": lines, "time": time.time_ns()}
        self._folder.write(f"{self._replica}-{self._fingerprint[:8]}{_LEARNT}", packed(header, arrays))

    def _take_learnt(self, source: SuffixTreeCandidates) -> None:
        """The newest there is."""
        if source.learnt()[0]:
            return  # it has drafted before
        found = []
        for name in self._folder.names(f"{self._fingerprint[:8]}{_LEARNT}"):
            try:
                found.append(unpacked(self._folder.read(name), name))
            except (FileNotFoundError, ValueError) as error:
                logger.warning_once(f"{self._folder.url}: {error}")
        for header, arrays in sorted(found, key=lambda item: item[0].get("time", 0), reverse=True):
            try:
                if header["fingerprint"] == self._fingerprint and source.take_over(header["lines"], arrays):
                    return
            except (KeyError, TypeError, ValueError) as error:
                logger.warning_once(f"{self._folder.url}: {error}")


def _age(item: SharedOutput) -> tuple[int, str, int]:
    return item.time, *item.key


def _newest(outputs: list[SharedOutput], max_tokens: int) -> list[SharedOutput]:
    """As many of the last ones as have no more tokens together."""
    total = first = 0
    for first in range(len(outputs), 0, -1):
        total += len(outputs[first - 1].tokens)
        if total > max_tokens:
            return outputs[first:]
    return outputs

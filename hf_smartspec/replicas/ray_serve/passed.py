"""Streams that a second replica begins anew, without the part that has been passed on already."""

import json
from collections.abc import Iterator
from typing import Any

_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_GROWING = frozenset("content reasoning_content refusal text arguments".split())
_SAME = ("id", "created")  # fields of a chunk that are those of the first attempt
_NOTHING = object()

Path = tuple[Any, ...]


class CannotContinueError(Exception):
    """Raised when a second replica cannot continue a stream."""


class PassedEvents:
    """
    The events of a stream that a client has received. Chunks add to texts; all other values are sent once. The chunks
    of two attempts need not be equal: a replica yields as many tokens at a time as it accepts.

    Example:

        >>> passed = PassedEvents()
        >>> passed.note(b'data: {"choices": [{"index": 0, "delta": {"content": "Once upon"}}]}\\n\\n')
        >>> passed.rest(b'data: {"choices": [{"index": 0, "delta": {"content": "Once"}}]}\\n\\n')
        b''
        >>> passed.rest(b'data: {"choices": [{"index": 0, "delta": {"content": " upon a time"}}]}\\n\\n')
        b'data: {"choices": [{"index": 0, "delta": {"content": " a time"}}]}\\n\\n'
    """

    def __init__(self) -> None:
        self._raw = bytearray()
        self._left: bytearray | None = None  # of the second attempt: an event that is not complete yet
        self._head: dict[str, Any] = {}
        self._texts: dict[Path, str] = {}
        self._sent: set[Path] = set()  # places of values that are sent once
        self._begun: dict[Path, str] = {}  # texts of the second attempt so far

    def __bool__(self) -> bool:
        return bool(self._raw) or self._left is not None

    def note(self, piece: bytes) -> None:
        """Record a piece that has been passed on."""
        self._raw += piece

    def rest(self, piece: bytes) -> bytes:
        """
        Return the new part of a piece of the second attempt, as whole events; raises `CannotContinueError` if the
        second attempt differs from the first, or has events that cannot be compared.
        """
        if self._left is None:
            self._left = bytearray()
            self._read()
        self._left += piece
        return b"".join([self._new(data) for data in _events(self._left)])

    def _read(self) -> None:
        """Parse all that has been passed on. This is done only if a replica dies."""
        for data in _events(self._raw):
            if data == _DONE:
                self._sent.add((_DONE,))
                continue
            chunk = _chunk(data)
            self._head = {name: chunk[name] for name in _SAME if name in chunk}
            if not chunk["choices"]:
                self._sent.add(())
            for path, value in _leaves(chunk["choices"], ()):
                if _grows(path, value):
                    self._texts[path] = self._texts.get(path, "") + value
                else:
                    self._sent.add(path)
        if self._raw:
            raise CannotContinueError("it was cut within an event")

    def _new(self, data: bytes) -> bytes:
        if data == _DONE:
            return b"" if (_DONE,) in self._sent else _DATA + _DONE + _END
        chunk = _chunk(data)
        choices = self._cut(chunk["choices"], ())
        if choices is _NOTHING and (chunk["choices"] or () in self._sent):
            return b""
        shown = chunk | self._head | {"choices": [] if choices is _NOTHING else choices}
        return _DATA + json.dumps(shown, ensure_ascii=False).encode() + _END

    def _cut(self, value: Any, path: Path) -> Any:
        """Return a part of a chunk without the values that have been passed on; `_NOTHING` if none are left."""
        if isinstance(value, list):
            items = [self._cut(item, (*path, place)) for place, item in _numbered(value)]
            return [item for item in items if item is not _NOTHING] or _NOTHING
        if isinstance(value, dict):
            cut = {name: self._cut(item, (*path, name)) for name, item in value.items()}
            if all(item is _NOTHING for item in cut.values()):
                return _NOTHING
            # Fields that clients read are kept, if only empty.
            frame = {name: item for name, item in value.items() if _is_frame(name, item)}
            frame |= {name: "" for name in value if _grows((name,), value[name])}
            if "delta" in value:
                frame["delta"] = {}
            return frame | {name: item for name, item in cut.items() if item is not _NOTHING}
        if _is_frame(path[-1], value):
            return _NOTHING
        if _grows(path, value):
            return self._cut_text(value, path)
        return _NOTHING if path in self._sent else value

    def _cut_text(self, text: str, path: Path) -> Any:
        passed, begun = self._texts.get(path, ""), self._begun.get(path, "")
        now = self._begun[path] = begun + text
        if not (passed.startswith(now) or now.startswith(passed)):
            raise CannotContinueError("the text is another one")
        return now[max(len(passed), len(begun)) :] or _NOTHING


def _events(buffer: bytearray) -> Iterator[bytes]:
    """Remove the complete events from the buffer, and yield their data."""
    while (end := buffer.find(_END)) >= 0:
        data = bytes(buffer[:end])
        del buffer[: end + len(_END)]
        if not data.startswith(_DATA):
            raise CannotContinueError("its events have names")
        yield data.removeprefix(_DATA)


def _chunk(data: bytes) -> dict[str, Any]:
    chunk = json.loads(data)
    if not isinstance(chunk.get("choices"), list):
        raise CannotContinueError("its events are not chunks")
    if any(choice.get("logprobs") is not None for choice in chunk["choices"]):
        raise CannotContinueError("it has log-probabilities")
    return chunk


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a chunk with their paths."""
    if isinstance(value, list | dict):
        for place, item in _numbered(value) if isinstance(value, list) else value.items():
            yield from _leaves(item, (*path, place))
    elif not _is_frame(path[-1], value):
        yield path, value


def _numbered(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    for place, item in enumerate(items):
        yield (item.get("index", place) if isinstance(item, dict) else place), item


def _is_frame(name: Any, value: Any) -> bool:
    """Return whether a value is an index or None, which add nothing to a stream by themselves."""
    return name == "index" or value is None


def _grows(path: Path, value: Any) -> bool:
    return path[-1] in _GROWING and isinstance(value, str)

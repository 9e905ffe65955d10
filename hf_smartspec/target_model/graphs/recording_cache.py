"""Recordings by shape, and the number of runs after which a shape is recorded."""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

SIGHTINGS = 2  # runs of a shape before it is recorded
_MOST, _MOST_SHAPES = 64, 2**12  # recordings, and shapes that are counted

T = TypeVar("T")


class RecordingCache(Generic[T]):
    """The recordings that were used last, 64 at most."""

    def __init__(self) -> None:
        self._recordings: OrderedDict[Hashable, T] = OrderedDict()
        self._sightings: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._recordings)

    def get(self, shape: Hashable) -> T | None:
        """Return the shape's recording, which then counts as used last."""
        recording = self._recordings.get(shape)
        if recording is not None:
            self._recordings.move_to_end(shape)
        return recording

    def is_due(self, shape: Hashable) -> bool:
        """Count a run of a shape without a recording, and return whether the shape is to be recorded."""
        if len(self._sightings) > _MOST_SHAPES:
            self._sightings.clear()
        self._sightings[shape] += 1
        return self._sightings[shape] >= SIGHTINGS

    def add(self, shape: Hashable, recording: T) -> None:
        self._recordings[shape] = recording
        if len(self._recordings) > _MOST:
            evicted, _ = self._recordings.popitem(last=False)
            del self._sightings[evicted]

    def drop(self, shape: Hashable) -> None:
        """Drop the shape's recording, if it has one."""
        self._recordings.pop(shape, None)

    def clear(self) -> None:
        self._recordings.clear()
        self._sightings.clear()

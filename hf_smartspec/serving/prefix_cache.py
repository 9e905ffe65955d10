"""Keys and values of texts that have ended, kept as long as nobody needs their memory: new prompts may begin alike."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from ..candidates.base import TreeCandidateGenerator
from ..target.rows import CacheRow

_MIN_SHARED = 8  # tokens; below, copying is not worth the trouble


class CachedText(NamedTuple):
    """
    What a row holds: int64 tokens `[length]`, of which request, the source that may have kept something of its own
    beside (None: it has not), and whose text it is.
    """

    tokens: np.ndarray
    request_id: Hashable = None
    source: TreeCandidateGenerator | None = None
    namespace: Hashable = ""


class SharedPrefix(NamedTuple):
    """A row whose first `length` tokens are those of a prompt, and whose request's they are."""

    row: CacheRow
    length: int
    request_id: Hashable = None


class PrefixRows:
    """
    Rows of a cache whose requests have ended, with the texts that they hold; the oldest go first.

    Attributes:
        given_up (list of `CachedText`): Those that are gone, for whoever has to say so to their sources.
    """

    def __init__(self) -> None:
        self._rows: dict[CacheRow, CachedText] = {}
        self.given_up: list[CachedText] = []

    def __len__(self) -> int:
        return len(self._rows)

    def num_taken(self, longest: int) -> int:
        """Tokens of the rows' slots that are no longer than this."""
        return sum(row.stride for row in self._rows if row.stride <= longest)

    def add(self, row: CacheRow, text: CachedText) -> None:
        """Keeps a row."""
        self._rows[row] = text

    def pop(self) -> CacheRow:
        """The row that has gone unused for longest."""
        row = next(iter(self._rows))
        self._give_up([row])
        return row

    def longer_than(self, num_tokens: int) -> list[CacheRow]:
        """Gives up the rows whose slots are for more than so many tokens."""
        rows = [row for row in self._rows if row.stride > num_tokens]
        self._give_up(rows)
        return rows

    def clear(self) -> list[CacheRow]:
        rows = list(self._rows)
        self._give_up(rows)
        return rows

    def _give_up(self, rows: Iterable[CacheRow]) -> None:
        texts = [self._rows.pop(row) for row in rows]
        self.given_up += [text for text in texts if text.source is not None]

    def longest(
        self,
        prompt: np.ndarray,
        running: Iterable[tuple[CacheRow, CachedText]],
        source: TreeCandidateGenerator | None = None,
        namespace: Hashable = "",
    ) -> SharedPrefix | None:
        """
        The row, of these and of running ones with their cached texts, that shares most of a prompt's beginning; for a
        `source` that keeps something beside, of its own requests if any does. At least the prompt's last token is left
        to be fed. Rows of other namespaces are passed over: how quickly a prompt is read would tell what others asked.
        """
        best, best_rank = None, (False, 0)
        beginning = prompt[:_MIN_SHARED].tobytes()
        for row, (tokens, request_id, owner, of_whom) in [*self._rows.items(), *running]:
            if of_whom != namespace or tokens[:_MIN_SHARED].tobytes() != beginning:
                continue
            length = min(num_shared(tokens, prompt), len(prompt) - 1)
            rank = source is None or owner is source, length
            if length >= _MIN_SHARED and rank > best_rank:
                best, best_rank = SharedPrefix(row, length, request_id), rank
        if best is not None and best.row in self._rows:  # was of use: the last to go now
            self._rows[best.row] = self._rows.pop(best.row)
        return best


def num_shared(text: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(text), len(other))
    different = text[:length] != other[:length]
    return int(different.argmax()) if different.any() else length

"""Keys and values of texts that have ended, kept as long as nobody needs their memory: new prompts may begin alike."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from ...candidates.base import TreeCandidateGenerator
from ...target_model.layout.rows import CacheRow

_MIN_SHARED = 8  # tokens; below, copying is not worth the trouble (for sharing, see `shared_base`)


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
    Rows of a cache whose requests have ended, with the texts that they hold; those that were used last go last. Those
    in which others begin are not given up.

    Attributes:
        given_up (list of `CachedText`): Those that are gone, for whoever has to say so to their sources.
    """

    def __init__(self) -> None:
        self._rows: dict[CacheRow, CachedText] = {}
        self.given_up: list[CachedText] = []
        self._covered: set[CacheRow] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: CacheRow) -> bool:
        return row in self._rows

    @property
    def num_taken(self) -> int:
        """Tokens of the rows' slots."""
        return sum(row.stride for row in self._rows)

    def add(self, row: CacheRow, text: CachedText) -> None:
        """Keeps a row."""
        self._covered.update(other for other, shorter in self._rows.items() if _is_covered(shorter, text))
        self._rows[row] = text

    def covered(self) -> list[CacheRow]:
        """Rows whose texts are the beginnings of others'; each is named once."""
        rows = [row for row in self._rows if row in self._covered and not row.num_sharers]
        self._covered = {row for row in self._covered if row.num_sharers and row in self._rows}
        kept = {row: text for row, text in self._rows.items() if row not in rows}  # what covered them may be gone
        return [row for row in rows if any(_is_covered(self._rows[row], text) for text in kept.values())]

    def oldest(self) -> CacheRow | None:
        """The row that has gone unused for longest; None if others begin in all."""
        return next((row for row in self._rows if not row.num_sharers), None)

    def of_sources(self) -> list[CacheRow]:
        """The rows beside which a source has kept something of its own, the oldest first."""
        return [row for row, text in self._rows.items() if text.source is not None]

    def old(self, num_young: int, num_tokens: int) -> list[CacheRow]:
        """The rows whose slots are for more than so many tokens, but for those that were used last."""
        rows = list(self._rows)[: max(len(self) - num_young, 0)]
        return [row for row in rows if row.stride > num_tokens and not row.num_sharers]

    def all_but(self, row: CacheRow | None) -> list[CacheRow]:
        """The other rows; all if there is none such."""
        return [other for other in self._rows if other is not row and not other.num_sharers]

    def clear(self) -> list[CacheRow]:
        rows = list(self._rows)
        self.give_up(rows)
        return rows

    def give_up(self, rows: Iterable[CacheRow]) -> None:
        """Forgets rows; who has them removes them."""
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
            if source is None and best is not None and tokens[: best.length + 1][-1] != prompt[best.length]:
                continue  # shares no more than the best does
            length = min(num_shared(tokens, prompt), len(prompt) - 1)
            rank = source is None or owner is source, length
            if length >= _MIN_SHARED and rank > best_rank:
                best, best_rank = SharedPrefix(row, length, request_id), rank
        if best is not None and best.row in self._rows:  # was of use: the last to go now
            self._rows[best.row] = self._rows.pop(best.row)
        return best


def _is_covered(text: CachedText, other: CachedText) -> bool:
    """Whether whatever begins as the one begins as the other, too, and no source has kept anything of it."""
    length = len(text.tokens)
    if text.source is not None or text.namespace != other.namespace or length > len(other.tokens):
        return False
    return np.array_equal(text.tokens, other.tokens[:length])


def num_shared(text: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(text), len(other))
    different = text[:length] != other[:length]
    return int(different.argmax()) if different.any() else length

"""Keys and values of texts that have ended, kept as long as nobody needs their memory: new prompts may begin alike."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..target.layout import CacheRow

_MIN_SHARED = 8  # tokens; below, copying is not worth the trouble


class SharedPrefix(NamedTuple):
    """A row whose first `length` tokens are those of a prompt."""

    row: CacheRow
    length: int


class PrefixRows:
    """Rows of a cache whose requests have ended, with the tokens that they hold; the oldest go first."""

    def __init__(self) -> None:
        self._rows: dict[CacheRow, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: CacheRow, tokens: np.ndarray) -> None:
        """Keeps a row."""
        self._rows[row] = tokens

    def pop(self) -> CacheRow:
        """The row that has gone unused for longest."""
        row = next(iter(self._rows))
        del self._rows[row]
        return row

    def longer_than(self, num_tokens: int) -> list[CacheRow]:
        """Gives up the rows of more than so many tokens."""
        rows = [row for row in self._rows if row.length > num_tokens]
        for row in rows:
            del self._rows[row]
        return rows

    def clear(self) -> list[CacheRow]:
        rows, self._rows = list(self._rows), {}
        return rows

    def longest(self, prompt: np.ndarray, running: Iterable[tuple[CacheRow, np.ndarray]]) -> SharedPrefix | None:
        """
        The row, of these and of running ones with their cached texts, that shares most of a prompt's beginning. At
        least the prompt's last token is left to be fed.
        """
        best: SharedPrefix | None = None
        beginning = prompt[:_MIN_SHARED].tobytes()
        for row, tokens in [*self._rows.items(), *running]:
            if tokens[:_MIN_SHARED].tobytes() != beginning:
                continue
            length = min(num_shared(tokens, prompt), len(prompt) - 1)
            if length >= _MIN_SHARED and (best is None or length > best.length):
                best = SharedPrefix(row, length)
        if best is not None and best.row in self._rows:  # was of use: the last to go now
            self._rows[best.row] = self._rows.pop(best.row)
        return best


def num_shared(text: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(text), len(other))
    different = text[:length] != other[:length]
    return int(different.argmax()) if different.any() else length

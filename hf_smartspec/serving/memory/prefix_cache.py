"""Reuse of prefixes: kept rows of ended requests are copied, beginnings of running ones are shared in place."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...candidates.base import TreeCandidateGenerator
from ...decoding.call import Request
from ...target_model.layout.rows import CacheRow

_MIN_SHARED = 8  # tokens; copying fewer is not worth it (for sharing in place, see `shared_base`)
# Measured on CPUs: sharing takes two more calls in every layer, which take as long as reading this many columns.
LEAST_SAVED = 3072  # columns that are read once for several running requests
LEAST_SHARED = 256  # tokens
_STEP = 64  # lengths are multiples of it: prompts with a few more tokens in common by chance share the same length
_JOINED = 2  # weight of a beginning that other requests share already


class CachedText(NamedTuple):
    """
    The text in a row.

    Args:
        tokens (`np.ndarray`, int64): `[length]`.
        request_id (hashable): The request that the row was computed for.
        source (`TreeCandidateGenerator`, *optional*): The source that keeps states for the text, if one does.
        namespace (hashable): The namespace of the request.
        on_release (sequence of `Callable`): See `SourceRequest`.
    """

    tokens: np.ndarray
    request_id: Hashable = None
    source: TreeCandidateGenerator | None = None
    namespace: Hashable = ""
    on_release: Sequence[Callable[[], object]] = ()


class SharedPrefix(NamedTuple):
    """A row whose first `length` tokens equal a prompt's, and the request that the row was computed for."""

    row: CacheRow
    length: int
    request_id: Hashable = None


class PrefixRows:
    """
    Kept rows of ended requests with their texts, from the least to the most recently used. Rows whose beginnings other
    rows share in place are not dropped.

    Attributes:
        dropped (list of `CachedText`): Dropped texts whose sources have yet to be told to forget them.
    """

    def __init__(self) -> None:
        self._rows: dict[CacheRow, CachedText] = {}
        self.dropped: list[CachedText] = []
        self._covered: set[CacheRow] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: CacheRow) -> bool:
        return row in self._rows

    @property
    def num_taken(self) -> int:
        """Return the tokens of the rows' slots."""
        return sum(row.stride for row in self._rows)

    def add(self, row: CacheRow, text: CachedText) -> None:
        """Keep a row."""
        self._covered.update(other for other, shorter in self._rows.items() if _is_covered(shorter, text))
        self._rows[row] = text

    def touch(self, row: CacheRow) -> None:
        """Make a row, if it is kept, the most recently used one."""
        if row in self._rows:
            self._rows[row] = self._rows.pop(row)

    def covered(self) -> dict[CacheRow, CacheRow]:
        """Return rows whose texts are beginnings of other rows' texts, each with such a row; each is returned once."""
        rows = [row for row in self._rows if row in self._covered and not row.num_sharers]
        self._covered = {row for row in self._covered if row.num_sharers and row in self._rows}
        kept = {row: text for row, text in self._rows.items() if row not in rows}  # the longer row may be dropped
        found = {row: next((o for o, text in kept.items() if _is_covered(self._rows[row], text)), None) for row in rows}
        return {row: longer for row, longer in found.items() if longer is not None}

    def oldest(self) -> CacheRow | None:
        """Return the least recently used row; None if the beginnings of all rows are shared."""
        return next((row for row in self._rows if not row.num_sharers), None)

    def with_source_states(self) -> list[CacheRow]:
        """Return the rows for which a source keeps states, the least recently used first."""
        return [row for row, text in self._rows.items() if text.source is not None]

    def long_unused(self, num_recent: int, num_tokens: int) -> list[CacheRow]:
        """Return rows with slots of more than `num_tokens`, except the `num_recent` most recently used rows."""
        rows = list(self._rows)[: max(len(self) - num_recent, 0)]
        return [row for row in rows if row.stride > num_tokens and not row.num_sharers]

    def droppable_except(self, row: CacheRow | None) -> list[CacheRow]:
        """Return all rows but this one that can be dropped."""
        return [other for other in self._rows if other is not row and not other.num_sharers]

    def clear(self) -> list[CacheRow]:
        rows = list(self._rows)
        self.drop(rows)
        return rows

    def drop(self, rows: Iterable[CacheRow]) -> None:
        """Drop rows from the index; the caller removes them from the cache."""
        texts = [self._rows.pop(row) for row in rows]
        self.dropped += [text for text in texts if text.source is not None]

    def longest(
        self,
        prompt: np.ndarray,
        running: Iterable[tuple[CacheRow, CachedText]],
        source: TreeCandidateGenerator | None = None,
        namespace: Hashable = "",
        reusable: Callable[[CacheRow, int], int] = lambda row, length: length,
    ) -> SharedPrefix | None:
        """
        Return the kept or running row with the longest beginning in common with a prompt; None if all are too short.
        Rows with states of `source` are preferred, if it is given. The prompt's last token is never shared, since its
        logits are needed. Rows of other namespaces are skipped: the time to read a prompt would reveal their texts.

        Args:
            running (iterable): Rows of running requests with their texts.
            reusable (`Callable`): Returns how many of a row's first tokens another row can begin with; default: all.
        """
        best, best_rank = None, (False, 0)
        beginning = prompt[:_MIN_SHARED].tobytes()
        for row, (tokens, request_id, owner, row_namespace, _) in [*self._rows.items(), *running]:
            if row_namespace != namespace or tokens[:_MIN_SHARED].tobytes() != beginning:
                continue
            if source is None and best is not None and tokens[: best.length + 1][-1] != prompt[best.length]:
                continue  # shares no more than the best row does
            length = reusable(row, min(num_shared(tokens, prompt), len(prompt) - 1))
            rank = source is None or owner is source, length
            if length >= _MIN_SHARED and rank > best_rank:
                best, best_rank = SharedPrefix(row, length, request_id), rank
        return best


def _is_covered(text: CachedText, other: CachedText) -> bool:
    """Return whether `text` is a beginning of `other` and no source keeps states for it."""
    length = len(text.tokens)
    if text.source is not None or text.namespace != other.namespace or length > len(other.tokens):
        return False
    return np.array_equal(text.tokens, other.tokens[:length])


def num_shared(text: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common beginning of two texts."""
    length = min(len(text), len(other))
    different = text[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


class SharedBase(NamedTuple):
    """A row whose slot holds the first `length` tokens of a prompt, to be shared in place; None for no sharing."""

    row: CacheRow | None = None
    length: int = 0


def shared_base(prompt: np.ndarray, running: Iterable[Request], is_read: bool = True) -> SharedBase:
    """
    Return the row of a running request whose beginning a prompt is to share, and its length. Beginnings that other
    requests share already are preferred. The prompt's last token is never shared, since its logits are needed.

    Args:
        is_read (`bool`): Whether only tokens count that the running requests have read; else their whole prompts.
    """
    if len(prompt) <= LEAST_SHARED:
        return SharedBase()
    best, most, lengths = SharedBase(), 0, []
    for request in running:
        if (row := request.row) is None:  # an ended request that could not be removed
            continue
        known = request.prompt[: row.length] if is_read else request.prompt
        if len(known) < LEAST_SHARED or known[LEAST_SHARED - 1] != prompt[LEAST_SHARED - 1]:
            continue
        lengths.append(length := min(num_shared(known, prompt), len(prompt) - 1))
        if row.prefix_row is not None and row.prefix_len <= length:
            base, weight = SharedBase(row.prefix_row, row.prefix_len), _JOINED * row.prefix_len
        else:
            base = SharedBase(row.prefix_row or row, length // _STEP * _STEP)
            weight = base.length
        if base.length >= LEAST_SHARED and weight > most:
            best, most = base, weight
    saved = sum(min(length, best.length) for length in lengths)
    return best if saved >= LEAST_SAVED else SharedBase()

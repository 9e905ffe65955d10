"""States of rows at lengths where they were kept: a state cannot be cut to a shorter text."""

from collections import defaultdict

import numpy as np
import torch

from ..layout.rows import CacheRow

_MOST = 8  # states of a row

States = list[torch.Tensor]  # in the order of a cache's memories


class KeptStates:
    """
    States of rows after some of their first tokens, by the numbers of these. They are never changed, so that rows with
    the same beginning share them. Of more than 8 states of a row, those stay without which the most tokens would have
    to be run again, and the last ones.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[CacheRow, dict[int, States]] = defaultdict(dict)

    def __len__(self) -> int:
        """Return the number of states; those that rows share count once."""
        return len({id(states) for kept in self._rows.values() for states in kept.values()})

    def last(self, row: CacheRow, length: int) -> int:
        """Return the largest length of at most `length` tokens at which a row's states are kept; 0 if there is none."""
        return max([own for own in self._rows.get(row, ()) if own <= length], default=0)

    def at(self, row: CacheRow, length: int) -> States | None:
        return self._rows.get(row, {}).get(length)

    def add(self, row: CacheRow, length: int, states: States) -> None:
        self._rows[row][length] = states
        self._thin(row)

    def inherit(self, row: CacheRow, other: CacheRow, length: int) -> None:
        """Give a row the states of another one, whose first `length` tokens are the same."""
        self._rows[row] |= {own: states for own, states in self._rows[other].items() if own <= length}
        self._thin(row)

    def cut(self, row: CacheRow, length: int = 0) -> None:
        """Drop a row's states after more than `length` tokens."""
        left = {own: states for own, states in self._rows.pop(row, {}).items() if own <= length}
        if left:
            self._rows[row] = left

    def clear(self) -> None:
        self._rows.clear()

    def _thin(self, row: CacheRow) -> None:
        while len(self._rows[row]) > _MOST:
            lengths = sorted(self._rows[row])
            del self._rows[row][lengths[int(np.diff(lengths[:-1], prepend=0).argmin())]]

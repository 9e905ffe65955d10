"""Copies of weights, which are made anew when the weights have changed."""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Generic, TypeVar

from ...log import get_logger

logger = get_logger(__name__)

# Forwards from a change of the weights to their next copy, which pays for being made only after many forwards: more
# after every change, since weights in training change again.
_LEAST_WAIT, _MOST_WAIT = 128, 2048

T = TypeVar("T")


class KeptCopy(Generic[T]):
    """
    A copy of weights that is made at its first use, and some time after every change of theirs.

    Args:
        make (`Callable`): Returns an iterator of the copy. It may yield None first, once for each use that goes on
            without it.
        is_current (`Callable`): Returns whether a copy is of the weights as they are; if its second argument is true,
            also of those that have changed in a way that torch does not count.
        num_unread (`int`): Uses without the copy after every thorough look, before it is compared with the weights:
            fewer may save less time than that takes.

    Attributes:
        kept (*optional*): The copy; None where there is none at present.
    """

    def __init__(self, make: Callable[[], Iterator[T | None]], is_current: Callable[[T, bool], bool], num_unread: int):
        self._make, self._is_current, self._num_unread = make, is_current, num_unread
        self._lock = Lock()
        self._wait = 0  # forwards from the last change to the next copy
        self._num_left = 0  # forwards that are left until the copy is made, or compared
        self._is_doubtful = False  # whether it is to be compared
        self._making: Iterator[T | None] | None = None
        self.kept: T | None = None

    def current(self) -> T | None:
        """
        Return the copy, as it was when last looked at; None until it is made, for a while after a change, in the first
        uses after a thorough look, or where there is no memory for it.
        """
        with self._lock:
            if self._num_left:
                self._num_left -= 1
                return None
            if self._is_doubtful:
                self._compare()
            elif self.kept is None:
                try:
                    self._go_on()
                except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
                    logger.warning_once(
                        f"Weights are read as they are for a while: there is no room for a copy ({error})."
                    )
                    self._drop()  # so that it is tried again later
            return self.kept

    def _go_on(self) -> None:
        """Make the copy, or more of it."""
        was_begun = self._making is not None
        making, self._making = self._making or self._make(), None  # one that is interrupted cannot go on
        found = next(making)
        if found is None:
            self._making = making
        else:
            self._is_doubtful, self.kept = was_begun, found  # weights may have changed meanwhile
            if was_begun:
                self._compare()

    def look(self, thoroughly: bool = False) -> None:
        """Drop the copy if weights have changed by torch's count, or thoroughly if they have changed in any way."""
        with self._lock:
            if self.kept is not None and not self._is_current(self.kept, False):
                self._drop()
            if self.kept is not None and thoroughly:
                self._is_doubtful, self._num_left = True, self._num_unread
                if not self._num_unread:
                    self._compare()

    def _compare(self) -> None:
        assert self.kept is not None
        if self._is_current(self.kept, True):
            self._is_doubtful = False  # and not before, since comparing may be interrupted
        else:
            self._drop()

    def _drop(self) -> None:
        """Drop the copy, and wait for a while before the next; the lock is held."""
        self.kept, self._making, self._is_doubtful = None, None, False
        self._wait = self._num_left = min(max(2 * self._wait, _LEAST_WAIT), _MOST_WAIT)

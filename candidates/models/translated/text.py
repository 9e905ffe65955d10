"""A target's text as the draft model's tokens."""

from dataclasses import dataclass, field
from typing import NamedTuple

_KEPT = 32  # tokens of the target's, at least, that are read anew whenever some are added
_LONG = 96  # as many, and it is tried to leave all but these as they are
_TOO_LONG = 1024  # as many, and they are left in any case
_TRIES = 16  # places at which a text may be parted
_LEAD = 4  # tokens before a place, which decide how the text after it begins

BROKEN = "\ufffd"  # the first bytes of a character whose others are to come


class Reading(NamedTuple):
    """The end of a text as characters."""

    whole: str
    string: str  # without characters that are not complete

    @property
    def is_complete(self) -> bool:
        return len(self.string) == len(self.whole)


@dataclass(eq=False)
class TranslatedText:
    """
    A text in the tokens of both models, which grows at its end. Added characters may change how those before them are
    cut into tokens, so that the end is encoded anew every time.

    ```
    ids     |-- read for good --|-- window: [start, ...)         |
    tokens  |-- stay -----------|-- may change: [num_fixed, ...) |
    ```

    Args:
        tokens (list of `int`): The draft's tokens.
        num_fixed (`int`): How many of these stay.
        ids (list of `int`): The target's tokens, without those that are not text.
        start (`int`): Index in `ids` at which the window begins.
        lead (`str`): The characters of the few tokens before it.
        is_complete (`bool`): Whether the text ends with a whole character.
    """

    tokens: list[int]
    num_fixed: int
    ids: list[int] = field(default_factory=list)
    start: int = 0
    lead: str = ""
    is_complete: bool = True
    _least: int = _LONG

    @property
    def window(self) -> list[int]:
        """The tokens to be decoded, the lead included."""
        return self.ids[max(self.start - _LEAD, 0) :]

    def reading(self, decoded: str) -> Reading:
        """Return the window's characters without the lead."""
        whole = decoded[len(self.lead) :]
        return Reading(whole, whole.rstrip(BROKEN))

    def take(self, tokens: list[int], reading: Reading) -> None:
        """Set the window's tokens."""
        self.tokens[self.num_fixed :] = tokens
        self.is_complete = reading.is_complete

    @property
    def is_long(self) -> bool:
        """Return whether the window should begin later."""
        return len(self.ids) - self.start > self._least

    def possible_starts(self) -> list[int]:
        latest = len(self.ids) - _KEPT
        return list(range(latest, max(latest - _TRIES, self.start), -1))

    def lead_of(self, start: int) -> list[int]:
        return self.ids[max(start - _LEAD, 0) : start]

    def around(self, start: int) -> tuple[list[int], list[int]]:
        """
        Return the tokens to be decoded for the characters after a place: its lead, and its lead with all that follows.
        """
        return self.lead_of(start), self.ids[max(start - _LEAD, 0) :]

    def begin_at(self, start: int, lead: str, num_fixed: int) -> None:
        """Let the window begin later."""
        self.start, self.lead, self.num_fixed, self._least = start, lead, num_fixed, _LONG

    def shorten_by_force(self, lead: str, reading: Reading) -> None:
        """Begin the window at the end of a text that could not be divided anywhere, if it has become too long."""
        if len(self.ids) - self.start > _TOO_LONG and reading.is_complete:
            self.begin_at(len(self.ids), lead, len(self.tokens))
        else:
            self._least = min(2 * self._least, _TOO_LONG)

"""Streamed text: a growing list of tokens, decoded piece by piece."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # decoded from a part of a character
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text without control characters, which a model may generate and a terminal would obey."""
    return text.translate(_CONTROLS)


class Piece(NamedTuple):
    """A piece of text."""

    text: str
    source: str | None = None  # label of the source that drafted its last token; None for the target's own


class GrowingText:
    """
    Decoder of a growing list of tokens. Pieces that were returned never change, characters are whole, and stop strings
    and the text after them are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()):
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._tokens: list[int] = []
        self._from = self._to = 0  # tokens between them are decoded already, and context for those that follow
        self._held: list[Piece] = []
        self._given: list[str] = []
        self._has_ended = False

    @property
    def text(self) -> str:
        """The text of all pieces that were returned."""
        return "".join(self._given)

    def feed(self, tokens: Sequence[int], sources: Sequence[str | None] | None = None) -> list[Piece]:
        """Return the pieces that are new since the last call; `tokens` and `sources` are those of all tokens so far."""
        for index in range(len(self._tokens), len(tokens)):
            self._tokens.append(tokens[index])
            text = self._decoded()
            if text and not text.endswith(_INCOMPLETE):
                self._advance(text, sources[index] if sources else None)
        return self._release(self._num_held())

    def end(self) -> list[Piece]:
        """Return the rest: parts of characters, and text that only began like a stop string."""
        if text := self._decoded():
            self._advance(text, None)
        return self._release(0)

    def _decoded(self) -> str:
        context = self._decode(self._tokens[self._from : self._to])
        return self._decode(self._tokens[self._from :])[len(context) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _advance(self, text: str, source: str | None) -> None:
        self._from, self._to = self._to, len(self._tokens)
        if self._has_ended:
            return
        held = "".join(piece.text for piece in self._held)
        ends = [place for stop in self._stop_strings if (place := (held + text).find(stop)) >= 0]
        self._held.append(Piece(text, source))
        if ends:
            self._has_ended = True
            self._held = _first(self._held, min(ends))

    def _num_held(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        if self._has_ended or not self._stop_strings:
            return 0
        held = "".join(piece.text for piece in self._held)
        longest = min(len(held), max(map(len, self._stop_strings)) - 1)
        ends = [held[-num:] for num in range(longest, 0, -1)]
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop_strings)), 0)

    def _release(self, num_held: int) -> list[Piece]:
        num = sum(len(piece.text) for piece in self._held) - num_held
        pieces, self._held = _first(self._held, num), _after(self._held, num)
        self._given += [piece.text for piece in pieces]
        return pieces


def _first(pieces: list[Piece], num: int) -> list[Piece]:
    """Return the first `num` characters of the pieces."""
    found = []
    for piece in pieces:
        if num <= 0:
            break
        found.append(piece._replace(text=piece.text[:num]))
        num -= len(piece.text)
    return found


def _after(pieces: list[Piece], num: int) -> list[Piece]:
    """Return the pieces without their first `num` characters."""
    found = []
    for piece in pieces:
        if len(piece.text) > num:
            found.append(piece._replace(text=piece.text[max(num, 0) :]))
        num -= len(piece.text)
    return found

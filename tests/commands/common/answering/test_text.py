"""Text that grows: the same as decoded at once, whole characters, and nothing of stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.commands.common.answering.text import GrowingText, Piece
from tests.folders import byte_tokenizer

TOKENIZER = byte_tokenizer()


def grown(text, stop_strings=(), steps=1):
    """The pieces as they came, when so many tokens come at a time."""
    ids = TOKENIZER(text).input_ids
    growing = GrowingText(TOKENIZER, stop_strings)
    found = [growing.feed(ids[:end]) for end in range(steps, len(ids) + steps, steps)]
    found.append(growing.end())
    pieces = ["".join(piece.text for piece in pieces) for pieces in found]
    assert growing.text == "".join(pieces)
    return pieces


@given(st.text(max_size=12), st.integers(1, 5))
def test_it_is_the_text_whatever_comes_at_a_time(text, steps):
    assert "".join(grown(text, steps=steps)) == TOKENIZER.decode(TOKENIZER(text).input_ids)


def test_characters_come_whole():
    assert [piece for piece in grown("a€😀b") if piece] == ["a", "€", "😀", "b"]


def test_half_a_character_at_the_end_is_shown_as_such():
    growing = GrowingText(TOKENIZER)
    assert growing.feed(TOKENIZER("a€").input_ids[:-1]) == [Piece("a")]
    assert "".join(piece.text for piece in growing.end()) == "\ufffd"


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_stop_string_ends_the_text_and_is_not_shown(steps):
    assert "".join(grown("one\nUser: two", ["\nUser:", "zzz"], steps)) == "one"


@given(st.text("ab", max_size=10), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.integers(1, 3))
def test_with_stop_strings_it_is_what_stands_before_the_first(text, stops, steps):
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    want = text
    if ends:
        want = min(
            (text[: end - len(stop)] for end in ends[:1] for stop in stops if text[:end].endswith(stop)), key=len
        )
    assert "".join(grown(text, stops, steps)) == want


def test_what_only_begins_like_a_stop_string_comes_late_but_comes():
    pieces = grown("one\nUsed", ["\nUser:"])
    assert "".join(pieces) == "one\nUsed" and pieces[3:7] == ["", "", "", ""]


def test_pieces_bear_their_tokens_sources():
    ids = TOKENIZER("a€b").input_ids
    pieces = GrowingText(TOKENIZER).feed(ids, [None, "x", "x", "suffix", None])
    assert pieces == [Piece("a"), Piece("€", "suffix"), Piece("b")]

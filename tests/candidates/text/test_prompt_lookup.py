"""Prompt lookup against a twin that searches the whole text anew each time."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import PromptLookupCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text import prompt_lookup

LONGEST = 32
texts = st.lists(st.integers(0, 2), max_size=30)  # three tokens only: repetitions of all lengths


def twin(text: list[int], max_ngram: int, min_ngram: int, limit: int) -> tuple[list[int], int, int]:
    """
    Return the continuation of the latest earlier occurrence of the longest possible end of the text, its length, which
    is at most `max_ngram`, and the length of all that agrees before both.
    """
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                found = text[end : end + limit]
                while len(found) < limit:  # the text repeats itself and ends: it goes on repeating itself
                    found.append(found[end - len(text)])
                return found, length, common(text[:end], text)
    return [], 0, 0


def common(first: list[int], second: list[int]) -> int:
    """Return the number of last tokens that two texts have in common, up to `LONGEST`."""
    pairs = zip(first[: -LONGEST - 1 : -1], second[::-1])
    return sum(accumulate((a == b for a, b in pairs), min, initial=True)) - 1


@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.data())
def test_proposals_continue_the_longest_then_latest_match(text, max_ngram, min_ngram, limit, data):
    min_ngram = min(min_ngram, max_ngram)
    source = PromptLookupCandidates(max_ngram=max_ngram, min_ngram=min_ngram)
    # The text comes as a prompt and in any number of pieces behind it.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    source.start("a", np.array(pieces[0], np.int64))
    seen = list(pieces[0])
    for piece in [[], *pieces[1:]]:
        source.observe("a", np.array(piece, np.int64))
        seen += piece
        tree = source.propose(["a"], [limit])[0]
        expected, _, length = twin(seen, max_ngram, min_ngram, limit)
        assert tree.tokens.tolist() == expected
        assert tree.is_chain and tree.match_lengths == length
        np.testing.assert_allclose(tree.probs, length / (length + 1), rtol=1e-6)
        tree.check_integrity(vocab_size=3)


def test_a_small_example():
    source = PromptLookupCandidates(max_ngram=2)
    source.start("a", np.array([1, 2, 3, 4, 1, 2, 5, 9, 2]))
    assert source.propose(["a"], [3])[0].tokens.tolist() == [5, 9, 2]  # behind the latest 2 that goes on
    source.observe("a", np.array([1, 2]))
    assert source.propose(["a"], [2])[0].tokens.tolist() == [5, 9]  # behind the latest (1, 2)
    source.observe("a", np.array([7]))
    assert len(source.propose(["a"], [2])[0]) == 0  # 7 is new
    source.observe("a", np.array([7, 8, 7]))
    assert source.propose(["a"], [5])[0].tokens.tolist() == [8, 7, 8, 7, 8]  # what repeats itself goes on doing so


def assigned(source, name, references, prompt):
    source.begin(
        SourceRequest(name, np.array(prompt, np.int64), references=[np.array(text, np.int64) for text in references])
    )


@given(texts, st.lists(texts, max_size=3), st.integers(1, 4), st.integers(1, 6))
def test_references_are_searched_after_the_own_text(text, references, max_ngram, limit):
    source = PromptLookupCandidates(max_ngram=max_ngram)
    assigned(source, "a", references, text)
    expected, length, agreeing = twin(text, max_ngram, 1, limit)
    own = length
    for reference in references:
        for end in range(1, len(reference)):
            match = min(max_ngram, end, len(text))
            while match and reference[end - match : end] != text[len(text) - match :]:
                match -= 1
            # Longest first, then the own text, then the latest; continuations end where the reference does.
            is_longer, is_later = match > length, match == length and match > own
            if is_longer or is_later:
                expected, length, agreeing = reference[end : end + limit], match, common(reference[:end], text)
    tree = source.propose(["a"], [limit])[0]
    assert tree.tokens.tolist() == expected
    np.testing.assert_allclose(tree.probs, agreeing / (agreeing + 1), rtol=1e-6)


def test_references_feed_their_request_only():
    source = PromptLookupCandidates()
    reference = [np.array([5, 6, 7, 8])]
    for name in ("a", "b"):  # as the rows of a call, which share them
        source.begin(SourceRequest(name, np.array([1, 6]), references=reference))
    assigned(source, "c", [[6, 9]], [6])
    source.start("d", np.array([6]))
    trees = source.propose(["a", "b", "c", "d"], [9] * 4)
    assert [tree.tokens.tolist() for tree in trees] == [[7, 8], [7, 8], [9], []]
    source.observe("a", np.array([7]))
    source.stop("b")
    assert source.propose(["a"], [9])[0].tokens.tolist() == [8]
    source.stop("a")
    source.start("a", np.array([6]))
    assert len(source.propose(["a"], [9])[0]) == 0


def test_references_are_indexed_once_as_long_as_they_exist(monkeypatch):
    """Also where the first rows of a call end before its others begin."""
    indexed, extend = [], prompt_lookup._References.__init__

    def counting(self, max_ngram, texts):
        indexed.append(texts)
        extend(self, max_ngram, texts)

    monkeypatch.setattr(prompt_lookup._References, "__init__", counting)
    source, references = PromptLookupCandidates(), [np.array([5, 6, 7, 8]), np.array([6, 9])]
    for name in "abc":
        source.begin(SourceRequest(name, np.array([1, 6]), references=references))
        assert source.propose([name], [1])[0].tokens.tolist() == [9]
        source.stop(name)
    assert len(indexed) == 1
    indexed.clear()
    del references[0]
    assert not source._references, "of texts that exist no more, nothing is kept"


def test_of_many_choices_among_texts_that_live_the_least_recently_used_are_dropped(monkeypatch):
    texts = [np.array([5, 6, 10 + number]) for number in range(6)]
    monkeypatch.setattr(prompt_lookup, "_MOST_INDEXED", 3 * 8)  # two texts and their borders are eight tokens
    source = PromptLookupCandidates()
    pairs = [(0, 1), (0, 2), (0, 3), (0, 1), (0, 4)]
    for pair in pairs:
        source.begin(SourceRequest(pair, np.array([1, 6]), references=[texts[number] for number in pair]))
    kept = [(id(texts[first]), id(texts[second])) for first, second in [(0, 3), (0, 1), (0, 4)]]
    assert list(source._references) == kept
    trees = source.propose(pairs[:3], [1] * 3)
    assert [tree.tokens.tolist() for tree in trees] == [[11], [12], [13]], "running requests keep theirs"
    long = [np.array([5, 6, 7] * 9)]
    source.begin(SourceRequest("long", np.array([1, 6]), references=long))
    assert [len(item.tokens) for item in source._references.values()] == [28]


def test_references_are_not_mixed_up_with_later_ones():
    """The caller's list changes, so that another text may come to lie where the first one lay."""
    source, references = PromptLookupCandidates(), [np.array([5, 6, 7, 8])]
    source.begin(SourceRequest("a", np.array([1, 6]), references=references))
    references.clear()
    for k in range(20):
        source.begin(SourceRequest(k, np.array([1, 6]), references=[np.array([5, 6, 20 + k, 8])]))
        matrix = np.array([[5, 6, 50 + k, 8]])  # whose rows are made when asked for
        source.begin(SourceRequest(("matrix", k), np.array([1, 6]), references=matrix))
    names = ["a", *range(20), *(("matrix", k) for k in range(20))]
    trees = source.propose(names, [1] * 41)
    assert [tree.tokens.tolist() for tree in trees] == [
        [7],
        *([20 + k] for k in range(20)),
        *([50 + k] for k in range(20)),
    ]


def test_no_match_crosses_from_one_reference_to_the_next():
    source = PromptLookupCandidates(max_ngram=2)
    assigned(source, "a", [[1, 2], [3, 4], [2]], [2, 3])
    assert source.propose(["a"], [5])[0].tokens.tolist() == [4]
    assigned(source, "b", [[1, 2], [3, 4]], [2])
    assert len(source.propose(["b"], [5])[0]) == 0


def test_requests_do_not_see_one_anothers_texts():
    source = PromptLookupCandidates()
    source.start("a", np.array([1, 2, 1]))
    source.start("b", np.array([3, 4, 1]))
    trees = source.propose(["b", "a"], [5, 2])
    assert [tree.tokens.tolist() for tree in trees] == [[], [2, 1]]
    source.stop("a")
    source.stop("never started")
    assert source.propose(["b"], [5])[0].tokens.tolist() == []


def test_a_name_can_be_used_again():
    source = PromptLookupCandidates()
    source.start("a", np.array([1, 2, 1]))
    source.stop("a")
    source.start("a", np.array([5, 1]))
    assert len(source.propose(["a"], [5])[0]) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"max_ngram": 0}, "max_ngram"),
        ({"min_ngram": -1}, "min_ngram"),
        ({"max_ngram": 2.5}, "2.5"),
        ({"max_ngram": 2, "min_ngram": 3}, "3 > 2"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        PromptLookupCandidates(**arguments)


def find_candidate_pred_tokens(text: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """Prompt lookup decoding by its published code: windows from the left, the longest n-grams first."""
    for length in range(max_ngram, 0, -1):
        for index in range(len(text) - length + 1):
            start = index + length
            if text[index:start] == text[-length:] and start + num_tokens <= len(text) and start < len(text) - length:
                return text[start : start + num_tokens]
    return []


@given(texts, st.integers(1, 4), st.integers(1, 8))
def test_published_proposals_are_those_of_the_published_code(text, max_ngram, num_tokens):
    """Saxena, 2023: `find_candidate_pred_tokens`."""
    source = PromptLookupCandidates.published(num_tokens, max_ngram)
    source.start("a", np.array(text[:4], np.int64))
    source.observe("a", np.array(text[4:], np.int64))
    expected = find_candidate_pred_tokens(text, max_ngram, num_tokens)
    assert source.propose(["a"], [num_tokens])[0].tokens.tolist() == expected
    assert source.propose(["a"], [20])[0].tokens.tolist() == expected
    assert source.propose(["a"], [2])[0].tokens.tolist() == expected[:2]

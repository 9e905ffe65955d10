"""Texts read in the tokens of another tokenizer, piece by piece, and scores in another vocabulary."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hf_smartspec.candidates.models.translated import text as reading
from hf_smartspec.candidates.models.translated.translation import Translation

from ....covering import examples
from .pairs import TEXTS, TOKENIZERS, byte_level, character_tokenizer, sentence_piece

PAIRS = [(one, other) for one in TOKENIZERS for other in TOKENIZERS if one != other]


def between(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast, padding: int = 0) -> Translation:
    return Translation(one, other, len(one) + padding, len(other) + padding)


def ids_of(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int64)


def in_pieces(translation: Translation, ids: np.ndarray, sizes):
    """The text as it stands behind every piece."""
    sizes = iter(sizes)
    first = next(sizes)
    text = translation.begin(ids[:first])
    translation.read([text])
    yield text
    for size in sizes:
        if first >= len(ids):
            return
        translation.extend(text, ids[first : first + size])
        first += size
        translation.read([text])
        yield text


def as_in_bytes(name: str) -> str:
    """A token that begins with a space."""
    return f"Ġ{name[1:]}" if name.startswith("▁") else name


words = st.lists(st.sampled_from([*" ".join(TEXTS).split(), "日", "🙂", "xyzzy"]), min_size=1, max_size=12).map(
    " ".join
)


@pytest.mark.parametrize(("one", "other"), PAIRS)
@settings(max_examples=examples(20))
@given(words, st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_a_text_in_pieces_reads_as_the_whole(one, other, string, sizes):
    target, draft = TOKENIZERS[one](), TOKENIZERS[other]()
    translation, ids = between(target, draft), ids_of(target, string)
    num = 0
    for text in in_pieces(translation, ids, sizes):
        num += 1
        shown = target.decode(text.ids)
        assert text.is_complete == (not shown.endswith("\ufffd"))
        assert text.tokens == draft(shown.rstrip("\ufffd")).input_ids
    assert target.decode(text.ids) == target.decode(ids) and num > 0


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_long_texts_are_read_from_near_their_end(one, other, monkeypatch):
    monkeypatch.setattr(reading, "_TOO_LONG", 300)
    target, draft = TOKENIZERS[one](), TOKENIZERS[other]()
    string = " ".join(TEXTS[number % 3] + str(number) for number in range(30))
    ids = ids_of(target, string)
    widest = 0
    for text in in_pieces(between(target, draft), ids, np.random.default_rng(0).integers(1, 7, len(ids))):
        widest = max(widest, len(text.ids) - text.start)
    assert widest <= 310 < len(ids) / 2
    seams = 0 if other != "pieces" else len(ids) // 300  # a space that is put before every text is seen
    assert draft.decode(text.tokens, skip_special_tokens=True).count(" ") <= string.count(" ") + seams
    assert draft.decode(text.tokens, skip_special_tokens=True).replace(" ", "") == string.replace(" ", "")
    if other != "pieces":
        assert text.tokens == draft(string).input_ids


def test_a_prompt_that_is_long_is_read_whole_once():
    target, draft = byte_level(), byte_level(300)
    translation, ids = between(target, draft), ids_of(byte_level(), " ".join(TEXTS * 20))
    text = translation.begin(ids)
    translation.read([text])
    assert text.tokens == draft(" ".join(TEXTS * 20)).input_ids
    assert len(ids) - text.start < 60


def test_special_tokens_that_the_draft_has_not_are_left_out():
    target, draft = byte_level(), sentence_piece()
    user, end = target.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    text = between(target, draft, padding=3).begin(np.array([user, *ids_of(target, "the fox"), end, len(target) + 1]))
    between(target, draft, padding=3).read([text])
    assert text.tokens == [*draft("the fox").input_ids, draft.convert_tokens_to_ids("<|end|>")]


def test_the_beginning_of_a_text_is_marked_once():
    target, draft = sentence_piece(), byte_level()
    for one, other in ((target, draft), (draft, target), (target, target)):
        text = between(one, other).begin(np.array(one("the fox").input_ids))
        between(one, other).read([text])
        assert text.tokens == other("the fox").input_ids


def test_nothing_reads_as_nothing():
    translation = between(byte_level(), byte_level(300))
    text = translation.begin(np.empty(0, np.int64))
    translation.read([text])
    assert text.tokens == [] and text.is_complete


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_scores_are_those_of_tokens_of_one_text(one, other):
    target, draft = TOKENIZERS[one](), TOKENIZERS[other]()
    translation = between(target, draft, padding=5)
    logits = torch.randn(2, len(draft) + 5)
    scores, restricted = translation.scores(logits), translation.restricted(logits)
    names = {as_in_bytes(name): number for name, number in draft.get_vocab().items()}
    expected = torch.full((2, len(target) + 5), -torch.inf)
    known = torch.zeros(len(draft) + 5, dtype=torch.bool)
    for name, number in target.get_vocab().items():
        match = names.get(as_in_bytes(name))
        if match is not None:
            expected[:, number], known[match] = logits[:, match], True
            assert translation._draft_ids[np.array([number])].tolist() == [match]
            assert translation.draft_ids(torch.tensor([[number]])).tolist() == [[match]]
            assert translation.to_target(np.array([match])).tolist() == [number]
        else:
            assert translation._draft_ids[np.array([number])].tolist() == [-1]
    assert torch.equal(scores, expected) and translation.num_shared == int(known.sum()) > 50
    assert torch.equal(restricted, torch.where(known, logits, -torch.inf))


def test_models_with_fewer_tokens_than_their_tokenizers():
    """A draft whose head was cut has no score for the rest."""
    target, draft = byte_level(), byte_level(300)
    translation = Translation(target, draft, 280, 290)
    assert translation.scores(torch.zeros(1, 290)).shape == (1, 280)
    assert 250 < translation.num_shared <= 280


def test_tokenizers_without_a_common_token_are_refused():
    one, other = character_tokenizer("abc"), character_tokenizer("xyz")
    other.get_vocab = lambda: {"x": 0, "y": 1, "z": 2}
    with pytest.raises(ValueError, match="no token in common"):
        Translation(one, other, 4, 4)


def test_a_translation_is_for_targets_of_one_size():
    with pytest.raises(ValueError, match=r"vocabulary of 7 tokens.*for one of 500"):
        Translation(byte_level(), byte_level(300), 500, 300).check_fit(7)


def test_the_callers_tokenizer_may_be_used_and_changed_meanwhile():
    """What it is told to pad or cut off, or which tokens it gets, is nothing to texts that are translated."""
    target, draft = byte_level(), copy.deepcopy(sentence_piece())
    translation, ids = between(target, draft), ids_of(byte_level(), TEXTS[0])
    before = [text.tokens.copy() for text in in_pieces(translation, ids, [20] * 9)]
    draft.add_tokens(["quick", "lazy dog"])
    assert [text.tokens.copy() for text in in_pieces(translation, ids, [20] * 9)] == before

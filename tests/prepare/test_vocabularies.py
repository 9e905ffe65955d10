"""Padding is told from another tokenizer, by the tokenizers where there are some, else by the sizes."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_smartspec.candidates.vocabulary import SharedVocabulary
from hf_smartspec.prepare import vocabularies
from hf_smartspec.prepare.vocabularies import shared_vocabulary

from ..generate.helpers import tiny_llama


def saved(folder, model, tokens: list[str] | None):
    """The model as it is loaded from a folder, beside a tokenizer of these tokens."""
    folder.mkdir()
    model.save_pretrained(folder)
    if tokens is not None:
        backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return type(model).from_pretrained(folder)


def pair(tmp_path, sizes: tuple[int, int], tokens=(None, None)):
    return [
        saved(tmp_path / name, tiny_llama(vocab_size=size), line)
        for name, size, line in zip(("draft", "target"), sizes, tokens)
    ]


WORDS = [f"t{number}" for number in range(300)]
OTHERS = [f"t{(7 * number) % 300}" for number in range(300)]


def test_one_size_is_one_vocabulary(tmp_path):
    assert shared_vocabulary(*pair(tmp_path, (40, 40))) is None


@pytest.mark.parametrize("sizes", [(1516, 1520), (1520, 1516), (1000, 1010)])
def test_sizes_that_differ_by_little_are_padding(tmp_path, sizes):
    assert shared_vocabulary(*pair(tmp_path, sizes)) == SharedVocabulary(*sizes)


@pytest.mark.parametrize("tokens", [(None, None), (WORDS, None), (None, WORDS)])
def test_sizes_that_differ_by_more_are_not(tmp_path, tokens):
    draft, target = pair(tmp_path, (320, 400), tokens)
    with pytest.raises(ValueError, match="of 320 tokens and the target one of 400, which is more than padding"):
        shared_vocabulary(draft, target)


@pytest.mark.parametrize("sizes", [(300, 512), (512, 300), (310, 320)])
@pytest.mark.parametrize("added", [[], ["added", "later"]])
def test_tokenizers_that_agree_are_one(tmp_path, sizes, added):
    draft, target = pair(tmp_path, sizes, (WORDS, WORDS + added))
    assert shared_vocabulary(draft, target) == SharedVocabulary(*sizes)


def test_tokenizers_that_differ_are_two_whatever_the_sizes(tmp_path):
    draft, target = pair(tmp_path, (1000, 1001), (WORDS * 2, WORDS))  # too small to be these models' own
    assert shared_vocabulary(draft, target) == SharedVocabulary(1000, 1001)
    (tmp_path / "more").mkdir()
    draft, target = pair(tmp_path / "more", (400, 401), (WORDS, OTHERS))
    with pytest.raises(ValueError, match=r"and the tokenizers beside them differ.*assistant='prompt_lookup'"):
        shared_vocabulary(draft, target)


def test_tokenizers_are_read_once_as_long_as_sizes_stay(tmp_path, monkeypatch):
    draft, target = pair(tmp_path, (300, 512), (WORDS, WORDS))
    read, find = [], vocabularies._vocabulary
    monkeypatch.setattr(vocabularies, "_vocabulary", lambda model: read.append(model) or find(model))
    for _ in range(3):
        shared_vocabulary(draft, target)
    assert read == [draft, target]
    draft.resize_token_embeddings(301)
    assert shared_vocabulary(draft, target) == SharedVocabulary(301, 512)
    assert len(read) == 4

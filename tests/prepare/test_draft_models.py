"""Padding is told from another tokenizer, by the tokenizers where there are some, else by the sizes."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_smartspec import DraftModelCandidates
from hf_smartspec.candidates.models.draft_model import SharedVocabulary
from hf_smartspec.candidates.models.translated.source import TranslatedDraftCandidates
from hf_smartspec.candidates.models.translated.translation import Translation
from hf_smartspec.prepare import draft_models
from hf_smartspec.prepare.draft_models import Tokenizers, vocabulary_between
from hf_smartspec.prepare.sources import resolve

from ..generate.helpers import tiny_llama


def tokenizer_of(tokens: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def saved(folder, model, tokens: list[str] | None):
    """The model as it is loaded from a folder, beside a tokenizer of these tokens."""
    folder.mkdir()
    model.save_pretrained(folder)
    if tokens is not None:
        tokenizer_of(tokens).save_pretrained(folder)
    return type(model).from_pretrained(folder)


def pair(tmp_path, sizes: tuple[int, int], tokens=(None, None)):
    return [
        saved(tmp_path / name, tiny_llama(vocab_size=size), line)
        for name, size, line in zip(("draft", "target"), sizes, tokens)
    ]


WORDS = [f"t{number}" for number in range(300)]
OTHERS = [f"t{(7 * number) % 300}" for number in range(300)]


def test_one_size_is_one_vocabulary(tmp_path):
    assert vocabulary_between(*pair(tmp_path, (40, 40))) is None


@pytest.mark.parametrize("sizes", [(1516, 1520), (1520, 1516), (1000, 1010)])
def test_sizes_that_differ_by_little_are_padding(tmp_path, sizes):
    assert vocabulary_between(*pair(tmp_path, sizes)) == SharedVocabulary(*sizes)


@pytest.mark.parametrize("tokens", [(None, None), (WORDS, None), (None, WORDS)])
def test_sizes_that_differ_by_more_are_not(tmp_path, tokens):
    draft, target = pair(tmp_path, (320, 400), tokens)
    with pytest.raises(ValueError, match="of 320 tokens and the target one of 400, which is more than padding"):
        vocabulary_between(draft, target)


@pytest.mark.parametrize("sizes", [(300, 512), (512, 300), (310, 320)])
@pytest.mark.parametrize("added", [[], ["added", "later"]])
def test_tokenizers_that_agree_are_one(tmp_path, sizes, added):
    draft, target = pair(tmp_path, sizes, (WORDS, WORDS + added))
    assert vocabulary_between(draft, target) == SharedVocabulary(*sizes)


@pytest.mark.parametrize("sizes", [(400, 401), (300, 512), (512, 300)])
def test_tokenizers_that_differ_are_two_whatever_the_sizes(tmp_path, sizes):
    found = vocabulary_between(*pair(tmp_path, sizes, (WORDS, OTHERS)))
    assert isinstance(found, Translation) and found.num_shared == 300


def test_tokenizers_that_are_too_small_are_not_the_models_own(tmp_path):
    draft, target = pair(tmp_path, (1000, 1001), (WORDS, OTHERS))
    assert vocabulary_between(draft, target) == SharedVocabulary(1000, 1001)


@pytest.mark.parametrize("sizes", [(300, 300), (300, 512)])
def test_tokenizers_that_are_given_count(tmp_path, sizes):
    models = pair(tmp_path, sizes, (WORDS, WORDS))
    words, others = tokenizer_of(WORDS), tokenizer_of(OTHERS)
    shared = SharedVocabulary(*sizes) if sizes[0] != sizes[1] else None
    assert vocabulary_between(*models, Tokenizers(words, words)) == shared
    assert vocabulary_between(*models, Tokenizers(None, words)) == shared
    found = vocabulary_between(*models, Tokenizers(words, others))
    assert isinstance(found, Translation) and found.assistant_tokenizer.get_vocab() == others.get_vocab()
    assert found.assistant_tokenizer is not others, "which may be at work in another thread"
    assert vocabulary_between(*models, Tokenizers(words, others)) is found, "made once"
    assert isinstance(vocabulary_between(*models, Tokenizers(None, others)), Translation)
    assert vocabulary_between(*models, Tokenizers(others, None)) is None or sizes[0] != sizes[1]


def test_a_draft_that_was_made_for_the_targets_own_tokens_is_refused(tmp_path):
    draft, target = pair(tmp_path, (300, 512), (WORDS, OTHERS))
    with pytest.raises(ValueError, match="drafts in its own tokens, and the target has another tokenizer"):
        resolve(DraftModelCandidates(draft), target)
    assert isinstance(resolve(draft, target).source, TranslatedDraftCandidates)


def test_tokenizers_are_read_once_as_long_as_sizes_stay(tmp_path, monkeypatch):
    draft, target = pair(tmp_path, (300, 512), (WORDS, WORDS))
    read, find = [], draft_models._tokenizer_beside
    monkeypatch.setattr(draft_models, "_tokenizer_beside", lambda model: read.append(model) or find(model))
    for _ in range(3):
        vocabulary_between(draft, target)
    assert read == [draft, target]
    draft.resize_token_embeddings(301)
    assert vocabulary_between(draft, target) == SharedVocabulary(301, 512)
    assert len(read) == 4

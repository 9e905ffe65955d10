"""Drafts in tokens of another tokenizer against plain forwards over the text encoded anew, and generation with them."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

import hf_smartspec
from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.candidates.models.translated.source import TranslatedDraftCandidates
from hf_smartspec.candidates.models.translated.translation import Translation
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.goodput import FixedLength
from hf_smartspec.sampling.noise import add_gumbel_noise

from ....cases import left_padded
from ....generate.helpers import noisy_copy, tiny_llama
from ....models import new_model
from ....serving.helpers import TIMEOUT, Asked
from ....strategies import path_to
from ..checks import look_at_the_end, next_scores
from .pairs import CHARACTERS, TEXTS, byte_level, character_tokenizer, other_characters, sentence_piece, with_tokens_of

TARGET, DRAFT = character_tokenizer(CHARACTERS), character_tokenizer(other_characters())
TOKENIZERS = {"tokenizer": TARGET, "assistant_tokenizer": DRAFT}
SIZE, DRAFT_SIZE = len(TARGET) + 2, len(DRAFT) + 8  # padded
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0}
PROMPTS = [[5, 9, 5, 9, 5], [len(TARGET) - 1, 11], [3, 4, 30, 6, 7, 8]]


# --- Drafts -----------------------------------------------------------------------------------------------------------


class Reference:
    """What a draft should be: the model run over the whole text as its tokenizer cuts it, and over the draft."""

    def __init__(self, model, translation: Translation, target, draft):
        self.model, self.translation, self.target, self.draft = model, translation, target, draft

    def scores(self, text: list[int], path: list[int], processors=(), seed=None, position=0) -> torch.Tensor:
        """In the target's vocabulary, behind a draft of the target's tokens."""
        own = self.draft(self.target.decode(text)).input_ids
        nodes = self.translation._draft_ids[np.array(path, np.int64)].tolist()
        assert min(nodes, default=0) >= 0, "a token that the draft does not have"
        scores = self.translation.scores(next_scores(self.model, own + nodes)[None])
        scores = LogitsProcessorList(processors)(None, scores)
        return scores if seed is None else add_gumbel_noise(scores, [seed], [position])


def check_tree(reference: Reference, tree, text: list[int], width: int, **noise) -> None:
    assert len(tree) > 0
    position = noise.pop("position", 0)
    for node in range(-1, len(tree)):
        children = np.flatnonzero(tree.parents == node)
        if len(children):
            path = tree.tokens[path_to(tree, node)].tolist()
            scores = reference.scores(text, path, position=position + len(path), **noise)[0]
            best = scores.topk(width).indices.tolist()
            assert [token in best for token in tree.tokens[children].tolist()] == [True] * len(children)
            np.testing.assert_allclose(tree.probs[children], scores.softmax(0)[tree.tokens[children]], rtol=2e-3)


TOKENIZER_PAIRS = {
    "characters": (TARGET, DRAFT),
    "bytes": (byte_level(500), byte_level(300)),
    "more bytes": (byte_level(300), byte_level(500)),
    "from pieces": (sentence_piece(), byte_level(400)),
    "to pieces": (byte_level(400), sentence_piece()),
}


WAYS = {
    "chain": ("llama", 1, 5, False),
    "tree": ("llama", 3, None, False),
    "chain at once": ("gemma2", 1, None, True),
    "tree at once": ("llama", 2, 5, True),
    "row by row": ("bloom", 1, None, False),
}


@pytest.mark.parametrize("pair", TOKENIZER_PAIRS)
@pytest.mark.parametrize("way", WAYS)
def test_shared_tokens_follow_the_text_whatever_was_accepted(pair, way, monkeypatch):
    """Also where what is added joins what was there, so that the draft has to forget tokens that it had run."""
    architecture, width, seed, at_once = WAYS[way]
    if at_once:
        look_at_the_end(monkeypatch)
    target, draft = TOKENIZER_PAIRS[pair]
    model = new_model(architecture, vocab_size=len(draft) + 3)
    translation = Translation(target, draft, len(target) + 2, len(draft) + 3)
    reference, processors = Reference(model, translation, target, draft), [hf.TemperatureLogitsWarper(0.8)]
    source = TranslatedDraftCandidates(model, translation, width=width, reencodes=False)
    texts, num_generated = {}, {}
    rng = np.random.default_rng(width)
    material = target("thequickbrownfox12ü" if pair == "characters" else TEXTS[0], add_special_tokens=False).input_ids
    for name, length in (("a", 9), ("b", 3), ("c", 20)):
        texts[name], num_generated[name] = material[:length], 0
        source.begin(SourceRequest(name, np.array(texts[name]), processors=LogitsProcessorList(processors), seed=seed))
    options = {} if seed is None else {"processors": processors, "seed": seed}
    num_drafted = 0
    for step in range(6):
        names = [name for name in texts if rng.random() < 0.7]
        for name, tree in zip(names, source.propose(names, [6] * len(names))):
            is_broken = target.decode(texts[name]).endswith("\ufffd")
            assert (len(tree) == 0) == is_broken
            if not is_broken:
                check_tree(reference, tree, texts[name], width, position=num_generated[name], **options)
                num_drafted += 1
            path = path_to(tree, int(rng.integers(-1, len(tree))))
            tokens = [*tree.tokens[path].tolist(), material[(len(texts[name]) + step) % len(material)]]
            source.observe(name, np.array(tokens))
            texts[name] += tokens
            num_generated[name] += len(tokens)
            if rng.random() < 0.3:  # not every step is drafted for
                source.observe(name, np.array([material[step]]))
                texts[name].append(material[step])
                num_generated[name] += 1
        if step == 4:
            source.weights_version += 1
    assert num_drafted > 6
    for name in texts:
        source.stop(name)
    assert source._forward is None


def test_half_a_character_is_waited_for(monkeypatch):
    target, draft = byte_level(300), sentence_piece()
    source = TranslatedDraftCandidates(
        new_model("llama", vocab_size=len(draft)), Translation(target, draft, len(target), len(draft))
    )
    first, *rest = target("🙂", add_special_tokens=False).input_ids
    source.start("a", np.array([*target("so").input_ids, first]))
    for token in rest:
        assert len(source.propose(["a"], [4])[0]) == 0
        source.observe("a", np.array([token]))
    assert len(source.propose(["a"], [4])[0]) == 4


def test_a_prompt_that_stands_for_no_text_is_waited_for():
    target, draft = byte_level(300), character_tokenizer("abc ")
    source = TranslatedDraftCandidates(
        new_model("llama", vocab_size=len(draft)), Translation(target, draft, len(target), len(draft))
    )
    source.start("a", np.array(target("<|user|>").input_ids))
    assert len(source.propose(["a"], [4])[0]) == 0
    source.observe("a", np.array(target("a").input_ids))
    assert len(source.propose(["a"], [4])[0]) > 0


# --- Generation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny_llama(vocab_size=SIZE, eos_token_id=None)


@pytest.fixture(scope="module")
def draft(target):
    return with_tokens_of(noisy_copy(target), TARGET, DRAFT, DRAFT_SIZE)


KINDS = {
    "chain": lambda draft: draft,
    "tree": lambda draft: SmartSpecConfig(draft, num_nodes=12, width=3),
    "named here": lambda draft: SmartSpecConfig(draft, policy=FixedLength(4), **TOKENIZERS),
    "stages": lambda draft: SmartSpecConfig(["suffix", draft], num_nodes=8),
    "source": lambda draft: TranslatedDraftCandidates(draft, Translation(TARGET, DRAFT, SIZE, DRAFT_SIZE), width=2),
}


@pytest.mark.parametrize(
    "settings", [{}, SAMPLING, SAMPLING | {"top_p": 0.9, "top_k": 9}], ids=["greedy", "sampled", "top"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(target, draft, kind, settings):
    arguments = {"max_new_tokens": 20, "pad_token_id": 0} | settings | ({"seed": 3} if settings else {})
    given = {} if kind in ("named here", "source") else TOKENIZERS
    with hf_smartspec.enabled(target):
        expected = target.generate(**left_padded(PROMPTS), **arguments, assistant="none")
        actual = target.generate(**left_padded(PROMPTS), **arguments, **given, assistant=KINDS[kind](draft))
        statistics = target.smartspec_statistics.last
    assert torch.equal(actual, expected)
    assert statistics.accepted_tokens > 15


@pytest.mark.parametrize("settings", [{}, SAMPLING | {"seed": 2}], ids=["greedy", "sampled"])
def test_every_draft_is_right_where_the_models_are_one(target, settings):
    """A model that knows all of the target's tokens, under other ids, sees the same scores and the same noise."""
    # Where it drafts any of its tokens, none must be one that the target, which is never wrong, does not know.
    tokenizer = character_tokenizer("".join(reversed(CHARACTERS + ("ABC" if settings else ""))))
    draft = with_tokens_of(target, TARGET, tokenizer, len(tokenizer))
    with hf_smartspec.enabled(target):
        texts = target.generate(
            **left_padded([[5, 6, 7], [8, 9]]),
            max_new_tokens=21,
            pad_token_id=0,
            tokenizer=TARGET,
            assistant_tokenizer=tokenizer,
            assistant=SmartSpecConfig(draft, num_nodes=4),
            suppress_tokens=[0, 1, SIZE - 1, SIZE - 2],  # which end the text, or stand for none
            **settings,
        )
        statistics = target.smartspec_statistics.last
    assert texts.shape == (2, 24) and statistics.accepted_tokens == statistics.drafted_tokens == 32


@pytest.mark.parametrize("pair", ["bytes", "from pieces", "to pieces"])
@pytest.mark.parametrize("settings", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_tokens_that_join_others_change_nothing(pair, settings):
    one, other = TOKENIZER_PAIRS[pair]
    target = tiny_llama(vocab_size=len(one), eos_token_id=None)
    draft = tiny_llama(seed=1, vocab_size=len(other))
    prompts = [one(text, add_special_tokens=False).input_ids[:12] for text in TEXTS]
    arguments = {"max_new_tokens": 24, "pad_token_id": 0, "seed": 8} | settings
    with hf_smartspec.enabled(target):
        expected = target.generate(**left_padded(prompts), **arguments, assistant="none")
        given = {"tokenizer": one, "assistant_tokenizer": other, "assistant": SmartSpecConfig(draft, width=2)}
        actual = target.generate(**left_padded(prompts), **arguments, **given)
        assert target.smartspec_statistics.last.drafted_tokens > 20
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("settings", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_verification_by_rejection(target, draft, settings):
    config = SmartSpecConfig(draft, verification="rejection", num_nodes=4)
    with hf_smartspec.enabled(target):
        texts = target.generate(
            **left_padded(PROMPTS),
            max_new_tokens=16,
            pad_token_id=0,
            assistant=config,
            seed=1,
            **settings,
            **TOKENIZERS,
        )
        statistics = target.smartspec_statistics.last
    assert int(texts.max()) < SIZE
    assert 5 < statistics.accepted_tokens < statistics.drafted_tokens


@pytest.mark.parametrize("given_to", ["engine", "config", "request"])
def test_requests_of_an_engine(target, draft, given_to):
    asked = [Asked(prompt, {"max_new_tokens": 12} | settings, seed) for prompt, (settings, seed) in
             zip(PROMPTS, [({}, None), (SAMPLING, 5), ({}, None)])]  # fmt: skip
    assistant = {"engine": draft, "config": SmartSpecConfig(draft, **TOKENIZERS), "request": "prompt_lookup"}[given_to]
    of_engine = TOKENIZERS if given_to == "engine" else {"tokenizer": TARGET}
    of_request = {"assistant": draft, "assistant_tokenizer": DRAFT} if given_to == "request" else {}
    with Engine(target, assistant, **of_engine) as engine:
        names = [engine.add_request(item.prompt, **item.arguments, **of_request) for item in asked]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        assert len(engine._preparing.drafters) <= 1, "requests share the draft model's forwards"
    for item, output in zip(asked, outputs):
        assert output.generated_tokens == item.alone(target)
    assert sum(output.statistics.accepted_tokens for output in outputs) > 5


def test_drafts_for_targets_that_run_row_by_row():
    target = new_model("bloom", vocab_size=SIZE)
    draft = with_tokens_of(target, TARGET, DRAFT, DRAFT_SIZE)
    with hf_smartspec.enabled(target):
        expected = target.generate(**left_padded(PROMPTS), max_new_tokens=12)
        actual = target.generate(**left_padded(PROMPTS), max_new_tokens=12, assistant=draft, **TOKENIZERS)
        assert target.smartspec_statistics.last.accepted_tokens > 0
    assert torch.equal(actual, expected)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refused(target, match: str, error=ValueError, **kwargs) -> None:
    with hf_smartspec.enabled(target), pytest.raises(error, match=match):
        target.generate(**left_padded(PROMPTS), max_new_tokens=4, **kwargs)


def test_refusals(target, draft):
    source = hf_smartspec.DraftModelCandidates(draft)
    only_draft = {"assistant_tokenizer": DRAFT}
    translated = TranslatedDraftCandidates(draft, Translation(TARGET, DRAFT, SIZE - 1, DRAFT_SIZE))
    refused(target, r"tokenizer is not stored beside it\. Pass both", assistant=draft, **only_draft)
    refused(target, "Pass both tokenizers, `tokenizer=` and `assistant_tokenizer=`", assistant=draft)
    refused(target, "Pass both tokenizers", assistant=source)
    refused(target, "`assistant_tokenizer` has an effect on draft models only", assistant="suffix", **TOKENIZERS)
    refused(target, "`assistant_tokenizer` has an effect on draft models only", assistant=[source], **TOKENIZERS)
    refused(target, "vocabulary of 42 tokens, and the `Translation` is for one of 41", assistant=translated)
    refused(
        target, "`assistant_tokenizer` must be", TypeError, assistant=draft, tokenizer=TARGET, assistant_tokenizer="a"
    )
    with Engine(target, "none") as engine, pytest.raises(ValueError, match="needs an `assistant`: pass"):
        engine.add_request([3, 4], max_new_tokens=2, assistant_tokenizer=DRAFT)

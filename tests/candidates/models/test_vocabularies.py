"""Draft models whose vocabulary is the target's but for its size: padded more, or less."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as hf

import hf_smartspec
from hf_smartspec import DraftModelCandidates, Engine, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.candidates import FusedCandidates, StagedCandidates
from hf_smartspec.candidates.models.draft_model import SharedVocabulary
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.sampling.noise import add_gumbel_noise

from ...cases import left_padded
from ...generate.helpers import check_same, noisy_copy, tiny_llama
from ...models import VOCAB_SIZE, new_model
from ...serving.helpers import TIMEOUT, Asked
from .checks import next_scores, sharp_model, start

SIZE = 1000
SIZES = pytest.mark.parametrize("draft_size", [SIZE - 8, SIZE + 8], ids=["smaller", "larger"])
PROMPTS = [[5, 9, 5, 9, 5], [SIZE - 1, SIZE - 7], [3, 4, SIZE - 3, 6, 7, 8]]  # with tokens that a smaller draft lacks
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0}


def with_vocabulary(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """The model with embeddings of another size; new ones are as large as the others, so that they would be picked."""
    old = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if size > old:
            module.weight.data[old:].normal_(std=float(module.weight.detach().std()), generator=generator)
    assert model.config.vocab_size == size
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(vocab_size=SIZE, eos_token_id=None, initializer_range=0.5)


@pytest.fixture
def draft(target, draft_size):
    return with_vocabulary(noisy_copy(target), draft_size)


KINDS = {
    "chain": lambda draft: draft,
    "tree": lambda draft: SmartSpecConfig(draft, num_nodes=12, width=3),
    "source": DraftModelCandidates,
    "stages": lambda draft: SmartSpecConfig(["suffix", draft], num_nodes=8),
    "stages that were made": lambda draft: StagedCandidates([SuffixTreeCandidates(), DraftModelCandidates(draft)]),
    "fused": lambda draft: FusedCandidates([SuffixTreeCandidates(), DraftModelCandidates(draft)]),
}


WAYS = {"greedy": {}, "sampled": SAMPLING | {"seed": 3}, "top_p": SAMPLING | {"seed": 3, "top_p": 0.9}}


@pytest.fixture(scope="module")
def plain(target):
    """What plain decoding says, by way."""
    inputs = left_padded(PROMPTS) | {"max_new_tokens": 20, "pad_token_id": 0}
    with hf_smartspec.enabled(target):
        return {way: target.generate(**inputs, **settings, assistant="none") for way, settings in WAYS.items()}


@SIZES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(target, draft, plain, kind, way):
    inputs = left_padded(PROMPTS) | {"max_new_tokens": 20, "pad_token_id": 0}
    with hf_smartspec.enabled(target):
        actual = target.generate(**inputs, **WAYS[way], assistant=KINDS[kind](draft))
        statistics = target.smartspec_statistics.last
    assert torch.equal(actual, plain[way])
    assert statistics.accepted_tokens > 10


@SIZES
def test_every_draft_is_right_where_the_models_are_one(target, draft_size):
    """Greedy and sampled: the same scores and the same noise, and nothing of the padding is proposed."""
    draft = with_vocabulary(noisy_copy(target, scale=0.0), draft_size)
    for settings in ({}, SAMPLING | {"seed": 5, "top_k": 40, "top_p": 0.95}):
        with hf_smartspec.enabled(target):
            texts = target.generate(
                **left_padded([[15, 16, 17], [18, 19]]),
                max_new_tokens=21,
                pad_token_id=0,
                assistant=SmartSpecConfig(draft, num_nodes=4),
                **settings,
            )
            statistics = target.smartspec_statistics.last
        assert int(texts.max()) < min(draft_size, SIZE), "the example has tokens that the draft cannot know"
        assert statistics.accepted_tokens == statistics.drafted_tokens == 32


@SIZES
def test_requests_of_an_engine(target, draft):
    asked = [Asked(prompt, {"max_new_tokens": 12} | settings, seed) for prompt, (settings, seed) in
             zip(PROMPTS, [({}, None), (SAMPLING, 5), ({}, None)])]  # fmt: skip
    with Engine(target, draft) as engine:
        names = [engine.add_request(item.prompt, **item.arguments) for item in asked]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for item, output in zip(asked, outputs):
        assert output.generated_tokens == item.alone(target)
    assert sum(output.statistics.accepted_tokens for output in outputs) > 0


@SIZES
@pytest.mark.parametrize("settings", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_verification_by_rejection(target, draft, settings):
    """Distributions have the target's size; how they are used is tested where vocabularies are alike."""
    config = SmartSpecConfig(draft, verification="rejection", num_nodes=4)
    with hf_smartspec.enabled(target):
        texts = target.generate(
            **left_padded(PROMPTS), max_new_tokens=16, pad_token_id=0, assistant=config, seed=1, **settings
        )
        statistics = target.smartspec_statistics.last
    assert int(texts.max()) < SIZE
    assert 5 < statistics.accepted_tokens < statistics.drafted_tokens


@SIZES
def test_row_by_row(draft_size):
    """Drafts that cannot be packed, and targets."""
    target = new_model("bloom", vocab_size=SIZE)
    draft = with_vocabulary(noisy_copy(target), draft_size)
    check_same(target, left_padded(PROMPTS) | {"max_new_tokens": 12}, source=shared(draft, target))


def shared(draft, target) -> DraftModelCandidates:
    return DraftModelCandidates(draft, vocabulary=SharedVocabulary(draft.config.vocab_size, target.config.vocab_size))


@SIZES
def test_drafts_see_the_targets_noise_and_processors(target, draft, way):
    """Token for token what the draft would generate of the tokens that both have."""
    processors = [
        hf.TemperatureLogitsWarper(0.7),
        hf.SuppressTokensLogitsProcessor([3, 4, SIZE - 1]),
        hf.TopKLogitsWarper(50),
    ]
    source, text = shared(draft, target), [5, 6, 7]
    source.begin(SourceRequest("a", np.array(text), processors=LogitsProcessorList(processors), seed=77))
    tokens = source.propose(["a"], [6])[0].tokens.tolist()
    for position, token in enumerate(tokens):
        scores = LogitsProcessorList(processors)(None, next_scores(draft, text)[None, :SIZE])
        whole = torch.full((1, SIZE), -torch.inf)
        whole[:, : scores.shape[1]] = scores
        assert token == int(add_gumbel_noise(whole, [77], [position]).argmax())
        text.append(token)


def test_the_text_is_read_without_unknown_tokens(way):
    model = sharp_model()
    sources = [DraftModelCandidates(model, vocabulary=SharedVocabulary(VOCAB_SIZE, VOCAB_SIZE + 9)) for _ in range(2)]
    start(sources[0])
    start(sources[1])
    rng = np.random.default_rng(0)
    for step in range(8):
        trees = [source.propose(["a", "c"], [4, 4]) for source in sources]
        for name, tree, other in zip("ac", *trees):
            assert tree.tokens.tolist() == other.tokens.tolist() and len(tree) == 4
            tokens = [*tree.tokens[: rng.integers(4)].tolist(), int(rng.integers(VOCAB_SIZE))]
            sources[0].observe(name, np.array(tokens))
            unknown = VOCAB_SIZE + step
            # Where nothing but an unknown token came, nothing has come.
            for part in {0: [[unknown], [*tokens, unknown]], 1: [[*tokens, unknown], [unknown]]}.get(
                step % 3, [tokens]
            ):
                sources[1].observe(name, np.array(part))


def test_a_prompt_of_nothing_but_unknown_tokens(target):
    draft = with_vocabulary(noisy_copy(target), SIZE - 8)
    with hf_smartspec.enabled(target):
        expected = target.generate(**left_padded([[SIZE - 1] * 3]), max_new_tokens=8)
        actual = target.generate(**left_padded([[SIZE - 1] * 3]), max_new_tokens=8, assistant=draft)
        assert target.smartspec_statistics.last.drafted_tokens > 0
    assert torch.equal(actual, expected)


def test_a_source_that_serves_one_target_is_refused_for_another():
    source = DraftModelCandidates(sharp_model())
    source.serve(SharedVocabulary(VOCAB_SIZE, VOCAB_SIZE + 1))
    start(source)
    source.serve(SharedVocabulary(VOCAB_SIZE, VOCAB_SIZE + 1))
    with pytest.raises(ValueError, match="another vocabulary at present"):
        source.serve(None)
    for name in "abc":
        source.stop(name)
    source.serve(None)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 50), st.booleans())
def test_tokens_that_both_have_get_the_same_noise(draft_size, target_size, seed, position, is_whole):
    logits = torch.randn(2, draft_size, generator=torch.Generator().manual_seed(seed))
    scores = SharedVocabulary(draft_size, target_size).scores(logits, is_whole)
    both = min(draft_size, target_size)
    assert scores.shape[1] == (target_size if is_whole else both)
    assert torch.equal(scores[:, :both], logits[:, :both]) and bool((scores[:, both:] == -torch.inf).all())
    wide = torch.full((2, 300), -torch.inf)
    wide[:, :both] = logits[:, :both]
    noisy, expected = (add_gumbel_noise(item, [seed, seed + 1], [position] * 2) for item in (scores, wide))
    assert torch.equal(noisy[:, :both], expected[:, :both])


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 60))
def test_what_a_draft_knows_of_a_text(tokens, size):
    known = SharedVocabulary(size, 61).known(np.array(tokens, np.int64))
    assert known == [token for token in tokens if token < size]

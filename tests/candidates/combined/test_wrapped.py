"""transformers' candidate generators in our engine, and our sources in transformers' loop."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import AssistedCandidateGenerator, CandidateGenerator, PromptLookupCandidateGenerator

import hf_smartspec
from hf_smartspec import DraftModelCandidates, PromptLookupCandidates
from hf_smartspec.candidates import WrappedCandidates

from ...cases import left_padded
from ...models import noisy_model, shared_model
from ...sources import Oracle, Random, Recording, WithDecoys

INPUTS = left_padded([[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 3, 4]])
LENGTH = 24


def assisted(draft, num_tokens: int = 4) -> AssistedCandidateGenerator:
    """transformers' own drafting with a model, as its loop would build it."""
    config = GenerationConfig(
        max_length=LENGTH + 8, min_length=0, num_assistant_tokens=num_tokens, num_assistant_tokens_schedule="constant"
    )
    draft.generation_config.num_assistant_tokens = num_tokens
    draft.generation_config.assistant_confidence_threshold = 0.0
    return AssistedCandidateGenerator(
        input_ids=INPUTS["input_ids"][:1],
        assistant_model=draft,
        generation_config=config,
        model_kwargs={},
        logits_processor=LogitsProcessorList(),
    )


class Telling(CandidateGenerator):
    """Drafts what it is told and notes what it hears."""

    def __init__(self, draft: list[int]):
        self.draft, self.heard = draft, []

    def get_candidates(self, input_ids):
        draft = torch.tensor([self.draft])
        return torch.cat([input_ids, draft], dim=1), torch.zeros(1, len(self.draft), 97)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.heard = [*self.heard, (input_ids.tolist(), scores.shape[1], num_matches)]


@pytest.mark.parametrize("name", ["prompt lookup", "draft model"])
def test_generators_of_transformers_serve_batches(name, deprecated_by_itself):
    model = shared_model("llama")
    if name == "prompt lookup":
        generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=99)
    else:
        generator = assisted(noisy_model("llama", seed=0))
    expected = model.generate(**INPUTS, max_new_tokens=LENGTH)
    recording = Recording(WrappedCandidates(generator))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**INPUTS, max_new_tokens=LENGTH, assistant=recording), expected)
        direct = model.generate(**INPUTS, max_new_tokens=LENGTH, assistant=generator, return_dict_in_generate=True)
    assert not recording.errors
    assert recording.drafted > 0 and recording.accepted > 0
    assert torch.equal(direct.sequences, expected) and direct.statistics.accepted_tokens > 0


class _Kept(dict):
    """Remembers what is taken out."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def pop(self, key, default=None):
        self.kept += [self[key]] if key in self else []
        return super().pop(key, default)


def test_generators_are_told_what_was_accepted():
    generator = Telling([7, 8, 9])
    wrapped = WrappedCandidates(generator)
    wrapped.start("a", np.array([1, 2]))
    for accepted, tokens in ((2, [7, 8, 5]), (0, [4]), (3, [7, 8, 9, 1]), (1, [7])):
        assert wrapped.propose(["a"], [3])[0].tokens.tolist() == [7, 8, 9]
        wrapped.observe("a", np.array(tokens))
        ids, num_scores, num_matches = wrapped._sequences["a"].generator.heard[-1]
        assert ids[0][-len(tokens) :] == tokens and num_scores == 1 + 3 and num_matches == accepted
    assert ids[0] == [1, 2, 7, 8, 5, 4, 7, 8, 9, 1, 7]


def test_requests_have_generators_of_their_own():
    generator = Telling([7])
    wrapped = WrappedCandidates(generator)
    wrapped.start("a", np.array([1]))
    wrapped.start("b", np.array([2]))
    wrapped.propose(["a", "b"], [3, 3])
    wrapped.observe("a", np.array([5]))
    assert len(wrapped._sequences["a"].generator.heard) == 1
    assert not wrapped._sequences["b"].generator.heard and not generator.heard
    for name in ("a", "b", "never started"):
        wrapped.stop(name)
    assert not wrapped._sequences


def test_no_more_is_proposed_than_was_asked_for():
    wrapped = WrappedCandidates(Telling([7, 8, 9]))
    wrapped.start("a", np.array([1]))
    assert wrapped.propose(["a"], [2])[0].tokens.tolist() == [7, 8]


def test_schedules_of_transformers_go_by_what_was_verified(deprecated_by_itself):
    """Drafts grow by two where all of them came true, and shrink by one where not, as in transformers' own loop."""
    model = shared_model("llama")

    def lengths(draft) -> list[int]:
        """The generators' own numbers of tokens at their requests' ends."""
        generator = assisted(draft)
        generator.assistant_generation_config.num_assistant_tokens_schedule = "heuristic"
        wrapped = WrappedCandidates(generator)
        wrapped._sequences = _Kept()
        with hf_smartspec.enabled(model):
            model.generate(**INPUTS, max_new_tokens=LENGTH, assistant=wrapped)
        return [sequence.generator.num_assistant_tokens for sequence in wrapped._sequences.kept]

    assert min(lengths(shared_model("llama"))) >= 4 + 2 * 2
    assert max(lengths(shared_model("llama", seed=5))) < 4


def test_generators_that_need_more_than_hidden_states_are_refused():
    generator = Telling([7])
    generator.requires_model_outputs = True
    generator.model_kwargs_overrides = {"output_hidden_states": True, "return_shared_kv_states": True}
    with pytest.raises(ValueError, match=r"Telling needs \['return_shared_kv_states'\]"):
        WrappedCandidates(generator)
    generator.model_kwargs_overrides = {"output_hidden_states": True}
    assert (
        WrappedCandidates(generator, num_layers=2).follows_target and not WrappedCandidates(Telling([7])).follows_target
    )
    generator.model_kwargs_overrides = {"output_hidden_states": [1]}
    with pytest.raises(ValueError, match="num_layers"):
        WrappedCandidates(generator)


# --- The other way round: transformers' loop asks our sources for the best chain --------------------------------------


def sources(expected):
    return {
        "lookup": PromptLookupCandidates(),
        "chain": DraftModelCandidates(noisy_model("llama")),
        "tree": DraftModelCandidates(noisy_model("llama"), width=3, num_nodes=9),
        "random": Random(0, is_tree=True),
        "oracle with decoys": WithDecoys(Oracle([expected[0].tolist()]), seed=0),
    }


@pytest.mark.parametrize("name", ["lookup", "chain", "tree", "random", "oracle with decoys"])
def test_sources_work_in_transformers_own_loop(name, monkeypatch):
    model = shared_model("llama")
    one = {"input_ids": torch.tensor([[5, 9, 5, 9, 5]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    expected = model.generate(**one, max_new_tokens=LENGTH)
    source = Recording(sources(expected)[name])
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: source, raising=False)
    actual = model.generate(**one, max_new_tokens=LENGTH, prompt_lookup_num_tokens=3)  # which sends it there
    assert torch.equal(actual, expected)
    assert source.drafted > 0
    if name in ("chain", "tree", "oracle with decoys"):
        assert source.accepted > 0


def test_another_text_begins_a_new_request():
    source = PromptLookupCandidates(num_tokens=3)

    def drafted(*text: int) -> list[int]:
        candidates, scores = source.get_candidates(torch.tensor([text]))
        assert candidates[0, : len(text)].tolist() == list(text) and scores is None
        return candidates[0, len(text) :].tolist()

    assert drafted(1, 2, 3, 1) == [2, 3, 1]
    assert drafted(1, 2, 3, 1, 7) == []  # goes on
    assert drafted(1, 2, 3, 1, 7, 2) == [3, 1, 7]
    assert drafted(4, 5, 6, 7, 4) == [5, 6, 7]  # another text
    assert drafted(4, 5) == []  # taken back


def test_a_batch_is_refused_as_transformers_knows_none():
    with pytest.raises(ValueError, match="batch of 2"):
        PromptLookupCandidates().get_candidates(torch.ones(2, 3, dtype=torch.long))

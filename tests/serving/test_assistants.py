"""Drafters of requests in an engine: their own or the engine's, and shared draft models."""

import gc

import pytest
import torch
from transformers import GenerationConfig

from hf_smartspec import DraftModelCandidates, Engine, SmartSpecConfig
from hf_smartspec.goodput import FixedLength

from ..generate.helpers import noisy_copy, tiny_llama
from .helpers import TIMEOUT, Asked

LENGTH = 9


@pytest.fixture
def model():
    return tiny_llama(eos_token_id=None)


@pytest.fixture
def draft(model):
    return noisy_copy(model)


def sources_of(engine: Engine, *assistants) -> list[DraftModelCandidates]:
    """The draft models of requests that are there at the same time."""
    ids, kwargs = torch.tensor([[3, 4]]), {"max_new_tokens": 3}
    calls = [engine._preparing.call_of(ids, assistant, None, kwargs) for assistant in assistants]
    stages = [stage for call in calls for stage in call.chain.sources]
    return [stage for stage in stages if isinstance(stage, DraftModelCandidates)]


CHOICES = {
    "model": lambda draft, path: draft,
    "name": lambda draft, path: path,
    "config": lambda draft, path: SmartSpecConfig(draft, num_nodes=3),
    "list": lambda draft, path: ["suffix", draft],
    "list of names": lambda draft, path: SmartSpecConfig(["prompt_lookup", path]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_requests_that_draft_alike_share_a_source(model, draft, tmp_path, name):
    draft.save_pretrained(tmp_path)
    engine = Engine(model, "none")
    first, second = sources_of(engine, *[CHOICES[name](draft, str(tmp_path)) for _ in range(2)])
    assert first is second


def test_the_engines_own_draft_model_is_shared_too(model, draft):
    engine = Engine(model, SmartSpecConfig(draft, num_nodes=3))
    own, bare, staged, wide = sources_of(engine, None, draft, ["suffix", draft], SmartSpecConfig(draft, width=2))
    assert own is bare is staged and own is not wide


def test_sampled_drafts_have_a_source_of_their_own(model, draft):
    coupled, sampled, again = sources_of(
        Engine(model, "none"), draft, *[SmartSpecConfig(draft, verification="rejection") for _ in range(2)]
    )
    assert sampled is again is not coupled and sampled.samples and not coupled.samples


def test_requests_that_share_a_draft_model_share_its_forwards(model, draft):
    fed, prompts = [], [[3, 4, 5 + place] for place in range(4)]
    choices = [draft, SmartSpecConfig(draft, num_nodes=3), SmartSpecConfig(draft, num_nodes=3), None]
    with Engine(model, draft, max_batch_size=4) as engine:
        source = engine._assistant.source
        propose = source.propose
        source.propose = lambda names, *args, **kwargs: fed.append(len(names)) or propose(names, *args, **kwargs)
        with engine.pause():
            names = [
                engine.add_request(prompt, assistant=choice, max_new_tokens=LENGTH)
                for prompt, choice in zip(prompts, choices)
            ]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for prompt, output in zip(prompts, outputs):
        assert output.generated_tokens == Asked(prompt, {"max_new_tokens": LENGTH}).alone(model)
        assert output.statistics.accepted_tokens > 0
    assert max(fed) == 4


def test_draft_models_of_requests_that_have_ended_are_let_go(model, draft):
    with Engine(model, draft) as engine:
        for _ in range(3):
            name = engine.add_request([3, 4], assistant=noisy_copy(model), max_new_tokens=3)
            assert engine.get_result(name, timeout=TIMEOUT).statistics.drafted_tokens > 0
        engine.generate([[5, 6]], max_new_tokens=2)  # what the thread has held of the last one
        gc.collect()
        assert len(engine._preparing.drafters) == 1


@pytest.mark.parametrize("own", ["prompt_lookup", "draft", "config"])
def test_numbers_of_assistant_tokens_are_bounds_of_requests(model, draft, own):
    assistant = {"draft": draft, "config": SmartSpecConfig(draft, policy=FixedLength(4))}.get(own, own)
    engine = Engine(model, assistant)
    for choice in (None, draft, "suffix"):
        for kwargs in ({"num_assistant_tokens": 2}, {"generation_config": GenerationConfig(num_assistant_tokens=2)}):
            assert engine._preparing.call_of(torch.tensor([[3, 4]]), choice, None, kwargs).max_nodes == 2
        assert engine._preparing.call_of(torch.tensor([[3, 4]]), choice, None, {}).max_nodes != 2
    with pytest.raises(ValueError, match="num_nodes"):
        engine.add_request([3], assistant=SmartSpecConfig(draft), num_assistant_tokens=2)


def test_a_bound_on_assistant_tokens_holds(model, draft):
    with Engine(model, SmartSpecConfig(draft, num_nodes=5)) as engine:
        name = engine.add_request([3, 4], num_assistant_tokens=1, max_new_tokens=LENGTH)
        output = engine.get_result(name, timeout=TIMEOUT)
    assert output.generated_tokens == Asked([3, 4], {"max_new_tokens": LENGTH}).alone(model)
    assert 0 < output.statistics.accepted_tokens <= output.statistics.drafted_tokens <= output.statistics.steps


def test_a_requests_config_is_taken_at_its_word(model, draft, tmp_path):
    """Whatever the model's own says, which says nothing to an engine: that has an assistant of its own."""
    draft.save_pretrained(tmp_path)
    name = str(tmp_path)
    engine = Engine(model, "none")
    for of_model in (None, name, "suffix"):
        model.generation_config.assistant = of_model
        for config, drafts in ((GenerationConfig(assistant=name), True), (GenerationConfig(), False), (None, False)):
            call = engine._preparing.call_of(torch.tensor([[3, 4]]), None, None, {"generation_config": config})
            assert isinstance(call.source, DraftModelCandidates) == drafts

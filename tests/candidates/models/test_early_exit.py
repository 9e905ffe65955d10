"""The target's first layers as its draft: on its own keys and values, and with the tokens of plain decoding."""

import logging

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import hf_smartspec
from hf_smartspec import EarlyExitCandidates, Engine, PromptLookupCandidates, RoutedCandidates, SmartSpecConfig
from hf_smartspec.candidates import FusedCandidates
from hf_smartspec.candidates.models import growing
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.prepare.sources import Drafters, resolve
from hf_smartspec.target_model.cache.slot_cache import SlotCache
from hf_smartspec.target_model.drafters import early_exit
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import written_decoder

from ...generate.helpers import prompts
from ...models import RECURRENT, new_model, shared_model

LENGTHS = (9, 5, 12)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "seed": 3, "temperature": 0.7}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


def knowing(name, num_layers=1):
    """A target whose first layers know it all: the others add nothing."""
    model = new_model(name)
    with torch.no_grad():
        for layer in model.get_decoder().layers[num_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def generated(model, assistant, **settings):
    with hf_smartspec.enabled(model):
        output = model.generate(**prompts(LENGTHS), assistant=assistant, **settings)
        return output, model.smartspec_statistics.last


class Spy:
    """What the first layers and the whole model are fed, by the order of calls."""

    def __init__(self, monkeypatch):
        self.short, self.whole = [], []
        own = PackedForward.run

        def run(forward, planned):
            kind = self.short if isinstance(forward, early_exit.EarlyExitForward) else self.whole
            kind.append(sum(len(item.feed) for item in planned.rows))
            return own(forward, planned)

        monkeypatch.setattr(PackedForward, "run", run)


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "smollm3"])
def test_outputs_are_those_of_plain_decoding(name, way, width):
    model = shared_model(name)
    nodes = None if width is None else 6
    plain, _ = generated(model, "none", **WAYS[way])
    output, statistics = generated(model, SmartSpecConfig("early_exit:1", width=width, num_nodes=nodes), **WAYS[way])
    assert torch.equal(output, plain)
    if nodes:
        assert statistics.drafted_tokens > 0


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_the_first_layers_know_is_accepted(name, settings):
    model = knowing(name)
    plain, _ = generated(model, "none", **settings)
    output, statistics = generated(model, SmartSpecConfig("early_exit:1", num_nodes=4), **settings)
    assert torch.equal(output, plain)
    # One step for the first token; then five tokens each, the last of them perhaps cut off.
    assert statistics.accepted_tokens >= 0.9 * statistics.drafted_tokens > 0
    assert statistics.steps <= len(LENGTHS) * (1 + -(-23 // 5))


def test_nothing_of_the_text_is_run_twice(monkeypatch):
    spy = Spy(monkeypatch)
    _, statistics = generated(knowing("llama"), SmartSpecConfig("early_exit:1", num_nodes=4), **GREEDY)
    assert sum(spy.whole) >= sum(LENGTHS)
    # Of every row, a draft reads the one token that the target has not run yet.
    assert max(spy.short) == len(LENGTHS) and sum(spy.short) <= statistics.steps


@pytest.mark.parametrize("is_free", [True, False], ids=["by level", "at once"])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_memory_is_the_targets_own_and_no_more_than_that(monkeypatch, width, is_free):
    """Also where waits for a device are to be saved. A slot of 96 tokens is what such a request just needs."""
    monkeypatch.setattr(growing, "waits_are_free", lambda device: is_free)
    model, moved, own = knowing("llama"), [], SlotCache._enlarge
    settings = GenerationConfig(**GREEDY | {"max_new_tokens": 40})
    prompt = prompts((40,))["input_ids"].tolist()

    def enlarge(cache, capacities):
        moved.append(capacities)
        own(cache, capacities)

    with Engine(model, assistant="none") as engine:
        plain = engine.generate(prompt, generation_config=settings)[0].generated_tokens
    monkeypatch.setattr(SlotCache, "_enlarge", enlarge)
    with Engine(model, assistant=SmartSpecConfig("early_exit:1", width=width, num_nodes=24)) as engine:
        output = engine.generate(prompt, generation_config=settings)[0]
    assert output.generated_tokens == plain and not moved
    assert output.statistics.accepted_tokens > 10


def test_it_agrees_with_a_model_of_these_layers():
    model = new_model("llama", num_hidden_layers=3)
    drafts = []
    source = EarlyExitCandidates(model, 2, num_nodes=3, width=1)
    own = source.propose

    def propose(names, *args, **kwargs):
        trees = own(names, *args, **kwargs)
        drafts.extend((list(source._states[name].tokens), tree.tokens) for name, tree in zip(names, trees))
        return trees

    source.propose = propose
    generated(model, SmartSpecConfig(source, num_nodes=3), **GREEDY)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    drafts = [(text, tokens) for text, tokens in drafts if len(tokens)]
    assert len(drafts) > 20
    for text, tokens in drafts:
        ids = torch.tensor([[*text, *tokens]])
        picked = model(ids).logits[0, len(text) - 1 : -1].argmax(-1)
        assert picked.tolist() == tokens.tolist()


def test_in_an_engine_with_reused_prefixes():
    model = knowing("llama")
    long = range(3, 20)
    asked = [[*long], [*long, 30, 31], [40, 41, 42], [*long, 30, 31, 32]]
    settings = GenerationConfig(**GREEDY)
    with Engine(model, assistant="none") as engine:
        plain = [item.generated_tokens for item in engine.generate(asked, generation_config=settings)]
    with Engine(model, assistant=SmartSpecConfig("early_exit:1", num_nodes=4), max_batch_size=2) as engine:
        outputs = [item.generated_tokens for item in engine.generate(asked, generation_config=settings)]
        again = [item.generated_tokens for item in engine.generate(asked, generation_config=settings)]
        statistics = engine.statistics
    assert outputs == plain and again == plain
    assert statistics.accepted_tokens > 0.8 * statistics.drafted_tokens > 0


@pytest.mark.parametrize("is_forever", [False, True])
def test_a_failure_in_the_middle_of_a_draft_changes_nothing(monkeypatch, is_forever):
    model = knowing("llama")
    plain, _ = generated(model, "none", **GREEDY)
    own, own_propose = early_exit.EarlyExitForward.run, EarlyExitCandidates.propose
    calls, states = [], []

    def run(forward, planned):
        calls.append(planned)
        if len(calls) == 6 or (is_forever and len(calls) > 6):  # in the second level of the second draft
            raise RuntimeError("no more")
        return own(forward, planned)

    def propose(source, names, *args, **kwargs):
        rows = [source._states[name].row for name in names]
        before = [(row.length, row.num_nodes) for row in rows]
        try:
            return own_propose(source, names, *args, **kwargs)
        finally:
            states.append(before == [(row.length, row.num_nodes) for row in rows])

    monkeypatch.setattr(early_exit.EarlyExitForward, "run", run)
    monkeypatch.setattr(EarlyExitCandidates, "propose", propose)
    output, statistics = generated(model, SmartSpecConfig("early_exit:1", num_nodes=4), **GREEDY)
    assert torch.equal(output, plain) and statistics.accepted_tokens > 0
    assert len(states) > 2 and all(states)


def test_a_model_that_is_hooked_meanwhile_goes_on_without_drafts():
    model = knowing("llama")
    plain, _ = generated(model, "none", **GREEDY)
    source = EarlyExitCandidates(model, 1)
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    assert written_decoder(model) is None
    output, statistics = generated(model, SmartSpecConfig(source, num_nodes=4), **GREEDY)
    handle.remove()
    assert torch.equal(output, plain) and statistics.drafted_tokens == 0


def many(make):
    """Sources that consist of others, one of which are the first layers."""
    return {
        "a list": lambda model: ["suffix", "early_exit:1"],
        "routed": lambda model: RoutedCandidates({"a": "early_exit:1", "b": "suffix"}, lambda prompt: "a"),
        "fused": lambda model: FusedCandidates([PromptLookupCandidates(), EarlyExitCandidates(model, 1)]),
    }[make]


@pytest.mark.parametrize("make", ["a list", "routed", "fused"])
def test_beside_other_sources(monkeypatch, caplog, make):
    spy, model = Spy(monkeypatch), knowing("llama")
    plain, _ = generated(model, "none", **GREEDY)
    output, statistics = generated(model, SmartSpecConfig(many(make)(model), num_nodes=4), **GREEDY)
    assert torch.equal(output, plain) and statistics.accepted_tokens > 0
    assert spy.short and not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_source_drafts_for_one_engine_or_call_at_a_time():
    model = shared_model("llama")
    source, first, second = EarlyExitCandidates(model, 1), PackedForward(model), PackedForward(model)
    one, other = (
        SourceRequest(name, np.array([3, 4]), forward=forward, row=forward.add())
        for name, forward in (("a", first), ("b", second))
    )
    source.begin(one)
    with pytest.raises(ValueError, match="another engine or call"):
        source.begin(other)
    source.stop("a")
    source.begin(other)
    with pytest.raises(ValueError, match="packed forwards only"):
        source.begin(SourceRequest("c", np.array([3, 4]), forward=object(), row=first.add()))
    with pytest.raises(ValueError, match="beside its target only"):
        source.start("d", np.array([3, 4]))


def test_rejection_sampling():
    model = knowing("llama")
    config = SmartSpecConfig("early_exit:1", num_nodes=3, verification="rejection")
    _, statistics = generated(model, config, **SAMPLED)
    assert statistics.accepted_tokens == statistics.drafted_tokens > 0  # both have the same distribution


def test_requests_of_one_engine_draft_together():
    model, drafters = shared_model("llama"), Drafters()
    first, second = (resolve("early_exit:1", model, drafters).source for _ in range(2))
    assert first is second and resolve("early_exit:1", model).source is not first


@pytest.mark.parametrize("name", ["early_exit:", "early_exit:x", "early_exit:0", "early_exit:2", "early_exit:-1"])
def test_numbers_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match="layers"):
        resolve(name, shared_model("llama"))


def test_targets_that_it_does_not_fit_are_refused():
    with pytest.raises(ValueError, match="first layers of"):
        resolve("early_exit:1", shared_model("gpt_bigcode"))
    for name in {"lfm2", "qwen3_5_text"} & RECURRENT.keys():
        with pytest.raises(ValueError, match="some have states"):
            resolve("early_exit:1", shared_model(name))
    source = EarlyExitCandidates(shared_model("llama"), 1)
    with pytest.raises(ValueError, match="made with only"):
        resolve(source, shared_model("qwen3"))
    with pytest.raises(TypeError, match="PreTrainedModel"):
        EarlyExitCandidates("llama", 1)


def test_by_itself_it_says_what_it_needs():
    source = EarlyExitCandidates(shared_model("llama"), 1)
    with pytest.raises(ValueError, match="beside its target only"):
        source.start("a request", np.array([3, 4]))
    with pytest.raises(ValueError, match="beside its target only"):
        source.get_candidates(torch.tensor([[3, 4]]))

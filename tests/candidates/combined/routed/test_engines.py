"""Engines with several drafters: requests come and go, sample, begin alike, and drafters' weights change meanwhile."""

import threading

import pytest
import torch

from hf_smartspec import Engine, RoutedCandidates, SmartSpecConfig

from ....generate.helpers import noisy_copy, prompts, tiny_llama, tiny_tokenizer
from ....serving.helpers import TIMEOUT, Asked, all_alone, random_requests
from ...heads.fitted import fitted_eagle, fitted_heads

GREEDY = {"max_new_tokens": 20}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(eos_token_id=None)


@pytest.fixture
def drafters(model):
    texts = model.generate(**prompts([12] * 12), **GREEDY)
    return {
        "model": noisy_copy(model),
        "other": noisy_copy(model, 0.05, seed=3),
        "eagle": fitted_eagle(model, texts),
        "medusa": fitted_heads(model, texts),
        "list": ["prompt_lookup", noisy_copy(model, seed=5)],
    }


def served(routed):
    return {name: found.requests for name, found in routed.statistics().items() if found.requests}


@pytest.mark.parametrize("beside", [[], ["suffix"]])
@pytest.mark.parametrize("num_nodes", [3, pytest.param(None, marks=pytest.mark.adaptive)])
def test_requests_that_come_and_go_get_the_tokens_of_plain_generate(model, drafters, beside, num_nodes):
    """Of all kinds, sampled ones among them, from two threads; most are named a drafter."""
    routed = RoutedCandidates(drafters)
    requests = random_requests(40)
    tags = [[*drafters, "?", None][index % 7] for index in range(len(requests))]
    names: dict[int, str] = {}
    config = SmartSpecConfig([*beside, routed] if beside else routed, num_nodes=num_nodes)
    with Engine(model, config, max_batch_size=6, max_prefill_tokens=16) as engine:

        def add(first):
            for index in range(first, len(requests), 2):
                asked = requests[index]
                names[index] = engine.add_request(asked.prompt, tag=tags[index], **asked.arguments)

        threads = [threading.Thread(target=add, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, (asked, tokens) in enumerate(zip(requests, all_alone(model, requests))):
            output = engine.get_result(names[index], timeout=TIMEOUT)
            assert output is not None and output.error is None
            assert output.generated_tokens == tokens, asked
    found = served(routed)
    assert sum(found.values()) == len(requests) or num_nodes is None, "a gate may turn some away"
    assert not len(routed._log) and not routed._serving


def test_prefixes_are_reused_whoever_drafted_for_them(model, drafters):
    """Heads must be shown what they have not kept of another drafter's requests, and need not be shown their own."""
    routed = RoutedCandidates(drafters)
    prompt = list(range(3, 33))
    with Engine(model, SmartSpecConfig(routed, num_nodes=4), max_batch_size=4) as engine:
        for tag in ("model", "eagle", "eagle", "medusa", "medusa", "list", "eagle", "model"):
            asked = Asked(prompt, GREEDY)
            output = engine.get_result(engine.add_request(prompt, tag=tag, **GREEDY), timeout=TIMEOUT)
            assert output.generated_tokens == asked.alone(model)
            prompt = prompt + output.generated_tokens[:5]
        assert engine._runner.memory.num_reused >= 4 * 30
    assert served(routed) == {"model": 2, "eagle": 3, "medusa": 2, "list": 1}


def test_weights_of_a_drafter_change_while_requests_run(model, drafters):
    """Another drafter's requests run on in the same steps."""
    routed = RoutedCandidates({name: drafters[name] for name in ("model", "other")})
    requests = [Asked(list(range(3 + number, 20)), {"max_new_tokens": 60}) for number in range(6)]
    with Engine(model, SmartSpecConfig(routed, num_nodes=4), max_batch_size=6) as engine:
        names = [
            engine.add_request(asked.prompt, tag=["model", "other"][index % 2], streaming=True, **asked.settings)
            for index, asked in enumerate(requests)
        ]
        source = routed.sources[0]
        for output in engine.request_id_iter(names[0]):
            if len(output.generated_tokens) > 10:
                break
        with engine.pause(), torch.no_grad():
            for parameter in source.model.parameters():
                parameter *= 1.01
            source.weights_version += 1
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for asked, output in zip(requests, outputs):
        assert output.generated_tokens == asked.alone(model)
        assert output.statistics.accepted_tokens > 0


def test_a_request_may_name_the_routed_drafters_itself(model, drafters):
    """Drafters are made once, whichever options a request has besides."""
    routed = RoutedCandidates({"model": drafters["model"], "lookup": "prompt_lookup"})
    prompt = [3, 4, 5, 3, 4, 5]
    with Engine(model, routed, tokenizer=tiny_tokenizer()) as engine:
        engine.add_request(prompt, tag="model", max_new_tokens=200)
        sources = routed.sources
        for options in ({"num_nodes": 3}, {"width": 1}, {"namespace": "x"}):
            config = SmartSpecConfig(routed, tag="model", **options)
            output = engine.get_result(engine.add_request(prompt, assistant=config, **GREEDY), timeout=TIMEOUT)
            assert output.generated_tokens == Asked(prompt, GREEDY).alone(model)
        assert routed.sources == sources
    routed = RoutedCandidates({"model": drafters["model"], "lookup": "prompt_lookup"})
    with Engine(model, "none") as engine:
        for tag in ("model", "lookup"):
            config = SmartSpecConfig(routed, tag=tag, num_nodes=4)
            output = engine.get_result(engine.add_request(prompt, assistant=config, **GREEDY), timeout=TIMEOUT)
            assert output.generated_tokens == Asked(prompt, GREEDY).alone(model)
        assert served(routed) == {"model": 1, "lookup": 1}
        with pytest.raises(ValueError, match="`tag='model'` has an effect on `RoutedCandidates` only"):
            engine.add_request(prompt, tag="model", **GREEDY)
        with pytest.raises(TypeError, match="tag"):
            engine.add_request(prompt, assistant=routed, tag=3, **GREEDY)
        with pytest.raises(ValueError, match="one per prompt"):
            engine.add_request(prompt, assistant=routed, tag=["model", "lookup"], **GREEDY)


@pytest.mark.adaptive
def test_what_drafts_are_worth_is_learnt_of_each_drafter(model, drafters):
    """A drafter that is never right is given up; another one beside it is not."""
    wrong = noisy_copy(model, scale=5.0, seed=9)
    routed = RoutedCandidates({"model": drafters["model"], "wrong": wrong})
    with Engine(model, routed, max_batch_size=8) as engine:
        names = [engine.add_request([3, 4, 5, number], tag=tag, max_new_tokens=60)
                 for number in range(6, 10) for tag in ("model", "wrong")]  # fmt: skip
        for name in names:
            assert engine.get_result(name, timeout=TIMEOUT).error is None
        right, bad = (f"{name}: {source.name}" for name, source in zip(routed.drafters, routed.sources))
        records = {stage.source: record for stage, record in engine._policy.policy.records.items()}
    assert {right, bad} <= set(records)
    assert records[right].acceptance.rate > records[bad].acceptance.rate + 0.2

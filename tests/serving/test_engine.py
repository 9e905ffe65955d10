"""Continuous batching: every request gets the tokens that it gets by itself."""

import numpy as np
import pytest
import torch

from hf_smartspec import Engine, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.goodput import GoodputAuction

from ..costs import UnmovedCost
from ..covering import exhaustive
from ..generate.helpers import EOS, VOCAB_SIZE, Oracle, Spy, noisy_copy, set_special_tokens, tiny_llama
from ..models import GEMMA_4, new_model
from .helpers import TIMEOUT, Asked, all_alone, change_weights_while_running, check_all, random_requests, suffix


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def many():
    """Requests, and what each yields by itself."""
    requests, model = random_requests(30), tiny_llama()
    return requests, all_alone(model, requests)


@pytest.mark.parametrize("max_prefill_tokens", [3, 512])
@pytest.mark.parametrize("max_batch_size", [1, 3, 16])
def test_many_requests_with_their_own_settings(model, many, max_batch_size, max_prefill_tokens):
    spy = Spy(suffix())
    with Engine(model, spy, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens) as engine:
        outputs = check_all(engine, model, *many)
    assert spy.drafted > 0 and spy.accepted > 0 and spy.started == spy.stopped == 30
    statistics = engine.statistics
    assert statistics.generated_tokens == sum(len(output.generated_tokens) for output in outputs)
    assert statistics.accepted_tokens == sum(output.statistics.accepted_tokens for output in outputs) > 0
    assert statistics.steps == sum(output.statistics.steps for output in outputs)
    assert (statistics.steps > statistics.forwards) == (max_batch_size > 1)


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3_text", *GEMMA_4[1:2], *exhaustive(["gpt2"], ["mistral"], ["stablelm"])]
)
def test_architectures_and_sources(architecture):
    model = set_special_tokens(new_model(architecture), EOS)
    long = [Asked([(7 * i) % 30 + 3 for i in range(150)], {"max_new_tokens": 12})]  # a part of its own in attention
    requests = [*random_requests(6, seed=3), *long, *random_requests(6, seed=4)]
    expected = all_alone(model, requests)
    for name, source in {"draft": noisy_copy(model), "suffix": suffix(), "none": "none"}.items():
        with Engine(model, source, max_batch_size=4, max_prefill_tokens=64) as engine:
            check_all(engine, model, requests, expected)
        assert (engine.statistics.drafted_tokens > 0) == (name != "none"), name
        assert engine.statistics.accepted_tokens > 0 or name != "draft"


def test_a_draft_that_is_always_right_or_never(model):
    requests = [asked for asked in random_requests(12) if not asked.settings.get("do_sample")]
    longest = max(len(asked.prompt) for asked in requests) + 24
    rows = []
    for asked in requests:
        text = asked.prompt + asked.alone(model)
        rows.append(text + [0] * (longest - len(text)))
    mask = torch.tensor([[1] * longest for _ in rows])
    for is_right in (True, False):
        source = Oracle(torch.tensor(rows), mask, is_right)
        with Engine(model, SmartSpecConfig(source, num_nodes=4), max_batch_size=4) as engine:
            check_all(engine, model, requests)
        assert (engine.statistics.accepted_tokens > 0) == is_right and engine.statistics.drafted_tokens > 0


def test_requests_choose_their_own_speculation(model):
    spy, other = Spy(suffix()), Spy(suffix())
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    asked = Asked(prompt, {"max_new_tokens": 20})
    with Engine(model, spy) as engine:
        names = [
            engine.add_request(prompt, max_new_tokens=20, assistant=choice)
            for choice in ("none", other, SmartSpecConfig(spy, num_nodes=1), None)
        ]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    expected = asked.alone(model)
    assert [output.generated_tokens for output in outputs] == [expected] * 4
    plain, others, capped, usual = (output.statistics for output in outputs)
    assert plain.drafted_tokens == 0 and plain.steps == 20
    assert other.drafted >= others.drafted_tokens > 0
    assert 0 < capped.drafted_tokens <= capped.steps
    assert spy.drafted >= capped.drafted_tokens + usual.drafted_tokens > capped.drafted_tokens


def test_shared_prefixes_are_not_computed_twice(model):
    fed = []
    with Engine(model, "none", max_batch_size=4) as engine:
        forward = engine._runner.memory.forward
        run = forward.forward
        forward.forward = lambda inputs: fed.append(sum(item.num_tokens for item in inputs)) or run(inputs)
        common = list(range(3, 33))
        for tail in ([5, 6], [7], [5, 6, 8], []):
            asked = Asked(common + tail, {"max_new_tokens": 3})
            output = engine.get_result(engine.add_request(asked.prompt, **asked.settings), timeout=TIMEOUT)
            assert output.generated_tokens == asked.alone(model)
    assert fed[0] == 32, "the first prompt"
    assert fed[3] == 1 and fed[6] == 1, "what the earlier ones do not share; at least one token yields logits"
    assert fed[9] == 1
    assert engine._runner.memory.num_reused >= 30 + 32 + 29


def test_long_prompts_do_not_stall_others(model):
    """While a prompt of 60 tokens is fed in pieces of 4, a running request goes on at every step."""
    with Engine(model, "none", max_prefill_tokens=4) as engine:
        steps = []
        step = engine._runner.loop.step

        def counting():
            ended = step()
            steps.append(
                {
                    call.requests[0].length - call.requests[0].num_generated: call.requests[0].num_generated
                    for call in engine._runner.loop.calls
                }
            )
            return ended

        engine._runner.loop.step = counting
        with engine.pause():
            names = [
                engine.add_request([3], max_new_tokens=30),
                engine.add_request(list(range(3, 33)) * 2, max_new_tokens=4),
            ]
        for name in names:
            engine.get_result(name, timeout=TIMEOUT)
    during = [counts[1] for counts in steps if counts.get(60) == 0 and 1 in counts]
    assert len(during) >= 14 and np.diff(during).min() == 1


# Memory


def test_memory_stays_within_its_bound(model):
    bytes_per_token = Engine(model)._runner.memory.bytes_per_token
    assert bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    shapes = []
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=300 * bytes_per_token) as engine:
        memory = engine._runner.memory
        place = memory.place
        memory.place = lambda *args: place(*args) or shapes.append(memory.num_bytes)
        check_all(engine, model, random_requests(25))
        with pytest.raises(ValueError, match=r"may reach 316 tokens .* memory holds 300"):
            engine.add_request([3] * 270, max_new_tokens=30)
    assert max(shapes) <= 300 * bytes_per_token and min(shapes) < max(shapes)
    assert engine.statistics.steps > engine.statistics.forwards, "several ran at once"


def test_wide_drafts_need_no_more_memory_than_usual_ones(model):
    """They shrink towards a request's end, where else they would reach beyond what is reserved."""
    asked = Asked(list(range(3, 11)), {"max_new_tokens": 24, "eos_token_id": None})
    num_tokens = 8 + 24 + 16  # prompt, output, and the usual draft after the last token
    max_bytes = num_tokens * Engine(model)._runner.memory.bytes_per_token
    source, rng, text = SuffixTreeCandidates(max_bytes=2**22), np.random.default_rng(0), np.array(asked.alone(model))
    forks = [np.append(text[end - 2 : end], rng.integers(3, VOCAB_SIZE, 4)) for end in range(2, 24) for _ in range(20)]
    source.add_outputs(forks, progress=False)
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-9, delta=0.02))  # nodes are free
    with Engine(model, SmartSpecConfig(source, policy=policy), max_kv_bytes=max_bytes) as engine:
        check_all(engine, model, [asked])
        assert engine._runner.memory.num_bytes <= max_bytes
        assert engine.statistics.drafted_tokens > 12 * engine.statistics.steps
        with pytest.raises(ValueError, match=f"may reach {num_tokens + 1} tokens"):
            engine.add_request([3] * 9, max_new_tokens=24)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),  # no tensor's version counts it
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_texts_computed_with_other_weights_are_forgotten(model, name):
    asked = Asked(list(range(3, 30)), {"max_new_tokens": 10})
    with Engine(model, suffix()) as engine:
        check_all(engine, model, [asked])
        optimizer = OPTIMIZERS[name](model.parameters())
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        reused = engine._runner.memory.num_reused
        check_all(engine, model, [asked])
        assert engine._runner.memory.num_reused == reused
        model.load_state_dict(tiny_llama(seed=7).state_dict())
        check_all(engine, model, [asked])
        check_all(engine, model, [asked])
    assert engine._runner.memory.num_reused == reused + 26


def test_weights_change_in_a_pause_while_a_request_runs(model):
    """Earlier tokens stay; later ones come from the new weights, with the whole text computed anew."""
    other = tiny_llama(seed=7)
    with Engine(model, "none") as engine:
        change_weights_while_running(engine, [3, 4, 5], 400, other)


# Outputs

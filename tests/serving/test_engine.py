"""Continuous batching: every request gets what it would get by itself, whatever the others do."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_smartspec import Engine, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.goodput import CostModel, FixedLength, GoodputAuction
from hf_smartspec.target.compat import RequestStatus

from ..generate.helpers import EOS, VOCAB_SIZE, Oracle, Spy, noisy_copy, set_special_tokens, tiny_llama
from ..models import new_model
from .helpers import Asked, random_requests

TIMEOUT = 60.0


@pytest.fixture
def model():
    return tiny_llama()


def suffix() -> SuffixTreeCandidates:
    """Drafts much, since little is known."""
    return SuffixTreeCandidates(min_probability=0.02, max_bytes=2**22)


def check_all(engine: Engine, model, requests: list[Asked]) -> list:
    """Adds all requests and compares every output with the request by itself."""
    names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests]
    outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for asked, output in zip(requests, outputs):
        assert output is not None and output.error is None
        assert output.generated_tokens == asked.alone(model), asked
        assert output.prompt_ids == asked.prompt
    return outputs


@pytest.mark.parametrize("max_prefill_tokens", [3, 512])
@pytest.mark.parametrize("max_batch_size", [1, 3, 16])
def test_many_requests_with_their_own_settings(model, max_batch_size, max_prefill_tokens):
    spy = Spy(suffix())
    with Engine(model, spy, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens) as engine:
        outputs = check_all(engine, model, random_requests(30))
    assert spy.drafted > 0 and spy.accepted > 0 and spy.started == spy.stopped == 30
    statistics = engine.statistics
    assert statistics.generated_tokens == sum(len(output.generated_tokens) for output in outputs)
    assert statistics.accepted_tokens == sum(output.statistics.accepted_tokens for output in outputs) > 0
    assert statistics.steps == sum(output.statistics.steps for output in outputs)
    assert (statistics.steps > statistics.forwards) == (max_batch_size > 1)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text", "gpt2", "stablelm"])
@pytest.mark.parametrize("assistant", ["draft", "suffix", "none"])
def test_architectures_and_sources(architecture, assistant):
    model = set_special_tokens(new_model(architecture), EOS)
    source = {"draft": noisy_copy(model), "suffix": suffix(), "none": "none"}[assistant]
    long = [Asked([(7 * i) % 30 + 3 for i in range(150)], {"max_new_tokens": 12})]  # a part of its own in attention
    with Engine(model, source, max_batch_size=4, max_prefill_tokens=64) as engine:
        check_all(engine, model, [*random_requests(6, seed=3), *long, *random_requests(6, seed=4)])
    assert (engine.statistics.drafted_tokens > 0) == (assistant != "none")
    assert engine.statistics.accepted_tokens > 0 or assistant != "draft"


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
    num_tokens = 8 + 24 + 16  # prompt, output, and the usual draft behind the last token
    max_bytes = num_tokens * Engine(model)._runner.memory.bytes_per_token
    source, rng, text = SuffixTreeCandidates(max_bytes=2**22), np.random.default_rng(0), np.array(asked.alone(model))
    forks = [np.append(text[end - 2 : end], rng.integers(3, VOCAB_SIZE, 4)) for end in range(2, 24) for _ in range(20)]
    source.add_outputs(forks, progress=False)
    policy = GoodputAuction(CostModel(alpha=0.0, gamma=1e-9, delta=0.02))  # nodes are free
    with Engine(model, SmartSpecConfig(source, policy=policy), max_kv_bytes=max_bytes) as engine:
        check_all(engine, model, [asked])
        assert engine._runner.memory.num_bytes <= max_bytes
        assert engine.statistics.drafted_tokens > 12 * engine.statistics.steps
        with pytest.raises(ValueError, match=f"may reach {num_tokens + 1} tokens"):
            engine.add_request([3] * 9, max_new_tokens=24)


def test_texts_computed_with_other_weights_are_forgotten(model):
    asked = Asked(list(range(3, 30)), {"max_new_tokens": 10})
    with Engine(model, suffix()) as engine:
        check_all(engine, model, [asked])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
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
    """What it has got stays; what follows is what the new weights say, with all of the text computed anew."""
    other = tiny_llama(seed=7)
    with Engine(model, "none") as engine:
        name = engine.add_request([3, 4, 5], max_new_tokens=400, eos_token_id=None, streaming=True)
        stream = engine.request_id_iter(name)
        next(stream)
        with engine.pause():
            model.load_state_dict(other.state_dict())
            request = next(iter(engine._runner.loop.calls)).requests[0]
            known = request.prompt.tolist() + request.tokens
        *_, last = stream
    assert len(known) < 403, "it ended before the pause"
    asked = Asked(known, {"max_new_tokens": 403 - len(known), "eos_token_id": None})
    assert last.prompt_ids + last.generated_tokens == known + asked.alone(model)


# Outputs


def test_streams_grow_and_end(model):
    asked = Asked([3, 4, 5], {"max_new_tokens": 30})
    with Engine(model, suffix()) as engine:
        name = engine.add_request(asked.prompt, streaming=True, **asked.settings)
        outputs = list(engine.request_id_iter(name))
        assert engine.get_result(name, timeout=0) is None, "the stream has fetched it"
        silent = list(engine.request_id_iter(engine.add_request(asked.prompt, **asked.settings)))
    expected = asked.alone(model)
    lengths = [len(output.generated_tokens) for output in outputs]
    assert lengths == sorted(set(lengths)) and all(
        output.generated_tokens == expected[:length] for output, length in zip(outputs, lengths)
    )
    assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(silent) == 1 and silent[0].generated_tokens == expected
    first = outputs[-1]
    assert first.created_time <= first.lifespan[0] <= first.first_token_time <= first.lifespan[1]


def test_asyncio(model):
    requests = random_requests(8)

    async def read(engine, asked):
        name = engine.add_request(asked.prompt, streaming=True, **asked.arguments)
        return [output async for output in engine.request_id_aiter(name)]

    async def main():
        with Engine(model, suffix(), max_batch_size=3) as engine:
            return await asyncio.gather(*(read(engine, asked) for asked in requests))

    for asked, outputs in zip(requests, asyncio.run(asyncio.wait_for(main(), TIMEOUT))):
        assert outputs[-1].generated_tokens == asked.alone(model)


def test_iteration_ends_when_all_is_answered(model):
    requests = random_requests(7)
    with Engine(model, suffix(), max_batch_size=2) as engine:
        names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests]
        answered = {output.request_id: output for output in engine}
    assert set(answered) == set(names)
    assert answered[names[3]].generated_tokens == requests[3].alone(model)


def test_why_requests_end(model):
    plain = Asked([3, 4, 5], {"max_new_tokens": 12, "eos_token_id": None}).alone(model)
    with Engine(model, suffix()) as engine:
        by_length = engine.add_request([3, 4, 5], max_new_tokens=12, eos_token_id=None)
        by_text = engine.add_request([3, 4, 5], max_new_tokens=12, eos_token_id=plain[4])
        length, text = (engine.get_result(name, timeout=TIMEOUT) for name in (by_length, by_text))
    assert (length.finish_reason, text.finish_reason) == ("length", "stop")
    assert text.generated_tokens == plain[: plain.index(plain[4]) + 1]


def test_offline_work(model):
    requests = random_requests(9)
    greedy = {"max_new_tokens": 10}
    engine = Engine(model, suffix(), max_batch_size=4)
    outputs = engine.generate([asked.prompt for asked in requests], **greedy)
    assert not engine.is_running
    for asked, output in zip(requests, outputs):
        assert output.generated_tokens == Asked(asked.prompt, greedy).alone(model)
    again = engine.generate([np.array(requests[0].prompt), torch.tensor([requests[1].prompt])], **greedy)
    assert [item.generated_tokens for item in again] == [item.generated_tokens for item in outputs[:2]]
    assert engine.generate([]) == []


def test_whoever_streams_with_transformers_streamers(model):
    class Collected(BaseStreamer):
        def __init__(self):
            self.values, self.ends = [], 0

        def put(self, value):
            self.values.append(value.flatten().tolist())

        def end(self):
            self.ends += 1

    streamer, asked = Collected(), Asked([3, 4, 5], {"max_new_tokens": 10})
    with Engine(model, suffix()) as engine:
        engine.get_result(engine.add_request(asked.prompt, streamer=streamer, **asked.settings), timeout=TIMEOUT)
    assert streamer.values == [[3, 4, 5], *([token] for token in asked.alone(model))] and streamer.ends == 1


# Life


def test_cancelling(model):
    with Engine(model, "none", max_batch_size=1) as engine:
        running = engine.add_request([3], max_new_tokens=400, eos_token_id=None, streaming=True)
        waiting = engine.add_request([4], max_new_tokens=400)
        asked = Asked([5], {"max_new_tokens": 5})
        last = engine.add_request(asked.prompt, **asked.settings)
        next(engine.request_id_iter(running))
        for name in (waiting, running, "nobody"):
            engine.cancel_request(name)
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in (running, waiting, last)]
        engine.cancel_request(last)
    assert [output.finish_reason for output in outputs[:2]] == ["cancelled"] * 2
    assert 0 < len(outputs[0].generated_tokens) < 400 and outputs[1].generated_tokens == []
    expected = Asked([3], {"max_new_tokens": 400, "eos_token_id": None}).alone(model)
    assert outputs[0].generated_tokens == expected[: len(outputs[0].generated_tokens)]
    assert outputs[2].generated_tokens == asked.alone(model)


def test_stopping(model):
    threads = threading.active_count()
    engine = Engine(model, "none", max_batch_size=1)
    first = engine.add_request([3], max_new_tokens=5)
    for timeout in (None, 0):
        for name in (first, None):
            with pytest.raises(RuntimeError, match=r"does not run: `start\(\)` it"):
                engine.get_result(name, timeout=timeout)
    assert engine.get_result("unknown") is None, "nothing is to come of that one"
    engine.start().start()
    engine.stop()  # drains
    assert engine.get_result(first).status == RequestStatus.FINISHED
    names = [
        engine.add_request([3], max_new_tokens=400, eos_token_id=None, streaming=True),
        engine.add_request([4], max_new_tokens=3),
    ]
    engine.start()
    next(engine.request_id_iter(names[0]))
    engine.stop(drain=False)
    assert [engine.get_result(name).finish_reason for name in names] == ["cancelled"] * 2
    assert not engine.is_running and threading.active_count() == threads
    with pytest.raises(KeyError), Engine(model, "none") as engine:
        name = engine.add_request([3], max_new_tokens=400, eos_token_id=None)
        raise KeyError
    assert engine.get_result(name).finish_reason == "cancelled" and threading.active_count() == threads


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": []}, ValueError, "at least one token"),
        ({"input_ids": [[3, 4], [5, 6]]}, ValueError, "add_requests"),
        ({"input_ids": [3.5]}, ValueError, "float"),
        ({"input_ids": [VOCAB_SIZE]}, ValueError, "vocabulary"),
        ({"input_ids": [3], "num_beams": 2}, ValueError, "num_beams"),
        ({"input_ids": [3], "attention_mask": torch.ones(1, 1)}, ValueError, "attention_mask"),
        ({"input_ids": [3], "num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"input_ids": [3], "assistant": "sufix"}, ValueError, "sufix"),
        ({"input_ids": [3], "max_new_tokenz": 3}, ValueError, "max_new_tokenz"),
        ({"input_ids": [3], "request_id": "known"}, ValueError, "in use"),
        ({"input_ids": [3], "seed": "x", "do_sample": True}, TypeError, "seed"),
    ],
)
def test_bad_requests_are_refused_at_once_and_harm_nobody(model, arguments, error, message):
    asked = Asked([3, 4, 5], {"max_new_tokens": 20})
    with Engine(model, suffix()) as engine:
        engine.add_request(asked.prompt, request_id="known", **asked.settings)
        with pytest.raises(error, match=message):
            engine.add_request(**arguments)
        assert engine.get_result("known", timeout=TIMEOUT).generated_tokens == asked.alone(model)


def test_generation_configs_of_requests_name_assistants(model, tmp_path):
    draft = noisy_copy(model)
    draft.save_pretrained(tmp_path)
    asked = Asked([3, 4, 5, 6], {"max_new_tokens": 20, "eos_token_id": None})
    with Engine(model, SmartSpecConfig("none", num_nodes=3)) as engine:
        for assistant in (str(tmp_path), draft, SmartSpecConfig(draft, num_nodes=3)):
            config = GenerationConfig(assistant=assistant, **asked.settings)
            for kwargs, drafts in (({}, True), ({"assistant": "none"}, False)):
                name = engine.add_request(asked.prompt, generation_config=config, **kwargs)
                output = engine.get_result(name, timeout=TIMEOUT)
                assert output.generated_tokens == asked.alone(model)
                assert (output.statistics.accepted_tokens > 0) == drafts
            assert config.assistant is assistant
        for assistant in ("sufix", [], SmartSpecConfig("suffix", policy=FixedLength(2))):
            with pytest.raises(ValueError, match="assistant"):
                engine.add_request([3], generation_config=GenerationConfig(assistant=assistant))


def test_requests_that_name_one_draft_share_it(model, tmp_path):
    noisy_copy(model).save_pretrained(tmp_path)
    engine = Engine(model, "none")
    sources = {id(engine._prepare(torch.tensor([[3, 4]]), str(tmp_path), None, {}).source) for _ in range(3)}
    assert len(sources) == 1


def test_bad_engines_are_refused(model):
    for name in ("max_batch_size", "max_kv_bytes", "max_prefill_tokens"):
        for value in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=name):
                Engine(model, **{name: value})
    with pytest.raises(ValueError, match="cannot be packed"):
        Engine(new_model("bloom"))


def test_report_says_where_the_time_went(model):
    with Engine(model, suffix(), max_batch_size=4) as engine:
        check_all(engine, model, random_requests(12))
        report = engine.report()
    statistics = engine.statistics
    assert report.drafted == statistics.drafted_tokens > 0 and report.accepted == statistics.accepted_tokens
    assert sum(report.nodes_per_row.values()) == statistics.steps
    forwards = report.seconds["prefill"] + report.seconds["verify"]
    assert forwards == pytest.approx(statistics.seconds_forward) and report.seconds["prefill"] > 0
    assert "12 answered" in str(report) and "SuffixTreeCandidates" in str(report)

"""How requests of an engine stream, end, are cancelled, stopped and refused."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.decoding.statistics import PHASES
from hf_smartspec.goodput import FixedLength
from hf_smartspec.target_model.compat import RequestStatus

from ..generate.helpers import VOCAB_SIZE, Oracle, noisy_copy, tiny_llama
from ..models import new_model
from .helpers import TIMEOUT, Asked, all_at_once, check_all, random_requests, suffix, wait_once


@pytest.fixture
def model():
    return tiny_llama()


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


@pytest.mark.parametrize("architecture", ["llama", "bloom"])  # together, and row by row
def test_outputs_carry_their_steps_and_seconds(architecture):
    asked = Asked([3, 4, 5, 3, 4, 5, 3, 4], {"max_new_tokens": 20, "eos_token_id": None})
    model = new_model(architecture)
    oracle = Oracle(torch.tensor([asked.prompt + asked.alone(model)]))
    with Engine(model, SmartSpecConfig(oracle, num_nodes=3), max_prefill_tokens=3) as engine:
        names = [engine.add_request(asked.prompt, streaming=True, **asked.settings) for _ in range(3)]
        streams = [[output.statistics for output in engine.request_id_iter(name)] for name in names]
    for counts in streams:
        assert [item.generated_tokens for item in counts] == sorted({item.generated_tokens for item in counts})
        for item in counts:
            phases = {name: value for name, value in vars(item).items() if name in PHASES}
            assert all(value > 0 for value in phases.values()), phases
            assert sum(phases.values()) <= item.seconds_total and 0 < item.seconds_prefill <= item.seconds_total
            assert 0 < item.goodput == item.generated_tokens / item.seconds_total
        last = counts[-1]
        assert last.generated_tokens == 20 and 0 < last.accepted_tokens <= last.drafted_tokens
        assert last.steps + last.accepted_tokens == 20 and last.mean_accepted_length == 20 / last.steps
    first = streams[0][-1]
    assert first.forwards == first.steps + 2, "its prompt takes three forwards; the others may share it"


def test_requests_that_end_early_carry_what_they_took(model):
    """One is cancelled after its first tokens, one while it waits: it has taken nothing."""
    with Engine(model, suffix(), max_batch_size=1) as engine:
        waits = wait_once(engine)
        with all_at_once(engine):
            name = engine.add_request([3, 4, 5], streaming=True, max_new_tokens=400, eos_token_id=None)
            waiting = engine.add_request([6, 7], max_new_tokens=4)
        assert waits.wait(TIMEOUT)
        with all_at_once(engine):
            for each in (waiting, name):
                engine.cancel_request(each)
        counts = engine.get_result(name, timeout=TIMEOUT).statistics
        nothing = engine.get_result(waiting, timeout=TIMEOUT).statistics
    assert counts.generated_tokens > 0 and counts.steps > 0 and counts.forwards > 0
    assert counts.seconds_total > counts.seconds_forward > 0
    assert not any(nothing.as_dict().values())


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
        asked, waits = Asked([5], {"max_new_tokens": 5}), wait_once(engine)
        with all_at_once(engine):
            running = engine.add_request([3], max_new_tokens=400, eos_token_id=None, streaming=True)
            waiting = engine.add_request([4], max_new_tokens=400)
            last = engine.add_request(asked.prompt, **asked.settings)
        next(engine.request_id_iter(running))
        assert waits.wait(TIMEOUT)
        with all_at_once(engine):
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
            with pytest.raises(RuntimeError, match=r"does not run: call `start\(\)`"):
                engine.get_result(name, timeout=timeout)
    assert engine.get_result("unknown") is None, "nothing is to come of that one"
    engine.start().start()
    engine.stop()  # drains
    assert engine.get_result(first).status == RequestStatus.FINISHED
    names = [
        engine.add_request([3], max_new_tokens=400, eos_token_id=None, streaming=True),
        engine.add_request([4], max_new_tokens=3),
    ]
    waits = wait_once(engine)
    engine.start()
    next(engine.request_id_iter(names[0]))
    assert waits.wait(TIMEOUT)
    engine.stop(drain=False)
    assert [engine.get_result(name).finish_reason for name in names] == ["cancelled"] * 2
    assert not engine.is_running and threading.active_count() == threads
    with pytest.raises(KeyError), Engine(model, "none") as engine:
        wait_once(engine)
        name = engine.add_request([3], max_new_tokens=400, eos_token_id=None)
        raise KeyError
    assert engine.get_result(name).finish_reason == "cancelled" and threading.active_count() == threads


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": []}, ValueError, "at least one token"),
        ({"input_ids": [[3, 4], [5, 6]]}, ValueError, "add_requests"),
        ({"input_ids": [3.5]}, TypeError, "float"),
        ({"input_ids": [VOCAB_SIZE]}, ValueError, "vocabulary"),
        ({"input_ids": [3], "num_beams": 2}, ValueError, "num_beams"),
        ({"input_ids": [3], "attention_mask": torch.ones(1, 1)}, ValueError, "attention_mask"),
        ({"input_ids": [3], "num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"input_ids": [3], "inputs": torch.ones(1, 1).long()}, ValueError, "`inputs` cannot be served"),
        ({"input_ids": [3], "return_dict_in_generate": True}, ValueError, "return_dict_in_generate"),
        ({"input_ids": [3], "output_scores": True}, ValueError, "output_scores"),
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


def test_of_a_list_with_a_bad_prompt_nothing_is_served(model):
    engine = Engine(model, "none")
    with pytest.raises(ValueError, match="vocabulary"):
        engine.add_requests([[3], [VOCAB_SIZE]], max_new_tokens=40)
    with engine:
        assert engine.get_result(timeout=TIMEOUT) is None
    assert engine.statistics.generated_tokens == 0


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


def test_bad_engines_are_refused(model):
    for name in ("max_batch_size", "max_kv_bytes", "max_prefill_tokens"):
        for value in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=name):
                Engine(model, **{name: value})
    with pytest.raises(ValueError, match=r"encoder that reads `input_features`.*use `model.generate"):
        Engine(new_model("whisper"))


def test_prompt_tokens_per_step_are_few_on_a_cpu(model):
    """tests/test_cuda.py has the number on a GPU."""
    for options, expected in (({}, 512), ({"max_prefill_tokens": 7}, 7)):
        with Engine(model, **options) as engine:
            assert engine._runner.loop.max_prefill_tokens == expected


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

"""Engines of models that cannot be packed: every request runs by itself, and gets what it would get alone."""

import logging
import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.target_model.compat import RequestStatus
from hf_smartspec.target_model.support import capabilities

from ...architectures import small_model
from ...generate.helpers import EOS, Oracle, Spy, set_special_tokens, tiny_tokenizer
from ...models import new_model
from ..helpers import (
    TIMEOUT,
    Asked,
    StopsAt,
    all_alone,
    all_at_once,
    change_weights_while_running,
    check_all,
    random_requests,
    suffix,
)

DRAFTED = ["bloom", "gpt_neo"]  # with attention of its own, and with windows
PLAIN = ["rwkv", "zamba", "openai-gpt"]  # a state, a state beside attention, no cache at all
LONG = {"max_new_tokens": 30, "eos_token_id": None}


def model_of(architecture: str, **changes):
    return set_special_tokens(new_model(architecture, **changes), EOS)


@pytest.mark.parametrize("architecture", [*DRAFTED, *PLAIN])
def test_many_requests_with_their_own_settings(architecture, caplog):
    model, spy, requests = model_of(architecture), Spy(suffix()), random_requests(9, longest=20, max_new_tokens=12)
    with caplog.at_level(logging.WARNING):
        engine, _again = (Engine(model, spy, max_batch_size=4, max_prefill_tokens=8) for _ in range(2))
    (warning,) = [record.message for record in caplog.records if "The engine decodes" in record.message]
    assert type(model).__name__ in warning and "row by row" in warning
    assert ("without speculation" in warning) == (architecture in PLAIN)
    with engine:
        outputs = check_all(engine, model, requests)
    statistics = engine.statistics
    if architecture in PLAIN:
        assert spy.drafted == spy.started == 0 and statistics.drafted_tokens == 0
    else:
        assert spy.drafted > 0 and spy.accepted > 0 and spy.started == spy.stopped == 9
        assert statistics.accepted_tokens == sum(output.statistics.accepted_tokens for output in outputs) > 0
    assert statistics.generated_tokens == sum(len(output.generated_tokens) for output in outputs)
    assert statistics.forwards >= statistics.steps, "every row takes its own"
    report = str(engine.report())
    assert "9 answered" in report and engine.report().drafted == statistics.drafted_tokens
    assert "Prompt tokens reused" in report and engine._memory.num_reused == 0
    assert engine._memory.num_bytes == 0, "caches go with their requests"


@pytest.mark.parametrize("is_right", [True, False])
def test_a_draft_that_is_always_right_or_never(is_right):
    model = model_of("bloom")
    requests = [asked for asked in random_requests(8) if not asked.settings.get("do_sample")]
    texts = [asked.prompt + tokens for asked, tokens in zip(requests, all_alone(model, requests))]
    longest = max(map(len, texts))
    source = Oracle(torch.tensor([text + [0] * (longest - len(text)) for text in texts]), is_right=is_right)
    with Engine(model, SmartSpecConfig(source, num_nodes=4), max_batch_size=4) as engine:
        check_all(engine, model, requests)
    assert (engine.statistics.accepted_tokens > 0) == is_right and engine.statistics.drafted_tokens > 0


class Counts(LogitsProcessor):
    """Wants another token at every call: who calls it twice, or out of order, gets other texts."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return scores.index_add(1, torch.tensor([self.num_calls * 7 % 40]), torch.full((len(scores), 1), 4.0))


@pytest.mark.parametrize("architecture", ["bloom", "rwkv"])
def test_stop_strings_criteria_and_processors_with_state(architecture):
    model, tokenizer = model_of(architecture), tiny_tokenizer()
    model.generation_config.suppress_tokens = list(range(40, 97))  # which the tokenizer does not know
    prompt = tokenizer("some words").input_ids
    text = tokenizer.decode(Asked(prompt, LONG).alone(model))

    def settings():
        yield {"stop_strings": [text[7:9]], "tokenizer": tokenizer}
        yield {"stop_strings": [text[3:5], "never"], "tokenizer": tokenizer}
        yield {"stopping_criteria": StoppingCriteriaList([StopsAt(17)])}
        yield {"logits_processor": LogitsProcessorList([Counts()])}
        yield {
            "logits_processor": LogitsProcessorList([Counts()]),
            "stopping_criteria": StoppingCriteriaList([StopsAt(20)]),
        }

    ours, theirs = list(settings()), list(settings())
    with Engine(model, suffix(), max_batch_size=4) as engine:
        names = [engine.add_request(prompt, **LONG | own) for own in ours]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for own, reference, output in zip(ours, theirs, outputs):
        assert output.generated_tokens == Asked(prompt, LONG | reference).alone(model), own
        for mine, its in zip(own.get("stopping_criteria", []), reference.get("stopping_criteria", [])):
            assert mine.lengths == its.lengths
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop", "length", "stop"]


@pytest.mark.parametrize("architecture", ["bloom", "rwkv"])
def test_outputs_tell_which_source_drafted_each_token(architecture):
    model = model_of(architecture)
    with Engine(model, suffix()) as engine:
        output = engine.get_result(engine.add_request([3, 4, 5], trace=True, **LONG), timeout=TIMEOUT)
    assert output.generated_tokens == Asked([3, 4, 5], LONG).alone(model)
    assert len(output.token_sources) == 30
    assert (set(output.token_sources) == {None}) == (architecture == "rwkv")


class Kept(BaseStreamer):
    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.has_ended = True


@pytest.mark.parametrize("architecture", ["bloom", "rwkv"])
def test_streams_streamers_and_cancellation(architecture):
    model, streamer = model_of(architecture), Kept()
    with Engine(model, suffix(), max_batch_size=3) as engine:
        step, has_read, outputs = engine._runner.loop.step, threading.Condition(), []

        def read_in_step():
            """Nothing runs on before an output has been read: whoever reads too slowly would see the last one only."""
            with has_read:
                assert has_read.wait_for(lambda: first not in engine.results._unread, TIMEOUT)
            return step()

        engine._runner.loop.step = read_in_step
        with all_at_once(engine):
            first = engine.add_request([3, 4, 5], streaming=True, **LONG)
            second = engine.add_request([6, 7], streamer=streamer, **LONG)
            gone = engine.add_request([8, 9], max_new_tokens=1000, eos_token_id=None, streaming=True)
        next(engine.request_id_iter(gone))
        engine.cancel_request(gone)
        for output in engine.request_id_iter(first):
            outputs.append(output)
            with has_read:
                has_read.notify_all()
        other, cancelled = engine.get_result(second, timeout=TIMEOUT), engine.get_result(gone, timeout=TIMEOUT)
    lengths = [len(output.generated_tokens) for output in outputs]
    assert lengths == sorted(lengths) and len(lengths) > 2
    assert outputs[-1].generated_tokens == Asked([3, 4, 5], LONG).alone(model)
    assert other.generated_tokens == Asked([6, 7], LONG).alone(model)
    assert streamer.tokens == [6, 7, *other.generated_tokens] and streamer.has_ended
    assert cancelled.finish_reason == "cancelled" and 0 < len(cancelled.generated_tokens) < 1000
    settings = {"max_new_tokens": len(cancelled.generated_tokens), "eos_token_id": None}
    assert cancelled.generated_tokens == Asked([8, 9], settings).alone(model)


@pytest.mark.parametrize("architecture", ["bloom", "rwkv"])
def test_a_forward_that_fails_ends_its_own_request_alone(architecture):
    model, requests = model_of(architecture), random_requests(4, longest=12, max_new_tokens=12)
    expected = all_alone(model, requests)
    with Engine(model, suffix(), max_batch_size=4) as engine:
        call_of = engine._memory.call_of

        def failing(prepared):
            call = call_of(prepared)
            if prepared.input_ids.shape[1] == 3:
                run, count = call.forward.forward, []
                call.forward.forward = lambda inputs: run(inputs) if count.append(1) or len(count) < 4 else 1 / 0
            return call

        engine._memory.call_of = failing
        with engine.pause():
            bad = engine.add_request([3, 4, 5], **LONG)
            names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        failure = engine.get_result(bad, timeout=TIMEOUT)
    assert failure.status == RequestStatus.FAILED and "ZeroDivisionError" in failure.error
    assert [output.generated_tokens for output in outputs] == expected
    begun = {"max_new_tokens": len(failure.generated_tokens), "eos_token_id": None}
    assert failure.generated_tokens == Asked([3, 4, 5], begun).alone(model)


@pytest.mark.parametrize("architecture", ["bloom", "rwkv"])
def test_weights_change_in_a_pause_while_a_request_runs(architecture):
    model, other = model_of(architecture), model_of(architecture, seed=7)
    with Engine(model, suffix(), max_prefill_tokens=4) as engine:
        change_weights_while_running(engine, [3, 4, 5, 6, 7, 8], 60, other)


def test_models_that_keep_their_state_in_themselves_serve_one_request_at_a_time(caplog, monkeypatch):
    """As RecurrentGemma does, where its layers are not known."""
    monkeypatch.setattr(capabilities, "recurrent_layers", lambda model: None)
    model = set_special_tokens(small_model("recurrent_gemma"), EOS)
    requests = random_requests(6, longest=12, max_new_tokens=8)
    with caplog.at_level(logging.WARNING), Engine(model, suffix(), max_batch_size=4) as engine:
        check_all(engine, model, requests)
        bad = engine.add_request([3, 4, 5], max_new_tokens=500, eos_token_id=None, streaming=True)
        next(engine.request_id_iter(bad))
        engine.cancel_request(bad)
        assert engine.get_result(bad, TIMEOUT) is not None  # nobody else runs the model meanwhile
        check_all(engine, model, requests[:2])
    assert "one request at a time" in caplog.text


def test_models_without_an_end_of_positions():
    model = set_special_tokens(small_model("xlnet"), EOS)
    assert model.config.max_position_embeddings == -1
    with Engine(model) as engine:
        check_all(engine, model, random_requests(2, longest=8, max_new_tokens=6))


@pytest.mark.parametrize("architecture", ["bloom", "rwkv", "zamba"])
def test_caches_stay_within_their_bound(architecture):
    model, requests, taken = model_of(architecture), random_requests(8, longest=20, max_new_tokens=12), []
    footprint = Engine(model)._memory.footprint
    assert (footprint.state > 0) == (architecture != "bloom") and (footprint.per_token > 0) == (architecture != "rwkv")
    most = footprint.of_text(150) + 2 * footprint.state
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=most) as engine:
        step = engine._runner.loop.step

        def watched():
            ended = step()
            taken.append((engine._memory.num_bytes, len(engine._memory.scheduler.running)))
            return ended

        engine._runner.loop.step = watched
        check_all(engine, model, requests)
        if footprint.per_token:
            with pytest.raises(ValueError, match="bytes of keys, values and states"):
                engine.add_request([3] * 300, max_new_tokens=30)
    assert 0 < max(num_bytes for num_bytes, _ in taken) <= most
    assert 1 < max(running for _, running in taken) < 8, "several at once, as many as fit"

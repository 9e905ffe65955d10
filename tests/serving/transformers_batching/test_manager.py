"""The manager's methods: they work as transformers' own, with each request's own settings."""

import asyncio

import pytest
import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig

import hf_smartspec

from ...generate.helpers import BOS, EOS, PAD, tiny_llama, tiny_tokenizer
from ..helpers import TIMEOUT, Holds, all_alone, random_requests

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
PROMPT = [BOS, 7, 9, 11, 7, 9]


@pytest.fixture
def model():
    return hf_smartspec.enable(tiny_llama(), assistant="suffix")


@pytest.fixture
def manager(model):
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    manager.start()
    yield manager
    manager.stop(timeout=TIMEOUT, hard_stop=True)


def alone(model, **options):
    ids = torch.tensor([PROMPT])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})[0, len(PROMPT) :].tolist()


def test_every_request_has_its_own_settings(model, manager):
    assert isinstance(manager, ContinuousBatchingManager) and manager.is_running()
    requests = random_requests(21)
    names = [manager.add_request(item.prompt, **item.arguments) for item in requests]
    found = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=TIMEOUT)
        found[output.request_id] = output
    assert [found[name].generated_tokens for name in names] == all_alone(model, requests)
    manager.stop(timeout=TIMEOUT)
    assert not manager.is_running() and manager.add_request(PROMPT) is None  # dropped, as transformers does
    assert manager.get_result(timeout=TIMEOUT) is None and list(manager) == []
    manager.start()
    assert manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT).error is None


def test_end_tokens_lengths_and_stop_strings_are_the_requests(model, manager):
    text = alone(model, eos_token_id=None, max_new_tokens=20)
    end, tokenizer = text[4], tiny_tokenizer()
    cases = [
        ({"eos_token_id": -1, "max_new_tokens": 20}, text),
        ({"eos_token_id": [-1, end], "max_new_tokens": 20}, text[: text.index(end) + 1]),
        ({"generation_config": GenerationConfig(max_new_tokens=3)}, alone(model, max_new_tokens=3)),
        ({"stop_strings": [tokenizer.decode(end)], "tokenizer": tokenizer, "eos_token_id": -1}, None),
    ]
    for options, expected in cases:
        output = manager.get_result(manager.add_request(PROMPT, **options), timeout=TIMEOUT)
        if expected is None:
            options["eos_token_id"] = None
            expected = alone(model, assistant="none", **options)
        assert output.error is None and output.generated_tokens == expected, options


def test_without_a_limit_a_text_goes_on_to_its_end(model):
    model.config.max_position_embeddings = 64
    with model.continuous_batching_context_manager(GenerationConfig(eos_token_id=-1)) as manager:
        output = manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT)
    assert len(output.generated_tokens) == 64 - len(PROMPT)


def test_streams_hold_all_tokens_so_far(model, manager):
    name = manager.add_request(PROMPT, streaming=True, record_timestamps=True)
    outputs = list(manager.request_id_iter(name))
    texts = [output.generated_tokens for output in outputs]
    assert texts == sorted(texts, key=len) and texts[-1] == alone(model, assistant="none")
    assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [len(output.timestamps) for output in outputs] == list(map(len, texts))


@pytest.mark.parametrize("is_streaming", [False, True])
def test_handlers_get_all_outputs_registered_before_or_after(model, manager, is_streaming):
    async def answer(registers_first: bool):
        seen, done = [], asyncio.get_running_loop().create_future()

        def receive(output):
            seen.append(output)
            if output.is_finished():
                done.set_result(None)

        name = f"first {registers_first}"
        if registers_first:
            manager.register_result_handler(name, receive)
        manager.add_request(PROMPT, request_id=name, streaming=is_streaming)
        if not registers_first:
            await asyncio.to_thread(manager.stop)  # everything is over by now
            manager.register_result_handler(name, receive)
        await asyncio.wait_for(done, TIMEOUT)
        return seen

    for registers_first in (True, False):
        seen = asyncio.run(answer(registers_first))
        assert seen[-1].generated_tokens == alone(model, assistant="none")
        assert (len(seen) > 1) == (is_streaming and registers_first)
    assert manager.get_result(timeout=0) is None


def test_a_handler_whose_loop_is_closed_harms_nobody(manager):
    async def register():
        manager.register_result_handler("nobody", lambda output: None)

    asyncio.run(register())
    manager.add_request(PROMPT, request_id="nobody")
    assert manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT).error is None
    assert manager.background_thread_status.fatal_error is None


def test_bad_requests_are_answered_with_an_error(manager):
    bad = [
        manager.add_request([10**6]),
        manager.add_request([]),
        manager.add_request(PROMPT, misspelt=3),
        manager.add_request(PROMPT, max_new_tokens=10**9),
        manager.add_request(PROMPT, stop_strings=["a"]),
    ]
    reasons = ["vocabulary", "at least one token", "misspelt", "shorten", "tokenizer"]
    for name, reason in zip(bad, reasons):
        output = manager.get_result(name, timeout=TIMEOUT)
        assert output.is_finished() and reason in output.error and not output.generated_tokens
    assert manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT).error is None


def test_cancelled_requests_are_over_and_given_to_nobody(manager):
    with Holds() as holds:
        name = manager.add_request(PROMPT, stopping_criteria=[holds])
        assert holds.arrived.wait(TIMEOUT)
        assert name in manager.batch_processor.scheduler.active_requests
        with pytest.raises(ValueError, match="in use"):
            manager.add_request(PROMPT, request_id=name)
        manager.cancel_request(name)
        manager.cancel_request("unknown")
    assert list(manager.request_id_iter(name)) == []
    manager.stop(timeout=TIMEOUT)
    assert manager.get_result(timeout=0) is None and manager.batch_processor is None


def test_stopping_waits_or_does_not(manager):
    with Holds() as holds:
        name = manager.add_request(PROMPT, stopping_criteria=[holds])
        assert holds.arrived.wait(TIMEOUT)
        manager.stop(block=False)
        assert manager.is_running() and manager.add_request(PROMPT) is None
        manager.stop(timeout=0.01)  # transformers, too, only says that it goes on
        assert manager.is_running()
    manager.join(0.0, TIMEOUT)
    assert not manager.is_running() and manager.get_result(name).error is None
    manager.start()
    with Holds() as holds:
        manager.add_request(PROMPT, request_id="runs", stopping_criteria=[holds])
        manager.add_request(PROMPT, request_id="waits")
        assert holds.arrived.wait(TIMEOUT)
        manager.stop(block=False, hard_stop=True)
    manager.join(0.0, TIMEOUT)
    assert "stopped" in manager.get_result("waits").error and "stopped" in manager.get_result("runs").error


def test_pauses_let_the_model_be_changed(model, manager):
    holds = Holds()
    name = manager.add_request(PROMPT, stopping_criteria=[holds])
    holds.may_go.set()
    with manager.pause():
        with pytest.raises(RuntimeError, match="inside a pause"):
            manager.stop()
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
    assert manager.get_result(name, timeout=TIMEOUT).error is None
    output = manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT)
    assert output.generated_tokens == alone(model, assistant="none")
    manager.stop(timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass


def test_a_fatal_error_is_shown(model, manager, monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(manager.engine._memory, "next", fail)
    output = manager.get_result(manager.add_request(PROMPT), timeout=TIMEOUT)
    assert "no room" in output.error
    manager.join(0.0)
    assert isinstance(manager.background_thread_status.fatal_error, MemoryError)
    assert manager.add_request(PROMPT) is None


def test_streams_hold_log_probabilities_of_all_tokens_so_far(model):
    options = ContinuousBatchingConfig(return_logprobs=True)
    with model.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), continuous_batching_config=options
    ) as own:
        outputs = list(own.request_id_iter(own.add_request(PROMPT, streaming=True)))
        failed = own.get_result(own.add_request(PROMPT, max_new_tokens=10**9), timeout=TIMEOUT)
    assert outputs[-1].generated_tokens == alone(model, assistant="none")
    assert all(len(item.logprobs) == len(item.generated_tokens) for item in outputs)
    assert all(item.logprobs == outputs[-1].logprobs[: len(item.logprobs)] for item in outputs)
    assert failed.error and not failed.logprobs


def test_memory_is_as_large_as_asked_for(model):
    options = ContinuousBatchingConfig(num_blocks=4, page_size=8, max_requests_per_batch=2, max_batch_tokens=3)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), options)
    outputs = [manager.add_request(PROMPT, max_new_tokens=length) for length in (26, 80)]
    with manager.engine:
        fits, does_not = (manager.get_result(name, timeout=TIMEOUT) for name in outputs)
    assert fits.error is None and "key/value memory" in does_not.error
    half = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.1))
    assert half.engine.max_tokens > manager.engine.max_tokens

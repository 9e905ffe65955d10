"""Streamers get the same sequence of `put` calls as in plain decoding, and nothing after a stop."""

import functools
import threading

import pytest
import torch
from transformers import StoppingCriteria, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_smartspec

from ..serving.helpers import TIMEOUT
from .helpers import EOS, Oracle, Spy, draft_source, prompts, tiny_llama

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
ONE = {"input_ids": IDS[1:2], "attention_mask": MASK[1:2]}


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        assert value.device.type == "cpu" and value.dtype == torch.int64
        self.calls.append(value.clone())

    def end(self):
        self.calls.append("end")

    def comparable(self):
        return [item if isinstance(item, str) else (list(item.shape), item.tolist()) for item in self.calls]


class EveryEnd(StoppingCriteria):
    def __init__(self, ends):
        self.ends, self.num_calls = torch.tensor(ends), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        return self.num_calls >= self.ends[: len(input_ids)]


def check_streams(model, make, source=None):
    recorders = [Recorder(), Recorder()]
    expected = model.generate(**make(), streamer=recorders[0])
    spy = Spy(source or draft_source(model))
    with hf_smartspec.enabled(model):
        output = model.generate(**make(), streamer=recorders[1], assistant=spy)
    assert spy.drafted > 0 and spy.accepted > 0
    plain, ours = (recorder.comparable() for recorder in recorders)
    assert ours == plain
    assert ours[-1] == "end" and ours.count("end") == 1
    streamed = torch.cat([recorders[1].calls[0], *(item[:, None] for item in recorders[1].calls[1:-1])], dim=1)
    sequences = [item if isinstance(item, torch.Tensor) else item.sequences for item in (expected, output)]
    assert torch.equal(streamed, sequences[0]) and torch.equal(streamed, sequences[1])


@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("eos", [None, [EOS, 8, 12]], ids=["no_eos", "eos"])
def test_custom_streamers(model, batch, eos):
    settings = {"max_new_tokens": 20, "eos_token_id": eos}
    check_streams(model, lambda: batch | settings)
    check_streams(model, lambda: batch | settings | {"return_dict_in_generate": True, "output_scores": True})


def test_every_draft_right(model):
    known = model.generate(**BATCH, max_new_tokens=20)
    check_streams(model, lambda: BATCH | {"max_new_tokens": 20}, Oracle(known, MASK))


@pytest.mark.parametrize("ends", [[1, 1, 1, 1], [2, 2, 2, 2], [3, 9, 5, 7], [11, 1, 1, 1], [6, 6, 6, 6]])
@pytest.mark.parametrize("eos", [None, 18], ids=["no_eos", "eos"])
def test_nothing_comes_after_a_criterion_stops(model, ends, eos):
    known = model.generate(**BATCH, max_new_tokens=30, eos_token_id=None)

    def make():
        return BATCH | {"stopping_criteria": [EveryEnd(ends)], "max_new_tokens": 30, "eos_token_id": eos}

    if max(ends) == 1:
        recorders = [Recorder(), Recorder()]
        model.generate(**make(), streamer=recorders[0])
        with hf_smartspec.enabled(model):
            model.generate(**make(), streamer=recorders[1], assistant=Oracle(known, MASK))
        assert recorders[1].comparable() == recorders[0].comparable()
    else:
        check_streams(model, make, Oracle(known, MASK))


def test_nothing_comes_after_a_stop_string(model, tokenizer):
    known = model.generate(**BATCH, max_new_tokens=30, eos_token_id=None)
    stops = [tokenizer.decode(known[row, 9 + row : 12 + row])[1:-1] for row in range(1, 4)]
    settings = {"stop_strings": stops, "tokenizer": tokenizer, "max_new_tokens": 30, "eos_token_id": None}
    check_streams(model, lambda: BATCH | settings, Oracle(known, MASK))
    check_streams(model, lambda: ONE | settings, Oracle(known, MASK))


def test_stateful_processors_beside_a_streamer(model):
    """Processors, criteria and streamer interleave as in plain decoding."""
    log = []

    def make():
        log.append([])
        mine = log[-1]

        class Logging(Recorder):
            def put(self, value):
                mine.append(("put", value.tolist()))

        def processor(ids, scores):
            mine.append(("processor", ids[:, -1].tolist()))
            return scores

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                mine.append(("criterion", input_ids[:, -1].tolist()))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        return BATCH | {
            "logits_processor": [processor],
            "stopping_criteria": [Criterion()],
            "streamer": Logging(),
            "max_new_tokens": 16,
        }

    known = model.generate(**make())
    spy = Spy(Oracle(known, MASK))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**make(), assistant=spy), known)
    assert spy.accepted > 0
    assert log[1] == log[0]


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamer(model, tokenizer, capsys, skip_prompt):
    def text(**kwargs):
        model.generate(**ONE, max_new_tokens=20, streamer=TextStreamer(tokenizer, skip_prompt), **kwargs)
        return capsys.readouterr().out

    plain = text()
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        assert text(assistant=spy) == plain
    assert plain.strip() and spy.accepted > 0


def test_text_iterator_streamer_in_a_thread(model, tokenizer):
    def chunks(**kwargs):
        streamer = TextIteratorStreamer(tokenizer, timeout=TIMEOUT)
        arguments = ONE | {"max_new_tokens": 20, "streamer": streamer} | kwargs
        thread = threading.Thread(target=model.generate, kwargs=arguments)
        thread.start()
        result = list(streamer)
        thread.join()
        return result

    plain = chunks()
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        assert chunks(assistant=spy) == plain
    assert "".join(plain).strip() and spy.accepted > 0


def test_threads_decode_side_by_side(model):
    """One model, one source, several threads: no call sees another's drafts or layout."""
    inputs = [prompts([4 + seed, 7], seed) for seed in range(4)]
    expected = [model.generate(**item, max_new_tokens=20) for item in inputs]
    hf_smartspec.enable(model)
    spy, results = Spy(draft_source(model)), {}
    barrier = threading.Barrier(len(inputs))

    def work(index):
        barrier.wait()
        assistant = "prompt_lookup" if index % 2 else draft_source(model)
        results[index] = model.generate(**inputs[index], max_new_tokens=20, assistant=assistant)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, item in enumerate(expected):
        assert torch.equal(results[index], item)
    assert torch.equal(model.generate(**inputs[0], max_new_tokens=20, assistant=spy), expected[0])
    assert spy.accepted > 0


def test_text_streamers_take_one_row_only(model, tokenizer):
    with hf_smartspec.enabled(model), pytest.raises(ValueError, match="batch size 1"):
        model.generate(**BATCH, max_new_tokens=5, streamer=TextStreamer(tokenizer), assistant="prompt_lookup")


def test_streamers_that_raise_end_the_call(model):
    """A client that has gone away: the error reaches the caller, and the model is as it was."""

    class Gone(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 4:
                raise ConnectionError("gone")

    implementation = model.config._attn_implementation
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model), pytest.raises(ConnectionError, match="gone"):
        model.generate(**BATCH, max_new_tokens=12, streamer=Gone(), assistant=spy)
    assert spy.started == spy.stopped == 4
    assert model.config._attn_implementation == implementation


def test_models_that_are_served_plainly_stream_too():
    model = tiny_llama(attention_dropout=0.1).train()
    recorder = Recorder()
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=5, streamer=recorder, assistant="prompt_lookup")
    assert recorder.comparable()[-1] == "end"
    assert len(recorder.calls) == output.shape[1] - IDS.shape[1] + 2


def test_what_the_callable_gets_from_transformers(model, draft):
    """
    `custom_generate=decode` without the patch: transformers hands on neither streamer nor tokenizer. Bound to the
    callable, the streamer arrives; if this test fails, newer versions hand it on, and it may be simplified.
    """
    settings = BATCH | {"max_new_tokens": 8, "assistant": draft}
    expected = model.generate(**BATCH, max_new_tokens=8)
    dropped, bound = Recorder(), Recorder()
    output = model.generate(**settings, custom_generate=hf_smartspec.decode, streamer=dropped)
    assert torch.equal(output, expected)
    assert dropped.comparable() == [([4, 9], IDS.tolist())]  # the prompt, and not even an end
    decode = functools.partial(hf_smartspec.decode, streamer=bound)
    assert torch.equal(model.generate(**settings, custom_generate=decode, streamer=bound), expected)
    assert len(bound.calls) == expected.shape[1] - 9 + 2 and bound.calls[-1] == "end"

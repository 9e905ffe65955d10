"""Engines of encoder-decoder models, whose encoders run when requests begin."""

import threading

import numpy as np
import pytest
import torch
from transformers import StoppingCriteriaList

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.serving.memory.encoded_memory import EncodedMemory
from hf_smartspec.serving.memory.row_memory import RowMemory
from hf_smartspec.target_model.compat import RequestStatus

from ...covering import exhaustive, part_of
from ...generate.helpers import EOS, VOCAB_SIZE, Spy, noisy_copy, set_special_tokens, tiny_tokenizer
from ...models import new_model
from ..helpers import TIMEOUT, Asked, StopsAt, all_alone, all_at_once, check_all, random_requests, suffix, wait_once

SHARING = ["t5", "bart", "t5gemma"]
ROWWISE = "m2m_100"
LONG = {"max_new_tokens": 30, "eos_token_id": None}


def model_of(architecture: str, **changes):
    return set_special_tokens(new_model(architecture, **changes), EOS)


def with_decoder_prompts(requests: list[Asked], seed: int = 0) -> list[Asked]:
    """Return the requests, every other one with a decoder prompt as well."""
    rng = np.random.default_rng(seed)
    for asked in requests[::2]:
        asked.settings["decoder_input_ids"] = torch.from_numpy(rng.integers(3, VOCAB_SIZE, (1, rng.integers(1, 9))))
    return requests


@pytest.mark.parametrize("architecture", [*part_of(SHARING, "t5"), ROWWISE])
def test_many_requests_with_their_own_settings(architecture):
    model, spy = model_of(architecture), Spy(suffix())
    requests = with_decoder_prompts(random_requests(12, max_new_tokens=16))
    requests[1].settings["encoder_repetition_penalty"] = 1.5
    requests[2].settings["encoder_no_repeat_ngram_size"] = 2
    with Engine(model, spy, max_batch_size=4, max_prefill_tokens=4) as engine:
        outputs = check_all(engine, model, requests)
    assert isinstance(engine._memory, EncodedMemory if architecture in SHARING else RowMemory)
    assert spy.drafted > 0 and spy.accepted > 0 and spy.started == spy.stopped == 12
    statistics = engine.statistics
    assert statistics.accepted_tokens == sum(output.statistics.accepted_tokens for output in outputs) > 0
    assert (statistics.steps > statistics.forwards) == (architecture in SHARING), "several rows to a forward"
    assert "12 answered" in str(engine.report()) and engine._memory.num_reused == 0


@pytest.mark.parametrize("architecture", ["t5", ROWWISE])
def test_drafts_with_encoders_of_their_own(architecture):
    model, requests = model_of(architecture), random_requests(5, longest=12, max_new_tokens=12)
    draft = noisy_copy(model_of("t5"))
    for assistant in (SmartSpecConfig(draft, num_nodes=3), ["suffix", draft]):
        with Engine(model, assistant, max_batch_size=3) as engine:
            check_all(engine, model, requests)
        assert engine.statistics.drafted_tokens > 0
        assert architecture != "t5" or engine.statistics.accepted_tokens > 0


def test_answers_that_repeat_what_was_read_are_drafted_from_it():
    """Suffix trees know what the encoder has read, as in `generate`."""
    model = model_of("t5")
    asked = Asked(list(range(3, 20)), LONG)
    again = Asked(asked.alone(model) * 2, LONG | {"max_new_tokens": 4})
    spy = Spy(suffix())
    with Engine(model, spy) as engine:
        check_all(engine, model, [again])
        assert spy.source is not None and spy.drafted > 0


@pytest.mark.parametrize("architecture", ["bart", ROWWISE])
def test_texts_stop_strings_and_criteria(architecture):
    model, tokenizer = model_of(architecture), tiny_tokenizer()
    model.generation_config.suppress_tokens = list(range(40, 97))  # which the tokenizer does not know
    asked = Asked(tokenizer("some words").input_ids, LONG)
    text = tokenizer.decode(asked.alone(model))
    with Engine(model, suffix(), tokenizer=tokenizer) as engine:
        (output,) = engine.generate(["some words"], **LONG)
        assert output.prompt_ids == asked.prompt and tokenizer.decode(output.generated_tokens) == text
        (stopped,) = engine.generate(["some words"], stop_strings=[text[6:9]], **LONG)
        reference = Asked(asked.prompt, LONG | {"stop_strings": [text[6:9]], "tokenizer": tokenizer})
        assert stopped.generated_tokens == reference.alone(model) and stopped.finish_reason == "stop"
        ours, theirs = StopsAt(9), StopsAt(9)
        (cut,) = engine.generate([asked.prompt], stopping_criteria=StoppingCriteriaList([ours]), **LONG)
        reference = Asked(asked.prompt, LONG | {"stopping_criteria": StoppingCriteriaList([theirs])})
        assert cut.generated_tokens == reference.alone(model) and ours.lengths == theirs.lengths


@pytest.mark.parametrize("architecture", ["t5", ROWWISE])
def test_encoders_run_when_requests_begin(architecture):
    """They run in the engine's thread, since the model may belong to another thread during a pause."""
    model, seen = model_of(architecture), []
    model.get_encoder().register_forward_hook(lambda *args: seen.append(threading.current_thread().name))
    engine = Engine(model, "none", max_batch_size=1)
    seen.clear()
    names = [engine.add_request([3, 4, 5], **LONG) for _ in range(3)]
    assert not seen
    with engine:
        assert all(engine.get_result(name, timeout=TIMEOUT).error is None for name in names)
    assert seen == ["hf-smartspec engine"] * 3


@pytest.mark.parametrize("architecture", ["bart", ROWWISE])
def test_an_encoder_that_fails_ends_its_own_request_alone(architecture):
    model, requests = model_of(architecture), random_requests(4, longest=12, max_new_tokens=12)
    expected = all_alone(model, requests)

    def failing(module, args, kwargs):
        if (kwargs["input_ids"] == 39).any():
            raise ArithmeticError("of the encoder")

    with Engine(model, suffix(), max_batch_size=3) as engine:
        model.get_encoder().register_forward_pre_hook(failing, with_kwargs=True)
        names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests[:2]]
        bad = engine.add_request([3, 39, 5], **LONG)
        names += [engine.add_request(asked.prompt, **asked.arguments) for asked in requests[2:]]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        failure = engine.get_result(bad, timeout=TIMEOUT)
    assert failure.status == RequestStatus.FAILED and "of the encoder" in failure.error
    assert [(output.error, output.generated_tokens) for output in outputs] == [(None, tokens) for tokens in expected]


@pytest.mark.parametrize("architecture", ["t5", ROWWISE])
def test_weights_change_in_a_pause_while_requests_run_and_wait(architecture):
    """Encoder outputs are computed anew, too."""
    model, other = model_of(architecture), model_of(architecture, seed=7)
    prompts = [[3, 4, 5, 6, 7, 8], [9, 10], list(range(3, 30))]
    with Engine(model, suffix(), max_batch_size=2) as engine:
        waits = wait_once(engine)
        with all_at_once(engine):
            names = [engine.add_request(prompt, streaming=True, **LONG | {"max_new_tokens": 60}) for prompt in prompts]
        assert waits.wait(TIMEOUT)
        with engine.pause():
            model.load_state_dict(other.state_dict())
            model.double()
            known = [call.requests[0].tokens.copy() for call in engine._runner.loop.calls]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    start = model.generation_config.decoder_start_token_id
    assert len(known) == 2 and max(map(len, known)) < 60
    for prompt, tokens, output in zip(prompts, [*known, *[[]] * 3], outputs):
        begins = torch.tensor([[start, *tokens]])
        rest = Asked(prompt, LONG | {"max_new_tokens": 60 - len(tokens), "decoder_input_ids": begins})
        assert output.generated_tokens == tokens + rest.alone(model)


@pytest.mark.parametrize("seed", [0, *exhaustive([1])])
def test_memory_stays_within_its_bound(seed):
    model, rng, taken = model_of("t5"), np.random.default_rng(seed), []
    requests = [
        Asked(rng.integers(3, 40, rng.integers(1, 150)).tolist(), {"max_new_tokens": int(rng.integers(1, 30))})
        for _ in range(14)
    ]
    memory = Engine(model, "none")._memory
    assert memory.bytes_per_token == memory.bytes_per_encoded == 2 * 2 * 4 * 8 * 4  # layers, two, heads, size, float32
    most = 420 * memory.bytes_per_token
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=most) as engine:
        place = engine._memory.place

        def watched(*args):
            place(*args)
            taken.append((engine._memory.num_bytes, len(engine._memory.scheduler.running)))

        engine._memory.place = watched
        check_all(engine, model, requests)
        with pytest.raises(ValueError, match="bytes of keys, values and states"):
            engine.add_request([3] * 400, max_new_tokens=30)
        check_all(engine, model, [Asked([3] * 305, {"max_new_tokens": 2})])  # in slots of unusual size
    assert max(num_bytes for num_bytes, _ in taken) <= most
    assert 1 < max(running for _, running in taken) < 8, "as many as fit"
    assert not engine._memory.forward.cache.rows and not engine._memory.forward.cross.rows


def test_streams_and_cancellation():
    model = model_of("t5")
    with Engine(model, suffix(), max_batch_size=2) as engine:
        stream = engine.request_id_iter(engine.add_request([3, 4, 5], streaming=True, **LONG))
        gone = engine.add_request([8, 9], max_new_tokens=1000, eos_token_id=None, streaming=True)
        next(engine.request_id_iter(gone))
        engine.cancel_request(gone)
        *_, last = stream
        assert engine.get_result(gone, timeout=TIMEOUT).finish_reason == "cancelled"
    assert last.generated_tokens == Asked([3, 4, 5], LONG).alone(model)


def test_what_cannot_be_read_is_refused():
    engine = Engine(model_of("bart", max_position_embeddings=32), "none")
    with pytest.raises(ValueError, match="may feed 33 tokens, but the model has 32 positions"):
        engine.add_request([3] * 33, max_new_tokens=2)
    with pytest.raises(ValueError, match="`encoder_outputs` cannot be served"):
        engine.add_request([3], encoder_outputs=(torch.zeros(1, 1, 32),))

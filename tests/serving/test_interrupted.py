"""Ctrl-C in `generate` and in `Engine.generate`: it ends at once, the next call works, and no request remains."""

import os
import signal

import pytest
import torch
from transformers import StoppingCriteria

import hf_smartspec
from hf_smartspec import Engine

from ..models import new_model
from .helpers import Asked

IDS = [5, 6, 7, 5, 6, 7, 5]
NEW = {"max_new_tokens": 12, "eos_token_id": None}


class Interrupts(StoppingCriteria):
    """Sends this process Ctrl-C after three tokens."""

    def __init__(self):
        self.count = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.count += 1
        if self.count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return torch.full((len(input_ids),), False)


@pytest.fixture(autouse=True)
def default_interrupt():
    """Python's own handler of Ctrl-C: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "t5"])  # packed, row by row, after an encoder
@pytest.mark.parametrize("assistant", ["none", "prompt_lookup", "auto"])
def test_generate(architecture, assistant):
    model = hf_smartspec.enable(new_model(architecture))
    expected = model.generate(torch.tensor([IDS]), **NEW)
    criterion, endless = Interrupts(), NEW | {"max_new_tokens": 500}
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.tensor([IDS]), assistant=assistant, stopping_criteria=[criterion], **endless)
    assert criterion.count < 500
    assert torch.equal(model.generate(torch.tensor([IDS]), assistant=assistant, **NEW), expected)


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
@pytest.mark.parametrize("is_running", [False, True])  # before the call, which else starts and stops it
def test_engine(architecture, is_running):
    model = new_model(architecture)
    engine = Engine(model, "prompt_lookup", max_batch_size=2)
    if is_running:
        engine.start()
    endless = NEW | {"max_new_tokens": 500}
    with pytest.raises(KeyboardInterrupt):
        engine.generate([IDS] * 3, stopping_criteria=[Interrupts()], **endless)
    assert engine.is_running == is_running
    (output,) = engine.generate([IDS], **NEW)
    assert output.generated_tokens == Asked(IDS, NEW).alone(model)
    assert not engine.results.is_open() and not engine.results._unread and not len(engine._memory.scheduler)
    engine.stop()


def test_interrupts_between_queueing_and_return_leave_nothing_behind(monkeypatch):
    engine = Engine(new_model("llama"), "prompt_lookup", max_batch_size=2)
    submit = engine._runner.submit

    def interrupted(pending):
        submit(pending)
        raise KeyboardInterrupt

    with engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._runner, "submit", interrupted)
            engine.generate([IDS] * 3, **NEW)
        assert not engine.results.is_open()

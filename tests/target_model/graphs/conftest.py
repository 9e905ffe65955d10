"""Forwards that are recorded, on the CPU."""

import pytest

from hf_smartspec.cpu import few_tokens
from hf_smartspec.target_model.attention import tree_attention as attention
from hf_smartspec.target_model.graphs import recorder
from hf_smartspec.target_model.written import decoder, mlps, norms

from ...recorder import OperationRecorder


@pytest.fixture(autouse=True)
def _tried(every_trial):
    """Every model has a trial of its own."""


@pytest.fixture
def recorders(monkeypatch):
    """All recorders of the test, in the order of the forwards that have them."""
    made: list[OperationRecorder] = []

    def make(device):
        made.append(OperationRecorder())
        return made[-1]

    monkeypatch.setattr(recorder, "_RECORDERS", {"cpu": make})
    # What torch does not dispatch is not recorded.
    for owner, name in ((few_tokens, "can_multiply"), (norms, "can_norm"), (mlps, "can_gate")):
        monkeypatch.setattr(owner, name, lambda *args: False)
    monkeypatch.setattr(attention, "can_attend", lambda *args: False)
    monkeypatch.setattr(decoder, "can_compile", lambda plan: False)
    return made

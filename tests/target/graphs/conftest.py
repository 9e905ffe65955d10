"""Forwards that are recorded, on the CPU."""

import pytest

from hf_smartspec.target.graphs import recorder
from hf_smartspec.target.written import parts

from ...recorder import OperationRecorder


@pytest.fixture
def recorders(monkeypatch):
    """All recorders of the test, in the order of the forwards that have them."""
    made: list[OperationRecorder] = []

    def make(device):
        made.append(OperationRecorder())
        return made[-1]

    monkeypatch.setattr(recorder, "_RECORDERS", {"cpu": make})
    monkeypatch.setattr(parts, "can_multiply", lambda *args: False)  # what torch does not dispatch is not recorded
    return made

"""Profiles of few points, and processes that remember none."""

from weakref import WeakKeyDictionary

import pytest

from hf_smartspec.target_model.cost import measuring, profiling
from hf_smartspec.target_model.cost.measuring import Design
from hf_smartspec.target_model.model_state import ModelState

FEW = (Design(1, 8, 1), Design(1, 8, 4), Design(3, 8, 1), Design(3, 16, 2), Design(2, 30, 3))


@pytest.fixture
def few_points(monkeypatch, tmp_path):
    monkeypatch.setattr(profiling, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling, "DESIGN", FEW)
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "_were_disturbed", lambda *_: False)


@pytest.fixture
def next_process(monkeypatch):
    """Has nothing in memory."""

    def begin():
        states = WeakKeyDictionary()
        monkeypatch.setattr(profiling, "state_of", lambda model: states.setdefault(model, ModelState(model)))
        monkeypatch.setattr(profiling, "_mended", set())

    begin()
    return begin

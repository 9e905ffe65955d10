"""Tests of written-out decoders."""

import pytest


@pytest.fixture(autouse=True)
def _tried(every_trial):
    """Every model has a trial of its own."""


@pytest.fixture(autouse=True)
def _any_number(any_number_of_tokens):
    """Forwards are programs, whatever their number of tokens."""


@pytest.fixture
def programs(monkeypatch):
    """Sizes of forwards that ran as programs."""
    from hf_smartspec.target_model.written.compiled import CompiledDecoder

    sizes, run = [], CompiledDecoder.run
    monkeypatch.setattr(
        CompiledDecoder, "run", lambda self, given, *rest: (sizes.append(len(given.x)), run(self, given, *rest))[1]
    )
    return sizes

"""Tests of written-out decoders."""

import pytest

from hf_smartspec.cpu import few_tokens


@pytest.fixture(autouse=True)
def _tried(every_trial):
    """Every model has a trial of its own."""


@pytest.fixture(autouse=True)
def _any_number_of_tokens(monkeypatch):
    """Compile forwards of any number of tokens, also on CPUs where torch's own products of many are faster."""
    monkeypatch.setattr(few_tokens, "_most_tokens", lambda dtype: few_tokens.ANY)
    few_tokens.most_tokens.cache_clear()
    yield
    monkeypatch.undo()
    few_tokens.most_tokens.cache_clear()

"""Fixtures of the tests of `generate(assistant=...)`."""

import pytest

from .helpers import noisy_copy, tiny_llama


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def draft(model):
    return noisy_copy(model)


@pytest.fixture
def hush(monkeypatch):
    """transformers' own assisted decoding logs a deprecation of its own, which would fail the test."""
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", lambda *args, **kwargs: None)

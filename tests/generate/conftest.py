"""Fixtures of the tests of `generate(assistant=...)`."""

import pytest

from .helpers import noisy_copy, tiny_llama, tiny_tokenizer


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def draft(model):
    return noisy_copy(model)


@pytest.fixture
def hush(monkeypatch):
    """For tests in which transformers logs a deprecation, which would make them fail."""
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", lambda *args, **kwargs: None)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()

"""Tests of written-out decoders."""

import pytest


@pytest.fixture(autouse=True)
def _tried(every_trial):
    """Every model has a trial of its own."""


@pytest.fixture(autouse=True)
def _any_number(any_number_of_tokens):
    """Forwards are programs, whatever their number of tokens."""

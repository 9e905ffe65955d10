"""Tests of compiled operators."""

import pytest


@pytest.fixture(autouse=True)
def _tried(every_trial):
    """Every model has a trial of its own."""

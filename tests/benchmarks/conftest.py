"""Fixtures of all tests of benches: those of commands, and the embedded target as the default."""

import pytest

from benchmarks.kit import models

from ..commands.conftest import _progress_bars_stay_on, folder  # noqa: F401


@pytest.fixture(autouse=True)
def _no_real_model(monkeypatch):
    """Benches would take the model in the user's cache, whose forwards cost more."""
    monkeypatch.setattr(models, "real_model", lambda: None)

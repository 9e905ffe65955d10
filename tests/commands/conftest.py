"""What holds for all tests of commands."""

import pytest
from transformers.utils import logging

from ..folders import save_tiny_models


@pytest.fixture(autouse=True)
def _progress_bars_stay_on():
    """Commands switch them off."""
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """See `save_tiny_models`."""
    return save_tiny_models(tmp_path_factory.mktemp("models"))

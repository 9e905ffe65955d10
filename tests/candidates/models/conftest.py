"""Both ways to look at drafts."""

import pytest

from .checks import look_at_the_end


@pytest.fixture(params=["by level", "at once"])
def way(request, monkeypatch):
    """Drafts that are looked at behind every level, or at the end."""
    if request.param == "at once":
        look_at_the_end(monkeypatch)
    return request.param

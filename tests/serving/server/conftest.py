"""A server of the embedded target, which all tests of a process share."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers.cli.serving.server")

from .running import Served, running, served_demo


@pytest.fixture(scope="session")
def demo() -> Served:
    """The embedded target in float32 and its tokenizer."""
    return served_demo()


@pytest.fixture(scope="session")
def server(demo):
    """Serves it as `demo`, without keys."""
    with running(demo) as started:
        yield started

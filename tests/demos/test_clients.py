"""Clients of servers: the examples of docs/works-with.md that ask one, run as they are."""

import socket

import pytest

from hf_smartspec import SuffixTreeCandidates

from ..generate.helpers import Spy
from .examples import load_example

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("transformers.cli.serving.server", reason="transformers[serving] is not installed")


@pytest.fixture(scope="module")
def served():
    """`smartspec serve`, in a thread."""
    from ..serving.server.running import running, served_demo

    with running(served_demo()) as server:
        yield server


def test_client_of_openai(served):
    plain, fast, speculation = load_example("openai_client").main(f"{served.url}/v1")
    assert fast == plain and all(plain)
    assert speculation["num_accepted_draft_tokens"] > 0


def test_chains_of_langchain(served):
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    before = served.engine.statistics.accepted_tokens
    plain, fast = load_example("langchain_chat").main(f"{served.url}/v1")
    assert fast == plain and all(plain)
    assert served.engine.statistics.accepted_tokens > before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_server_of_transformers(deprecated_by_itself):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spy = Spy(SuffixTreeCandidates(min_probability=0.02))
    plain, fast = load_example("transformers_serve").main(port, spy)
    assert fast == plain and plain
    assert spy.accepted > 0 and spy.started == spy.stopped == 1

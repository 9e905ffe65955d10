"""Clients of servers: the examples of docs/works-with.md that ask one, run as they are."""

import socket

import pytest

from hf_smartspec import SuffixTreeCandidates

from ..generate.helpers import Spy
from .examples import load_example

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("transformers.cli.serving.server", reason="transformers[serving] is not installed")
pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def demo():
    from ..serving.server.running import served_demo

    return served_demo()


@pytest.fixture(scope="module")
def served(demo):
    """`smartspec serve`, in a thread."""
    from ..serving.server.running import running

    with running(demo) as server:
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


def test_chat_of_transformers(demo, served, monkeypatch, capsys):
    from transformers.cli.chat import Chat

    question, lines = "What is 12 times 4?", []
    typed = iter([question, "n", "!exit"])
    monkeypatch.setattr("rich.console.Console.input", lambda console, prompt: lines.append(prompt) or next(typed))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # or its client asks nobody, not even us
    before = served.engine.statistics.accepted_tokens
    Chat("demo", served.url, ["max_new_tokens=16", "do_sample=False"])
    answer = demo.text(demo.alone(demo.chat_ids(question), max_new_tokens=16))
    assert "".join(answer.split()) in "".join(capsys.readouterr().out.split())
    assert len(lines) == 3 and served.engine.statistics.accepted_tokens > before


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # how uvicorn ends
def test_a_server_of_transformers_on_a_port_in_use_is_not_waited_for(deprecated_by_itself):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match="cannot listen on port"):
            load_example("transformers_serve").main(taken.getsockname()[1])

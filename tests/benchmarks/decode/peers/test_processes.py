"""Peers' processes: a job, answers, errors that are answers, and ends that are told."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.decode.peers import known
from benchmarks.decode.peers.known import PEERS, python_of
from benchmarks.decode.peers.processes import RUNNERS, PeerError, PeerProcess

from ....serving.helpers import TIMEOUT

JOB = {"prompts": [[1, 2], [3], [4]], "num_tokens": 3, "threads": 1, "settings": {}}
FAKE = """
import os
from runners.protocol import Engine, Way, serve

KNOWN = []

def count(prompts, num_tokens):
    print("what a library prints")
    return [[prompt[-1] + step for step in range(num_tokens)] for prompt in prompts]

def remember(prompts, num_tokens):
    KNOWN.extend(prompts)
    return [[len(KNOWN)] for prompt in prompts]

def fail(prompts, num_tokens):
    raise RuntimeError("no such\\nkernel")

def die(prompts, num_tokens):
    os.write(2, b"out of luck")
    os._exit(7)

def wait(prompts, num_tokens):
    os.read(os.pipe()[0], 1)

def load(job):
    if job["settings"].get("broken"):
        raise OSError("no model")
    forgetful = Way(remember, True, lambda num_rows: KNOWN.clear())
    ways = {"count": Way(count, in_batches=True), "fail": Way(fail), "die": Way(die), "forgetful": forgetful}
    ways["wait"] = Way(wait)
    return Engine(ways, "fake 1.0")

serve(load)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the fake peer."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    started = []

    def start(**settings):
        job = JOB | {"settings": settings}
        started.append(PeerProcess(Path(sys.executable), "fake_peer", job, tmp_path, timeout=TIMEOUT))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_a_peer_decodes_the_rows_it_is_asked_for(start):
    process = start()
    assert process.ways == {"count": True, "fail": False, "die": False, "forgetful": True, "wait": False}
    assert process.about == "fake 1.0"
    answer = process.decode("count", [2, 1])
    assert answer.tokens == [[4, 5, 6], [3, 4, 5]] and answer.seconds > 0
    assert process.decode("count", [0]).tokens == [[2, 3, 4]]


def test_what_was_decoded_before_is_forgotten_when_it_is_prepared(start):
    process = start()
    assert [process.decode("forgetful", [0]).tokens for _ in range(2)] == [[[1]], [[1]]]


def test_what_fails_is_told_and_the_process_goes_on(start):
    process = start()
    with pytest.raises(PeerError, match="RuntimeError: no such kernel"):
        process.decode("fail", [0])
    assert process.decode("count", [0]).tokens == [[2, 3, 4]]


def test_an_end_without_an_answer_is_told_with_its_last_words(start):
    process = start()
    for _ in range(2):
        with pytest.raises(PeerError, match="status 7: out of luck"):
            process.decode("die", [0])


def test_a_peer_that_takes_too_long_is_ended(start):
    process = start()
    process.timeout = 0.2
    with pytest.raises(PeerError, match=r"took longer than 0\.2 s"):
        process.decode("wait", [0])


def test_a_model_that_cannot_be_loaded_is_told(start):
    with pytest.raises(PeerError, match="OSError: no model"):
        start(broken=True)


def test_what_interrupts_the_command_leaves_its_peers_to_be_closed(start):
    process = start()
    assert os.getsid(process._process.pid) != os.getsid(0)
    process.close()
    assert process._process.returncode is not None


def test_an_interrupted_wait_leaves_nothing_that_keeps_python_from_ending(start, monkeypatch):
    process = start()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(
        process._process, "stdout", SimpleNamespace(readline=interrupt, close=process._process.stdout.close)
    )
    with pytest.raises(KeyboardInterrupt):
        process.decode("count", [0])
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(60)
    assert not any(timer.is_alive() for timer in timers)


def test_every_peer_has_a_runner():
    assert all((RUNNERS / "runners" / f"{peer.runner}.py").is_file() for peer in PEERS.values())


def test_an_environment_is_made_once_and_never_gets_torch(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(known.venv, "create", lambda place, **_: place.mkdir())
    monkeypatch.setattr(known, "_run", lambda command, log: calls.append(command))
    python = python_of(tmp_path, "some", ("engine==1",))
    assert python_of(tmp_path, "some", ("engine==1",)) == python == tmp_path / "some" / "bin" / "python"
    assert len(calls) == 1 and calls[0][-1] == "engine==1"
    limits = calls[0][calls[0].index("--constraint") + 1]
    assert Path(limits).read_text() == "torch<0\n"


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "Makefile").write_text("all:")
    with pytest.raises(PeerError, match="--cache"):
        python_of(tmp_path, "llama.cpp", ("engine==1",))
    assert (tmp_path / "llama.cpp" / "Makefile").read_text() == "all:"


def test_what_cannot_be_installed_is_told_with_the_reason(tmp_path, monkeypatch):
    def create(place, **_):
        place.mkdir(exist_ok=True)
        (place / "pyvenv.cfg").touch()

    monkeypatch.setattr(known.venv, "create", create)
    script = "print('ERROR: no compiler'); print('more'); raise SystemExit(1)"
    monkeypatch.setattr(known.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!{sys.prefix}/bin/python\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    for _ in range(2):  # it is tried again
        with pytest.raises(PeerError, match="ERROR: no compiler"):
            python_of(tmp_path, "some", ("engine==1",))

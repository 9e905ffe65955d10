"""How commands show that they are alive where there is no terminal."""

import time

import pytest

from hf_smartspec.commands.common import console
from hf_smartspec.commands.common.console import ProgressLines, track

from ...serving.helpers import TIMEOUT


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(console, "_FIRST", 0.01)


def wait_for(capsys, text):
    """Everything on stderr, once it holds the text."""
    seen, end = "", time.monotonic() + TIMEOUT
    while text not in seen:
        assert time.monotonic() < end, seen
        seen += capsys.readouterr().err
    return seen


def test_a_long_step_says_what_is_being_done(capsys):
    with track(desc="serving", total=3) as bar:
        wait_for(capsys, "serving 0 of 3, ")
        bar.update()
        bar.set_postfix_str("auction")
        line = wait_for(capsys, "serving 1 of 3, auction, ").splitlines()[-1]
    assert line.endswith(" s")
    assert not ProgressLines._open


def test_what_begins_within_joins_the_line(capsys):
    with track(desc="ablations", total=2):
        for number in track(range(4), desc="replaying", unit=" requests"):
            if number == 2:
                wait_for(capsys, "ablations 0 of 2; replaying 2 of 4 requests, ")
    assert not ProgressLines._open


def test_unknown_totals_are_counted(capsys):
    with track(desc="simulating", unit=" loads") as bar:
        wait_for(capsys, "simulating, ")
        bar.update(5)
        wait_for(capsys, "simulating 5 loads, ")


def test_an_error_ends_the_lines():
    with pytest.raises(KeyboardInterrupt), track(desc="serving", total=3):
        raise KeyboardInterrupt
    assert not ProgressLines._open

"""Sessions: what is measured is kept, shown and judged, also where a measurement fails, is late, or is interrupted."""

import argparse
import json
import signal
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.kit import session
from benchmarks.kit.arguments import add_session_arguments
from benchmarks.kit.claims import Claim
from benchmarks.kit.session import Case, Section, Session, new_session
from benchmarks.kit.tables import Column
from benchmarks.kit.time_limit import OutOfTimeError
from hf_smartspec.commands.common.arguments import UsageError

COLUMNS = [Column("value", "value")]


def measured(value=1):
    return {"value": value}


def section(cases, **options):
    return Section("part", lambda: cases, COLUMNS, **options)


def test_rows_are_shown_with_their_claims_and_note(capsys):
    cases = [Case("first", measured), Case("second", lambda: {"value": None})]
    claims = {"claims": lambda rows: [Claim("all are 1", False, f"{len(rows)} rows")], "note": "a note"}
    assert Session({}).run([section(cases, title="A title", **claims)], Console()) == 1, "a claim fails"
    out = capsys.readouterr().out
    assert all(text in out for text in ("A title", "first", "second", "NO  all are 1: 2 rows", "a note"))
    assert "None" not in out


def test_what_fails_is_named_and_the_rest_is_measured(capsys):
    def fail():
        raise RuntimeError("no such kernel")

    session = Session({})
    assert session.run([section([Case("broken", fail), Case("whole", measured)])], Console()) == 1
    assert list(session.rows("part")) == ["whole"]
    assert "Traceback" in session.report["failures"]["part: broken"]
    assert "part: broken: RuntimeError: no such kernel" in capsys.readouterr().out


def test_arguments_that_cannot_be_used_end_the_run():
    def refuse():
        raise UsageError("--size: too large")

    with pytest.raises(UsageError, match="too large"):
        Session({}).run([section([Case("refused", refuse)])], Console())


def test_what_was_measured_before_ctrl_c_is_shown_and_written(tmp_path, capsys):
    def interrupt():
        raise KeyboardInterrupt

    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        Session({}, path).run([section([Case("early", measured), Case("late", interrupt)])], Console())
    assert list(json.loads(path.read_text())["results"]["part"]) == ["early"]
    assert "early" in capsys.readouterr().out


def arguments(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--part", default="all")
    add_session_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_a_resumed_run_measures_only_what_is_missing(tmp_path):
    path = tmp_path / "results.json"
    free = ["part"]
    new_session(arguments("--json", path), free=free).run([section([Case("a", measured)])], Console())
    resumed = new_session(arguments("--json", path, "--resume", "--part", "one"), free=free)
    cases = [Case("a", lambda: pytest.fail("is measured already")), Case("b", measured)]
    assert resumed.run([section(cases)], Console()) == 0 and list(resumed.rows("part")) == ["a", "b"]
    with pytest.raises(UsageError, match="with other versions or options"):
        new_session(arguments("--json", path, "--resume", "--size", "2"), free=free)
    with pytest.raises(UsageError, match="--resume goes with --json"):
        new_session(arguments("--resume"))


def test_measurements_are_kept_at_once_and_stopped_in_time(tmp_path, monkeypatch):
    path, handler = tmp_path / "results.json", signal.getsignal(signal.SIGALRM)
    now, seen, left = [0.0], [], []
    # What comes before the endless case takes none of the session's time, however slow the machine is.
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def endless():
        seen.append(json.loads(path.read_text())["results"])
        now[0] = 600.0
        left.append(signal.setitimer(signal.ITIMER_REAL, 0.01)[0])  # that time passes at once
        while True:
            time.sleep(0.01)

    cases = [Case("quick", measured), Case("endless", endless), Case("late", measured)]
    Session({}, path, 600.0).run([section(cases, may_overrun=False)], Console())
    assert 300 < left[0] <= 600 and seen[0]["part"]["quick"]["value"] == 1
    report = json.loads(path.read_text())
    assert list(report["results"]["part"]) == ["quick"]
    assert "stopped" in report["skipped"]["part: endless"] and "was over" in report["skipped"]["part: late"]
    assert signal.getsignal(signal.SIGALRM) == handler and not issubclass(OutOfTimeError, Exception)

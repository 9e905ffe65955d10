"""`python -m benchmarks tenants` on a tiny model."""

import json
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers.cli.serving.server")

from benchmarks.load.tenants import server

from .. import helpers


@pytest.fixture
def one_server(monkeypatch):
    """Let all runs of a test ask the server that the first of them starts: they differ in what is asked only."""
    start, started = server.tenant_server, []

    @contextmanager
    def shared(args):
        if not started:
            started.append(stack.enter_context(start(args)))
        yield started[0]

    with ExitStack() as stack:
        monkeypatch.setattr(server, "tenant_server", shared)
        yield


@pytest.mark.long
@pytest.mark.end_to_end
def test_an_attacker_and_others(one_server, folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    options = ["--model", folder / "target", "--tenants", "3", "--requests", "4", "--attack-tokens", "60"]
    assert helpers.bench("tenants", *options, "--most", "1e6", "--json", out) == 0
    found = json.loads(out.read_text())["results"]["tenants"]["tenants"]
    assert list(found["tenants"]) == ["1", "2", "all"] and found["tenants"]["all"]["requests"] == 8
    assert found["num_wrong"] == 0 and set(found["statuses"]) <= {"200"}
    shown = capsys.readouterr().out
    assert "p50 attacked" in shown and "Their answers are the same" in shown
    assert helpers.bench("tenants", *options, "--attack", "streams", "--most", "1e-6") == 1


def test_one_tenant_is_refused(capsys):
    assert helpers.bench("tenants", "--tenants", "1") == 2
    assert "must be at least 2" in capsys.readouterr().err


@pytest.mark.end_to_end
def test_a_server_that_does_not_start_is_an_error(tmp_path, capsys):
    assert helpers.bench("tenants", "--model", tmp_path / "none") == 2
    assert "the server did not start" in capsys.readouterr().err

"""`smartspec serve`: errors before anything is loaded, and an end in order."""

import argparse
import re
import socket
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers.cli.serving.server")
import httpx
import torch

from hf_smartspec.commands.serve import checks

from ...serving.helpers import TIMEOUT
from .. import processes
from ..helpers import EMBEDDED, call

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no/such/folder"], "no such model folder"),
        (["a=demos/models/target", "a=demos/models/draft"], "two models are named 'a'"),
        (["=x"], "NAME=MODEL"),
        (["--assistant", "nonsense"], "--assistant"),
        (["--api-key-file", "no/such/file"], "--api-key"),
        (["--api-key", " "], "printable"),
        (["--admin-key-file", "no/such/file"], "--admin-key-file"),
        (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid"),
        (["--host", ""], "must name an address"),
        (["--port", "99999"], "must be at most 65535, got 99999"),
        (["--assistant", "suffix+nonsense"], "preset 'nonsense'"),
        (["--device", "cuda:77"], "cannot use the device"),
        (["--device", "meta"], "cannot use the device 'meta'"),
        (["--chat-template-kwargs", "[]"], "JSON object"),
        (["--timeout", "0"], "must be positive"),
        (["--shared", ""], "argument --shared: must not be empty"),
        (["--learn", ""], "argument --learn: must not be empty"),
        (["--max-requests-per-key", "0"], "must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    port = [] if "--port" in arguments else ["--port", "0"]
    assert call("serve", *arguments, *port) == 2
    error = capsys.readouterr().err
    assert message in error and error.strip().count("\n") == 0


def test_a_port_in_use_and_missing_packages(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert call("serve", "--port", taken.getsockname()[1]) == 2
    assert "in use" in capsys.readouterr().err
    monkeypatch.setattr(checks, "EXTRAS", ("no_such_package",))
    assert call("serve") == 2
    assert 'pip install "hf-smartspec[serve]"' in capsys.readouterr().err


def test_releases_of_transformers_that_cannot_serve_are_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(checks, "TRANSFORMERS", checks.Version("5.22.2"))
    assert call("serve") == 2
    assert 'needs transformers 5.23, not 5.22.2: pip install "hf-smartspec[serve]"' in capsys.readouterr().err


def test_the_oldest_release_that_serves_is_that_of_the_extra():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers[serving]>={checks.OLDEST}" in extras["serve"]


def test_a_folder_without_a_tokenizer(folder, capsys):
    assert call("serve", folder / "bare", "--port", "0", "--assistant", "none") == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_memory_is_divided_and_told_of(monkeypatch, capsys):
    """Among models, and among replicas on one machine; on a cluster, each replica has its own."""
    from hf_smartspec.commands.serve.arguments import add_arguments
    from hf_smartspec.commands.serve.serving import loaded_server, num_sharing
    from hf_smartspec.serving.memory import budget
    from hf_smartspec.serving.server.guard.keys import ApiKeys

    monkeypatch.setattr(budget, "free_bytes", lambda device: 800 * 2**20)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def sharing(*words):
        return num_sharing(parser.parse_args(["--device", "cpu", *words]), 2)

    assert sharing() == 2 and sharing("--replicas", "4") == 8 and sharing("--replicas", "1", "--max-replicas", "3") == 6
    assert sharing("--replicas", "4", "--ray-address", "x") == sharing("--replicas", "4", "--device", "cuda") == 2
    args = parser.parse_args(["--device", "cpu", "--dtype", "float32", "--assistant", "suffix"])
    with loaded_server(args, {"a": str(EMBEDDED), "b": str(EMBEDDED)}, ApiKeys()) as server:
        assert [served.engine.max_kv_bytes for served in server.models.values()] == [100 * 2**20] * 2
    said = capsys.readouterr().err
    assert "keys and values take at most 100 MiB for a, 100 MiB for b (--max-kv-mib)" in said
    assert "texts to draft from: 512 MiB" in said


def test_names_of_models():
    assert checks.name_models(["owner/name", "x=owner/name"]) == {"owner/name": "owner/name", "x": "owner/name"}
    assert list(checks.name_models([])) == ["demo"]


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.skipif(torch.cuda.is_available(), reason="the command would take the GPU")
def test_what_runs_is_finished_when_the_server_is_told_to_end(tmp_path):
    """By SIGTERM: the stream goes on to its end, nobody else is let in, and the exit status is 0."""
    options = ["--port", "0", "--assistant", "none", "--dtype", "float32", "--api-key", "k"]
    process = processes.start(processes.run_logged, ["serve", f"demo={EMBEDDED}", *options], tmp_path / "said")
    try:
        url = address(process, tmp_path / "said")
        body = {"prompt": "1, 2, 3,", "max_tokens": 200, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer k"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
        process.join(TIMEOUT)
        assert process.exitcode == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        process.kill()
        process.join()


def address(process, said):
    end = time.monotonic() + TIMEOUT
    while not (said.exists() and (match := re.search(r"at (http://\S+)/v1", said.read_text()))):
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.02)
    return match[1]

"""`smartspec serve --replicas 2`: one service, whichever replica lives."""

import asyncio
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("fastapi")
import httpx
import psutil
import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from hf_smartspec.commands.serve.cluster import application

from ...commands.common.test_ray_cluster import listening
from ...commands.helpers import call
from ...serving.helpers import TIMEOUT
from ...serving.server.running import served_demo

REPOSITORY = Path(__file__).parents[3]
PROMPTS = [
    "def fib(n):", "1, 2, 3, 4,", "SELECT name FROM users WHERE", "Once upon a time", "The sum of 3 and 4 is",
    "import numpy as np\n", "Question: What is 7 times 8?\nAnswer:", "class Stack:\n    def",
]  # fmt: skip


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The folder of --learn."""
    return tmp_path_factory.mktemp("learnt")


@pytest.fixture(scope="module")
def service(learnt):
    """The process and where it listens."""
    arguments = ["demo=demos/models/target", "--port", "0", "--dtype", "float32", "--threads", "1"]
    options = {"every_requests": 2, "background": False}
    arguments += ["--draft", "demos/models/draft", "--learn", str(learnt), "--learn-options", json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_smartspec.commands.main", "serve", "--replicas", "2", *arguments],
        cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = next(match[1] for line in process.stderr if (match := re.search(r"at (http://\S+)/v1", line)))
        yield process, url
    finally:
        process.kill()
        process.wait()


def replicas_of(process):
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "ServeReplica:smartspec:Replica" in "".join(child.cmdline())]


def wait_for(ask, is_right):
    """The first answer that is right."""
    for _ in range(1000):
        if is_right(answer := ask()):
            return answer
    raise TimeoutError


def body_of(number):
    """Greedy and sampled, with and without seeds, as streams and whole."""
    fields = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 80, "stream": number % 3 != 0}
    if number % 2:
        fields |= {"temperature": 0.8, "seed": number}
    else:
        fields |= {"temperature": 0}
    return fields


async def ask(client, fields, begun=None):
    """The text of an answer, after checks that it is there once."""
    async with client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        if not fields["stream"]:
            return json.loads(await answer.aread())["choices"][0]["text"]
        texts, ends, names = [], [], set()
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                ends += [line] if line else []
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            names.add(chunk["id"])
            texts.append(chunk["choices"][0]["text"])
            ends += [end] if (end := chunk["choices"][0]["finish_reason"]) else []
            if begun is not None:
                begun()
    assert len(names) == 1 and len(ends) == 2 and ends[1] == "data: [DONE]"
    return "".join(texts)


@pytest.mark.exhaustive  # as Ray Serve starts: a minute or more of two cores
def test_all_are_answered_once_though_a_replica_is_killed(service):
    process, url = service
    bodies = [body_of(number) for number in range(24)]

    async def main():
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=64)) as client:
            calm = await asyncio.gather(*(ask(client, fields) for fields in bodies))
            enough, count = asyncio.Event(), 0

            def begun():
                nonlocal count
                count += 1
                if count == 8:
                    enough.set()

            free = {"prompt": PROMPTS[0], "max_tokens": 80, "stream": True, "temperature": 1.0}  # any answer will do
            asked = asyncio.gather(*(ask(client, fields, begun) for fields in [*bodies, free, free]))
            await enough.wait()
            one, _ = replicas_of(process)
            one.send_signal(signal.SIGKILL)
            again = await asked
            assert again[: len(bodies)] == calm
            return calm

    calm = asyncio.run(main())
    served = served_demo()
    for number in (0, 6):  # as without any service
        ids = served.tokenizer(PROMPTS[number % len(PROMPTS)], return_tensors="pt").input_ids
        plain = served.model.generate(ids, max_new_tokens=80, do_sample=False)[0, ids.shape[1] :]
        assert calm[number] == served.tokenizer.decode(plain, skip_special_tokens=True)


@pytest.mark.exhaustive  # as Ray Serve starts: a minute or more of two cores
def test_the_front_answers_for_all(service):
    _, url = service
    assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT).json()["data"][0]["id"] == "demo"
    metrics = httpx.get(f"{url}/metrics", timeout=TIMEOUT).text
    assert re.search(r'vllm:request_success_total\{finished_reason="length",model_name="demo",replica="\w+"\}', metrics)
    wrong = httpx.post(f"{url}/v1/completions", json={"prompt": ""}, timeout=TIMEOUT)
    assert wrong.status_code == 400 and "empty" in wrong.json()["error"]["message"]
    large = httpx.post(f"{url}/v1/completions", content=b" " * (9 * 2**20), timeout=TIMEOUT)
    assert large.status_code == 413
    assert httpx.get(f"{url}/nowhere", timeout=TIMEOUT).status_code == 404
    for path in ("/v1/models", "/metrics"):  # a page in a browser here, under a name of its own
        assert httpx.get(f"{url}{path}", headers={"Host": "elsewhere.example"}, timeout=TIMEOUT).status_code == 403


@pytest.mark.exhaustive  # as Ray Serve starts: a minute or more of two cores
def test_replicas_learn_from_what_they_serve(service, learnt):
    _, url = service

    def updates():
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT).status_code == 200
        metrics = httpx.get(f"{url}/metrics", timeout=TIMEOUT).text
        found = re.findall(r'smartspec:learning_updates_total\{.*replica="(\w+)"\} (\S+)', metrics)
        return {replica for replica, number in found if float(number)}

    wait_for(updates, lambda found: len(found) > 0)
    assert [path.name for path in (learnt / "demo").iterdir() if path.suffix == ".pt"] == ["draft.pt"]


@pytest.mark.exhaustive  # as Ray Serve starts: a minute or more of two cores
def test_nothing_listens_but_on_loopback(service):
    process, _ = service
    addresses = {address.removeprefix("::ffff:") for address in listening(process.pid)}
    assert addresses == {"127.0.0.1"}


@pytest.mark.exhaustive  # as Ray Serve starts: a minute or more of two cores
def test_what_runs_is_finished_when_the_service_is_told_to_end(service):
    process, url = service
    fields = {"prompt": "1, 2, 3,", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=TIMEOUT) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        refused = wait_for(
            lambda: httpx.get(f"{url}/v1/models", timeout=TIMEOUT), lambda answer: answer.status_code != 200
        )
        assert refused.status_code == 503 and refused.headers["retry-after"] and "error" in refused.json()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
    assert process.wait(TIMEOUT) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--replicas", "2", "--max-replicas", "1"], "--max-replicas: 1 is less than the 2"),
        (["--replicas", "0"], "at least 1"),
        (["--min-goodput", "-1"], "must be at least 0"),
        (["--router", "random"], "invalid choice"),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    assert call("serve", *arguments, "--port", "0") == 2
    error = capsys.readouterr().err
    assert message in error and error.strip().count("\n") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="replicas would take the GPU")
def test_a_configuration_file_makes_the_same_service():
    options = {"models": ["m=demos/models/target"], "replicas": 3, "max_batch_size": 4, "assistant": ["suffix"]}
    front = application(options)._bound_deployment
    replicas = front.init_args[0]._bound_deployment
    assert front.name == "Front" and replicas.name == "Replica" and replicas.num_replicas == 3
    assert replicas.max_ongoing_requests == 4 + 64
    front = application({"replicas": 1, "max_replicas": 5, "min_goodput": 20})._bound_deployment
    scaling = front.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 5, 32)
    with pytest.raises(ValueError, match="--colour"):
        application({"colour": "red"})


def test_the_example_file_is_valid():
    config = yaml.safe_load((REPOSITORY / "demos/examples/ray_serve.yaml").read_text())
    (app,) = ServeDeploySchema.model_validate(config).applications
    module, _, name = app.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is application
    assert application(app.args)._bound_deployment.name == "Front"


def test_ray_that_does_not_come_up_is_told_in_a_line(monkeypatch, capsys):
    def fail(**_):
        raise Exception("many\nlines\nThe current node timed out during startup.")

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert call("serve", "--replicas", "2", "--port", "0") == 2
    error = capsys.readouterr().err
    assert "Ray cannot be started: The current node timed out" in error and error.strip().count("\n") == 0

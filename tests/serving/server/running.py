"""Servers in threads, for tests."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec import SmartSpecConfig
from hf_smartspec.serving.server.app import make_app
from hf_smartspec.serving.server.engine import ServedEngine
from hf_smartspec.serving.server.guard.keys import ApiKeys
from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.metrics import ServerMetrics
from hf_smartspec.serving.server.running import DrainingServer, listen
from hf_smartspec.serving.server.served import ServedModel

from ..helpers import TIMEOUT, Asked

TARGET = Path(__file__).parents[3] / "demos/models/target"


@dataclass
class Served:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def chat_ids(self, text: str, **kwargs) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, **kwargs)[
            "input_ids"
        ]

    def alone(self, prompt: list[int] | str, seed: int | None = None, **settings) -> list[int]:
        """Return the tokens of plain `generate`."""
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return Asked(ids, settings, seed).alone(self.model)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@dataclass
class Running:
    url: str
    models: dict[str, ServedModel]
    server: DrainingServer

    @property
    def engine(self) -> ServedEngine:
        return next(iter(self.models.values())).engine

    def client(self, key: str = "none", **kwargs) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT, **kwargs)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT)

    def get(self, path: str, **kwargs) -> httpx.Response:
        return httpx.get(self.url + path, timeout=TIMEOUT, **kwargs)

    def post(self, path: str, body=None, **kwargs) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=TIMEOUT, **kwargs)


def served_demo() -> Served:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return Served(model, AutoTokenizer.from_pretrained(TARGET))


@contextmanager
def running(
    served: Served,
    keys=(),
    limits=None,
    max_batch_size=8,
    assistant="suffix",
    names=("demo",),
    hosts=None,
    admin_keys=(),
):
    """Serves one model, under several names with an engine each."""
    limits, metrics, models = limits or Limits(), ServerMetrics(), {}
    for name in names:
        config = SmartSpecConfig(assistant, num_nodes=8)
        engine = ServedEngine(served.model, config, max_batch_size=max_batch_size, tokenizer=served.tokenizer).start()
        models[name] = ServedModel(name, engine, limits, metrics, max_batch_size)
    app = make_app(models, metrics, ApiKeys(keys, admin_keys=admin_keys), limits.max_body_bytes, hosts=hosts)
    listener, started = listen("127.0.0.1", 0), threading.Event()
    server = DrainingServer(app, 5, started.set, "error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(TIMEOUT)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", models, server)
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
        for item in models.values():
            item.stop()
        listener.close()


def wait_until(is_true) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def is_idle(server: Running) -> bool:
    load = server.engine.load
    return load.num_running == load.num_waiting == 0 == len(next(iter(server.models.values())).open)


def check_serves(server: Running, demo: Served) -> None:
    """The server answers as if nothing had happened."""
    result = server.client().completions.create(model="demo", prompt="SELECT", max_tokens=4)
    assert result.choices[0].text == demo.text(demo.alone("SELECT", max_new_tokens=4))


def check_nothing_is_left(server: Running) -> None:
    results = server.engine.results
    # What was cancelled has yet to be taken out.
    wait_until(lambda: not (results._listeners or results._unread or results._open) and is_idle(server))
    assert not next(iter(server.models.values())).metrics._last_step

"""transformers' own server over an enabled model: its clients get what `generate` gives each by itself."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_smartspec
from hf_smartspec.serving.transformers_batching.manager import SpeculativeBatchingManager
from hf_smartspec.serving.transformers_batching.server import own_settings

from ...generate.helpers import EOS, VOCAB_SIZE, set_special_tokens, tiny_llama, tiny_tokenizer
from ...models import RECURRENT, new_model
from ..helpers import TIMEOUT

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

CASES = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.9, "seed": 3},
    {"temperature": 0.8, "seed": 5, "stop": ["q", "z"]},
    {"temperature": 0.8, "seed": 7, "max_tokens": 3},
]
TEXTS = ["abcab", "xyzzyxyz"]


def recurrent():
    """A model that transformers does not batch."""
    return set_special_tokens(new_model("lfm2", vocab_size=VOCAB_SIZE), EOS)


@pytest.fixture(scope="module", params=[tiny_llama, recurrent] if RECURRENT else [tiny_llama])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = request.param()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server(folder, deprecated_by_itself):
    from transformers.cli.serve import Serve

    with hf_smartspec.enable(assistant="suffix"), own_settings():
        server = Serve(
            folder, continuous_batching=True, host="127.0.0.1", port=0, device="cpu", dtype="float32",
            non_blocking=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + TIMEOUT
            while not server.server.started:
                assert server._thread.is_alive() and time.monotonic() < deadline
                time.sleep(0.01)
            port = server.server.servers[0].sockets[0].getsockname()[1]  # one that was free when it was bound
            yield server, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        finally:
            server.kill_server()


def answer(client, folder, text, case, is_streaming):
    case = {"max_tokens": 16, **case}
    found = client.completions.create(model=folder, prompt=text, stream=is_streaming, **case)
    if not is_streaming:
        return found.choices[0].text, found.choices[0].finish_reason
    chunks = [chunk.choices[0] for chunk in found]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def alone(model, tokenizer, text, case):
    case = {"max_tokens": 16, **case}
    options = {"max_new_tokens": case.pop("max_tokens"), "do_sample": case["temperature"] > 0, **case}
    if "stop" in options:
        options |= {"stop_strings": options.pop("stop"), "tokenizer": tokenizer}
    ids = tokenizer(text, return_tensors="pt").input_ids
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    reason = "length" if len(tokens) == options["max_new_tokens"] else "stop"
    return tokenizer.decode(tokens, skip_special_tokens=True), reason


def test_clients_get_their_own_settings_streaming_and_not(folder, server):
    started, client = server
    jobs = [(text, case, is_streaming) for text in TEXTS for case in CASES for is_streaming in (False, True)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: answer(client, folder, *job), jobs))
    (manager,) = [started._generation_state._cb_manager]
    assert isinstance(manager._cb, SpeculativeBatchingManager)
    with hf_smartspec.enabled(AutoModelForCausalLM.from_pretrained(folder)) as model:
        expected = {text: [alone(model, tiny_tokenizer(), text, case) for case in CASES] for text in TEXTS}
    for (text, case, is_streaming), got in zip(jobs, found):
        assert got == expected[text][CASES.index(case)], (text, case, is_streaming)
    assert {reason for _, reason in found} == {"stop", "length"}
    assert client.get("/../health", cast_to=object) == {"status": "ok"}
    with pytest.raises(openai.InternalServerError):  # more positions than the model has
        client.completions.create(model=folder, prompt="a", max_tokens=10**9)
    again = client.with_options(max_retries=1)  # after an error, uvicorn closes the connection
    assert answer(again, folder, TEXTS[0], CASES[0], False) == expected[TEXTS[0]][0]


def test_what_was_there_comes_back(monkeypatch):
    from transformers.cli.serving import utils

    before = utils.CBGenerateManager, utils.set_torch_seed
    with pytest.raises(RuntimeError, match="inside"), own_settings():
        assert utils.CBGenerateManager is not before[0] and issubclass(utils.CBGenerateManager, before[0])
        raise RuntimeError("inside")
    assert (utils.CBGenerateManager, utils.set_torch_seed) == before

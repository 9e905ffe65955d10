"""Requests that cannot be served: wrong fields, bodies of any form and size, and too many tokens."""

import asyncio
import gc
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import httpx
import openai
import pytest
from fastapi import FastAPI, HTTPException

from hf_smartspec.candidates.text import prompt_lookup
from hf_smartspec.serving.server import served as served_module
from hf_smartspec.serving.server.errors import ApiError, add_error_handlers
from hf_smartspec.serving.server.guard.keys import CALLER, Caller
from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.request import body
from hf_smartspec.serving.server.request.fields import ChatFields, CompletionFields
from hf_smartspec.serving.server.served import ServedModel

from .running import TIMEOUT, check_serves, is_idle, running

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {}),
        (CHAT, [1, 2]),
        (CHAT, {"messages": [{"content": "hi"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (CHAT, {"messages": MESSAGES, "temperature": -1}),
        (CHAT, {"messages": MESSAGES, "n": 0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 10**30}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2048}),
        (CHAT, {"messages": MESSAGES, "seed": 2**70}),
        (CHAT, {"messages": MESSAGES, "stop": [""]}),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"99999": 1}}),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}),
        (CHAT, {"messages": MESSAGES, "structured_outputs": {"regex": "("}}),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        (CHAT, {"messages": MESSAGES, "speculation": {"namespace": "other"}}),
        (CHAT, {"messages": MESSAGES, "speculation": {"assistant": "datastore:/etc/passwd"}}),
        (CHAT, {"messages": MESSAGES, "generation_config": "[]"}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": [8192]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [5, 9, 8192], "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/completions", {"prompt": ["x"] * 200, "n": 128, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "x", "stop": ["x" * 2000]}),
        (CHAT, {"messages": MESSAGES, "logit_bias": {str(token): 1 for token in range(2000)}}),
        (CHAT, {"messages": MESSAGES, "prediction": {"content": "x 1 " * 2000}}),
        ("/v1/completions", {"prompt": [1.5]}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/v1/completions", {"prompt": "x " * 3000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
        ("/v1/responses", {}),
        ("/v1/responses", {"input": [{"type": "message"}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}),
        ("/v1/responses", {"input": "x", "previous_response_id": "y"}),
        ("/v1/responses", {"input": "x", "tools": [1]}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [5] * 2049}),
        ("/load_model", {}),
        ("/load_model", {"model": 1}),
        ("/load_model", {"model": [{}]}),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_told(server, path, body):
    answer = server.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"] and answer.json()["error"]["type"]


@pytest.mark.parametrize(
    "method, path, content, error, message",
    [
        ("POST", CHAT, b"{not", openai.BadRequestError, "not valid JSON: key must be a string at line 1 column 2"),
        ("POST", CHAT, b'{"messages": [{"role":', openai.BadRequestError, "not valid JSON: EOF while parsing"),
        ("POST", CHAT, b"", openai.BadRequestError, "The body must be a JSON object"),
        ("POST", CHAT, b"[1, 2]", openai.BadRequestError, "The body must be a JSON object"),
        ("POST", CHAT, b'{"a": "\xff"}', openai.BadRequestError, "not valid JSON: invalid unicode code point"),
        ("POST", "/tokenize", b"[" * 100_000, openai.BadRequestError, "not valid JSON: recursion limit exceeded"),
        (
            "POST",
            "/v1/completions",
            b'{"max_tokens": ' + b"9" * 5000 + b"}",
            openai.BadRequestError,
            "not valid JSON: number out of range",
        ),
        ("POST", "/v1/embeddings", b"{}", openai.NotFoundError, "There is no /v1/embeddings here"),
        ("GET", "/", b"", openai.NotFoundError, "There is no / here"),
        ("GET", CHAT, b"", openai.APIStatusError, f"{CHAT} does not take GET, but POST"),
        ("DELETE", "/metrics", b"", openai.APIStatusError, "/metrics does not take DELETE, but GET"),
    ],
)
def test_errors_before_any_handler_are_openais_too(server, method, path, content, error, message):
    """The `openai` client raises its own exceptions for them."""
    client = server.client().with_options(default_headers={"Content-Type": "application/json"})
    client.base_url = server.url
    with pytest.raises(error, match=message) as raised:
        getattr(client, method.lower())(path, cast_to=object, **({"content": content} if content else {}))
    told = raised.value
    assert told.status_code == {openai.APIStatusError: 405}.get(error, told.status_code)
    assert isinstance(told.body, dict) and set(told.body) == {"message", "type", "param", "code"}
    assert told.type == ("not_found_error" if error is openai.NotFoundError else "invalid_request_error")
    assert told.status_code != 405 or told.response.headers["allow"]


def test_errors_of_handlers_keep_their_own_words():
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/items/{name}")
    async def item(name: str):
        raise HTTPException(404 if name == "x" else 405, f"no item {name}")

    async def ask(path):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            answer = await client.get(path)
            return answer.status_code, answer.json()["error"]["message"]

    assert asyncio.run(ask("/items/x")) == (404, "no item x")
    assert asyncio.run(ask("/items/y")) == (405, "no item y")
    assert asyncio.run(ask("/none")) == (404, "There is no /none here")


def test_large_bodies_are_read_beside_the_event_loop(server, monkeypatch):
    """Whoever else asks is answered meanwhile."""
    begun, gate, parse = threading.Event(), threading.Event(), body.from_json

    def slow(text, **options):
        begun.set()
        assert gate.wait(TIMEOUT)
        return parse(text, **options)

    monkeypatch.setattr(body, "from_json", slow)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, "/v1/completions", {"prompt": "x", "max_tokens": 1, "user": "u" * 100_000})
        try:
            assert begun.wait(TIMEOUT)
            assert server.get("/health").status_code == 200
            assert not asking.done()
        finally:
            gate.set()
        assert asking.result(TIMEOUT).status_code == 200


def test_bodies_of_too_many_parts_are_refused_before_they_are_read(server, monkeypatch):
    """Garbage is not searched meanwhile, and brackets within texts are none."""
    collected, parse = [], body.from_json
    monkeypatch.setattr(body, "from_json", lambda *args, **kw: collected.append(gc.isenabled()) or parse(*args, **kw))
    for part in ([], {}, [[{}]]):
        told = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "metadata": [part] * 2**17})
        assert told.status_code == 400 and "131072 lists and objects" in told.text
    assert not collected and gc.isenabled()
    text = 'a\\\\ "[' * 2**17
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "user": text}).status_code == 200
    assert collected == [False] and gc.isenabled()


def test_a_key_whose_body_is_large_waits_for_one_of_each_other_key(monkeypatch):
    order, gate, begun = [], threading.Event(), threading.Event()

    def slow(text, **options):
        begun.set()
        assert gate.wait(TIMEOUT)
        order.append(text[:3])
        return {"prompt": "x"}

    monkeypatch.setattr(body, "from_json", slow)

    class Asked:
        headers = MappingProxyType({"content-type": "application/json"})

        def __init__(self, key):
            self.key = key

        async def body(self):
            return self.key + b" " * 2**17

    async def ask(key):
        CALLER.set(Caller(key.decode()))
        await body.read(CompletionFields, Asked(key))

    async def main():
        asking = [asyncio.create_task(ask(b"one")) for _ in range(20)]
        while not begun.is_set():
            await asyncio.sleep(0)
        asking.append(asyncio.create_task(ask(b"two")))
        for _ in range(3):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*asking)

    asyncio.run(main())
    assert order.index(b"two") <= 2 and len(order) == 21


def test_unknown_fields_are_not_kept():
    """Those of messages are: templates may read them."""

    class Asked:
        headers = MappingProxyType({"content-type": "application/json"})

        async def body(self):
            return b'{"metadata": [[]], "x": 1, "messages": [{"role": "user", "content": "x", "name": "me"}]}'

    fields = asyncio.run(body.read(ChatFields, Asked()))
    assert not fields.model_extra and fields.messages[0].model_extra == {"name": "me"}


def test_lists_without_an_end_are_refused_before_they_are_checked(server):
    """The last item is wrong, but the check never reaches it."""
    for path, name, item, count in [
        (CHAT, "messages", MESSAGES[0], 2**13),
        ("/v1/completions", "prompt", 5, 2**20),
        ("/detokenize", "tokens", 5, 2**20),
        ("/v1/responses", "input", MESSAGES[0], 2**13),
    ]:
        answer = server.post(path, {name: [*[item] * (count + 1), None]})
        assert answer.status_code == 400 and "at most" in answer.text, path
    assert server.post(CHAT, {"messages": MESSAGES * 2**13, "max_tokens": 1}).status_code == 400, "of too many tokens"


def test_numbers_beyond_all_floats_harm_nobody(server, demo):
    """JSON has them, and where any value may stand they are infinite."""
    tool = '[{"type": "function", "function": {"name": "f", "parameters": {"minimum": 1e999}}}]'
    ask = '"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "max_tokens": 1'
    for path in (CHAT, "/v1/completions", "/v1/responses"):
        for field in (
            f'"tools": {tool}', f'"tools": {tool}, "tool_choice": "required"', '"metadata": {"a": 1e999}',
            '"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": 1e999}}}',
            '"temperature": 1e999',
        ):  # fmt: skip
            content = f"{{{ask}, {field}}}"
            answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400), (path, field, answer.text)
    check_serves(server, demo)


def test_no_page_takes_scripts_from_elsewhere(server):
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert server.get(path).status_code == 404
    assert server.get("/openapi.json").status_code == 200


def test_texts_that_no_context_holds_are_refused_before_they_are_read(server):
    """The bound is the number of characters that a context of longest tokens would have."""
    most = server.models["demo"].max_chars
    text = " " * (most + 1)
    assert server.post("/tokenize", {"prompt": text[1:]}).status_code == 200
    for path, fields in {
        "/tokenize": {"prompt": text},
        "/v1/completions": {"prompt": ["x", text]},
        CHAT: {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }.items():
        refused = server.post(path, fields)
        assert refused.status_code == 400 and f"at most {most} are accepted" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    half = text[: most // 2 + 1]
    for field in ({"prediction": {"content": text}}, {"speculation": {"references": [half, half]}}):
        refused = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1} | field)
        assert refused.status_code == 400 and f"at most {most} are accepted" in refused.json()["error"]["message"]
    assert is_idle(server)


def test_of_texts_with_too_many_tokens_the_beginning_is_encoded_alone(server, monkeypatch):
    served, encoded = server.models["demo"], []
    encode = type(served.tokenizer).__call__

    def counted(tokenizer, text, *args, **kwargs):
        encoded.append(len(text))
        return encode(tokenizer, text, *args, **kwargs)

    monkeypatch.setattr(type(served.tokenizer), "__call__", counted)
    refused = server.post("/v1/completions", {"prompt": "1, 2; " * (served.max_chars // 6)})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert encoded == [8 * served.max_model_len] and encoded[0] < served.max_chars
    own = served_module.model_limits(served.model)
    monkeypatch.setattr(served_module, "model_limits", lambda _: own._replace(num_positions=None))
    endless = ServedModel("endless", served.engine, Limits(), served.metrics, 8)
    with pytest.raises(ApiError, match="at most 2097152 are accepted"):
        endless.encode("a" * (2**21 + 1))
    assert len(encoded) == 1


def test_references_are_bounded_in_tokens_and_indexed_once_for_all_choices(demo, monkeypatch):
    indexed, extend = [], prompt_lookup._References.__init__

    def counting(self, max_ngram, texts):
        indexed.append(sum(map(len, texts)))
        extend(self, max_ngram, texts)

    monkeypatch.setattr(prompt_lookup._References, "__init__", counting)
    with running(demo, assistant="prompt_lookup") as server:
        digits = "1" * (server.get("/v1/models/demo").json()["max_model_len"] // 2 + 1)
        assert len(demo.tokenizer(digits, add_special_tokens=False).input_ids) == len(digits)
        body = {"prompt": "1, 2,", "n": 8, "temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
        refused = server.post("/v1/completions", body | {"speculation": {"references": [digits, digits]}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "speculation.references"
        assert not indexed
        assert server.post("/v1/completions", body | {"speculation": {"references": [digits]}}).status_code == 200
        assert indexed == [len(digits)]


def test_nonsense_harms_nobody(server, demo):
    headers = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"\xff\xfe", b"null", b'{"messages": NaN}', b"[" * 100_000, b'{"a": 1e999}'):
        answer = server.post(CHAT, content=content, headers=headers)
        assert 400 <= answer.status_code < 500, content[:20]
    answer = server.post("/v1/completions", content=b'{"prompt": "x", "top_p": NaN}', headers=headers)
    assert answer.status_code == 400
    with pytest.raises(openai.NotFoundError, match="not served here"):
        server.client().completions.create(model="other", prompt="x")
    host, port = server.url.removeprefix("http://").split(":")
    for half in (
        b"POST",
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"',
        b"\0" * 99,
    ):
        with socket.create_connection((host, int(port)), TIMEOUT) as raw:
            raw.sendall(half)
    check_serves(server, demo)


def test_unknown_fields_are_accepted(server):
    body = {"prompt": "x", "max_tokens": 1, "logprobs": None, "some_other_server": {"has": "it"}, "user": "me"}
    assert server.post("/v1/completions", body).status_code == 200

"""Keys, tenants, limits, nonsense, and clients that leave."""

import asyncio
import gc
import hashlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import httpx
import openai
import pytest
from fastapi import FastAPI, HTTPException

from hf_smartspec import Engine
from hf_smartspec.candidates.text import prompt_lookup
from hf_smartspec.serving.server import served as served_module
from hf_smartspec.serving.server.errors import ApiError, add_error_handlers
from hf_smartspec.serving.server.guard.keys import CALLER, ApiKeys, Caller, read_keys
from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.request import body
from hf_smartspec.serving.server.request.fields import ChatFields, CompletionFields
from hf_smartspec.serving.server.request.sampling import Settings
from hf_smartspec.serving.server.served import ServedModel

from .running import TIMEOUT, running, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
LONG = {"model": "demo", "prompt": "1, 2, 3,", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def is_idle(server) -> bool:
    load = server.engine.load
    return load.num_running == load.num_waiting == 0 == len(next(iter(server.models.values())).open)


def check_serves(server, demo) -> None:
    """The server answers as if nothing had happened."""
    result = server.client().completions.create(model="demo", prompt="SELECT", max_tokens=4)
    assert result.choices[0].text == demo.text(demo.alone("SELECT", max_new_tokens=4))


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
    answer = httpx.post(server.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"})
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
            answer = httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"})
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
        answer = httpx.post(server.url + CHAT, content=content, headers=headers)
        assert 400 <= answer.status_code < 500, content[:20]
    answer = httpx.post(server.url + "/v1/completions", content=b'{"prompt": "x", "top_p": NaN}', headers=headers)
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


def check_nothing_is_left(server) -> None:
    results = server.engine.results
    wait_until(lambda: not results._listeners and is_idle(server))  # what was cancelled has yet to be taken out
    assert not results._unread and not results._open
    assert not next(iter(server.models.values())).metrics._last_step


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, form", [("/v1/completions", {}), ("/v1/responses", {"input": "x"})])
def test_who_leaves_frees_the_slot(server, demo, path, form, stream):
    body = LONG | form | {"stream": stream}

    async def ask_and_leave():
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            asking = asyncio.create_task(_read(client, server.url + path, body))
            while not server.engine.load.num_running:
                await asyncio.sleep(0.01)
            asking.cancel()

    asyncio.run(ask_and_leave())
    wait_until(lambda: is_idle(server))
    check_serves(server, demo)
    check_nothing_is_left(server)


@pytest.mark.parametrize("path, form", [("/v1/completions", {}), (CHAT, {"messages": MESSAGES})])
def test_who_leaves_a_stream_of_choices_leaves_nothing_even_where_no_garbage_is_collected(server, path, form):
    body = LONG | form | {"n": 4}
    if path == CHAT:
        del body["prompt"]

    async def read_a_little_and_leave():
        async with (
            httpx.AsyncClient(timeout=TIMEOUT) as client,
            client.stream("POST", server.url + path, json=body) as answer,
        ):
            lines = answer.aiter_lines()
            for _ in range(20):
                await anext(lines)

    gc.disable()
    try:
        for _ in range(5):
            asyncio.run(read_a_little_and_leave())
        wait_until(lambda: is_idle(server))
        check_nothing_is_left(server)
    finally:
        gc.enable()


async def _read(client, url, body):
    async with client.stream("POST", url, json=body) as answer:
        async for _ in answer.aiter_lines():
            pass


def test_keys_are_asked_for(demo):
    with running(demo, keys=["first key", "second"]) as server:
        assert server.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first key"}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
                answer = server.get(path, headers=headers)
                assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            server.client("third").models.list()
        assert server.client("first key").models.list().data and server.client("second").models.list().data


def test_what_all_keys_have_asked_is_counted_for_admins_only(demo):
    keys = ("first key", "second key", "the admin's")
    with running(demo, keys=keys[:2], admin_keys=keys[2:]) as server:
        server.client("first key").completions.create(model="demo", prompt="x", max_tokens=1)
        refused = server.get("/metrics", headers={"Authorization": "Bearer first key"})
        assert refused.status_code == 403 and "--admin-key-file" in refused.json()["error"]["message"]
        shown = server.get("/metrics", headers={"Authorization": "Bearer the admin's"})
        assert shown.status_code == 200 and 'finished_reason="length"' in shown.text
        assert server.client("the admin's").models.list().data
        assert server.get("/metrics").status_code == 401
        with server.client("first key").completions.create(
            model="demo",
            prompt="1, 2,",
            n=3,
            temperature=1.0,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            loads = [
                server.get("/load", headers={"Authorization": f"Bearer {key}"}).json()["server_load"] for key in keys
            ]
    assert loads == [3, 0, 3], "a key's own requests, and to admins those of all"
    both = ApiKeys(["k", "other"], admin_keys=["k"])
    assert len(both) == 2 and both.caller("Bearer k").is_admin and not both.caller("Bearer other").is_admin
    assert ApiKeys().caller(None).is_admin, "nobody has a secret to keep from others"


def test_no_text_of_one_key_is_drafted_for_another_or_read_from_its_memory(demo):
    """The same question again: with the same key the answer is known, with another one nothing is."""
    with running(demo, keys=["one", "two"]) as server:

        def ask(key):
            result = server.client(key).chat.completions.create(model="demo", messages=MESSAGES, max_tokens=30)
            counts = result.model_extra["metrics"]["speculative_decoding"]
            cached = result.usage.prompt_tokens_details.cached_tokens
            return result.choices[0].message.content, counts["num_accepted_draft_tokens"], cached

        first, others, again = ask("one"), ask("two"), ask("one")
        assert first[0] == others[0] == again[0]
        assert others[1:] == first[1:], "what one has asked is new to the other"
        assert again[1] > others[1] and again[2] > others[2] == 0


def test_what_nobody_asks_for_has_no_namespace(server):
    """A request without a caller is refused, rather than served in a namespace of all."""
    with pytest.raises(LookupError):
        asyncio.run(server.models["demo"].begin([[5]], Settings({"do_sample": False}, 1, [None])))
    assert is_idle(server)


def test_pages_of_browsers_do_not_get_in(demo):
    """Neither under a name of their own, nor by what they may send without being asked."""
    from hf_smartspec.commands.serve.serving import hosts_of

    hosts = hosts_of("127.0.0.1", ApiKeys())
    assert hosts_of("127.0.0.1", ApiKeys(["k"])) is hosts_of("0.0.0.0", ApiKeys()) is None
    with running(demo, hosts=hosts) as server:
        for name, status in {"evil.example": 403, "localhost:8000": 200, "127.0.0.1": 200, "[::1]:80": 200}.items():
            assert server.get("/v1/models", headers={"Host": name}).status_code == status
        plain = httpx.post(
            server.url + "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
        )
        assert 400 <= plain.status_code < 500


def test_namespaces_of_keys_are_salted():
    """Keys cannot be guessed from a namespace; servers with the same salt have the same namespaces."""

    def namespace(salt=None):
        return ApiKeys(["a key", "another"], salt).caller("Bearer a key").namespace

    assert namespace(b"salt") == namespace(b"salt") != namespace(b"other")
    assert namespace() != namespace()
    assert hashlib.sha256(b"a key").hexdigest()[:16] not in namespace(b"salt")


def test_keys_in_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret-1\n\n secret-2 \n")
    keys = ApiKeys(read_keys(path))
    assert len(keys) == 2 and keys.caller("bearer secret-2") != keys.caller("Bearer secret-1") is not None
    assert keys.caller(None) is keys.caller("Bearer ") is keys.caller("Bearer \xff") is None
    assert "secret" not in repr(keys.caller("Bearer secret-1"))
    for wrong in ("", "  ", "\xe9", "a\nb"):
        with pytest.raises(ValueError, match="printable"):
            ApiKeys([wrong])
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="no API keys"):
        read_keys(path)


def test_limits(demo):
    limits = Limits(max_body_bytes=2000, max_model_len=300, max_new_tokens=5, max_queue=1)
    with running(demo, limits=limits, max_batch_size=1) as server:
        client = server.client()
        assert server.post("/v1/completions", {"prompt": "x" * 3000}).status_code == 413
        huge = httpx.post(server.url + CHAT, content=(b"x" * 500 for _ in range(9)))
        assert huge.status_code == 413, "of unknown length"
        with pytest.raises(openai.BadRequestError, match="300 tokens") as caught:
            client.completions.create(model="demo", prompt=[5] * 290, max_tokens=20)
        assert caught.value.code == "context_length_exceeded"
        assert client.completions.create(model="demo", prompt=[5] * 290).usage.completion_tokens <= 10
        assert client.chat.completions.create(model="demo", messages=MESSAGES).usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="at once"):
            client.completions.create(model="demo", prompt="x", n=3)
        gate = threading.Event()
        with server.engine.pause():  # whoever comes waits
            threads = [threading.Thread(target=_ask, args=(server, gate)) for _ in range(2)]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.engine.load.num_waiting == 2)
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
            assert server.get("/load").json() == {"server_load": 2}
        for thread in threads:
            thread.join(TIMEOUT)
        assert gate.is_set()
        check_serves(server, demo)


def _ask(server, done):
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    done.set()


def test_time_is_limited(demo):
    with running(demo, limits=Limits(timeout=0.05)) as server:
        late = server.post("/v1/completions", LONG | {"stream": False})
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        text = server.post("/v1/completions", LONG).text
        assert '"timeout"' in text and text.endswith("data: [DONE]\n\n")
        wait_until(lambda: is_idle(server))
        several = server.post("/v1/completions", LONG | {"stream": False, "n": 3})
        assert several.status_code == 504
        wait_until(lambda: is_idle(server))
        check_nothing_is_left(server)


def test_a_request_that_fails_is_its_own_misfortune(server, demo, monkeypatch):
    from hf_smartspec.serving.server.tokens import Penalties

    def fails(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(Penalties, "__call__", fails)
    failed = server.post("/v1/completions", {"prompt": "x", "presence_penalty": 1.0})
    assert failed.status_code == 500 and "out of order" in failed.json()["error"]["message"]
    check_serves(server, demo)
    wait_until(lambda: is_idle(server))


def test_health_tells_of_an_engine_that_has_ended(demo):
    with running(demo, names=("a", "b")) as server:
        assert server.get("/health").status_code == 200
        Engine.stop(server.models["b"].engine)
        assert server.get("/health").status_code == 503 == server.get("/ping").status_code
        assert server.client().completions.create(model="a", prompt="x", max_tokens=1).choices
        assert server.post("/v1/completions", {"model": "b", "prompt": "x"}).status_code == 503

"""Keys, tenants, limits, failures, and clients that leave."""

import asyncio
import gc
import hashlib
import threading

import httpx
import openai
import pytest

from hf_smartspec import Engine
from hf_smartspec.serving.server.guard.keys import ApiKeys, read_keys
from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.request.sampling import Settings

from ...covering import exhaustive
from .running import TIMEOUT, check_nothing_is_left, check_serves, is_idle, running, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
LONG = {"model": "demo", "prompt": "1, 2, 3,", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, form", [("/v1/completions", {}), ("/v1/responses", {"input": "x"})])
def test_who_leaves_frees_the_slot(server, demo, path, form, stream):
    body = LONG | form | {"stream": stream}

    async def ask_and_leave():
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            asking = asyncio.create_task(_read(client, server.url + path, body))
            while not server.engine.load.num_running:
                assert not asking.done(), "it has ended before it was seen to run"
                await asyncio.sleep(0.01)
            asking.cancel()

    asyncio.run(ask_and_leave())
    wait_until(lambda: is_idle(server))
    check_serves(server, demo)
    check_nothing_is_left(server)


@pytest.mark.parametrize("path, form", [(CHAT, {"messages": MESSAGES}), *exhaustive(("/v1/completions", {}))])
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
        many = {"n": 3, "temperature": 1.0, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        with (
            server.engine.pause(),  # they stay open, however long three answers take
            server.client("first key").completions.create(model="demo", prompt="1, 2,", stream=True, **many),
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
        plain = server.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
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
        huge = server.post(CHAT, content=(b"x" * 500 for _ in range(9)))
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

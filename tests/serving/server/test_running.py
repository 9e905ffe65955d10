"""A server process from SIGTERM on: what runs is finished, what is new gets a 503, and a second signal ends all."""

import asyncio
import json
import signal
import socket
import threading

import httpx
import pytest

pytest.importorskip("fastapi")

from hf_smartspec.serving.server.guard import guard as guard_module
from hf_smartspec.serving.server.guard.guard import Guard
from hf_smartspec.serving.server.guard.keys import ApiKeys, Caller
from hf_smartspec.serving.server.running import DrainingServer, listen

from .running import TIMEOUT, wait_until


class Held:
    """A server of an application whose answers wait: paths that begin with /stream have begun theirs."""

    def __init__(self, drain_seconds=None):
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        self.listener, started = listen("127.0.0.1", 0), threading.Event()
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = DrainingServer(self.answer, drain_seconds, started.set, "critical")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        assert started.wait(TIMEOUT)

    async def answer(self, scope, receive, send):
        if scope["type"] != "http":
            return
        head = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"].startswith("/stream"):
            await send(head)
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        self.begun.release()
        while not self.release.is_set():
            await asyncio.sleep(0.01)
        if not scope["path"].startswith("/stream"):
            await send(head)
        await send({"type": "http.response.body", "body": b"ended"})

    def asked(self, path, answers):
        def ask():
            try:
                answers.append(httpx.get(self.url + path, timeout=TIMEOUT))
            except httpx.HTTPError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert self.begun.acquire(timeout=TIMEOUT)
        return thread

    def end(self):
        self.release.set()
        self.server.handle_exit(signal.SIGTERM, None)
        self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join(TIMEOUT)
        self.listener.close()


@pytest.fixture
def held():
    server = Held()
    yield server
    server.end()


def test_while_it_drains_what_runs_is_finished_and_what_is_new_refused(held):
    answers = []
    threads = [held.asked(path, answers) for path in ("/whole", "/stream")]
    held.server.handle_exit(signal.SIGTERM, None)
    for _ in range(3):
        refused = httpx.get(f"{held.url}/v1/models", timeout=TIMEOUT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "server_error"
    assert held.thread.is_alive() and not answers
    held.release.set()
    for thread in [*threads, held.thread]:
        thread.join(TIMEOUT)
    assert not held.thread.is_alive() and sorted(answer.text for answer in answers) == ["begun ended", "ended"]


def test_an_idle_server_ends_at_once(held):
    held.release.set()
    with httpx.Client() as client:  # whose connection stays open
        client.get(f"{held.url}/x", timeout=TIMEOUT)
        held.server.handle_exit(signal.SIGTERM, None)
        held.thread.join(TIMEOUT)
        assert not held.thread.is_alive()


@pytest.mark.parametrize("is_told_again", [True, False])  # or the time is over
def test_what_does_not_end_is_ended_without_a_fault(is_told_again):
    held = Held(drain_seconds=None if is_told_again else 0)
    answers = []
    threads = [held.asked(path, answers) for path in ("/whole", "/stream")]
    held.server.handle_exit(signal.SIGINT, None)
    if is_told_again:
        held.server.handle_exit(signal.SIGINT, None)
    for thread in [*threads, held.thread]:
        thread.join(TIMEOUT)
    assert not held.thread.is_alive()
    statuses = [answer.status_code for answer in answers if isinstance(answer, httpx.Response)]
    assert statuses == [503], "the stream is cut off, the other one is told to come again"
    held.end()


def opened(url, headers, piece, path="/v1/completions"):
    """A connection that has sent a part of its body, and then nothing."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), TIMEOUT)
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Transfer-Encoding: chunked", *headers, "", ""]
    client.settimeout(TIMEOUT)
    client.sendall("\r\n".join(lines).encode() + f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    return client


def sent(url, key, content):
    """The answer to a whole body."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=TIMEOUT)


def status(client):
    """Return the status of an answer after which the server closes the connection."""
    answer = b""
    while piece := client.recv(4096):
        answer += piece
    return int(answer.split()[1])


@pytest.fixture
def guarded(request):
    async def app(scope, receive, send):
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(len(body)).encode()})

    guard = Guard(app, ApiKeys(request.param), 1000)
    listener, started = listen("127.0.0.1", 0), threading.Event()
    server = DrainingServer(guard, 0, started.set, "critical")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(TIMEOUT)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", guard
    server.handle_exit(signal.SIGTERM, None)
    server.handle_exit(signal.SIGTERM, None)
    thread.join(TIMEOUT)
    listener.close()


@pytest.mark.parametrize("guarded", [["a", "b"]], indirect=True)
def test_without_a_key_no_body_is_waited_for(guarded):
    url, guard = guarded
    for headers in ([], ["Authorization: Bearer wrong"]):
        with opened(url, headers, b"x" * 500) as client:
            assert status(client) == 401
    assert not guard._held.total()


@pytest.mark.parametrize("guarded", [["a", "b"], ["a"]], indirect=True)
def test_what_open_bodies_hold_is_bounded_and_one_key_leaves_room_for_others(guarded):
    url, guard = guarded
    most = 16 * 1000 if len(guard.keys) == 1 else 4 * 1000
    header = ["Authorization: Bearer a"]
    clients = []
    while guard._held.total() + 800 <= most:
        before = guard._held.total()
        clients.append(opened(url, header, b"x" * 800))
        wait_until(lambda before=before: guard._held.total() > before)
    with opened(url, header, b"x" * 800) as refused:
        assert status(refused) == 503
    if len(guard.keys) > 1:
        whole = sent(url, "b", (b"x" * 90 for _ in range(9)))
        assert whole.json() == 810
    small = sent(url, "a", b"small")
    assert small.json() == 5, "what comes at once holds nothing"
    for client in clients:
        client.close()
    wait_until(lambda: not guard._held.total())


@pytest.mark.parametrize("guarded", [list("abcde")], indirect=True)
def test_keys_that_hold_all_there_is_leave_others_their_equal_part(guarded):
    url, guard = guarded
    clients = []
    for number in range(20):
        clients.append(opened(url, [f"Authorization: Bearer {'abcd'[number % 4]}"], b"x" * 795))
        wait_until(lambda number=number: guard._held.total() > number * 795)
    assert guard._held.total() > 16 * 1000 - 200
    own = sent(url, "e", (b"x" * 90 for _ in range(9)))
    assert own.json() == 810
    with opened(url, ["Authorization: Bearer a"], b"x" * 800) as refused:
        assert status(refused) == 503
    for client in clients:
        client.close()
    wait_until(lambda: not guard._held.total())


@pytest.mark.parametrize("guarded", [["a", "b"], ["a"]], indirect=True)
def test_without_a_key_nothing_of_a_body_is_held(guarded):
    """Paths that are open to all: no room is taken from those who have keys."""
    url, guard = guarded
    clients = [opened(url, [], b"x" * 900, "/health") for _ in range(20)]
    assert [status(client) for client in clients] == [200] * 20
    assert not guard._held.total()
    for client in clients:
        client.close()


def test_bodies_count_until_they_are_answered(monkeypatch):
    """Whole ones too: of seven, the application gets as many as the bound on one key admits."""
    monkeypatch.setattr(guard_module, "_SMALL", 500)
    release, held = asyncio.Event(), []

    async def app(scope, receive, send):
        await receive()
        held.append(guard._held["key"])
        await release.wait()

    guard = Guard(app, ApiKeys(["a", "b"]), 1000)
    guard.keys.caller = lambda _: Caller("key")
    statuses = []

    async def ask():
        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            statuses.append(message.get("status"))

        messages = [{"type": "http.request", "body": b"x" * 700, "more_body": False}]
        await guard({"type": "http", "path": "/v1/models", "headers": []}, receive, send)

    async def main():
        asked = []
        for number in range(7):
            asked.append(asyncio.create_task(ask()))
            while len(held) <= number and not any(statuses):
                await asyncio.sleep(0)
            statuses.append(None)
        release.set()
        await asyncio.gather(*asked)

    asyncio.run(main())
    assert held == [700, 1400, 2100, 2800, 3500] and not guard._held.total()
    assert statuses.count(503) == 2


@pytest.mark.parametrize("key, num_dropped", [("a", 5), ("wrong", 0)])
def test_what_is_too_large_is_dropped_before_the_connection_is_closed(key, num_dropped):
    """Else the client gets a reset connection in place of 413. Without a key, nothing is read."""
    guard, order = Guard(None, ApiKeys(["a"]), 1000), []
    pieces = [{"type": "http.request", "body": b"x" * 500, "more_body": number < 7} for number in range(8)]

    async def receive():
        order.append("piece")
        return pieces.pop(0)

    async def send(message):
        order.append(message.get("status") or ("more" if message.get("more_body") else "end"))

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", f"Bearer {key}".encode())]}
    asyncio.run(guard(scope, receive, send))
    if num_dropped:
        assert order == [*["piece"] * 3, 413, "more", *["piece"] * num_dropped, "end"]
    else:
        assert order == [401, "end"]

"""Requests on their way from a front to a replica, without Ray."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("fastapi")
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from hf_smartspec.replicas.ray_serve.front import Front, answered, joined_metrics
from hf_smartspec.replicas.ray_serve.messages import ForwardedRequest, Head, route_of, with_seed
from hf_smartspec.replicas.ray_serve.passed import CannotContinueError
from hf_smartspec.replicas.ray_serve.replica import asked
from hf_smartspec.replicas.ray_serve.service import ScaleByGoodput, SpeculativeRequestRouter
from hf_smartspec.serving.server.guard.keys import CALLER, Caller

CHAT = "/v1/chat/completions"


def post(fields, path=CHAT, headers=()):
    return ForwardedRequest("POST", path, b"", list(headers), json.dumps(fields).encode())


def test_what_may_sample_can_be_repeated():
    request = post({"messages": [], "temperature": 1}, headers=[(b"Content-Length", b"9"), (b"x", b"y")])
    seeded = with_seed(request)
    seed = json.loads(seeded.body)["seed"]
    assert 0 <= seed < 2**62 and json.loads(with_seed(request).body)["seed"] != seed
    assert dict(seeded.headers) == {b"x": b"y", b"content-length": str(len(seeded.body)).encode()}
    others = [post({"seed": 3}), post([1]), post({}, "/tokenize"), request._replace(method="GET")]
    for other in [*others, request._replace(body=b"{"), request._replace(body=b'{"a":' * 100_000)]:
        assert with_seed(other) == other


def test_routes_are_of_prompt_tenant_and_drafts():
    first = route_of(post({"messages": [{"role": "user", "content": "Hello"}], "model": "m"}))
    longer = route_of(post({"messages": [{"role": "user", "content": "Hello there"}], "model": "m", "top_p": 0.3}))
    assert longer.text.startswith(first.text) and b"Hello" in first.text and first.namespace == longer.namespace
    assert route_of(post({"prompt": [1, 23]}, "/v1/completions")).text == b"1\n23"
    changed = [{"headers": [(b"Authorization", b"Bearer x")]}, {"fields": {"model": "n"}},
               {"fields": {"speculation": {"assistant": "none"}, "model": "m"}}]  # fmt: skip
    spaces = {route_of(post(item.get("fields", {"model": "m"}), headers=item.get("headers", ()))).namespace
              for item in changed}  # fmt: skip
    assert len(spaces | {first.namespace}) == 4
    assert route_of(post({"prompt": "\ud800"}, "/v1/completions")).text
    assert route_of(ForwardedRequest("GET", "/health", b"", [], b"")) == (b"", "")


def application(left):
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request):
        return {"body": (await request.body()).decode(), "query": request.url.query, "x": request.headers.get("x")}

    @app.get("/endless")
    async def endless():
        async def pieces():
            try:
                while True:
                    yield b"more"
                    await asyncio.sleep(0)
            finally:
                left.set()

        return StreamingResponse(pieces())

    @app.get("/broken")
    async def broken():
        raise LookupError("broken")

    @app.get("/torn")
    async def torn():
        async def pieces():
            yield b"half"
            raise LookupError("torn")

        return StreamingResponse(pieces())

    return app


def test_an_application_is_asked_without_a_socket():
    async def main():
        left = asyncio.Event()
        app = application(left)
        request = ForwardedRequest("POST", "/echo", b"a=b", [(b"X", b"y")], b"z")
        head, *body = [part async for part in asked(app, request)]
        assert head.status == 200 and not head.is_stream
        assert json.loads(b"".join(body)) == {"body": "z", "query": "a=b", "x": "y"}
        async with aclosing(asked(app, ForwardedRequest("GET", "/endless", b"", [], b""))) as parts:
            assert [await anext(parts) for _ in range(3)][1:] == [b"more"] * 2
        assert left.is_set()  # and nobody is left behind
        assert len(asyncio.all_tasks()) == 1
        head, body = [part async for part in asked(app, ForwardedRequest("GET", "/broken", b"", [], b""))]
        assert head.status == 500 and b"Error" in body
        parts = asked(app, ForwardedRequest("GET", "/torn", b"", [], b""))
        assert [await anext(parts), await anext(parts)][1] == b"half"
        with pytest.raises(LookupError):
            await anext(parts)

    asyncio.run(main())


class Replicas:
    """Stands for a handle: each call takes the next script, whose exceptions are raised."""

    def __init__(self, *scripts):
        self.scripts, self.asked, self.cancelled = list(scripts), [], 0

    answer = property(lambda self: self)

    def options(self, stream):
        return self

    def remote(self, request):
        self.asked.append(request)
        return _Response(self, self.scripts.pop(0))


class _Response:
    def __init__(self, owner, script):
        self.owner, self.script = owner, iter(script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = next(self.script, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self):
        self.owner.cancelled += 1


PLAIN = Head(200, [(b"content-type", b"application/json")])
STREAM = Head(200, [(b"Content-Type", b"text/event-stream; charset=utf-8")])
DEAD = RayActorError()


def text_event(text):
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def answer(*scripts):
    replicas = Replicas(*scripts)

    async def main():
        return [part async for part in answered(replicas, post({}))]

    return asyncio.run(main()), replicas


def test_of_an_answer_that_is_no_stream_nothing_is_seen_of_a_dead_replica():
    parts, replicas = answer([PLAIN, b"hal", DEAD], [PLAIN._replace(status=201), b"whole"])
    assert parts == [PLAIN._replace(status=201), b"whole"]
    assert len(replicas.asked) == 2 and replicas.asked[0] == replicas.asked[1] and replicas.cancelled == 0


def test_a_stream_goes_on():
    parts, _ = answer([STREAM, text_event("a"), text_event("b"), DEAD], [STREAM, text_event("abc"), text_event("d")])
    assert parts == [STREAM, text_event("a"), text_event("b"), text_event("c"), text_event("d")]
    parts, _ = answer([STREAM, text_event("abc"), DEAD], [STREAM, *map(text_event, "abcd")])
    assert parts == [STREAM, text_event("abc"), text_event("d")]
    parts, _ = answer([STREAM, DEAD], [STREAM, text_event("a")])
    assert parts == [STREAM, text_event("a")]


def test_a_request_is_asked_twice_at_the_most():
    with pytest.raises(RayActorError):
        answer([DEAD], [DEAD], [PLAIN])
    with pytest.raises(CannotContinueError):
        answer([STREAM, text_event("a"), DEAD], [STREAM._replace(status=429)])
    with pytest.raises(CannotContinueError):
        answer([STREAM, text_event("a"), DEAD], [STREAM, text_event("b")])
    with pytest.raises(ZeroDivisionError):  # an error of the replica's own is an answer
        answer([ZeroDivisionError()], [PLAIN])


def test_whoever_leaves_is_told_to_the_replica():
    replicas = Replicas([STREAM, text_event("a"), text_event("b")])

    async def main():
        async with aclosing(answered(replicas, post({}))) as parts:
            await anext(parts)

    asyncio.run(main())
    assert replicas.cancelled == 1


def test_metrics_of_replicas_are_told_apart():
    text = '# HELP x_total Some.\n# TYPE x_total counter\nx_total{model="m"} 2.0\n'
    joined = joined_metrics({"a": text, "b": text})
    assert 'x_total{model="m",replica="a"} 2.0' in joined and 'replica="b"' in joined
    assert joined.count("# TYPE x_total counter") == 1


class Replica:
    def __init__(self, name):
        self.replica_id = type("Id", (), {"unique_id": name})()


class Waiting:
    def __init__(self, request):
        self.args = [request]


@pytest.fixture
def router():
    router = object.__new__(SpeculativeRequestRouter)  # without Ray's loop and gauges
    router.initialize_state()
    router._replica_queue_len_cache = {}
    return router


def test_requests_go_where_their_beginning_has_been(router):
    replicas = [Replica(name) for name in "abc"]
    lengths = {replica.replica_id: 0 for replica in replicas}
    router._replica_queue_len_cache = lengths

    def ranked(text, model="m"):
        request = Waiting(post({"prompt": text, "model": model}, "/v1/completions"))
        ranks = asyncio.run(router.choose_replicas(replicas, request))
        assert sorted(len(rank) for rank in ranks) == [1, 1, 1]
        return [rank[0].replica_id.unique_id for rank in ranks]

    home = ranked("a long system prompt of a tenant, and a question")[0]
    for replica in replicas:  # the same beginning, wherever there is more to do
        lengths[replica.replica_id] = 3 if replica.replica_id.unique_id == home else 1
    assert ranked("a long system prompt of a tenant, and another one")[0] == home
    for replica in replicas:  # too much to do
        lengths[replica.replica_id] = 60 if replica.replica_id.unique_id == home else 2
    order = ranked("a long system prompt of a tenant, and a third one")
    assert order[0] != home and order[-1] == home
    assert asyncio.run(router.choose_replicas([])) == []
    assert len(asyncio.run(router.choose_replicas(replicas, Waiting("no request")))) == 3


class Context:
    def __init__(self, requests, replicas, goodput=()):
        self.total_num_requests, self.current_num_replicas = requests, replicas
        self.config = type("Config", (), {"target_ongoing_requests": 8})()
        self.aggregated_metrics = {"goodput": dict(enumerate(goodput))}


@pytest.mark.parametrize(
    "context, least, wanted",
    [
        (Context(0, 1), 0, 0),
        (Context(20, 2), 0, 2.5),
        (Context(20, 2, [10, 10]), 0, 2.5),  # nothing is asked of goodput
        (Context(20, 4, [10, 20]), 20, 16 / 3),  # 15 a second on four replicas
        (Context(20, 4, [40, 40]), 20, 2.5),  # enough: the queue decides
        (Context(3, 2, [1.0]), 20, 3),  # no more replicas than requests
    ],
)
def test_replicas_are_as_many_as_queue_and_goodput_ask_for(context, least, wanted):
    assert ScaleByGoodput(least)(context)[0] == pytest.approx(wanted)


def front_says(scope, *scripts):
    """What an ASGI client gets of a front before these replicas, and the replicas."""
    replicas = Replicas(*scripts)
    sent = []

    async def main():
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        asked = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "root_path": ""} | scope
        await Front(replicas)(asked, receive, send)

    asyncio.run(main())
    return b"".join(message.get("body", b"") for message in sent), replicas


def test_a_front_hands_paths_on_as_they_are():
    body, replicas = front_says({"path": "/v1/models/a name/ä"}, [PLAIN, b"it"])
    assert body == b"it" and replicas.asked[0].path == "/v1/models/a name/ä"


@pytest.mark.parametrize("error", [DEAD, ValueError("of the replica's own"), BackPressureError(1, 2)])
def test_whatever_ends_a_stream_is_told_in_it(error):
    lost = [STREAM, text_event("a"), DEAD], [STREAM, text_event("a"), error]
    body, _ = front_says({"path": "/x"}, *lost)
    first, told, end, rest = body.split(b"\n\n")
    assert first + b"\n\n" == text_event("a") and b"ask again" in told and end == b"data: [DONE]" and not rest


def test_two_replicas_that_die_and_a_full_queue_have_a_status():
    assert b"have died" in front_says({"path": "/x"}, [DEAD], [DEAD])[0]
    assert b"Too many" in front_says({"path": "/x"}, [BackPressureError(1, 2)])[0]


@pytest.mark.parametrize(
    "fields, number",
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [5, 6, 7], "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3, "seed": 1}, 6),
        ({"prompt": [[5], [6], [7]]}, 3),
        ({"messages": [{}, {}], "n": 2}, 2),
        ({"prompt": "a", "n": "4"}, 4),
        ({"prompt": [], "n": "many"}, 1),
        ({"n": float("inf")}, 1),
        ({"n": -5}, 1),
    ],
)
def test_a_request_takes_its_turn_with_all_its_answers(fields, number):
    taken = []

    class Turns:
        @asynccontextmanager
        async def turn(self, namespace, num_answers):
            taken.append((namespace, num_answers))
            yield

    async def main():
        async def receive():
            return {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

        async def send(message):
            pass

        CALLER.set(Caller("a"))
        asked = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await Front(Replicas([PLAIN, b"it"]), Turns())(asked | {"root_path": ""}, receive, send)

    asyncio.run(main())
    assert taken == [("a", number)]

"""The front of a service, which sends each request to a replica, and once more to another if that one dies."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

import prometheus_client
from prometheus_client import CollectorRegistry, parser
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...log import get_logger
from ...serving.server.errors import STREAM_END, ApiError
from ...serving.server.guard.guard import Guard
from ...serving.server.guard.keys import CALLER, ApiKeys
from .messages import ForwardedRequest, Head, with_seed
from .passed import CannotContinueError, PassedEvents
from .private import listen_where_ray_does
from .turns import KeyTurns

logger = get_logger(__name__)

# Headers of one connection, which are not passed on.
_OF_ONE_HOP = frozenset([b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server"])
_LARGE = 2**16  # bytes of a body
_METRICS_SECONDS = 30.0  # for all replicas to answer


class Front:
    """
    ASGI application that forwards requests to any path to replicas. A request that generates text without a seed gets
    one, so that a second replica can finish the answer of the first.

    Args:
        replicas (`DeploymentHandle`): Handle of a deployment of `Replica`.
        turns (`KeyTurns`, *optional*): Turns of keys, where there are several.
    """

    def __init__(self, replicas: DeploymentHandle, turns: KeyTurns | None = None):
        self._replicas, self._turns = replicas, turns
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by namespace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        caller = CALLER.get(None)  # None for paths that need no key
        async with AsyncExitStack() as stack:
            try:
                forwarded = await self._read(Request(scope, receive), "" if caller is None else caller.namespace)
                if self._turns is not None and caller is not None:
                    turn = self._turns.turn(caller.namespace, forwarded.num_answers)
                    await stack.enter_async_context(turn)
                response = await self._response(forwarded)
            except ApiError as error:
                response = error.response()
            await response(scope, receive, send)

    async def _read(self, request: Request, namespace: str) -> ForwardedRequest:
        """Return the request with a seed. Each key's bodies are read one after the other, before its turn."""
        body, query = await request.body(), request.url.query.encode()
        forwarded = ForwardedRequest(request.method, request.scope["path"], query, request.headers.raw, body)
        async with self._reading[namespace]:
            # A large body would hold up the thread that all answers go through.
            return await asyncio.to_thread(with_seed, forwarded) if len(body) > _LARGE else with_seed(forwarded)

    async def _response(self, request: ForwardedRequest) -> Response:
        if request.path == "/metrics":
            return await self._metrics(request)
        try:
            parts = answered(self._replicas, request)
            head = await anext(parts)
        except BackPressureError:
            return ApiError(429, "Too many requests wait", retry_after=1).response()
        except RayActorError as error:
            logger.error(f"Two replicas died on one request: {error}")
            return ApiError(503, "The replicas that were asked have died", retry_after=1).response()
        assert isinstance(head, Head)
        if head.is_stream:
            answer: Response = StreamingResponse(_with_error_event(parts), head.status)
        else:
            answer = Response(b"".join([part async for part in parts if isinstance(part, bytes)]), head.status)
        own = [item for item in answer.raw_headers if item[0] == b"content-length"]
        answer.raw_headers = [item for item in head.headers if item[0].lower() not in _OF_ONE_HOP] + own
        return answer

    async def _metrics(self, request: ForwardedRequest) -> Response:
        """Return the metrics of all replicas, labelled by their names."""
        forwarded = ForwardedRequest("GET", "/metrics", b"", request.headers, b"")
        calls = self._replicas.broadcast("whole_answer", forwarded)
        answers = await calls.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        texts: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, BaseException):  # it has just died
                continue
            name, head, body = answer
            if head.status != 200:
                return Response(body, head.status, media_type="application/json")
            texts[name] = body.decode()
        return Response(joined_metrics(texts), media_type=prometheus_client.CONTENT_TYPE_LATEST)


def guarded(
    replicas: DeploymentHandle,
    keys: ApiKeys,
    max_body_bytes: int,
    hosts: Collection[str] | None = None,
    turns: KeyTurns | None = None,
) -> Guard:
    """Return a front of these replicas within the guard of a single server, whose arguments the others are."""
    return Guard(Front(replicas, turns), keys, max_body_bytes, hosts)


class Ingress:
    """The front as a deployment, for services that Ray Serve's own proxy serves. Arguments as of `guarded`."""

    def __init__(self, *args: Any):
        listen_where_ray_does()
        self._app = guarded(*args)

    async def __call__(self, _: Request) -> Response:
        return _Answer(self._app)


class _Answer(Response):
    """Response of an ASGI application."""

    def __init__(self, app: ASGIApp):
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def answered(replicas: DeploymentHandle, request: ForwardedRequest) -> AsyncGenerator[Head | bytes, None]:
    """
    Yield the head of a replica's answer, then its body. If the replica dies before the end, another one gets the
    request, and the rest of its answer is passed on, from where the first one stopped.

    Raises:
        RayActorError: if the second replica dies, too.
        CannotContinueError: if its answer is not the one that was begun.
    """
    passed, head = PassedEvents(), None
    try:
        async for part in _held_unless_stream(_asked(replicas, request)):
            if isinstance(part, Head):
                head = part
            else:
                passed.note(part)
            yield part
        return
    except RayActorError:
        logger.warning(f"A replica died on {request.path}; another one is asked.")
    async for part in _held_unless_stream(_asked(replicas, request)):
        if isinstance(part, Head):
            if head is None:
                yield part
            elif part.status != head.status or not part.is_stream:
                raise CannotContinueError(f"the second replica answers {part.status}")
        elif not passed:
            yield part
        elif rest := passed.rest(part):
            yield rest


async def _asked(replicas: DeploymentHandle, request: ForwardedRequest) -> AsyncGenerator[Head | bytes, None]:
    """Yield a replica's answer; cancel the call if the answer is not read to its end."""
    response = cast(DeploymentResponseGenerator, replicas.options(stream=True).answer.remote(request))
    is_over = False
    try:
        async for part in response:
            yield part
        is_over = True
    except RayActorError:
        is_over = True
        raise
    finally:
        if not is_over:
            response.cancel()


async def _held_unless_stream(parts: AsyncGenerator[Head | bytes, None]) -> AsyncGenerator[Head | bytes, None]:
    """Yield a stream part by part, but any other answer only when it is complete."""
    async with aclosing(parts):
        held: list[Head | bytes] = []
        holds = True
        async for part in parts:
            if isinstance(part, Head) and part.is_stream:
                holds = False
            if holds:
                held.append(part)
            else:
                yield part
        for part in held:
            yield part


async def _with_error_event(parts: AsyncGenerator[Head | bytes, None]) -> AsyncIterator[bytes]:
    """Yield the rest of a stream; an error becomes an event in it, since the status has been sent already."""
    async with aclosing(parts):
        try:
            async for part in parts:
                assert isinstance(part, bytes)
                yield part
        except Exception as error:  # of a replica that died or failed, or of a queue that is full by now
            logger.error(f"A stream could not be ended: {error}")
            lost = ApiError(503, "The replica died, and no other one could go on: ask again", retry_after=1)
            yield f"{lost.event}{STREAM_END}".encode()


def joined_metrics(texts: Mapping[str, str]) -> str:
    """Return the metrics of several replicas, in Prometheus's text format, with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for found in parser.text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in found.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Known(list(families.values())))
    return prometheus_client.generate_latest(registry).decode()


class _Known(Collector):
    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families

"""The application: transformers' own, its handlers replaced, with what it lacks beside it."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from transformers.cli.serving.server import build_server

from .errors import add_error_handlers
from .guard.guard import Guard
from .guard.keys import ApiKeys
from .handlers.chat import EngineChatHandler
from .handlers.completions import EngineCompletionHandler
from .handlers.responses import EngineResponseHandler
from .handlers.routes import add_routes
from .metrics import ServerMetrics
from .models import EngineState, ServedModels
from .served import ServedModel

# Routes for what engines do not do (sounds, classification, unloading models); those that have bodies, which FastAPI
# would read in the event loop and `add_routes` reads beside it; and pages that take scripts from elsewhere.
_NOT_SERVED = frozenset(
    "/v1/audio/transcriptions /v1/systemone /reset /load_model /v1/chat/completions /v1/completions /v1/responses "
    "/docs /docs/oauth2-redirect /redoc".split()
)


class Server(NamedTuple):
    """
    Args:
        app (`FastAPI`): See `make_app`.
        models (mapping of `ServedModel`): By name, with engines that run.
    """

    app: FastAPI
    models: Mapping[str, ServedModel]


def make_app(
    models: Mapping[str, ServedModel],
    metrics: ServerMetrics,
    keys: ApiKeys,
    max_body_bytes: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    version: str = "unknown",
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """
    Args:
        models (mapping of `ServedModel`): By name, with engines that run. At least one, which is the default.
        metrics (`ServerMetrics`): Of these models.
        keys (`ApiKeys`): Who may ask.
        max_body_bytes (`int`): Of a request.
        chat_template_kwargs (`dict`, *optional*): Defaults for chat templates.
        version (`str`): What `/version` says.
        hosts (collection of `str`, *optional*): Names under which clients must know the server; any, where not given.
    """
    manager, state = ServedModels(models), EngineState(models)
    template_defaults = dict(chat_template_kwargs or {})
    answering: dict[str, EngineChatHandler | EngineCompletionHandler | EngineResponseHandler] = {
        "/v1/chat/completions": EngineChatHandler(manager, state, template_defaults),
        "/v1/completions": EngineCompletionHandler(manager, state),
        "/v1/responses": EngineResponseHandler(manager, state, template_defaults),
    }
    parts = {"model_manager": manager, "generation_state": state}
    rest = inspect.signature(build_server).parameters.keys() - parts.keys() - {"enable_cors"}
    app = build_server(**parts, **dict.fromkeys(rest))  # type: ignore[arg-type]  # handlers of routes that go
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in _NOT_SERVED]
    for path, handler in answering.items():
        app.post(path)(handler.answer)
    metrics.watch({name: served.engine for name, served in models.items()})
    add_routes(app, state, metrics, version, template_defaults)
    add_error_handlers(app)
    app.add_middleware(Guard, keys=keys, max_body_bytes=max_body_bytes, hosts=hosts)
    return app

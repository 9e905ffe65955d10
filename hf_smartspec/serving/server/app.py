"""The application: transformers' serving application with other handlers and further routes."""

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

# Routes without an engine's equivalent (sounds, classification, unloading models); routes with bodies, which FastAPI
# would parse in the event loop and our handlers parse in a thread; and pages that load scripts from other sites.
_REMOVED_ROUTES = frozenset(
    "/v1/audio/transcriptions /v1/systemone /reset /load_model /v1/chat/completions /v1/completions /v1/responses "
    "/docs /docs/oauth2-redirect /redoc".split()
)


class Server(NamedTuple):
    """
    An application and its models.

    Args:
        app (`FastAPI`): See `make_app`.
        models (mapping of `ServedModel`): Models by name, with running engines.
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
    Return an application that serves models over HTTP.

    Args:
        models (mapping of `ServedModel`): Models by name, with running engines; at least one. The first is the default.
        metrics (`ServerMetrics`): Counts the requests of these models.
        keys (`ApiKeys`): API keys of clients.
        max_body_bytes (`int`): Largest body of a request.
        chat_template_kwargs (`dict`, *optional*): Defaults for chat templates.
        version (`str`): Version shown by `/version`.
        hosts (collection of `str`, *optional*): Host names that requests may name; any, if omitted.
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
    app = build_server(**parts, **dict.fromkeys(rest))  # type: ignore[arg-type]  # handlers of removed routes
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in _REMOVED_ROUTES]
    for path, handler in answering.items():
        app.post(path)(handler.answer)
    metrics.watch({name: served.engine for name, served in models.items()})
    add_routes(app, state, metrics, version, template_defaults)
    add_error_handlers(app)
    app.add_middleware(Guard, keys=keys, max_body_bytes=max_body_bytes, hosts=hosts)
    return app

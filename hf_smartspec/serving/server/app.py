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

# transformers' routes for what engines do not do (sounds, classification, unloading models), and one that fails for
# names that are no text, in place of which there is our own.
_NOT_SERVED = ("/v1/audio/transcriptions", "/v1/systemone", "/reset", "/load_model")


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
    parts = {
        "model_manager": manager,
        "chat_handler": EngineChatHandler(manager, state, template_defaults),
        "completion_handler": EngineCompletionHandler(manager, state),
        "response_handler": EngineResponseHandler(manager, state, template_defaults),
        "generation_state": state,
    }
    rest = inspect.signature(build_server).parameters.keys() - parts.keys() - {"enable_cors"}
    app = build_server(**parts, **dict.fromkeys(rest))  # type: ignore[arg-type]  # handlers of routes that go
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in _NOT_SERVED]
    metrics.watch(models)
    add_routes(app, state, metrics, version, template_defaults)
    add_error_handlers(app)
    app.add_middleware(Guard, keys=keys, max_body_bytes=max_body_bytes, hosts=hosts)
    return app

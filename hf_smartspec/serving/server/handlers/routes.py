"""Routes that transformers' application lacks, beside those of answers."""

import json
from collections.abc import Mapping
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ..chat_template.rendering import render, template_kwargs
from ..errors import ApiError
from ..guard.keys import CALLER
from ..metrics import ServerMetrics
from ..models import EngineState, model_card
from ..request.body import read
from ..request.fields import Fields, Items, Message, TokenIds

_NEITHER = "prompt or messages: pass one of them"


class LoadFields(Fields):
    model: str


class TokenizeFields(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeFields(Fields):
    model: str | None = None
    tokens: TokenIds


def add_routes(
    app: FastAPI,
    state: EngineState,
    metrics: ServerMetrics,
    version_shown: str,
    template_defaults: Mapping[str, Any],
) -> None:
    """
    Add `/tokenize`, `/detokenize`, `/tokenizer_info`, `/v1/models/NAME`, `/load_model`, `/metrics`, `/load`, `/version`
    and `/ping`.
    """

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        fields = await read(TokenizeFields, request)
        served = state.find(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise ApiError(400, _NEITHER)
        if fields.messages is not None:
            kwargs = template_kwargs(template_defaults, fields.chat_template_kwargs, fields.reasoning_effort)
            ids = await served.in_worker(render, served, fields.messages, fields.tools, kwargs)
        else:
            ids = await served.in_worker(served.tokens_of, fields.prompt, "prompt", fields.add_special_tokens)
        shown: dict[str, Any] = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            shown["token_strs"] = await served.in_worker(served.tokenizer.convert_ids_to_tokens, ids)
        return JSONResponse(shown)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        fields = await read(DetokenizeFields, request)
        served = state.find(fields.model)
        served.check_length(fields.tokens, "tokens")
        try:
            return JSONResponse({"prompt": await served.in_worker(served.tokenizer.decode, fields.tokens)})
        except (OverflowError, IndexError, KeyError, TypeError) as error:
            raise ApiError(400, f"tokens: {error}", param="tokens") from None

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> JSONResponse:
        tokenizer = state.find(model).tokenizer
        special = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        shown = {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
        return JSONResponse(shown | {"model_max_length": tokenizer.model_max_length} | special)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        return JSONResponse(model_card(state.find(name)))

    @app.post("/load_model")
    async def load_model(request: Request) -> Response:
        """Answer `transformers chat`, which loads a model before it asks: models here are loaded already."""
        status: dict[str, Any] = {"model": (await read(LoadFields, request)).model}
        try:
            state.find(status["model"])
            status |= {"status": "ready", "cached": True}
        except ApiError as error:
            status |= {"status": "error", "message": error.message}
        return Response(f"data: {json.dumps(status)}\n\n", media_type="text/event-stream")

    @app.get("/metrics")
    async def show_metrics() -> Response:
        if not CALLER.get().is_admin:
            raise ApiError(403, "Metrics count requests of all keys: they need a key of --admin-key-file")
        text = prometheus_client.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/load")
    async def load() -> JSONResponse:
        """Return the number of the caller's requests that run or wait; to admins, those of all keys."""
        caller, all_open = CALLER.get(), [served.open for served in state.models.values()]
        counts = map(len, all_open) if caller.is_admin else (requests.of(caller.namespace) for requests in all_open)
        return JSONResponse({"server_load": sum(counts)})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": version_shown})

    @app.get("/ping")
    async def ping() -> Response:
        return Response(status_code=200 if state.is_cb_alive() else 503)

"""Errors in OpenAI's format."""

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

STREAM_END = "data: [DONE]\n\n"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """
    Error that is answered to the client.

    Args:
        status (`int`): HTTP status.
        message (`str`): One line for people.
        param (`str`, *optional*): The wrong field.
        code (`str`, *optional*): A code for programs.
        retry_after (`int`, *optional*): Seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, " ".join(message.split()), param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": _TYPES.get(self.status, usual), "param": self.param}
        return {"error": error | {"code": self.code or self.status}}

    @property
    def event(self) -> str:
        """Return the error as an event, for streams, whose status has been sent already."""
        return f"data: {json.dumps(self.body)}\n\n"

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return JSONResponse(self.body, self.status, headers)


def validation_error(error: ValidationError) -> ApiError:
    """Return an error for a body's first wrong field; if a list is too long, for this field."""
    errors = error.errors()
    first = next((item for item in errors if item["type"] == "too_long"), errors[0])
    names = [str(part) for part in first["loc"]]
    where = ".".join(names)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else message, param=names[0] if names else None)


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors of an application in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def _api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)  # FastAPI's own is one of these; the router raises them for 404 and 405
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        message, headers = str(error.detail), error.headers or {}
        is_routers = message == HTTPStatus(error.status_code).phrase  # else a handler's message
        if is_routers and error.status_code == 404:
            message = f"There is no {request.url.path} here"
        elif is_routers and error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}, but {headers.get('Allow', 'others')}"
        response = ApiError(400 if error.status_code == 422 else error.status_code, message).response()
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def _fault(_: Request, error: Exception) -> JSONResponse:  # the server logs it
        return ApiError(500, f"The server failed: {type(error).__name__}").response()

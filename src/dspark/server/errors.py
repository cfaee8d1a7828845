"""Errors as clients of OpenAI's API know them: a status, and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dspark.engine.queue import QueueFull

__all__ = [
    "ERROR_RESPONSES",
    "ApiError",
    "ErrorResponse",
    "add_error_handlers",
    "api_error",
    "client_gone",
    "first_word",
]

_MOST_PROBLEMS = 5
_LONGEST_MESSAGE = 1000
_RETRY_SECONDS = 1
_INTERNAL = "an error inside the server cost this request; the server's log has the cause"

_CODES: Mapping[str, str] = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "not_supported": "unsupported_parameter",
    "json_invalid": "invalid_json",
}


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer whose status is 400 or more."""

    error: ErrorBody


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "What is wrong with the request; 429: try again later"},
    "5XX": {"model": ErrorResponse, "description": "The server is not ready, or an error cost the request"},
}
"""``responses`` of a route."""


class ApiError(Exception):
    """Ends a request with an error that the client is told.

    Args:
        status: HTTP status, 400 or more.
        message: for the client's developer: what is wrong and what to do.
        param: parameter of the request, if one is to blame.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _clean(message)
        self.param = None if param is None else _clean(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The envelope."""
        error = {"message": self.message, "type": self._type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)

    @property
    def _type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"


def client_gone() -> ApiError:
    """What nobody reads, since the client has left: for log and metrics, under nginx's number for it."""
    return ApiError(499, "the client has gone", code="client_gone")


def api_error(error: BaseException) -> ApiError:
    """What the client is told of any exception; nothing of an internal one."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _validation_error(error.errors())
        case HTTPException(status_code=400):  # FastAPI's, of a body that is no UTF-8, or JSON of absurd depth
            return ApiError(400, "the body cannot be read: send JSON in UTF-8", code="invalid_json")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case QueueFull():
            headers = {"Retry-After": str(_RETRY_SECONDS)}
            return ApiError(429, "too many requests are waiting: try again later", code="queue_full", headers=headers)
        case _:
            return ApiError(500, _INTERNAL, code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of an app's routes come out in the envelope."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    for kind in (ApiError, RequestValidationError, HTTPException, QueueFull, Exception):
        app.add_exception_handler(kind, handle)


def _validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Name the parameters; what the client sent for them is not repeated."""
    told = [_problem(problem) for problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > len(told):
        told.append(f"and {len(problems) - len(told)} more")
    first = problems[0]
    param = _parameter(first["loc"]) or (first_word(told[0]) if first["type"] == "value_error" else None)
    return ApiError(400, "; ".join(told), param, _CODES.get(str(first["type"]), "invalid_value"))


def first_word(message: str) -> str | None:
    """The parameter that a message begins with, as ours do."""
    found = re.match(r"\w+", message)
    return found.group() if found else None


def _problem(problem: Mapping[str, Any]) -> str:
    name = _parameter(problem["loc"])
    match problem["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {problem['ctx']['error']}"
        case "extra_forbidden":
            return f"unknown parameter: {name}"
        case "missing":
            return f"{name} is missing" if name else "the request has no body: send JSON"
        case "model_attributes_type" if not name:
            return "the body must be a JSON object, with content-type application/json"
        case _:
            message = str(problem["msg"]).removeprefix("Value error, ")
            return f"{name}: {message}" if name else message


def _parameter(location: Sequence[str | int]) -> str:
    """``messages[0].content`` of ``("body", "messages", 0, "content")``."""
    if location[1:] and isinstance(location[1], int):
        return ""  # a place in a text that is not JSON
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:]]
    return "".join(parts).removeprefix(".")


def _clean(text: str) -> str:
    """What a client sent may be in it: cut to a readable length, and with no half of a surrogate pair."""
    return text[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()

"""Errors as answers: OpenAI's error form, the right status, and nothing about this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moestro.errors import EngineDeadError, MoestroError, RequestError
from moestro.logs import logger

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than success. retry_after_s: when it makes sense to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception; what users cannot have caused is logged here and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after_s=5)
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if not isinstance(error, MoestroError):
        logger.log(logging.ERROR, "a request fails", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    # A name that the client sent may have half a character in it, which JSON can say and UTF-8 cannot.
    message = error.message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_body(error))
    return Response(body, error.status, headers=headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Answer every exception of the app's handlers in this form."""

    async def handle(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    for kind in (ApiError, MoestroError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, in one sentence; of a union's, the one that got furthest."""
    first = max(errors, key=lambda e: sum(isinstance(part, int) for part in e["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    path = [part for part in first["loc"][1:] if isinstance(part, int) or str(part).isidentifier()]
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    field = str(path[0])
    if first["type"] == "missing":
        return ApiError(400, f"{name} is required", param=field)
    return ApiError(400, f"{name}: {first['msg']}", param=field)

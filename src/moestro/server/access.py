"""What every HTTP request has to pass before its handler: a server that is not draining, the key, the size limit."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.server.failures import ApiError, error_response
from moestro.server.service import Service

# Load balancers and Prometheus ask these, without a key and to the end.
_OPEN_PATHS = ("/", "/health", "/metrics")


class Access:
    """ASGI middleware around the app; also counts the requests being answered, which draining waits for."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._service.num_active += 1
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._service.num_active -= 1

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if path in _OPEN_PATHS:
            return None
        if self._service.draining:
            return ApiError(503, "the server is shutting down", code="draining", retry_after_s=10)
        if not self._has_key(headers):
            return ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._service.config.max_body_bytes:
            return self._too_large()
        return None

    def _has_key(self, headers: Headers) -> bool:
        key = self._service.config.api_key
        if key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared as bytes and in constant time, so that answers do not tell how much of the key was right.
        return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode("latin-1"), key.encode())

    def _limited(self, receive: Receive) -> Receive:
        """Bodies sent in chunks say no length beforehand; count them."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._service.config.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._service.config.max_body_bytes} bytes")

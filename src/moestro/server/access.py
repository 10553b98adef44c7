"""What every HTTP request has to pass before its handler: a server that is not draining, the key, the size limit, the
number of open requests of its client. And what is told about it afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.logs import logger
from moestro.server.facts import Facts, request_id_of
from moestro.server.failures import ApiError, error_response
from moestro.server.service import ClientGone, Service

# Load balancers and Prometheus ask these, without a key and to the end.
_OPEN_PATHS = ("/", "/health", "/metrics")
# A client that sends its body, or takes its answer, so slowly that nothing moves for this long is let go.
BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 120.0


class Access:
    """ASGI middleware around the app; also counts the requests being answered, which draining waits for."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        facts = _facts(scope, headers)
        scope.setdefault("state", {})["facts"] = facts
        send = self._noted(send, facts)
        try:
            refusal = self._refusal(scope["path"], headers, facts)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
            await self._pass_on(scope, receive, send, facts)
        finally:
            self._tell(facts)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, facts: Facts) -> None:
        is_open_path = scope["path"] in _OPEN_PATHS
        self._service.num_active += 1
        self._open[facts.client] += not is_open_path
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._service.num_active -= 1
            self._open[facts.client] -= not is_open_path
            if not self._open[facts.client]:
                del self._open[facts.client]

    def _refusal(self, path: str, headers: Headers, facts: Facts) -> ApiError | None:
        if path in _OPEN_PATHS:
            return None
        if self._service.draining:
            return ApiError(503, "the server is shutting down", code="draining", retry_after_s=10)
        if self._service.keys:
            name = self._service.keys.name_of(headers.get("authorization", ""))
            if name is None:
                return ApiError(
                    401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
                )
            facts.client = name
        limit = self._service.config.max_client_requests
        if limit is not None and self._open[facts.client] >= limit:
            message = f"{limit} requests of yours are open already, which is the limit; try again when one has ended"
            return ApiError(429, message, code="too_many_requests", retry_after_s=1)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._service.config.max_body_bytes:
            return self._too_large()
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Bodies sent in chunks say no length beforehand: count them. And do not wait for the next part for ever."""
        num_bytes, complete = 0, False

        async def counted() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # this one waits for the client to go away
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body does not arrive") from None
            complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._service.config.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _noted(self, send: Send, facts: Facts) -> Send:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = facts.request_id
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        return noted

    def _tell(self, facts: Facts) -> None:
        facts.duration_s = time.monotonic() - facts.started_s
        if facts.path in _OPEN_PATHS:
            return
        if self._service.config.access_log:
            logger.info("request", extra={"fields": facts.fields()})
        if self._service.tracer is not None:
            self._service.tracer.record(facts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._service.config.max_body_bytes} bytes")


def _facts(scope: Scope, headers: Headers) -> Facts:
    client = scope.get("client")
    return Facts(
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "local",
        request_id=request_id_of(headers.get("x-request-id")),
        traceparent=headers.get("traceparent", ""),
    )

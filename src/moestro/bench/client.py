"""A lean streaming client: h11 over asyncio, a connection a request, a time for every event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from moestro.errors import SettingError

_READ_BYTES = 65536


@dataclass
class Outcome:
    """What became of one request. Times are in seconds; *_at_s on the clock that `time.monotonic` has.

    error: None for a good answer, else its kind: "http 429", "timeout", "connection", "cut off" (the stream ended
    without its end), "error event". event_times_s: of the events that brought text.
    """

    number: int
    planned_at_s: float | None = None
    sent_at_s: float = 0.0
    ended_at_s: float = 0.0
    status: int = 0
    error: str | None = None
    detail: str = ""
    event_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    retry_after: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.sent_at_s if self.event_times_s else None

    @property
    def num_tokens(self) -> int:
        """As the server counts them, else the events with text."""
        return len(self.event_times_s) if self.output_tokens is None else self.output_tokens


class Server:
    """An OpenAI-compatible server. url: with or without /v1 at its end."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"url={url!r} must be like http://127.0.0.1:8000")
        self.host, self._tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._netloc = parts.netloc.rpartition("@")[2]
        self._key = api_key
        self._timeout_s = timeout_s

    async def get(self, path: str) -> tuple[int, Any]:
        """(status, parsed body) of a GET. Raises OSError when there is nobody."""
        body = bytearray()
        status = 0
        async with asyncio.timeout(self._timeout_s):
            async for event in self._exchange("GET", path, b""):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
        return status, _json(bytes(body))

    async def stream(
        self, path: str, body: dict[str, Any], outcome: Outcome, abandon_after: int | None = None
    ) -> Outcome:
        """POST a streaming request and note its course in the outcome.

        abandon_after: close the connection after so many events with text, as a client that goes away does.
        """
        outcome.sent_at_s = time.monotonic()
        reader = _EventReader(outcome)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in self._exchange("POST", path, json.dumps(body).encode()):
                    if isinstance(event, h11.Response):
                        outcome.status = event.status_code
                        outcome.retry_after = dict(event.headers).get(b"retry-after", b"").decode() or None
                    elif isinstance(event, h11.Data):
                        reader.feed(bytes(event.data), time.monotonic())
                        if abandon_after is not None and len(outcome.event_times_s) >= abandon_after:
                            outcome.error = "abandoned"
                            break
        except TimeoutError:
            outcome.error = "timeout"
        except (OSError, h11.ProtocolError, EOFError) as error:
            if outcome.error is None:  # a server that tells its error may well close afterwards
                outcome.error, outcome.detail = "connection", f"{type(error).__name__}: {error}"[:200]
        outcome.ended_at_s = time.monotonic()
        reader.conclude()
        return outcome

    async def _exchange(self, method: str, path: str, body: bytes) -> Any:
        """The events of one request's answer, on a connection of its own."""
        context = ssl.create_default_context() if self._tls else None
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        try:
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
            headers = [("Host", self._netloc), ("Connection", "close"), ("Accept", "*/*")]
            if body:
                headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            if self._key:
                headers.append(("Authorization", f"Bearer {self._key}"))
            data = http.send(h11.Request(method=method, target=self._base + path, headers=headers))
            writer.write(
                (data or b"") + (http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b"")
            )
            await writer.drain()
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return
                else:
                    yield event
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


class _EventReader:
    """Server-sent events, cut where they end and read for what they bring."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._held = b""
        self._done = False

    def feed(self, data: bytes, now_s: float) -> None:
        self._held += data
        if self._outcome.status != 200:
            return
        *lines, self._held = self._held.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def conclude(self) -> None:
        """Decide what kind of end it was."""
        outcome = self._outcome
        if outcome.error is not None:
            return
        if outcome.status != 200:
            outcome.error, outcome.detail = f"http {outcome.status}", _message(_json(self._held))
        elif not self._done and outcome.finish_reason is None:
            outcome.error = "cut off"

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        event, outcome = _json(payload), self._outcome
        if not isinstance(event, dict):
            return
        if event.get("error"):
            outcome.error, outcome.detail = "error event", _message(event)
            return
        if isinstance(usage := event.get("usage"), dict):
            outcome.prompt_tokens, outcome.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        for choice in event.get("choices") or []:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                outcome.text += text
                outcome.event_times_s.append(now_s)
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message(body: Any) -> str:
    error = body.get("error", body.get("detail", "")) if isinstance(body, dict) else ""
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]

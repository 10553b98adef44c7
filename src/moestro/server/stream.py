"""Server-sent events: a generation as it grows, errors included, [DONE] at the end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

from moestro.engine.request import Delta
from moestro.errors import MoestroError
from moestro.server.failures import ApiError, error_body
from moestro.server.service import Generation, failure_of

Chunk = dict[str, Any]
_DONE = b"data: [DONE]\n\n"


def event(chunk: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def sse_response(
    generation: Generation,
    first: Iterable[Chunk],
    chunks_of: Callable[[int, Delta], Iterable[Chunk]],
    last: Callable[[], Iterable[Chunk]],
) -> StreamingResponse:
    """first: chunks before any token. chunks_of(place of the request, delta): those of a delta. last: after the end."""

    async def events() -> AsyncIterator[bytes]:
        try:
            for chunk in first:
                yield event(chunk)
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for place, delta in deltas:
                    for chunk in chunks_of(place, delta):
                        yield event(chunk)
            for chunk in last():
                yield event(chunk)
        except (ApiError, MoestroError) as error:
            yield event(error_body(error if isinstance(error, ApiError) else failure_of(error)))
        finally:
            generation.close()
        yield _DONE

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

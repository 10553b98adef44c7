"""What the server process and the engine process say to each other: msgspec structs in MessagePack, a type tag each."""

from __future__ import annotations

from typing import Any

import msgspec

from moestro.engine.request import Delta, Request
from moestro.engine.stats import EngineStats, ModelInfo


class Add(msgspec.Struct, tag=True, frozen=True):
    """Start a request. Answered by Accepted or Refused, then by Deltas."""

    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop a request and forget it; nothing more is said about it. Unknown ids do no harm."""

    request_id: str


class AskStats(msgspec.Struct, tag=True, frozen=True):
    """Send Stats now."""


class AskLoads(msgspec.Struct, tag=True, frozen=True):
    """Send Loads now."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the process."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded; requests may come."""

    info: ModelInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The process ends because of this; a sentence for users."""

    message: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The request is in the engine's queue."""

    request_id: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The request cannot be served. field: the parameter at fault, None for the request as a whole."""

    request_id: str
    message: str
    field: str | None


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """What one step added to open requests."""

    deltas: list[Delta]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counters, about twice a second and when asked."""

    stats: EngineStats


class Loads(msgspec.Struct, tag=True, frozen=True):
    """Tokens by layer and expert."""

    loads: dict[str, Any]


ToEngine = Add | Abort | AskStats | AskLoads | Shutdown
FromEngine = Ready | Failed | Accepted | Refused | Deltas | Stats | Loads

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

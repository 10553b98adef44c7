"""What is told about one HTTP request afterwards, in the log and in traces. Never its content."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.types import Scope

_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Facts:
    """request_id: the client's X-Request-Id, or a fresh one. client: name of the key, or the address.

    started_s: monotonic; started_ns: since the epoch. status: 0 while there is no answer. ttft_s: of the first token of
    all completions. finish: finish reasons, or the error's code.
    """

    method: str
    path: str
    client: str
    request_id: str
    traceparent: str = ""
    started_s: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    answer_id: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    finish: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        """As log fields; None where there is nothing to tell."""
        return {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(self.duration_s, 4),
            "client": self.client,
            "request_id": self.request_id,
            "answer_id": self.answer_id,
            "prompt_tokens": self.prompt_tokens or None,
            "completion_tokens": self.completion_tokens or None,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 4),
            "finish": ",".join(sorted(set(self.finish))) or None,
        }


def request_id_of(given: str | None) -> str:
    """The client's own id when it is a plain one: it goes into a header and into log lines."""
    return given if given and _GOOD_ID.fullmatch(given) else f"req-{uuid4().hex}"


def facts_of(scope: Scope) -> Facts | None:
    """The facts of the request that a handler answers; None when it came past `Access`."""
    found = scope.get("state", {}).get("facts")
    return found if isinstance(found, Facts) else None

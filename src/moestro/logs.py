"""Logging: one logger for the package, and `log_once` for fallbacks that would repeat at every step.

A record may carry `fields` (`logger.info("...", extra={"fields": {...}})`): the JSON form writes them as keys of their
own, the text form after the message.
"""

from __future__ import annotations

import datetime
import json
import logging
from functools import cache
from typing import Any

from moestro.errors import SettingError

logger = logging.getLogger("moestro")
FORMATS = ("text", "json")


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([text, *(f"{k}={v}" for k, v in fields.items() if v is not None)])


class _JsonFormatter(logging.Formatter):
    """One object a line; time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {k: v for k, v in getattr(record, "fields", {}).items() if v is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(level: str = "info", format: str = "text") -> None:
    """Send moestro's log lines to stderr. Called by the command line only; libraries do not configure logging.

    format: "text" or "json"; raises SettingError for others. A stderr that cannot be written to, such as a file on a
    full disk, loses the lines and does no other harm.
    """
    if format not in FORMATS:
        raise SettingError(f"log format {format!r} must be one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    logging.raiseExceptions = False
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time it is seen in this process."""
    logger.log(level, message)

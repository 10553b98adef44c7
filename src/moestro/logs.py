"""Logging: one logger for the package, and `log_once` for fallbacks that would repeat at every step.

A record may carry `fields` (`logger.info("...", extra={"fields": {...}})`): the JSON form writes them as keys of their
own, the text form after the message.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import queue
import threading
import time
from functools import cache
from typing import Any

from moestro.errors import SettingError

logger = logging.getLogger("moestro")
FORMATS = ("text", "json")
_MAX_WAITING = 10_000


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
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {k: v for k, v in getattr(record, "fields", {}).items() if v is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _BackgroundHandler(logging.StreamHandler[Any]):
    """Writes in a thread of its own: a pipe that nobody reads must not stop whoever logs. Lines beyond what the queue
    holds are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[str] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(self.format(record) + self.terminator)

    def wait(self, timeout_s: float) -> None:
        """Wait until all lines are written, or for this long."""
        deadline = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def _write(self) -> None:
        while True:
            line = self._queue.get()
            # Without the handler's lock, which those who log need; and there is nobody to tell of a failure.
            with contextlib.suppress(OSError, ValueError):
                self.stream.write(line)
                self.stream.flush()
            self._queue.task_done()


def flush_logs(timeout_s: float = 1.0) -> None:
    """Give lines that wait a moment to be written; for the end of a process."""
    for handler in logger.handlers:
        if isinstance(handler, _BackgroundHandler):
            handler.wait(timeout_s)


def setup_logging(level: str = "info", format: str = "text") -> None:
    """Send moestro's log lines to stderr. Called by the command line only; libraries do not configure logging.

    format: "text" or "json"; raises SettingError for others. A stderr that cannot be written to, such as a file on a
    full disk or a pipe that nobody reads, loses lines and does no other harm.
    """
    if format not in FORMATS:
        raise SettingError(f"log format {format!r} must be one of {', '.join(FORMATS)}")
    handler = _BackgroundHandler()
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    logging.raiseExceptions = False
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    atexit.unregister(flush_logs)
    atexit.register(flush_logs)


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time it is seen in this process."""
    logger.log(level, message)

"""Logging: one logger for the package, and `log_once` for fallbacks that would repeat at every step."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger("moestro")


def setup_logging(level: str = "info") -> None:
    """Send moestro's log lines to stderr, time first. Called by the command line only; libraries do not configure
    logging.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time it is seen in this process."""
    logger.log(level, message)

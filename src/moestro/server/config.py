"""The server's own options; those of the engine are in `engine.config`. Command-line flags are generated from both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moestro.errors import SettingError
from moestro.logs import FORMATS


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Raises SettingError for a value that cannot work."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every network the machine is on")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = _option(None, "key that clients must send; MOESTRO_API_KEY keeps it off the process list")
    api_key_file: str | None = _option(None, "file with further keys, one a line; MOESTRO_API_KEY_FILE likewise")
    max_client_requests: int | None = _option(
        None, "most open requests of one key, or of one address when there are no keys; more are answered with 429"
    )
    request_timeout_s: float = _option(3600.0, "seconds after which a request that is not finished ends with an error")
    allow_origin: str | None = _option(
        None, "origins of web pages that may call the server (CORS), with commas between, or *; none when not given"
    )
    log_format: str = _option("text", "text or json: log lines for people or for machines")
    access_log: bool = _option(True, "log a line for each request, without its content")
    otlp_traces_endpoint: str | None = _option(
        None, "OpenTelemetry collector to send a trace of each request to, as http://HOST:4318/v1/traces"
    )
    max_body_bytes: int = _option(16 * 2**20, "largest request body; more is answered with 413")
    max_engine_restarts: int = _option(10, "times in ten minutes that an engine which has died is started again")
    drain_timeout_s: float = _option(300.0, "seconds that open requests get to finish after SIGTERM")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError(f"port={self.port} must be between 0 and 65535")
        if self.max_body_bytes < 1024:
            raise SettingError(f"max_body_bytes={self.max_body_bytes} must be at least 1024")
        if not self.drain_timeout_s >= 0:
            raise SettingError(f"drain_timeout_s={self.drain_timeout_s} must not be negative")
        if self.max_client_requests is not None and self.max_client_requests < 1:
            raise SettingError(f"max_client_requests={self.max_client_requests} must be at least 1")
        if self.max_engine_restarts < 0:
            raise SettingError(f"max_engine_restarts={self.max_engine_restarts} must not be negative")
        if not self.request_timeout_s > 0:
            raise SettingError(f"request_timeout_s={self.request_timeout_s} must be more than 0")
        if self.log_format not in FORMATS:
            raise SettingError(f"log_format={self.log_format!r} must be one of {', '.join(FORMATS)}")
        if self.api_key == "":
            raise SettingError("api_key is empty; leave it out to serve without a key")

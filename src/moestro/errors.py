"""Every exception that moestro raises for its users.

    MoestroError
    ├── ConfigError             a config.json that cannot be read, or asks for something moestro does not have
    │   └── UnsupportedModelError   the architecture is not one of the supported families
    ├── CheckpointError         a tensor or file is missing, left over, truncated or of the wrong shape
    ├── SettingError            an engine option, flag or environment variable has a value that cannot work
    ├── CapacityError           something does not fit in the memory there is
    ├── KernelError             the implementation that was asked for by name cannot run here
    ├── RequestError            a request that cannot be served; `field` names the offending parameter
    └── EngineDeadError         the engine process has stopped

A message names the offending thing, its value, and what would be accepted. `assert` is for our own mistakes.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "KernelError",
    "MoestroError",
    "RequestError",
    "SettingError",
    "UnsupportedModelError",
]


class MoestroError(Exception):
    """Base of all errors that a user can cause or meet."""


class ConfigError(MoestroError):
    """The model's config.json cannot be used."""


class UnsupportedModelError(ConfigError):
    """The architecture is not among the supported families."""


class CheckpointError(MoestroError):
    """The checkpoint's files or tensors are not what the config asks for."""


class SettingError(MoestroError, ValueError):
    """An engine option, flag or environment variable cannot work."""


class CapacityError(MoestroError):
    """Something does not fit in memory; the message carries the numbers."""


class KernelError(MoestroError):
    """An implementation asked for by name cannot run on this device or shape."""


class RequestError(MoestroError, ValueError):
    """A request that cannot be served as it is.

    field: the request parameter at fault, as the client spelled it; None when it is the request as a whole.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineDeadError(MoestroError):
    """The engine process has stopped; nothing more can be generated until it is restarted."""

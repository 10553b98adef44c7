"""Where errors become one line and an exit code: 2 for what the user gave, 1 for what went wrong, never a traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from moestro.errors import CheckpointError, ConfigError, MoestroError, RequestError, SettingError
from moestro.logs import flush_logs, setup_logging
from moestro.settings import log_level

_USERS_INPUT = (CheckpointError, ConfigError, RequestError, SettingError)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Run a command so that its errors end the process quietly."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            setup_logging(log_level())
            command(**options)
            sys.stdout.flush()  # here, where a closed pipe can still be met in silence
        except MoestroError as error:
            fail(str(error), 2 if isinstance(error, _USERS_INPUT) else 1)
        except BrokenPipeError:
            # Python flushes stdout once more at exit; give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except OSError as error:
            fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)

    return run


def fail(message: str, code: int) -> None:
    """Say one line on stderr and end."""
    flush_logs()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)

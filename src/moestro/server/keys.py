"""API keys: from an option, the environment and a file; compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from moestro.errors import SettingError

MAX_KEYS = 10_000


class ApiKeys:
    """The keys that clients may send. In logs a key is called by its name: key1, key2, ... in the order given."""

    def __init__(self, keys: list[str]) -> None:
        # Digests are all of one length: comparing them tells nothing about the keys' lengths either.
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    @classmethod
    def load(cls, key: str | None, file: str | None) -> ApiKeys:
        """key: one more than those in the file, which has one a line; empty lines and those that begin with # are none.

        Raises SettingError when the file cannot be read or has no key.
        """
        keys = [] if key is None else [key]
        if file is not None:
            found = _read(Path(file))
            if not found:
                raise SettingError(f"api_key_file={file!r} has no key in it; it takes one a line")
            if len(found) > MAX_KEYS:
                raise SettingError(f"api_key_file={file!r} has {len(found)} keys; {MAX_KEYS} are the limit")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an Authorization header; None when there is no right one."""
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip().encode("latin-1", "replace"))
        name = None
        for place, known in enumerate(self._digests, 1):  # all of them, always: the time taken tells nothing
            if secrets.compare_digest(digest, known):
                name = f"key{place}"
        return name if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingError(f"api_key_file={str(path)!r} cannot be read: {reason}") from None
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]

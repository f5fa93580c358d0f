"""The keys of watermarks: one secret of the installation, from which each tenant's key is derived.

Invariant: neither the secret nor a key is ever logged, returned or written anywhere; a tenant's key says nothing about
another tenant's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError

SHORTEST = 32
"""Characters of a secret."""
_PURPOSE = b"penstock watermark 1\0"


class WatermarkKeys:
    """Derives keys. With several secrets the first one marks, and all of them detect."""

    __slots__ = ("_secrets",)

    def __init__(self, found: Sequence[bytes]) -> None:
        self._secrets = tuple(found)

    @classmethod
    def read(cls, file: str) -> WatermarkKeys | None:
        """None when no file is configured."""
        if not file:
            return None
        try:
            lines = [line.strip() for line in Path(file).expanduser().read_bytes().splitlines()]
        except OSError as error:
            raise ConfigError(f"watermark.secret_file: {error.filename}: {error.strerror}") from error
        found = [line for line in lines if line]
        if not found or any(len(line) < SHORTEST for line in found):
            raise ConfigError(
                f"watermark.secret_file: {file} must have a secret of at least {SHORTEST} characters on each line; "
                "`penstock watermark secret FILE` writes one"
            )
        return cls(found)

    def marking(self, tenant: str) -> bytes:
        """The key that new answers of a tenant are marked with."""
        return self.detecting(tenant)[0]

    def detecting(self, tenant: str) -> list[bytes]:
        """All keys that answers of a tenant may have been marked with."""
        return [hmac.digest(secret, _PURPOSE + tenant.encode(), hashlib.sha256) for secret in self._secrets]

    def __repr__(self) -> str:
        return f"<WatermarkKeys of {len(self._secrets)} secrets>"


def write_secret(file: Path) -> None:
    """Writes a new secret to `file`, which must not exist."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(secrets.token_urlsafe(32) + "\n")

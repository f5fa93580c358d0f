"""One shared secret makes the machines of a fleet known to each other.

The CURVE keys of engines and of gateways are derived from it (HKDF-SHA256, RFC 5869), so that every connection between
machines is encrypted and authenticated and there is one small file to distribute. Records in the registry are signed
with a third key: whoever can write to the registry but does not have the secret cannot add an engine.

A machine that holds the secret can be any other machine of the fleet. Where that is too much trust, engines and
gateways take key files of their own (`--curve-key`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq.utils.z85

from penstock.errors import ConfigError
from penstock.protocol.transport import CurveClient, CurveServer, public_key

VARIABLE = "PENSTOCK_FLEET_SECRET"
SHORTEST = 32
"""Characters of a secret; one that `generate` makes has 43."""


def generate() -> str:
    return secrets.token_urlsafe(32)


def write(file: Path) -> None:
    """Writes a new secret to `file`, which must not exist."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(generate() + "\n")


@dataclass(frozen=True, slots=True, repr=False)
class FleetSecret:
    """The secrets of a fleet, newest first: the first is used, all are accepted."""

    secrets: tuple[str, ...]

    @classmethod
    def read(cls, file: str, environ: Mapping[str, str] = os.environ) -> FleetSecret:
        """From the environment variable, or else from the file that the configuration names."""
        text = environ.get(VARIABLE, "")
        where = f"${VARIABLE}"
        if not text and file:
            where = file
            try:
                text = Path(file).expanduser().read_text()
            except OSError as error:
                raise ConfigError(f"fleet.secret_file: {error.filename}: {error.strerror}") from error
        found = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not found:
            raise ConfigError(
                "a fleet needs a secret that all its machines share: `penstock fleet secret FILE` writes one; copy it "
                f"to each machine and set fleet.secret_file (or ${VARIABLE})"
            )
        if short := next((secret for secret in found if len(secret) < SHORTEST), None):
            raise ConfigError(f"{where}: a secret of {len(short)} characters is too short; {SHORTEST} are needed")
        return cls(found)

    @classmethod
    def find(cls, file: str, environ: Mapping[str, str] = os.environ) -> FleetSecret | None:
        """The same, but None where neither is given."""
        return cls.read(file, environ) if file or environ.get(VARIABLE) else None

    def engine(self) -> CurveServer:
        """The identity of an engine, which admits the gateways of the fleet, and its engines, which exchange KV
        blocks."""
        clients = [public_key(_curve(secret, who)) for secret in self.secrets for who in ("gateway", "engine")]
        return CurveServer(_curve(self.secrets[0], "engine"), clients)

    @property
    def engine_public_key(self) -> str:
        """What engines of this machine say in the registry."""
        return public_key(_curve(self.secrets[0], "engine"))

    def gateway(self, engine_public_key: str = "") -> CurveClient:
        """What a gateway needs to connect to an engine with this public key (the fleet's own when empty). One that
        no secret of the fleet gives is refused: the engine is not of this fleet."""
        for secret in self.secrets:
            known = public_key(_curve(secret, "engine"))
            if engine_public_key in ("", known):
                # The engine may have been started with the older secret only, so the gateway uses the same one.
                return CurveClient(known, _curve(secret, "gateway"))
        raise ConfigError("the engine's key is not of this fleet: its machine has another fleet secret")

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(_derive(self.secrets[0], "registry"), message, "sha256")

    def verify(self, message: bytes, signature: bytes) -> bool:
        return any(
            hmac.compare_digest(hmac.digest(_derive(secret, "registry"), message, "sha256"), signature)
            for secret in self.secrets
        )


def _curve(secret: str, who: str) -> str:
    """The CURVE secret key of engines or gateways, as Z85 text."""
    encoded = zmq.utils.z85.encode(_derive(secret, f"curve {who}"))
    return str(encoded.decode() if isinstance(encoded, bytes) else encoded)


def _derive(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose: HKDF with a single block of output."""
    key = hmac.digest(b"penstock fleet", secret.encode(), hashlib.sha256)
    return hmac.digest(key, purpose.encode() + b"\x01", hashlib.sha256)

"""Signatures as Standard Webhooks defines them, and as the SDK of OpenAI verifies them: HMAC-SHA256 over the id, the
time and the body."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Sequence

_PREFIX = "whsec_"


def new_secret() -> str:
    return _PREFIX + base64.b64encode(os.urandom(32)).decode()


def hint(secret: str) -> str:
    """As much of a secret as tells it from others."""
    return f"{_PREFIX}...{secret[-5:]}"


def signed_headers(id: str, at: int, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """The headers of a delivery. With several secrets it is signed with each, and a receiver needs one of them."""
    signed = f"{id}.{at}.".encode() + body
    signatures = [
        base64.b64encode(hmac.digest(base64.b64decode(secret.removeprefix(_PREFIX)), signed, hashlib.sha256)).decode()
        for secret in secrets
    ]
    return {
        "webhook-id": id,
        "webhook-timestamp": str(at),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }

"""The format of API keys: `psk_`, eight public characters, `_`, forty secret ones.

Only the public part and a digest of the whole key are stored. The secret has over 200 random bits, so a plain SHA-256
is enough. Digests are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass

_ALPHABET = string.ascii_letters + string.digits
_KEY = re.compile(r"(psk_[A-Za-z0-9]{8})_[A-Za-z0-9]{40}")


@dataclass(frozen=True, slots=True)
class Minted:
    """A new key. `text` exists only here and cannot be recovered later."""

    id: str
    text: str
    digest: str


def mint() -> Minted:
    public, secret = ("".join(secrets.choice(_ALPHABET) for _ in range(length)) for length in (8, 40))
    text = f"psk_{public}_{secret}"
    return Minted(f"psk_{public}", text, digest(text))


def key_id(text: str) -> str | None:
    """The public part of a key, or None when the text is not a key."""
    match = _KEY.fullmatch(text)
    return None if match is None else match.group(1)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def matches(text: str, stored: str) -> bool:
    return hmac.compare_digest(digest(text), stored)

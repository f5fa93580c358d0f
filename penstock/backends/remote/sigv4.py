"""Signature Version 4, with which AWS authenticates requests.

A pure function of the request, the credentials and the time. The secret never leaves this module: only the signature
does.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from penstock.errors import ConfigError

ALGORITHM = "AWS4-HMAC-SHA256"
_UNRESERVED = "-_.~"


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def from_environment() -> AwsCredentials:
    """The credentials in the variables that all of Amazon's tools read."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not key or not secret:
        raise ConfigError("the environment variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set")
    return AwsCredentials(key, secret, os.environ.get("AWS_SESSION_TOKEN", ""))


def from_profile(text: str) -> AwsCredentials | None:
    """The credentials in the text of a shared credentials file: of the profile AWS_PROFILE, or of `default`; None where
    they are incomplete."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
        found = parser[os.environ.get("AWS_PROFILE") or "default"]
        return AwsCredentials(
            found["aws_access_key_id"], found["aws_secret_access_key"], found.get("aws_session_token", "")
        )
    except (configparser.Error, KeyError):
        return None


def sign(
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes,
    credentials: AwsCredentials,
    *,
    region: str,
    service: str,
    now: datetime | None = None,
) -> dict[str, str]:
    """The headers with date, token and signature added. All given headers are signed, and the host."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    signed |= {"host": parts.netloc, "x-amz-date": moment}
    if credentials.session_token:
        signed["x-amz-security-token"] = credentials.session_token
    names = sorted(signed)
    canonical = "\n".join(
        (
            method,
            canonical_path(parts.path),
            canonical_query(parts.query),
            *(f"{name}:{signed[name]}" for name in names),
            "",
            ";".join(names),
            hashlib.sha256(body).hexdigest(),
        )
    )
    scope = f"{moment[:8]}/{region}/{service}/aws4_request"
    text = "\n".join((ALGORITHM, moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    who = f"Credential={credentials.access_key}/{scope}"
    authorization = f"{ALGORITHM} {who}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return {**signed, "authorization": authorization}


def canonical_path(path: str) -> str:
    """Dots and empty segments removed, then encoded once more than the path already is, as all services but S3 want."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            kept = kept[:-1]
        elif segment not in ("", "."):
            kept.append(segment)
    found = "/" + "/".join(kept)
    if len(found) > 1 and path.endswith(("/", "/.", "/..")):
        found += "/"
    return quote(found, safe=f"/{_UNRESERVED}")


def canonical_query(query: str) -> str:
    """Parameters encoded, sorted by name and value."""
    pairs = [(_encoded(name), _encoded(value)) for name, value in parse_qsl(query, keep_blank_values=True)]
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def _encoded(text: str) -> str:
    return quote(unquote(text), safe=_UNRESERVED)

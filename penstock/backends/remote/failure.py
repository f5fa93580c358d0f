"""What a client is told when a server refuses or fails.

Mistakes in the request keep the server's message. Problems between us and the server, such as a wrong key or model
name, are for the operator's log, not for clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import msgspec

from penstock.protocol.errors import ApiError, ContentBlocked, EngineLost, EngineUnavailable, InvalidRequest, Overloaded

LONGEST = 2048
DEFAULT_WAIT_S = 2.0

log = logging.getLogger("penstock.backends")


class ServerOverloaded(Overloaded):
    """The server itself says that it has too much to do; another one may have room."""


class ServerRefused(EngineUnavailable):
    """The server does not accept our key, or does not know the model: an operator has to act."""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to be asked again: milliseconds, seconds or a date."""
    with_ms = headers.get("retry-after-ms")
    try:
        if with_ms is not None:
            return max(float(with_ms) / 1000, 0.0)
        told = headers.get("retry-after")
        if told is None:
            return None
        try:
            return max(float(told), 0.0)
        except ValueError:
            return max(parsedate_to_datetime(told).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error for a reply other than 200."""
    said, code = error_details(body)
    if code == "content_filter" or code == "ResponsibleAIPolicyViolation":
        return ContentBlocked(said or "The remote server of this model refused the content of the request.")
    if code in ("insufficient_quota", "billing_error") or (said and "credit balance" in said):
        return _ours(status, code or "credit balance")  # of the operator's account, none of a client's business
    if status in (400, 413, 422):
        return InvalidRequest(
            said or f"The remote server of this model refused the request ({status}).",
            code=code if code == "context_length_exceeded" else None,
        )
    if status in (429, 529) or (status == 503 and "retry-after" in headers):
        wait = retry_after(headers)
        return ServerOverloaded(
            "The remote server of this model is overloaded; try again shortly.",
            retry_after=DEFAULT_WAIT_S if wait is None else wait,
        )
    if status in (401, 403, 404):
        return _ours(status, said or "")
    return EngineUnavailable(f"The remote server of this model returned {status}; try again.")


def _ours(status: int, why: str) -> ServerRefused:
    """An error that an operator has to remedy, whose reason is in the log only."""
    log.warning("remote server refuses us", extra={"status": status, "why": why[:200]})
    return ServerRefused(f"The remote server of this model returned {status}; try again.", retry_after=5.0)


def failed_stream(kind: str, said: str = "") -> ApiError:
    """The error for one that a server sends in the middle of its answer."""
    if kind in ("overloaded_error", "throttlingException", "rate_limit_error", "overloaded"):
        return ServerOverloaded("The remote server of this model is overloaded; try again shortly.", retry_after=2.0)
    if kind in ("invalid_request_error", "validationException", "validation", "BadRequestError") and said:
        return InvalidRequest(said[:LONGEST])
    if kind == "content_filter":
        return ContentBlocked(said[:LONGEST] or "The remote server of this model refused the content of the request.")
    return EngineLost("The remote server of this model failed on this request; try again.")


def garbage() -> EngineLost:
    return EngineLost("The remote server of this model sent an invalid chunk.")


def error_details(body: bytes) -> tuple[str | None, str | None]:
    """The message and code in an error's body, in any of the shapes in use: `{"error": {"message", "code"}}`,
    `{"error": "..."}`, `{"message": "..."}`, `{"detail": ...}`."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, None
    if not isinstance(found, dict):
        return None, None
    inner = found.get("error", found)
    if isinstance(inner, str):
        kind = found.get("error_type")
        return inner[:LONGEST], kind if isinstance(kind, str) else None
    if not isinstance(inner, dict):
        return None, None
    said = inner.get("message", inner.get("Message", inner.get("detail")))
    code = inner.get("code") if isinstance(inner.get("code"), str) else inner.get("type")
    deeper = inner.get("innererror")
    if isinstance(deeper, dict) and isinstance(deeper.get("code"), str):
        code = deeper["code"]
    return (said[:LONGEST] if isinstance(said, str) else None), (code if isinstance(code, str) else None)

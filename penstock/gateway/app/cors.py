"""CORS: which web pages may use the API from a browser; none unless origins are configured.

Keys are sent in headers, never in cookies, so `access-control-allow-credentials` is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.app.exchange import Exchange

_METHODS = b"GET, POST, PATCH, DELETE, OPTIONS"
_EXPOSED = (
    b"x-request-id, request-id, openai-processing-ms, retry-after, retry-after-ms, x-should-retry, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    b"x-penstock-model, x-penstock-route, x-penstock-replica, x-penstock-reason, x-penstock-cache, "
    b"x-penstock-ignored"
)
_REMEMBER_S = b"600"


class Cors:
    """Adds CORS headers and answers preflight requests."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    async def answered(self, exchange: Exchange) -> bool:
        """Add headers to the reply to come; True when the request was a preflight and has been answered."""
        origin = exchange.header(b"origin")
        if origin is None:
            return False
        if not self._any:
            exchange.extra_headers.append((b"vary", b"origin"))
        if not self._any and origin not in self._origins:
            return False
        exchange.extra_headers.append((b"access-control-allow-origin", b"*" if self._any else origin))
        if exchange.method != "OPTIONS" or exchange.header(b"access-control-request-method") is None:
            exchange.extra_headers.append((b"access-control-expose-headers", _EXPOSED))
            return False
        asked = exchange.header(b"access-control-request-headers")
        headers = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _REMEMBER_S)]
        if asked is not None:
            headers.append((b"access-control-allow-headers", asked))
        await exchange.reply(204, b"", headers=headers)
        return True
